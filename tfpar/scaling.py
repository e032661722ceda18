"""Help with batch size and learning rate: scaling rules, warm-up, and the gradient noise scale."""

import keras
import numpy as np
import tensorflow as tf

from tfpar.accumulation import AccumulatingOptimizer


def linear(learning_rate, batch, base_batch):
    """The learning rate for `batch` rows if `learning_rate` suits `base_batch`: in proportion.

    For SGD, with warm-up (Goyal et al. 2017, "Accurate, Large Minibatch SGD", arXiv:1706.02677).

    Args:
      learning_rate: float.
      batch, base_batch: rows of a global batch, or of a window of micro-batches.
    """
    return learning_rate * _ratio(batch, base_batch)


def square_root(learning_rate, batch, base_batch):
    """The learning rate for `batch` rows if `learning_rate` suits `base_batch`: by its root.

    For Adam and RMSprop (Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient
    Algorithms", arXiv:2205.10782); for SGD it keeps the variance of an update (Krizhevsky 2014,
    arXiv:1404.5997).
    """
    return learning_rate * _ratio(batch, base_batch) ** 0.5


def _ratio(batch, base_batch):
    for name, value in (("batch", batch), ("base_batch", base_batch)):
        if not value > 0:
            raise ValueError(f"{name} must be above 0; received {value!r}")
    return batch / base_batch


@keras.saving.register_keras_serializable("tfpar")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """Raises the learning rate in a straight line over the first updates, then goes on.

    Args:
      learning_rate: a float, or a schedule, which is asked for the updates after the warm-up.
      updates: length of the warm-up, above 0.
      start: the fraction of the learning rate to start from, from 0 to 1.
    """

    def __init__(self, learning_rate, updates, start=0.0):
        if not updates > 0:
            raise ValueError(f"updates must be above 0; received {updates!r}")
        if not 0 <= start <= 1:
            raise ValueError(f"start must lie between 0 and 1; received {start!r}")
        self.learning_rate = learning_rate
        self.updates = updates
        self.start = start

    def __call__(self, step):
        dtype = keras.config.floatx()
        step = keras.ops.cast(step, dtype)
        after = keras.ops.maximum(step - self.updates, 0.0)
        rate = self.learning_rate(after) if callable(self.learning_rate) else self.learning_rate
        share = keras.ops.minimum(step / self.updates, 1.0)
        return rate * (self.start + (1.0 - self.start) * share)

    def get_config(self):
        rate = self.learning_rate
        if callable(rate):
            rate = keras.saving.serialize_keras_object(rate)
        return {"learning_rate": rate, "updates": self.updates, "start": self.start}

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        if isinstance(config["learning_rate"], dict):
            config["learning_rate"] = keras.saving.deserialize_keras_object(config["learning_rate"])
        return cls(**config)


def noise_scale(small, inverse_small, big, count):
    """Gradient noise and signal from squared gradient norms at two batch sizes, without bias.

    McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", arXiv:1812.06162,
    appendix A.1, for micro-batches that may differ in size.

    Args:
      small: mean over the micro-batches of the squared norm of their gradients.
      inverse_small: mean over them of 1 / (what a micro-batch weighs: rows, tokens).
      big: squared norm of the window's gradient.
      count: what the window weighs.

    Returns:
      (noise, signal): the trace of the covariance of one row's gradient, and the squared norm of
      the true gradient. Their ratio is the noise scale; each must be averaged over many windows
      before it is taken.
    """
    noise = (small - big) / (inverse_small - 1.0 / count)
    return noise, big - noise / count


class NoiseScale(keras.callbacks.Callback):
    """Estimates the gradient noise scale and says whether a larger batch would pay.

    Up to about the noise scale, a batch of twice the size needs about half the updates; far beyond
    it, the rows are wasted (McCandlish et al. 2018, arXiv:1812.06162). It costs one norm of the
    gradient per micro-batch. Needs `AccumulatingOptimizer(..., measure_noise=True)` with two or
    more micro-batches in a window::

        noise = tfpar.scaling.NoiseScale("logs")
        model.fit(dataset, callbacks=[noise])
        print(noise)

    Args:
      log_dir: where to write TensorBoard scalars, by update; None to write none.
      decay: of the running means over windows, from 0 up to 1.
    """

    def __init__(self, log_dir=None, decay=0.98):
        super().__init__()
        if not 0 <= decay < 1:
            raise ValueError(f"decay must lie in [0, 1); received {decay!r}")
        self._writer = tf.summary.create_file_writer(log_dir) if log_dir else None
        self._decay = decay
        self._sums = np.zeros(3)  # of noise, signal and weight of the running means
        self._seen = 0
        self.batch = None

    @property
    def value(self):
        """The noise scale, in rows (or tokens, whatever the loss is a mean of), or None so far."""
        noise, signal, weight = self._sums
        return noise / signal if weight and signal > 0 and noise > 0 else None

    def on_train_begin(self, logs=None):
        optimizer = self.model.optimizer
        if not isinstance(optimizer, AccumulatingOptimizer) or not optimizer.measure_noise:
            raise ValueError(
                "NoiseScale needs compile(tfpar.AccumulatingOptimizer(optimizer, steps, "
                f"measure_noise=True)); received {type(optimizer).__name__}"
            )

    def on_train_batch_end(self, batch, logs=None):
        updates = int(self.model.optimizer.iterations.numpy())
        if updates == self._seen:
            return
        self._seen = updates
        small, inverse_small, big, count = self.model.optimizer.noise_measurement()
        if not np.isfinite([small, big]).all() or inverse_small * count < 1.5:
            return  # an overflow, or a window of one micro-batch
        self.batch = count
        one = np.array([*noise_scale(small, inverse_small, big, count), 1.0])
        self._sums = self._decay * self._sums + (1 - self._decay) * one
        if self._writer is not None and self.value is not None:
            with self._writer.as_default(step=updates):
                tf.summary.scalar("noise_scale", self.value)
                tf.summary.scalar("noise_scale/gradient_norm", max(one[1], 0.0) ** 0.5)
                tf.summary.scalar("noise_scale/batch", count)

    def on_train_end(self, logs=None):
        if self._writer is not None:
            self._writer.flush()

    def __str__(self):
        if self.value is None:
            return "The gradient noise scale is not known yet: no window told noise from signal."
        says = (
            f"The gradient noise scale is about {self.value:.3g}; a window holds {self.batch:.3g}. "
        )
        if self.batch < self.value / 2:
            return says + "A larger batch would pay: twice its size needs nearly half the updates."
        if self.batch > self.value * 2:
            return says + "A larger batch would not pay; a smaller one would do nearly as well."
        return says + "The batch is about right: a larger one would pay little."
