"""ZeRO: what each device of the axis `data` need not hold whole (Rajbhandari et al. 2020).

Stage 1 splits the optimizer's slots over `data`, stage 2 the gradients too, stage 3 the weights
too.
"""

STAGES = (0, 1, 2, 3)


def bytes_per_device(parameters, data, zero, weight=2, gradient=2, slots=12):
    """Bytes that a device holds for the state of a model, section 3 and figure 1 of the paper.

    The defaults are the paper's: weights and gradients of 2 bytes, and 12 for a float32 copy of the
    weight, momentum and variance. Adam in float32 has weight=4, gradient=4, slots=8; variables of
    Keras under a mixed policy are float32 too.

    Args:
      parameters: how many parameters the model has.
      data: degree of data parallelism.
      zero: the stage, 0 to 3.
      weight, gradient, slots: bytes a parameter.

    Returns:
      A float: parameters x (weight + gradient + slots), of which stage 1 divides `slots` by `data`,
      stage 2 `gradient` too, stage 3 `weight` too.

    Raises:
      ValueError: an unknown stage.
    """
    check(zero)
    parts = [(weight, 3), (gradient, 2), (slots, 1)]
    return parameters * sum(size / data if zero >= stage else size for size, stage in parts)


def check(zero):
    """Refuses what is no stage.

    Raises:
      ValueError: not 0, 1, 2 or 3.
    """
    if isinstance(zero, bool) or zero not in STAGES:
        raise ValueError(
            f"zero must be 0, 1 (slots split over `data`), 2 (gradients too) or 3 (weights too); "
            f"received {zero!r}"
        )


def split_over_data(shape, axes, data):
    """The axes of a tensor that is split over `data` on top of `axes`.

    Of the dims that are still whole the longest that `data` divides is split; if it divides none,
    the one that padding lengthens least.

    Args:
      shape: the global shape.
      axes: one of None, "data", "model" per dim.
      data: the degree of `data`.

    Returns:
      A tuple like `axes`; `axes` itself if no dim is left to split, such as of a scalar.
    """
    if data == 1 or "data" in axes:
        return tuple(axes)
    free = [dim for dim, (size, axis) in enumerate(zip(shape, axes)) if axis is None and size > 1]
    if not free:
        return tuple(axes)
    waste = lambda dim: -shape[dim] % data / shape[dim]
    best = min(free, key=lambda dim: (waste(dim), -shape[dim]))
    return tuple("data" if dim == best else axis for dim, axis in enumerate(axes))
