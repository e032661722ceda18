"""Faults that users of distributed training reported in public, each with its right numbers.

Every function registered by `@case` returns a `Case`: a model, its data, and what a one-device
run of the whole global batch gives (`reference`). A strategy, a pipeline or an accumulating
optimizer must give the same. `mutants` are simulated versions of the reported bug: a test that
cannot tell one from the reference would not have caught the bug.
"""

import dataclasses
import functools
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers as L
from keras import ops

from tfpar.testing import relative_error

SGD = keras.optimizers.SGD


@dataclasses.dataclass(frozen=True)
class Case:
    """One reported fault.

    Attributes:
      id: its two digits.
      kind: "dp", "tp", "pp", "accum" or "ckpt"; `also` names further kinds that it applies to.
      build: makes the model; `initial_weights` gives the weights to start from.
      loss: makes what `compile(loss=...)` takes.
      data: (x, y) or (x, y, sample_weight), cut into batches of `batch` rows, the last one partial;
        or None when `batches` lists the batches themselves, whose shapes change.
      optimizer: makes the optimizer.
      compile_args: makes further arguments of `compile`.
      use_fit: whether only `fit` shows the fault.
      layouts: rules that split its weights over `model`; they divide by 2 and by 4.
      micro: rows of a micro-batch; `accum`: micro-batches of a window.
      combine: how parts of a batch weigh: by "samples" or by "tokens" (then `count(x, y, weight)`).
      replicas: how many parts the fault needs.
      stop_after: the step after which a checkpoint is taken.
      tolerance: largest `relative_error` that passes in float32.
      through_outputs: weights whose true gradient is zero, patterns: Adam makes noise of them.
      mutants: {name: function(case) -> weights}.
      source: where it was reported, on GitHub.
    """

    id: str
    kind: str
    build: Callable
    source: str
    data: tuple = None
    batches: tuple = None
    batch: int = 8
    epochs: int = 1
    loss: Callable = keras.losses.MeanSquaredError
    optimizer: Callable = lambda: SGD(0.05)
    compile_args: Callable = dict
    use_fit: bool = False
    layouts: dict = dataclasses.field(default_factory=dict)
    also: tuple = ()
    micro: int = None
    accum: int = 1
    combine: str = "samples"
    count: Callable = None
    replicas: int = None
    stop_after: int = None
    tolerance: float = 2e-5
    through_outputs: tuple = ()
    mutants: dict = dataclasses.field(default_factory=dict)
    seed: int = 7

    def but(self, **changes):
        """A copy with other attributes."""
        return dataclasses.replace(self, **changes)

    def rows(self, index):
        """A copy that trains on these rows (a slice or a list) of the data only."""
        return self.but(data=keras.tree.map_structure(lambda a: a[index], self.data))


CASES = {}


def case(function):
    """Registers a function that makes a Case under its id."""
    CASES[function.__name__.removeprefix("case_")] = functools.cache(function)
    return function


# ------------------------------------------------------------------ training a case on one device
def global_batches(case):
    """The batches (x, y, sample_weight or None) of one epoch."""
    if case.batches is not None:
        return [tuple(b) + (None,) * (3 - len(b)) for b in case.batches]
    whole = case.data + (None,) * (3 - len(case.data))
    return split(whole, size=case.batch)


