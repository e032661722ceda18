"""Does a strategy train your model as one device would? `assert_same_training` finds out.

::

    import tfpar.testing

    tfpar.testing.assert_same_training(
        build_model, (x, y), tfpar.MeshStrategy(mesh, layouts),
        optimizer=lambda: keras.optimizers.AdamW(1e-3), loss="mse", batch_size=32, epochs=2,
    )

It trains the model twice, on one device and under the strategy, from the same initial weights, on
the same batches in the same order, and compares after every step. When the two part, the error
says at which step, in which quantity, by how much, and what usually causes that.
"""

import contextlib
import math
import re

import keras
import numpy as np
import tensorflow as tf


def relative_error(a, b):
    """The largest `|a - b| / (1 + |b|)` over all entries of two arrays or nests of arrays.

    Args:
      a: what to judge.
      b: what is right.

    Returns:
      A float; inf if shapes or structures differ, or if an entry is not finite.
    """
    flat_a, flat_b = keras.tree.flatten(a), keras.tree.flatten(b)
    if len(flat_a) != len(flat_b):
        return math.inf
    errors = [_errors(_array(u), _array(v)) for u, v in zip(flat_a, flat_b)]
    return max((float(e.max(initial=0.0)) for e in errors), default=0.0)


def _array(value):
    value = keras.ops.convert_to_numpy(value) if hasattr(value, "dtype") else np.asarray(value)
    return value.astype("complex128" if value.dtype.kind == "c" else "float64")


def _errors(a, b):
    if a.shape != b.shape:
        return np.array(math.inf)
    with np.errstate(invalid="ignore"):
        errors = np.abs(a - b) / (1 + np.abs(b))
    return np.where(np.isfinite(errors), errors, math.inf)


def assert_same_training(
    build,
    data,
    strategy,
    *,
    optimizer="adam",
    loss=None,
    metrics=None,
    compile_args=None,
    batch_size=32,
    epochs=1,
    use_fit=False,
    tolerance=2e-5,
    through_outputs=(),
    seed=0,
):
    """Checks that training under `strategy` gives the numbers of one device.

    After every step it compares the optimizer's `iterations`, the loss and metrics of that step,
    all weights and the optimizer's variables; at the end what `evaluate` and `predict` give. The
    measure is `relative_error`. Models that draw random numbers (Dropout) part by nature: build
    them with rate 0 for this check.

    Args:
      build: a function that makes a new model each time it is called. If it compiles the model,
        the arguments `optimizer` to `compile_args` are not used.
      data: a tuple `(x, y)` or `(x, y, sample_weight)` of arrays or nests (dicts, lists) of arrays
        whose dim 0 is the rows, cut into batches in order, the last one partial; or a list of such
        tuples, the batches themselves, whose shapes may change.
      strategy: a `tf.distribute.Strategy`, such as `tfpar.MeshStrategy(mesh)`.
      optimizer: a name, an optimizer (each run trains with a copy) or a function that makes one.
      loss: as `compile` takes it.
      metrics: as `compile` takes them (each run gets copies), or a function that makes them.
      compile_args: a dict of further arguments of `compile`, such as `loss_weights`.
      batch_size: rows of a global batch.
      epochs: how often the data is gone through.
      use_fit: whether to train with `fit`, an epoch at a time, and not with `train_on_batch`. The
        logs that callbacks see are compared then, and weights after each epoch. For
        `steps_per_execution` and the like.
      tolerance: the largest error that passes. Float32 reaches 2e-5 in most models.
      through_outputs: patterns (searched in the path) of weights that are not compared themselves,
        only through the outputs: those whose true gradient is zero, such as the key bias of
        attention, where Adam makes full steps out of rounding noise.
      seed: of `keras.utils.set_random_seed` before each `build()`.

    Returns:
      A dict of the largest error seen per kind: "logs", "weights", "optimizer", "outputs".

    Raises:
      AssertionError: the runs part; the message tells where, in what and why.
      ValueError: arguments that make no sense.
    """
    _check_arguments(build, strategy, batch_size, epochs, tolerance)
    batches = _cut(data, batch_size)

    def make(where):
        keras.utils.set_random_seed(seed)
        with where:
            model = build()
            if not isinstance(model, keras.Model):
                raise ValueError(f"build() must return a keras.Model; received {model!r}")
            if not model.built:
                model(batches[0][0])
            if not model.compiled:
                model.compile(
                    optimizer=_fresh(optimizer() if callable(optimizer) else optimizer),
                    loss=loss,
                    metrics=_fresh(metrics() if callable(metrics) else metrics),
                    **_fresh(compile_args or {}),
                )
        return model

    pair = make(contextlib.nullcontext()), make(strategy.scope())
    judge = _Judge(*pair, tolerance, through_outputs)
    judge.start()
    last = len(batches)
    if use_fit:
        for epoch in range(epochs):
            judge.compare(f"epoch {epoch + 1}", *(_fit(m, data, batch_size, epoch) for m in pair))
    else:
        for step in range(epochs * last):
            batch = batches[step % last]
            rows = len(keras.tree.flatten(batch[0])[0])
            where = f"step {step + 1} (epoch {step // last + 1}, batch {step % last + 1} of {last}"
            judge.compare(f"{where}, {rows} rows)", *(_step(m, batch) for m in pair))
    judge.compare_outputs(*(_outputs(m, data, batches, batch_size) for m in pair))
    return judge.worst


