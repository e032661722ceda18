"""Projections that share one kernel, cut so that what belongs together stays on one device.

A fused kernel split over devices by plain columns would give the first devices all queries and the
last ones all values. Here the parts have a dim of their own: the split goes along heads or units,
and each device holds its share of every part.
"""

import keras

from tfpar.mesh import check_positive


def FusedDense(units, parts, **kwargs):
    """Several column-split projections of one input, such as gate and up of a gated MLP::

        gate, up = tfpar.layers.unstack(tfpar.layers.FusedDense(256, parts=2)(x))
        x = tfpar.layers.SplitDense(64, split="rows")(keras.ops.silu(gate) * up)

    Args:
      units: output features of each part.
      parts: how many.
      **kwargs: as `keras.layers.EinsumDense`.

    Returns:
      A `keras.layers.EinsumDense` from (batch, sequence, features) to (batch, sequence, parts,
      units), split along `units` over `model`. Its kernel has shape (features, units, parts). A
      copy made from its config is plain: split it by a `LayoutMap`.

    Raises:
      ValueError: units or parts below 1; when it is built, units that `model` does not divide.
    """
    check_positive(units=units, parts=parts)
    layer = keras.layers.EinsumDense(
        "abc,cfp->abpf", output_shape=(None, parts, units), bias_axes="pf", **kwargs
    )
    layer.axes_of_weights = {"kernel": (None, "model", None), "bias": (None, "model")}
    return layer


def FusedQKV(heads, key_dim, kv_heads=None, **kwargs):
    """Queries, keys and values of an attention from one kernel, split by heads over `model`::

        qkv = tfpar.layers.FusedQKV(heads=8, key_dim=16)(x)
        q, k, v = tfpar.layers.unfuse(qkv)

    Each of the `kv_heads` groups holds its query heads, one key and one value head (grouped-query
    attention, Ainslie et al. 2023; with kv_heads=heads it is that of every head its own).

    Args:
      heads: number of query heads.
      key_dim: size of a head.
      kv_heads: number of key and value heads; by default as many as query heads.
      **kwargs: as `keras.layers.EinsumDense`.

    Returns:
      A `keras.layers.EinsumDense` from (batch, sequence, features) to (batch, sequence, kv_heads,
      heads / kv_heads + 2, key_dim); see `unfuse`. A copy made from its config is plain: split it
      by a `LayoutMap`.

    Raises:
      ValueError: a number below 1, heads that kv_heads does not divide; when it is built, kv_heads
        that `model` does not divide.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    check_positive(heads=heads, key_dim=key_dim, kv_heads=kv_heads)
    if heads % kv_heads:
        raise ValueError(f"kv_heads must divide heads; received kv_heads={kv_heads}, heads={heads}")
    shape = (None, kv_heads, heads // kv_heads + 2, key_dim)
    layer = keras.layers.EinsumDense(
        "abc,cgpk->abgpk", output_shape=shape, bias_axes="gpk", **kwargs
    )
    split = ("model", None, None)
    layer.axes_of_weights = {"kernel": (None, *split), "bias": split}
    return layer


def unfuse(qkv):
    """Queries, keys and values, each (batch, sequence, heads, key_dim), of what `FusedQKV` makes.

    Keys and values are repeated for the query heads that share them.
    """
    groups, parts, size = qkv.shape[2:]
    each = parts - 2
    merge = keras.layers.Reshape((-1, groups * each, size))
    repeated = lambda x: x if each == 1 else keras.ops.repeat(x, each, axis=3)
    return tuple(
        merge(x)
        for x in (
            qkv[:, :, :, :each],
            repeated(qkv[:, :, :, each : each + 1]),
            repeated(qkv[:, :, :, each + 1 :]),
        )
    )


def unstack(fused):
    """The parts, each (batch, sequence, units), of what `FusedDense` makes."""
    parts, units = fused.shape[2:]
    part = keras.layers.Reshape((-1, units))  # DTensor keeps the split of a slice, not of an index
    return [part(fused[:, :, k : k + 1]) for k in range(parts)]