def split(batch, parts=None, size=None):
    """Cuts a batch along its rows; parts=4 of 10 rows are 3, 3, 3, 1, as tf.distribute cuts."""
    rows = _rows(batch[0])
    size = size or -(-rows // parts)
    take = lambda i: lambda a: None if a is None else a[i : i + size]
    return [keras.tree.map_structure(take(i), batch) for i in range(0, rows, size)]


def _rows(nest):
    return len(keras.tree.flatten(nest)[0])


@functools.cache
def _initial_weights(case_id, floatx):
    case = CASES[case_id]()
    keras.utils.set_random_seed(case.seed)
    model, r, out = case.build(), np.random.default_rng(case.seed + 1000), []
    for v in model.weights:
        w = np.asarray(v)
        if v.trainable and np.issubdtype(w.dtype, np.inexact):
            w = (w + 0.1 * r.standard_normal(w.shape)).astype(w.dtype)
        out.append(w)
    return out


def initial_weights(case):
    """The weights to start from: the initial ones, jittered so that bugs in biases show."""
    return _initial_weights(case.id, keras.config.floatx())


def build(case):
    """The model with its initial weights."""
    weights = initial_weights(case)
    model = case.build()
    model.set_weights(weights)
    return model


def compiled(case, optimizer=None):
    """The model with its initial weights, compiled for one device."""
    model = build(case)
    model.compile(
        optimizer=optimizer or case.optimizer(),
        loss=case.loss(),
        **{"jit_compile": False, **case.compile_args()},
    )
    return model


def reference(case):
    """Plain Keras on one device: {"weights", "losses" per step, "metrics" of the last step}."""
    model, losses, logs = compiled(case), [], {}
    for _ in range(case.epochs):
        for x, y, weight in global_batches(case):
            model.reset_metrics()
            logs = model.train_on_batch(x, y, sample_weight=weight, return_dict=True)
            losses.append(float(logs["loss"]))
    return {"weights": model.get_weights(), "losses": losses, "metrics": logs}


def train_in_parts(
    case, parts=1, size=None, combine="samples", optimizer=None, scale=1.0, each=None, whole=None
):
    """Trains on parts of each batch, weighs their gradients and updates once: gives the weights.

    With the right `combine` it equals `reference`; with a wrong one it is a mutant.

    Args:
      parts, size: how a batch is cut (see `split`).
      combine: "samples", "tokens", "equal" or "sum".
      scale: a factor on the gradients.
      each: a function of the gradients of a part.
      whole: a function of the gradients of the batch.
    """
    model = compiled(case, optimizer)
    for _ in range(case.epochs):
        for batch in global_batches(case):
            gradients, weights = [], []
            for x, y, weight in split(batch, parts, size):
                with tf.GradientTape() as tape:
                    y_pred = model(x, training=True)
                    loss = model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weight)
                g = [
                    tf.convert_to_tensor(g) for g in tape.gradient(loss, model.trainable_variables)
                ]
                gradients.append(each(g) if each else g)
                amount = {"samples": lambda: _rows(x), "tokens": lambda: case.count(x, y, weight)}
                weights.append(float(amount.get(combine, lambda: 1)()))
            total = 1.0 if combine == "sum" else sum(weights)
            g = [
                sum(w / total * scale * a for w, a in zip(weights, same))
                for same in zip(*gradients)
            ]
            model.optimizer.apply_gradients(
                zip(whole(g) if whole else g, model.trainable_variables)
            )
    return model.get_weights()


# ------------------------------------------------------------------ models and data
def _regression(seed, rows, inputs, loud=None):
    """Rows for a linear model with noise; `loud` rows have targets 3 times as large."""
    r = np.random.default_rng(seed)
    x = r.standard_normal((rows, inputs)).astype("float32")
    y = x @ r.standard_normal((inputs, 1)) + 0.3 * r.standard_normal((rows, 1))
    y = y.astype("float32")
    if loud is not None:
        y[loud] *= 3
    return x, y


def _tokens(seed, lengths, width, vocabulary):
    r = np.random.default_rng(seed)
    x = np.zeros((len(lengths), width), "int32")
    for i, n in enumerate(lengths):
        x[i, :n] = r.integers(1, vocabulary, n)
    return x, r.integers(0, vocabulary, (len(lengths), width)).astype("int32")


def _mlp(hidden=(8,), outputs=1, **kwargs):
    def build():
        i = z = L.Input((6,))
        for n, units in enumerate(hidden):
            z = L.Dense(units, activation="tanh", name=f"hidden_{n}", **kwargs)(z)
        return keras.Model(i, L.Dense(outputs, name="head", **kwargs)(z))

    return build


