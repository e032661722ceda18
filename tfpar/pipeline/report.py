"""The loss of a batch from what its micro-batches tell."""

import numpy as np

from tfpar import denominators


def batch_loss(figures, kinds, weights):
    """What one device would have said of the whole batch.

    Args:
      figures: for each micro-batch an array: its loss, how much of it the layers have added, its
        rows, then value and denominator of each loss that was compiled, if all are known.
      kinds: for each of these losses `denominators.MEAN` or `denominators.SUM`.
      weights: for each of them its weight in the total.

    Returns:
      (the total, the list of the losses that it is made of, unweighted).
    """
    figures = np.asarray(figures, "float64")
    rows = figures[:, 2]
    mean = lambda values: float((values * rows).sum() / rows.sum())
    values, counts = figures[:, 3::2], figures[:, 4::2]
    if not values.size:
        return mean(figures[:, 0]), []
    losses = []
    for k, kind in enumerate(kinds):
        total = (values[:, k] * counts[:, k]).sum()
        count = 1.0 if kind == denominators.SUM else counts[:, k].sum()
        losses.append(float(total / count) if count else 0.0)
    return float(np.dot(weights, losses)) + mean(figures[:, 1]), losses