def _check_arguments(build, strategy, batch_size, epochs, tolerance):
    if not callable(build) or isinstance(build, keras.Model):
        raise ValueError(f"build must be a function that makes a new model; received {build!r}")
    if not isinstance(strategy, tf.distribute.Strategy):
        raise ValueError(
            "strategy must be a tf.distribute.Strategy to compare with one device, such as "
            f"tfpar.MeshStrategy(mesh); received {strategy!r}"
        )
    for name, value in (("batch_size", batch_size), ("epochs", epochs)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive int; received {value!r}")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be above 0; received {tolerance!r}")
    if tf.distribute.has_strategy():
        raise ValueError(
            "assert_same_training enters the scope itself; call it outside of strategy.scope()"
        )


def _cut(data, batch_size):
    """The batches (x, y, sample_weight) of `data`."""
    if not isinstance(data, (tuple, list)) or not data:
        raise ValueError(
            "data must be a tuple (x, y) or (x, y, sample_weight) of arrays, or a list of such "
            f"tuples; received {data!r}"
        )
    whole = data if isinstance(data, list) else [data]
    for batch in whole:
        leaves = [a for a in keras.tree.flatten(batch) if a is not None]
        shapes = [np.shape(a) for a in leaves]
        if not isinstance(batch, tuple) or len(batch) > 3 or not leaves:
            raise ValueError(f"a batch must be (x, y) or (x, y, sample_weight); received {batch!r}")
        if () in shapes or len({s[0] for s in shapes}) > 1 or not shapes[0][0]:
            raise ValueError(
                f"arrays of data must have the same rows, 1 or more; received {shapes}"
            )
    whole = [batch + (None,) * (3 - len(batch)) for batch in whole]
    if isinstance(data, list):
        return whole
    (batch,) = whole
    rows = len(keras.tree.flatten(batch[0])[0])
    return [
        keras.tree.map_structure(lambda a: None if a is None else a[i : i + batch_size], batch)
        for i in range(0, rows, batch_size)
    ]


def _fresh(nest):
    """`nest` with copies of its optimizers and metrics, which hold variables of their own."""
    stateful = (keras.optimizers.Optimizer, keras.metrics.Metric)

    def copy(leaf):
        return type(leaf).from_config(leaf.get_config()) if isinstance(leaf, stateful) else leaf

    return keras.tree.map_structure(copy, nest)


class _Batches(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self._batches = [
            b[: 1 + max(i for i in range(len(b)) if b[i] is not None)] for b in batches
        ]

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, index):
        return self._batches[index]


def _step(model, batch):
    x, y, weight = batch
    model.reset_metrics()
    return model.train_on_batch(x, y, sample_weight=weight, return_dict=True)


def _fit(model, data, batch_size, epoch):
    """The logs of one epoch of `fit`, and those that a callback saw after each of its calls."""
    seen = {}

    def end(batch, logs):
        seen.update({f"{name} until batch {batch + 1}": v for name, v in (logs or {}).items()})

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    kwargs = dict(initial_epoch=epoch, epochs=epoch + 1, callbacks=[callback], verbose=0)
    if isinstance(data, list):
        history = model.fit(_Batches(data), shuffle=False, **kwargs).history
    else:
        x, y, weight = data + (None,) * (3 - len(data))
        kwargs |= dict(sample_weight=weight, batch_size=batch_size, shuffle=False)
        history = model.fit(x, y, **kwargs).history
    return {**seen, **history}


def _outputs(model, data, batches, batch_size):
    """What `evaluate` and `predict` give, by name."""
    model.reset_metrics()
    if isinstance(data, list):
        for x, y, weight in batches:
            logs = model.test_on_batch(x, y, sample_weight=weight, return_dict=True)
        predicted = [model.predict_on_batch(batch[0]) for batch in batches]
    else:
        x, y, weight = data + (None,) * (3 - len(data))
        kwargs = dict(sample_weight=weight, batch_size=batch_size, verbose=0, return_dict=True)
        logs = model.evaluate(x, y, **kwargs)
        predicted = model.predict(x, batch_size=batch_size, verbose=0)
    if len({len(keras.tree.flatten(x)[0]) for x, _, _ in batches}) > 1:
        logs = {name: logs[name] for name in set(logs) - _losses_of_outputs(model)}
    found = {f"evaluate's {name}": value for name, value in sorted(logs.items())}
    for i, output in enumerate(keras.tree.flatten(predicted)):
        found[f"predict's output {i}"] = output
    return found


