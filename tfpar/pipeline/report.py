"""The loss of a batch from what its micro-batches tell."""

import numpy as np

from tfpar import denominators


def batch_loss(figures, kinds, weights, added):
    """What one device would have said of the whole batch.

    Args:
      figures: for each micro-batch an array: its loss, what the last stage's layers added to it, its
        rows, then value and denominator of each loss that was compiled, if all are known.
      kinds: for each of these losses `denominators.MEAN` or `denominators.SUM`.
      weights: for each of them its weight in the total.
      added: for each micro-batch what the layers of other stages have added.

    Returns:
      (the total, the list of the losses that it is made of, unweighted).
    """
    figures = np.asarray(figures, "float64")
    rows = figures[:, 2]
    mean = lambda values: float((values * rows).sum() / rows.sum())
    own = mean(figures[:, 1] + np.asarray(added, "float64"))
    values, counts = figures[:, 3::2], figures[:, 4::2]
    if not values.size:
        return mean(figures[:, 0]) + own, []
    losses = []
    for k, kind in enumerate(kinds):
        total = (values[:, k] * counts[:, k]).sum()
        count = 1.0 if kind == denominators.SUM else counts[:, k].sum()
        losses.append(float(total / count) if count else 0.0)
    return float(np.dot(weights, losses)) + own, losses