COLUMNS = {r"hidden_0/kernel": (None, "model"), r"hidden_0/bias": ("model",)}
COLUMNS_ROWS = {**COLUMNS, r"head/kernel": ("model", None)}


def _cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


# ------------------------------------------------------------------ accumulation
@case
def case_01():
    """Padding differs between micro-batches: the update is the token mean of the whole window."""

    def build():
        i = L.Input((6,), dtype="int32")
        z = L.Embedding(11, 8, mask_zero=True, name="embedding")(i)
        z = L.Dense(8, activation="tanh", name="hidden_0")(z)
        return keras.Model(i, L.Dense(11, name="head")(z))

    lengths = [6, 6, 5, 6, 1, 1, 1, 1, 6, 5, 6, 6, 2, 1, 1, 2] * 2
    return Case(
        "01",
        "accum",
        build,
        data=_tokens(1, lengths, 6, 11),
        batch=16,
        loss=_cross_entropy,
        micro=4,
        accum=4,
        also=("dp", "pp"),
        combine="tokens",
        count=lambda x, y, weight: (x != 0).sum(),
        optimizer=lambda: SGD(0.5, momentum=0.9),
        layouts={r"embedding/embeddings": (None, "model"), r"hidden_0/kernel": ("model", None)},
        mutants={"mean of micro means": lambda c: train_in_parts(c, size=4, combine="equal")},
        source="huggingface/transformers#34191, ml-explore/mlx-lm#1413, OpenNMT/OpenNMT-py#2209",
    )


@case
def case_03():
    """5 micro-batches in windows of 2: the tail is applied at the epoch's end, scaled by what it
    holds, and does not leak into the next epoch."""

    def halved(case):
        model = compiled(case)
        for _ in range(case.epochs):
            for x, y, _ in global_batches(case):
                with tf.GradientTape() as tape:
                    loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
                g = tape.gradient(loss, model.trainable_variables)
                g = [a * 0.5 for a in g] if len(x) == 4 else g
                model.optimizer.apply_gradients(zip(g, model.trainable_variables))
        return model.get_weights()

    return Case(
        "03",
        "accum",
        _mlp(),
        data=_regression(3, 20, 6, loud=slice(16, 20)),
        epochs=2,
        micro=4,
        accum=2,
        layouts=COLUMNS_ROWS,
        mutants={
            "tail dropped": lambda c: train_in_parts(c.rows(slice(16))),
            "tail scaled by the full window": halved,
        },
        source="Lightning-AI/pytorch-lightning#19987, tracel-ai/burn#5695, timoschick/pet#36",
    )


@case
def case_05():
    """A learning rate schedule advances once per update, not once per micro-batch."""

    def sgd(steps, staircase):
        decay = keras.optimizers.schedules.ExponentialDecay(0.2, steps, 0.5, staircase=staircase)
        return SGD(decay, momentum=0.9)

    return Case(
        "05",
        "accum",
        _mlp(),
        data=_regression(5, 36, 6),
        batch=12,
        epochs=2,
        micro=4,
        accum=3,
        optimizer=lambda: sgd(2, True),
        layouts=COLUMNS_ROWS,
        mutants={"3 times too fast": lambda c: train_in_parts(c, optimizer=sgd(2 / 3, False))},
        source="huggingface/accelerate#963, tensorflow/addons#2525, h2oai/h2o-llmstudio#663",
    )


@case
def case_07():
    """The optimizer's EMA moves once per update; its overwrite frequency counts updates."""
    return Case(
        "07",
        "accum",
        _mlp(),
        data=_regression(7, 36, 6),
        batch=12,
        epochs=2,
        micro=4,
        accum=3,
        also=("dp",),
        optimizer=lambda: SGD(0.2, use_ema=True, ema_momentum=0.6, ema_overwrite_frequency=2),
        layouts=COLUMNS_ROWS,
        mutants={"no EMA": lambda c: train_in_parts(c, optimizer=SGD(0.2))},
        source="SWivid/F5-TTS#631, keras-team/keras#18972",
    )