def _losses_of_outputs(model):
    """The logs that Keras averages wrongly on one device: it counts a batch's rows in the loss of
    each output as its compiled function last knew them, and those of uneven batches as one."""
    outputs = getattr(model, "output_names", None) or []
    return {f"{name}_loss" for name in outputs} if len(outputs) > 1 else set()


class _Judge:
    """Compares two models kind by kind and keeps the largest errors."""

    def __init__(self, one, many, tolerance, through_outputs):
        if one is many or one.optimizer is many.optimizer:
            raise ValueError("build() must make a new model each time; received the same one again")
        self._one, self._many, self._tolerance = one, many, tolerance
        self._skip = tuple(through_outputs)
        self.worst = dict(logs=0.0, weights=0.0, optimizer=0.0, outputs=0.0)

    def start(self):
        """Gives both models the same weights."""
        shapes = [[tuple(v.shape) for v in m.weights] for m in (self._one, self._many)]
        if shapes[0] != shapes[1]:
            raise AssertionError(
                "build() makes another model under the strategy: its weights have the shapes "
                f"{shapes[1]}, those on one device {shapes[0]}"
            )
        self._many.set_weights(self._one.get_weights())

    def compare(self, where, logs_one, logs_many):
        """Compares the logs of a step or epoch, then weights, then the optimizer's variables."""
        models = self._one, self._many
        updates = [{"the count optimizer.iterations": m.optimizer.iterations} for m in models]
        self._judge(where, "optimizer", *updates)
        self._judge(where, "logs", logs_one, logs_many)
        self._judge(where, "weights", *({"": m.weights} for m in models))
        self._judge(where, "optimizer", *({"": m.optimizer.variables} for m in models))

    def compare_outputs(self, one, many):
        """Compares what `evaluate` and `predict` gave."""
        self._judge("after training", "outputs", one, many)

    def _judge(self, where, kind, one, many):
        if "" in one:  # lists of variables, named as in the model under the strategy
            names = [f"{kind} variable {v.path!r}" for v in many[""]]
            one, many = dict(zip(names, one[""])), dict(zip(names, many[""]))
        errors = {name: relative_error(many.get(name, ()), one[name]) for name in one}
        for name in list(errors):
            if kind == "weights" and any(re.search(p, name) for p in self._skip):
                del errors[name]
        self.worst[kind] = max([self.worst[kind], *errors.values()])
        apart = [name for name, error in errors.items() if not error <= self._tolerance]
        if apart:
            raise AssertionError(self._message(where, kind, apart, errors, one, many))

    def _message(self, where, kind, apart, errors, one, many):
        name = apart[0]
        lines = [
            f"training parted from one device at {where}, first in {name}",
            f"  error {errors[name]:.3g}, tolerance {self._tolerance:.3g}"
            f" (|a - b| / (1 + |b|)): {_where_worst(many.get(name), one[name])}",
        ]
        others = [f"{n} ({errors[n]:.2g})" for n in apart[1:]]
        if others:
            more = "" if len(others) <= 6 else f" and {len(others) - 6} more"
            lines.append(
                f"  {len(apart)} of {len(errors)} {kind} part: {', '.join(others[:6])}{more}"
            )
        agreed = ", ".join(f"{k} to {e:.1e}" for k, e in self.worst.items() if e <= self._tolerance)
        lines.append(f"  agreed until then: {agreed or 'nothing'}")
        causes = _causes(kind, name, errors[name] / self._tolerance)
        return "\n".join(lines + ["  likely causes:"] + [f"    - {cause}" for cause in causes])


def _where_worst(many, one):
    many, one = _array(() if many is None else many), _array(one)
    if many.shape != one.shape:
        return f"shape {many.shape} under the strategy, {one.shape} on one device"
    errors = _errors(many, one)
    index = tuple(int(i) for i in np.unravel_index(errors.argmax(), errors.shape))
    at = f"at {list(index)} of shape {one.shape}, " if index else ""
    return f"{at}{many[index]:.9g} under the strategy, {one[index]:.9g} on one device"


def _causes(kind, name, times):
    """What usually makes this kind of quantity part."""
    if "iterations" in name:
        return ["batches dropped or trained twice", "an optimizer that updates once per replica"]
    causes = {
        "logs": [
            "the forward pass: random layers (Dropout), or a layer that sees only its own rows or "
            "asks for the strategy or the number of replicas",
            "a loss or metric that is averaged per replica, so that rows, masks or sample weights "
            "of uneven parts weigh differently; rows dropped or padded",
        ],
        "weights": [
            "gradients summed instead of averaged over replicas, or averaged without regard to "
            "their rows; a regulariser counted once per replica",
            "clipping before the reduction, or stale values read by the optimizer",
            "a custom train_step or compute_loss that divides by its own rows",
        ],
        "optimizer": ["state of the optimizer that is not reduced or not split like its weight"],
        "outputs": ["a layer that acts differently in inference", "rows dropped or out of order"],
    }[kind]
    if times < 100:
        causes = causes + [
            "rounding: the error is small. Optimizers like Adam enlarge it where gradients are "
            "near zero; try float64, or name weights without true gradient in through_outputs"
        ]
    return causes
