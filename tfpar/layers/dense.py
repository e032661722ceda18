"""The split dense layer, for those who prefer layers to patterns."""

import keras


def SplitDense(units, split, **kwargs):
    """A `keras.layers.Dense` that states how its weights are split over the axis `model`.

    - ``split="columns"``: each device holds units/model columns of the kernel and of the bias, and
      makes those outputs; no communication in the forward pass.
    - ``split="rows"``: each device holds in_features/model rows of the kernel and multiplies its
      part of the input; the products are summed over `model`, then the whole bias is added, once.
    - ``split="classes"``: as "columns", for the logits of a vocabulary or of many classes. `units` need
      not divide: the kernel is padded on the mesh, and nowhere else. The logits stay split in
      `keras.losses.SparseCategoricalCrossentropy(from_logits=True)` and in accuracies.

    A "columns" layer followed by a "rows" layer needs one all-reduce (Shoeybi et al. 2019,
    Megatron-LM). It is a plain Dense in all else: the same initial values for the same seed, the
    same weights, saved and loaded as Dense; without a MeshStrategy it is just Dense.

    Args:
      units: number of output features.
      split: "columns", "rows" or "classes".
      **kwargs: as `keras.layers.Dense`.

    Returns:
      A `keras.layers.Dense`. A copy made from its config (`clone_model`, a loaded file) is plain:
      split it by a `LayoutMap`.

    Raises:
      ValueError: an unknown `split`; when the layer is built, a dim that the axis does not divide.
    """
    axes = {
        "columns": {"kernel": (None, "model"), "bias": ("model",)},
        "rows": {"kernel": ("model", None), "bias": (None,)},
    }
    axes["classes"] = axes["columns"]
    if split not in axes:
        raise ValueError(f'split must be "columns", "rows" or "classes"; received {split!r}')
    layer = keras.layers.Dense(units, **kwargs)
    layer.axes_of_weights = axes[split]
    layer.pads_classes = split == "classes"
    return layer
