"""How tensors travel from one stage mesh to another."""

from tensorflow.experimental import dtensor


def hop(tensor, mesh):
    """Brings a DTensor from one stage mesh to another of the same shape: each device to its peer.

    Waits until the tensor has been computed; an error that kept it from being computed comes out
    here.

    Args:
      tensor: an eager DTensor.
      mesh: the `Mesh` (pipe=1) to bring it to.

    Returns:
      A DTensor of the same layout there.
    """
    specs = dtensor.fetch_layout(tensor).sharding_specs
    # DTensor itself copies each part to its device.
    return dtensor.pack(dtensor.unpack(tensor), dtensor.Layout(specs, mesh.dtensor_mesh))