@case
def case_08():
    """Accumulation inside a run on 4 replicas."""
    return Case(
        "08",
        "accum",
        _mlp(),
        data=_regression(8, 32, 6, loud=slice(0, 3)),
        batch=16,
        epochs=2,
        micro=8,
        accum=2,
        also=("dp",),
        replicas=4,
        optimizer=lambda: SGD(0.1, momentum=0.9),
        layouts=COLUMNS_ROWS,
        mutants={"sum, not mean": lambda c: train_in_parts(c, size=8, combine="sum")},
        source="keras-team/keras#17429, keras-team/tf-keras#107, huggingface/transformers#2794",
    )


# ------------------------------------------------------------------ data parallelism
@case
def case_12():
    """Sparse gradients: the same ids on several replicas add up, rows not seen stay.

    Ids 0 to 5 come up in every replica and several times in a row; ids 6 to 11 never.
    """

    def build():
        i = L.Input((4,), dtype="int32")
        z = L.Flatten()(L.Embedding(12, 4, name="embedding")(i))
        return keras.Model(i, L.Dense(1, name="head")(z))

    r = np.random.default_rng(12)
    x = r.integers(0, 6, (24, 4)).astype("int32")
    x[:, 3] = x[:, 0]

    return Case(
        "12",
        "dp",
        build,
        data=(x, r.standard_normal((24, 1)).astype("float32") + x[:, :1]),
        epochs=2,
        also=("accum",),
        optimizer=lambda: SGD(0.05, momentum=0.9),
        layouts={r"embedding/embeddings": ("model", None)},
        mutants={
            "sum, not mean": lambda c: train_in_parts(c, parts=4, combine="sum"),
            "ids divided twice": lambda c: train_in_parts(c, whole=lambda g: [g[0] / 4, *g[1:]]),
        },
        source="tensorflow/tensorflow#53160, horovod/horovod#341, tensorflow/tensorflow#5252",
    )


def _equal_replicas(case):
    return train_in_parts(case, parts=4, combine="equal")


@case
def case_13():
    """A last batch of 7 rows on 4 replicas (2, 2, 2, 1): every row weighs the same."""
    return Case(
        "13",
        "dp",
        _mlp(),
        data=_regression(13, 23, 6, loud=[22]),
        epochs=2,
        layouts=COLUMNS_ROWS,
        mutants={"replicas weigh the same": _equal_replicas},
        source="tensorflow/tensorflow#45594, tensorflow/tensorflow#30843",
    )


@case
def case_15():
    """Clipping acts on the reduced gradient."""

    def per_replica(case):
        clip = lambda g: tf.clip_by_global_norm(g, 0.5)[0]
        return train_in_parts(case, parts=4, each=clip, optimizer=SGD(0.3))

    return Case(
        "15",
        "dp",
        _mlp(),
        data=_regression(15, 24, 6, loud=[0, 1, 8, 9, 16, 17]),
        epochs=2,
        optimizer=lambda: SGD(0.3, global_clipnorm=0.5),
        layouts=COLUMNS_ROWS,
        mutants={"clipped per replica": per_replica},
        source="tensorflow/tensorflow#33929, LeelaChessZero/lczero-training#162",
    )


@case
def case_17():
    """A weight regulariser counts once, whatever the number of replicas or micro-batches."""
    model = lambda strength: _mlp(kernel_regularizer=keras.regularizers.L2(strength))
    return Case(
        "17",
        "dp",
        model(0.3),
        data=_regression(17, 24, 6),
        epochs=2,
        also=("accum", "pp", "tp"),
        layouts=COLUMNS_ROWS,
        mutants={"counted 4 times": lambda c: train_in_parts(c.but(build=model(1.2)))},
        source="keras-team/keras#20609, keras-team/keras#7178",
    )


@case
def case_18():
    """Metrics equal those of one device on uneven batches; accuracy never exceeds 1."""
    r = np.random.default_rng(18)
    x = r.standard_normal((23, 6)).astype("float32")
    return Case(
        "18",
        "dp",
        _mlp(outputs=3),
        data=(x, r.integers(0, 3, (23,)).astype("int32")),
        loss=_cross_entropy,
        compile_args=lambda: {
            "metrics": ["sparse_categorical_accuracy"],
            "weighted_metrics": [
                keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="ce")
            ],
        },
        layouts=COLUMNS_ROWS,
        source="keras-team/keras#19280, keras-team/keras#19340",
    )


@case
def case_20():
    """A weighted mean divides by the weights of the whole batch; some replicas hold only zeros."""
    x, y = _regression(20, 24, 6)
    weight = np.tile(np.array([1, 3, 0, 0, 5, 0.5, 0, 2], "float32"), 3)
    return Case(
        "20",
        "dp",
        _mlp(),
        data=(x, y, weight),
        loss=lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        epochs=2,
        also=("accum", "pp"),
        combine="tokens",
        count=lambda x, y, weight: weight.sum(),
        layouts=COLUMNS_ROWS,
        mutants={"divided per replica": _equal_replicas},
        source="keras-team/keras#15323, tensorflow/tensorflow#34491",
    )


@case
def case_21():
    """A compute_loss of one's own with a plain mean plus the model's losses."""

    class OwnLoss(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = ops.mean(ops.square(y_pred - y))
            return loss + ops.sum(ops.stack(self.losses)) if self.losses else loss

    def build():
        i = L.Input((6,))
        z = L.Dense(8, activation="tanh", kernel_regularizer="l2", name="hidden_0")(i)
        return OwnLoss(i, L.Dense(1, name="head")(z))

    return Case(
        "21",
        "dp",
        build,
        data=_regression(21, 24, 6),
        loss=lambda: None,
        epochs=2,
        also=("accum", "pp"),
        layouts=COLUMNS_ROWS,
        mutants={"4 times the rate": lambda c: train_in_parts(c, scale=4.0)},
        source="keras-team/keras#15509, keras-team/keras#14104",
    )


@case
def case_24():
    """jit_compile=True on several devices: works, or is refused before tracing."""
    return Case(
        "24",
        "dp",
        _mlp(),
        data=_regression(24, 16, 6),
        epochs=2,
        also=("accum",),
        compile_args=lambda: {"jit_compile": True},
        source="keras-team/keras#19005, keras-team/keras#17187, tensorflow/tensorflow#53140",
    )


@case
def case_27():
    """Dicts in (int and float) and out, with losses, loss weights and sample weights per output.

    22 rows in batches of 8: on 4 replicas the last batch of 6 is 2, 2, 2, 0.
    """
    r, n = np.random.default_rng(27), 22
    x = {
        "ids": r.integers(0, 7, (n, 3)).astype("int32"),
        "num": r.standard_normal((n, 4)).astype("float32"),
    }
    y = {
        "a": r.standard_normal((n, 1)).astype("float32"),
        "b": r.integers(0, 3, (n,)).astype("int32"),
    }
    weight = {"a": r.random(n).astype("float32"), "b": np.ones(n, "float32")}

    def build():
        ids, num = L.Input((3,), dtype="int32", name="ids"), L.Input((4,), name="num")
        z = L.Concatenate()([L.Flatten()(L.Embedding(7, 2)(ids)), num])
        z = L.Dense(8, activation="tanh", name="hidden_0")(z)
        return keras.Model(
            {"ids": ids, "num": num}, {"a": L.Dense(1, name="a")(z), "b": L.Dense(3, name="b")(z)}
        )

    return Case(
        "27",
        "dp",
        build,
        data=(x, y, weight),
        loss=lambda: {"a": keras.losses.MeanSquaredError(), "b": _cross_entropy()},
        epochs=2,
        also=("accum", "pp"),
        compile_args=lambda: {"loss_weights": {"a": 0.7, "b": 1.3}},
        layouts=COLUMNS | {r"^b/kernel": ("model", None)},
        mutants={"loss weights ignored": lambda c: train_in_parts(c.but(compile_args=dict))},
        source="keras-team/keras#20329, tensorflow/tensorflow#29680, tensorflow/tensorflow#21389",
    )


@case
def case_29():
    """Synchronised BatchNormalization: weights and moving statistics equal one device."""

    def build():
        i = L.Input((6,))
        z = L.BatchNormalization(momentum=0.8, synchronized=True)(L.Dense(8, name="hidden_0")(i))
        return keras.Model(i, L.Dense(1, name="head")(L.Activation("tanh")(z)))

    return Case(
        "29",
        "dp",
        build,
        data=_regression(29, 24, 6, loud=[0, 1]),
        epochs=2,
        tolerance=1e-4,
        through_outputs=("hidden_0/bias", "moving_mean"),  # BatchNormalization takes the bias away
        layouts=COLUMNS_ROWS,
        mutants={"statistics per replica": lambda c: train_in_parts(c, parts=4)},
        source="tensorflow/tensorflow#7439, tensorflow/tensorflow#18222",
    )


@case
def case_31():
    """steps_per_execution=3 with 7 batches, the last one partial: all are trained on."""
    return Case(
        "31",
        "dp",
        _mlp(),
        data=_regression(31, 54, 6),
        also=("accum",),
        use_fit=True,
        compile_args=lambda: {"steps_per_execution": 3},
        layouts=COLUMNS_ROWS,
        mutants={"tail dropped": lambda c: train_in_parts(c.rows(slice(48)))},
        source="keras-team/keras#17589, keras-team/keras#21422",
    )


@case
def case_59():
    """Every batch is uneven, the first one too: 10 rows on 4 replicas (3, 3, 3, 1)."""
    return Case(
        "59",
        "dp",
        _mlp(),
        data=_regression(59, 20, 6, loud=[9, 19]),
        batch=10,
        epochs=2,
        layouts=COLUMNS_ROWS,
        mutants={"replicas weigh the same": _equal_replicas},
        source="tensorflow/tensorflow#58809, perslev/MultiPlanarUNet#10, keras-team/keras#12835",
    )


# ------------------------------------------------------------------ tensor parallelism
@case
def case_32():
    """A column- then row-split pair with biases: the row layer adds its bias once."""

    class BiasFourTimes(L.Dense):
        def call(self, x):
            return super().call(x) + 3 * self.bias

    def build(row=L.Dense):
        i = L.Input((6,))
        z = L.Dense(12, activation="gelu", name="column")(i)
        return keras.Model(i, L.Dense(1)(L.LayerNormalization()(row(8, name="row")(z))))

    return Case(
        "32",
        "tp",
        build,
        data=_regression(32, 24, 6),
        also=("dp", "pp"),
        layouts={
            r"column/kernel": (None, "model"),
            r"column/bias": ("model",),
            r"row/kernel": ("model", None),
        },
        mutants={
            "bias 4 times": lambda c: train_in_parts(c.but(build=lambda: build(BiasFourTimes)))
        },
        source="huggingface/text-generation-inference#1036, awslabs/slapo#10, "
        "PaddlePaddle/Paddle#35186",
    )


@case
def case_36():
    """The global norm counts replicated weights once and split ones whole."""

    def build():
        i = L.Input((6,))
        z = L.Dense(8, name="row")(L.Dense(12, activation="relu", name="column")(i))
        return keras.Model(i, L.Dense(1)(L.LayerNormalization()(z)))

    def overcount(g):  # on 4 devices the first 3 weights are split, the others replicated
        squares = [(1.0 if k < 3 else 4.0) * tf.reduce_sum(a * a) for k, a in enumerate(g)]
        return [a * 0.5 / tf.maximum(tf.sqrt(sum(squares)), 0.5) for a in g]

    return Case(
        "36",
        "tp",
        build,
        data=_regression(36, 24, 6),
        also=("pp",),
        optimizer=lambda: SGD(0.3, global_clipnorm=0.5),
        layouts={
            r"column/kernel": (None, "model"),
            r"column/bias": ("model",),
            r"row/kernel": ("model", None),
        },
        mutants={
            "replicated weights 4 times": lambda c: train_in_parts(
                c, whole=overcount, optimizer=SGD(0.3)
            )
        },
        source="NVIDIA-NeMo/RL#3788, ROCm/TransformerEngine#715, facebookresearch/fairscale#167",
    )


# ------------------------------------------------------------------ pipelines
@case
def case_40():
    """A batch of 10 in 4 micro-batches, and a last batch of 5: every row weighs the same."""
    even = [i for i in range(25) if i not in (8, 9, 18, 19, 24)]
    return Case(
        "40",
        "pp",
        _mlp(hidden=(8, 7, 6)),
        data=_regression(40, 25, 6, loud=[9, 19, 24]),
        batch=10,
        epochs=2,
        micro=3,
        also=("accum",),
        layouts=COLUMNS | {r"hidden_1/kernel": ("model", None)},
        mutants={
            "micro-batches weigh the same": lambda c: train_in_parts(c, size=3, combine="equal"),
            "uneven tail dropped": lambda c: train_in_parts(c.rows(even).but(batch=8)),
        },
        source="pytorch/pytorch#126600, pytorch/torchtitan#784, NVIDIA/apex#1500",
    )


@case
def case_42():
    """A U-shaped model: tensors of the stages 1 and 2 are used again in stage 4."""

    def conv(filters, width, name, **kwargs):
        return L.Conv1D(filters, width, padding="same", activation="tanh", name=name, **kwargs)

    def build():
        i = L.Input((8, 3))
        a = conv(4, 3, "down_0")(i)
        b = conv(6, 3, "down_1", strides=2)(a)
        z = L.Concatenate()([conv(6, 3, "middle")(b), b])
        z = L.Concatenate()([L.UpSampling1D(2)(conv(6, 1, "up")(z)), a, i])
        return keras.Model(i, L.Conv1D(1, 3, padding="same", name="head")(z))

    r = np.random.default_rng(42)
    return Case(
        "42",
        "pp",
        build,
        data=tuple(r.standard_normal((16, 8, n)).astype("float32") for n in (3, 1)),
        micro=2,
        layouts={r"down_0/kernel": (None, None, "model"), r"down_0/bias": ("model",)},
        mutants={"both paths counted twice": lambda c: train_in_parts(c, scale=2.0)},
        source="pytorch/pytorch#127964, deepspeedai/DeepSpeedExamples#932, "
        "hpcaitech/ColossalAI#2490",
    )


@case
def case_44():
    """The output of a stage is a dict of tuples, with an int tensor riding along."""

    class Pack(L.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = L.Dense(8, activation="tanh", name="hidden_0")

        def build(self, shapes):
            self.dense.build(shapes["x"])

        def call(self, inputs):
            return {"h": (self.dense(inputs["x"]), inputs["x"]), "segment": inputs["segment"]}

        def compute_output_spec(self, inputs):
            x, segment = inputs["x"], inputs["segment"]
            hidden = keras.KerasTensor(x.shape[:-1] + (8,)), keras.KerasTensor(x.shape)
            return {"h": hidden, "segment": keras.KerasTensor(segment.shape, segment.dtype)}

    class Use(L.Layer):
        def build(self, shapes):
            self.table = self.add_weight(shape=(4, 8), initializer="normal", name="table")

        def call(self, inputs):
            hidden, x = inputs["h"]
            return hidden * (1 + ops.take(self.table, inputs["segment"], axis=0)) + ops.tanh(x)

        def compute_output_spec(self, inputs):
            return keras.KerasTensor(inputs["h"][0].shape)

    def build():
        inputs = {
            "x": L.Input((8,), name="x"),
            "segment": L.Input((), dtype="int32", name="segment"),
        }
        z = L.Dense(8, name="last")(Use(name="use")(Pack(name="pack")(inputs)))
        return keras.Model(inputs, L.Dense(1, name="head")(z))

    x, y = _regression(44, 24, 8)
    segment = np.random.default_rng(45).integers(0, 4, 24).astype("int32")
    lost = ({"x": x, "segment": 0 * segment}, y)
    return Case(
        "44",
        "pp",
        build,
        data=({"x": x, "segment": segment}, y),
        micro=2,
        also=("dp", "accum"),
        layouts={r"hidden_0/kernel": (None, "model"), r"last/kernel": ("model", None)},
        mutants={"third tensor lost": lambda c: train_in_parts(c.but(data=lost))},
        source="deepspeedai/DeepSpeed#969, pytorch/pytorch#50693, NVIDIA/Megatron-LM#867",
    )


@case
def case_46():
    """The sequence length changes from step to step: 5, 9, 3."""
    r = np.random.default_rng(47)
    batches = tuple(
        (
            r.standard_normal((8, t, 3)).astype("float32"),
            r.standard_normal((8, 1)).astype("float32"),
        )
        for t in (5, 9, 3)
    )

    def build():
        i = L.Input((None, 3))
        z = L.Dense(4, activation="tanh", name="hidden_0")(i)
        z = L.GRU(5, return_sequences=True, name="gru")(z)
        return keras.Model(i, L.Dense(1, name="head")(L.GlobalMaxPooling1D()(z)))

    cut = tuple((x[:, :5], y) for x, y in batches)
    return Case(
        "46",
        "pp",
        build,
        batches=batches,
        micro=2,
        also=("dp", "accum"),
        tolerance=5e-5,
        layouts=COLUMNS,
        mutants={"cut to the first length": lambda c: train_in_parts(c.but(batches=cut))},
        source="deepspeedai/DeepSpeed#3195, deepspeedai/DeepSpeed#4777, deepspeedai/DeepSpeed#5696",
    )


@case
def case_47():
    """4 stages x 4 micro-batches x windows of 2: the mean is taken once, in every stage."""
    early = lambda g: [a * (0.25 if k < 4 else 1.0) for k, a in enumerate(g)]
    return Case(
        "47",
        "pp",
        _mlp(hidden=(8, 7, 6)),
        data=_regression(47, 32, 6),
        batch=16,
        epochs=2,
        micro=2,
        accum=2,
        also=("accum",),
        optimizer=lambda: SGD(0.2, momentum=0.9),
        layouts=COLUMNS | {r"hidden_1/kernel": ("model", None)},
        mutants={
            "summed": lambda c: train_in_parts(c, size=2, combine="sum"),
            "early stage scaled twice": lambda c: train_in_parts(c, whole=early),
        },
        source="pytorch/torchtitan#1733, pytorch/torchtitan#2972, deepspeedai/DeepSpeed#7773, "
        "deepspeedai/DeepSpeed#8154, NVIDIA-NeMo/Automodel#3530",
    )


# ------------------------------------------------------------------ checkpoints
@case
def case_51():
    """Save after 3 of 6 Adam steps on one topology, go on with another: as if never stopped."""

    def moments_lost(case):
        first = train_in_parts(case.rows(slice(24)))
        model = compiled(case)
        model.set_weights(first)
        for x, y, _ in global_batches(case.rows(slice(24, 48))):
            model.train_on_batch(x, y)
        return model.get_weights()

    return Case(
        "51",
        "ckpt",
        _mlp(hidden=(8, 8)),
        data=_regression(51, 48, 6),
        stop_after=3,
        also=("dp", "tp", "pp"),
        optimizer=lambda: keras.optimizers.Adam(
            keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.7)
        ),
        layouts=COLUMNS | {r"hidden_1/kernel": ("model", None)},
        mutants={"moments lost": moments_lost},
        source="tensorflow/tensorflow#44518, keras-team/keras#19389, huggingface/nanotron#106, "
        "Lightning-AI/pytorch-lightning#16815",
    )


CASE_IDS = tuple(CASES)


def error(case, weights):
    """How far `weights` are from the reference's."""
    return relative_error(weights, reference(case)["weights"])
