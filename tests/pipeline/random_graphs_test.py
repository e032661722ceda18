"""Random models: whatever the graph, a pipeline gives the numbers of one device.

A seed decides on everything: the model, where it is cut, the mesh, the schedule, the data, the losses
and the optimizer. `describe(seed)` tells what it decided.
"""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from accumulation_test import DenseAdam

import tfpar
from tfpar.pipeline.graph import Graph
from tfpar.testing import assert_same_training

L = keras.layers
O = keras.optimizers
keras.saving.register_keras_serializable("random_graphs")(DenseAdam)
ops = keras.ops

LENGTH = 5  # of the sequences
WORDS = 7  # of the vocabulary, 0 is padding


def rng_of(seed, purpose):
    return np.random.default_rng([seed, *map(ord, purpose)])


# ------------------------------------------------------------------ layers that Keras does not have


class Pair(L.Layer):
    """Returns a tuple of two."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.one, self.two = L.Dense(width, activation="tanh"), L.Dense(width)

    def build(self, shape):
        self.one.build(shape)
        self.two.build(shape)

    def call(self, x):
        return self.one(x), self.two(x)


class Named(Pair):
    """Returns a dict of two, and takes a second tensor by name."""

    def call(self, x, scale=None):
        found = self.one(x)
        return {"b": found if scale is None else found * ops.tanh(scale), "a": self.two(x)}


class Penalty(L.Layer):
    """Adds a loss that is a mean over the rows, and one of its weight."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    def call(self, x):
        x = x * self.factor
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


class OneHotTable(L.Layer):
    """A lookup that is a product: its gradient is dense."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.width = width

    def build(self, shape):
        self.table = self.add_weight(shape=(WORDS, self.width), name="table")

    def call(self, tokens):
        return ops.matmul(ops.one_hot(tokens, WORDS, dtype=self.compute_dtype), self.table)

    def compute_mask(self, tokens, mask=None):
        return ops.not_equal(tokens, 0)


class Transposed(L.Layer):
    """A product with the weights of another layer, the other way round."""

    def __init__(self, other, **kwargs):
        super().__init__(**kwargs)
        self.other = other
        self.supports_masking = True

    def call(self, x):
        held = self.other
        table = held.kernel if isinstance(held, L.Dense) else held.table
        return ops.matmul(x, ops.transpose(table))


# ------------------------------------------------------------------ models


class Maker:
    """Makes a model by drawing one part after the other.

    Attributes:
      rows, series: the tensors so far of shape (rows, width) and (rows, LENGTH, width).
    """

    WIDTHS = (3, 4, 6)

    def __init__(self, seed):
        self.rng = rng_of(seed, "model")
        self.rows, self.series = [], []
        self.shared: list = []
        self.count = 0

    def chance(self, p):
        return self.rng.random() < p

    def choose(self, options):
        return options[int(self.rng.integers(len(options)))]

    def name(self, kind):
        self.count += 1
        return f"{kind}_{self.count}"

    def any(self, pool):
        """One of the tensors so far: mostly a late one, at times one from the very beginning."""
        late = pool[-3:]
        return self.choose(pool if self.chance(0.35) else late)

    def add(self, *tensors):
        for x in tensors:
            if None in x.shape[1:]:
                continue  # Keras cannot tell
            (self.rows if len(x.shape) == 2 else self.series).append(x)

    def dense(self, width, **kwargs):
        if "activation" not in kwargs:
            kwargs["activation"] = self.choose(["tanh", "gelu", "sigmoid", None])
        if self.chance(0.2):
            kwargs["kernel_regularizer"] = self.choose(["l2", "l1"])
        if self.chance(0.1):
            kwargs["bias_regularizer"] = "l2"
        if self.chance(0.1):
            kwargs["kernel_constraint"] = keras.constraints.MaxNorm(0.8)
        if self.chance(0.1):
            kwargs["trainable"] = False
        return L.Dense(width, name=self.name("dense"), **kwargs)

    def as_wide(self, x, width):
        return x if x.shape[-1] == width else self.dense(width)(x)

    def model(self):
        inputs = self.inputs()
        self.wide = L.Dense(4, name="wide", activation="tanh")(self.rows[0])
        self.add(self.wide)
        parts = [getattr(self, name) for name in dir(self) if name.startswith("part_")]
        for _ in range(int(self.rng.integers(6, 11))):
            self.choose(parts)()
        outputs = self.outputs()
        if self.chance(0.4):
            inputs = {x.name: x for x in inputs}
        names = [x._keras_history.operation.name for x in outputs]
        self.kind_of = dict(zip(names, self.kinds))
        if self.chance(0.4) and len(self.kind_of) == len(names) and "none" not in self.kinds:
            outputs = dict(zip(names, outputs))
        return keras.Model(inputs, outputs)

    def inputs(self):
        made = [
            keras.Input((4,), name="numbers"),
            keras.Input((LENGTH,), name="words", dtype="int32"),
        ]
        self.rows.append(made[0])
        masked = self.chance(0.6)
        width = self.choose(self.WIDTHS)
        if self.chance(0.5):
            table = OneHotTable(width, name="one_hot")
            self.shared.append(table)
        else:
            table = L.Embedding(WORDS, width, mask_zero=masked, name="embedding")
        self.series.append(table(made[1]))
        if self.chance(0.5):
            made.append(keras.Input((LENGTH, 3), name="steps"))
            x = L.Masking(0.0, name="masking")(made[-1]) if self.chance(0.5) else made[-1]
            self.series.append(x)
        if self.chance(0.3):
            made.append(keras.Input((), name="scalar", dtype="int32"))
            self.rows.append(L.Embedding(WORDS, 4, name="of_scalar")(made[-1]))
        if self.chance(0.25):
            made.append(keras.Input((2,), name="unused"))
        if self.chance(0.25):
            made.append(keras.Input((2, 2, 3), name="image"))
            self.rows.append(L.Flatten(name="flat")(made[-1]))
        return [made[k] for k in self.rng.permutation(len(made))]

    def outputs(self):
        row, series = self.any(self.rows[-2:]), self.any(self.series[-2:])
        made = [self.dense(2, activation=None)(L.Concatenate(name="last")([row, self.wide]))]
        self.kinds = ["mse"]
        if self.chance(0.8):
            made.append(L.Dense(3, name="classes")(series))
            self.kinds.append("steps")
        if self.chance(0.5):
            made.append(L.Dense(3, name="kind")(self.any(self.rows)))
            self.kinds.append("class")
        if self.chance(0.3):
            made.append(L.Dense(2, name="early")(self.any(self.rows[:3])))
            self.kinds.append("huber")
        if self.chance(0.15):
            made.append(L.Dense(2, name="summed")(self.any(self.rows)))
            self.kinds.append("sum")
        if self.chance(0.25):
            made.append(self.any(self.rows))
            self.kinds.append("none")
        if self.chance(0.1):
            made.append(made[0])
            self.kinds.append("none")
        order = self.rng.permutation(len(made))
        self.kinds = [self.kinds[k] for k in order]
        return [made[k] for k in order]

    # What a model is made of.

    def part_dense(self):
        x = self.any(self.rows)
        self.add(self.dense(self.choose(self.WIDTHS))(x))

    def part_dense_over_steps(self):
        self.add(self.dense(self.choose(self.WIDTHS))(self.any(self.series)))

    def part_skip(self):
        pool = self.choose([self.rows, self.series])
        x, y = self.any(pool), self.any(pool[:3])
        kind = self.choose([L.Add, L.Multiply, L.Concatenate, L.Average, L.Maximum, "plus"])
        if kind is not L.Concatenate:
            y = self.as_wide(y, x.shape[-1])
        if kind == "plus":
            self.add(x + y)
        else:
            self.add(self.as_wide(kind(name=self.name("skip"))([x, y]), 4))

    def part_shared(self):
        layer = self.dense(4)
        self.shared.append(layer)
        for _ in range(int(self.rng.integers(2, 4))):
            pool = self.choose([self.rows, self.series])
            self.add(layer(self.as_wide(self.any(pool), 4)))
            if self.chance(0.5):
                self.part_dense()

    def part_tied(self):
        if not self.shared:
            return
        layer = self.choose(self.shared)
        width = layer.width if isinstance(layer, OneHotTable) else layer.units
        x = self.as_wide(self.any(self.choose([self.rows, self.series])), width)
        self.add(Transposed(layer, name=self.name("tied"))(x))

    def part_nested(self):
        width = self.choose(self.WIDTHS)
        a = keras.Input((4,))
        if self.chance(0.5):
            b = keras.Input((4,))
            c = self.dense(width)(ops.tanh(a) * b)
            d = self.dense(4)(L.Concatenate()([b, c]))
            structure = self.choose(["list", "dict"])
            given = [a, b] if structure == "list" else {"left": a, "right": b}
            inner = keras.Model(given, self.choose([d, [c, d], {"c": c, "d": d}]))
            for _ in range(self.choose([1, 2])):
                x, y = (self.as_wide(self.any(self.rows), 4) for _ in range(2))
                made = inner([x, y] if structure == "list" else {"left": x, "right": y})
                self.add(*keras.tree.flatten(made))
        else:
            stack = [self.dense(width), L.LayerNormalization(), self.dense(4)]
            if self.chance(0.4):
                frozen = L.BatchNormalization(trainable=False)
                stack.insert(1, frozen)
            inner = keras.Sequential([a, *stack], name=self.name("stack"))
            if self.chance(0.3):
                inner = keras.Sequential([keras.Input((4,)), inner, L.Dropout(0.0)])
            flag = self.choose([{}, {"training": False}])
            for _ in range(self.choose([1, 1, 2])):
                self.add(inner(self.as_wide(self.any(self.rows), 4), **flag))

    def part_nested_series(self):
        a = keras.Input((LENGTH, 4))
        x = L.Conv1D(4, 2, padding="causal")(a) if self.chance(0.3) else self.dense(4)(a)
        inner = keras.Model(a, L.Add()([a, x]), name=self.name("inner"))
        for _ in range(self.choose([1, 2])):
            self.add(inner(self.as_wide(self.any(self.series), 4)))

    def part_ops(self):
        x = self.any(self.rows)
        self.add(
            self.choose(
                [
                    lambda: ops.tanh(x) + 0.5 * x,
                    lambda: ops.softmax(x, axis=-1),
                    lambda: ops.concatenate([x, ops.sin(x)], axis=-1)[:, 1:4],
                    lambda: ops.where(ops.greater(x, 0.1), x, 0.2 * x),
                    lambda: x / (1.0 + ops.sum(ops.square(x), axis=-1, keepdims=True)),
                    lambda: ops.stop_gradient(x) * 0.5 + x,
                    lambda: ops.stop_gradient(ops.tanh(x)),
                    lambda: ops.cast(ops.cast(x * 8.0, "int32"), "float64") * 0.1,
                    lambda: ops.flip(ops.abs(x), axis=-1),
                ]
            )()
        )

    def part_integers(self):
        x = self.any(self.series)
        best = ops.argmax(x, axis=-1)
        width = self.choose(self.WIDTHS)
        y = OneHotTable(width, name=self.name("one_hot"))(best)
        is_large = ops.greater(ops.max(x, axis=-1, keepdims=True), 0.0)
        self.add(ops.where(is_large, self.as_wide(self.any(self.series), width), y))

    def part_norm(self):
        pool = self.choose([self.rows, self.series])
        self.add(L.LayerNormalization(name=self.name("norm"))(self.any(pool)))

    def part_convolution(self):
        x = self.any(self.series)
        self.add(L.Conv1D(4, 3, padding="same", activation="tanh", name=self.name("conv"))(x))

    def part_attention(self):
        x, y = self.any(self.series), self.any(self.series)
        attend = L.MultiHeadAttention(2, 3, use_bias=False, name=self.name("attention"))
        self.add(attend(x, y, use_causal_mask=self.chance(0.4)))

    def part_pool(self):
        kind = self.choose([L.GlobalAveragePooling1D, L.GlobalMaxPooling1D, L.Flatten])
        x = self.any(self.series)
        self.add(self.as_wide(kind(name=self.name("pool"))(x), 4))

    def part_repeat(self):
        self.add(L.RepeatVector(LENGTH, name=self.name("repeat"))(self.any(self.rows)))

    def part_gate(self):
        x = self.any(self.series)
        y = L.Reshape((1, x.shape[-1]))(self.as_wide(self.any(self.rows), x.shape[-1]))
        self.add(x * ops.sigmoid(y))

    def part_recurrent(self):
        if self.chance(0.3):
            x = self.any(self.series)
            y, state = L.GRU(4, return_sequences=True, return_state=True)(x)
            self.add(y, state)

    def part_pair(self):
        self.add(*Pair(4, name=self.name("pair"))(self.any(self.rows)))

    def part_named(self):
        x, scale = self.any(self.rows), self.as_wide(self.any(self.rows), 4)
        found = Named(4, name=self.name("named"))(x, scale=scale if self.chance(0.6) else None)
        self.add(found["a"], found["b"])

    def part_penalty(self):
        pool = self.choose([self.rows, self.series])
        self.add(Penalty(name=self.name("penalty"))(self.any(pool)))


# ------------------------------------------------------------------ the rest of what a seed decides

OPTIMIZERS = {
    "Adam": lambda: DenseAdam(0.01, epsilon=1e-4),
    "Adam with schedule": lambda: DenseAdam(
        O.schedules.ExponentialDecay(0.02, 2, 0.7), epsilon=1e-4
    ),
    "AdamW": lambda: DenseAdam(0.01, weight_decay=0.05, global_clipnorm=0.3, epsilon=1e-4),
    "AdamW and averages": lambda: DenseAdam(
        0.01, weight_decay=0.05, use_ema=True, ema_momentum=0.8, epsilon=1e-4
    ),
    "RMSprop": lambda: O.RMSprop(0.005, momentum=0.5, centered=True, epsilon=1e-4),
    "Nadam": lambda: O.Nadam(0.01, epsilon=1e-4, clipnorm=0.5),
    "Adafactor": lambda: O.Adafactor(0.02, epsilon_1=1e-6),
    "Lamb": lambda: O.Lamb(0.01, epsilon=1e-3, clipvalue=0.1),
    "Ftrl": lambda: O.Ftrl(0.05, l1_regularization_strength=0.01),
    "SGD with averages": lambda: O.SGD(0.05, momentum=0.9, use_ema=True, ema_overwrite_frequency=2),
    "SGD, weight decay, scaled": lambda: O.SGD(
        0.05,
        momentum=0.9,
        nesterov=True,
        weight_decay=0.1,
        loss_scale_factor=4.0,
        global_clipnorm=0.5,
    ),
}
DENSE = (
    "Adam",
    "Adam with schedule",
    "AdamW and averages",
)  # right for repeated ids of an Embedding


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a seed decides besides the model."""

    pipe: int
    data: int
    model: int
    zero: int
    schedule: str
    recompute: bool
    micro_batches: int
    cut_at_random: bool
    optimizer: str
    steps: int
    batch_size: int
    rows: int
    weights: str
    loss_weights: bool
    use_fit: bool
    metrics: bool
    steps_per_execution: int = 1


def plan_of(seed):
    rng = rng_of(seed, "plan")
    choose = lambda options: options[int(rng.integers(len(options)))]
    pipe = choose([2, 2, 3, 4])
    data = choose([1, 1, 2])
    model = choose([1, 1, 1, 2]) if pipe * data <= 4 else 1
    schedule = choose(["1f1b", "1f1b", "gpipe", "interleaved"])
    if pipe == 4 and schedule == "interleaved":
        pipe, model = 3, 1
    micro_batches = choose([1, 2, 3, 4, 5])
    if schedule == "interleaved":
        micro_batches = pipe * choose([1, 2])
    steps = choose([1, 1, 1, 2])
    use_fit, batch_size = steps > 1 or rng.random() < 0.3, choose([5, 6, 7, 9, 10])
    rest = int(rng.integers(1, batch_size)) if not use_fit and rng.random() < 0.4 else batch_size
    return Plan(
        pipe=pipe,
        data=data,
        model=model,
        zero=choose([0, 0, 0, 1, 2, 3]) if data > 1 else 0,
        schedule=schedule,
        recompute=rng.random() < 0.5,
        micro_batches=micro_batches,
        cut_at_random=rng.random() < 0.6,
        optimizer=choose(list(OPTIMIZERS)),
        steps=steps,
        batch_size=batch_size,
        rows=batch_size + rest,
        weights=choose(["none", "none", "rows", "steps"]),
        loss_weights=rng.random() < 0.4,
        use_fit=use_fit,
        metrics=rng.random() < 0.4,
        steps_per_execution=choose([1, 2]) if use_fit else 1,
    )


def data_of(seed, model, kinds, plan):
    rng, n = rng_of(seed, "data"), plan.rows
    words = rng.integers(1, WORDS, (n, LENGTH))
    for row, end in enumerate(rng.integers(1, LENGTH + 1, n)):
        words[row, end:] = 0
    steps = rng.standard_normal((n, LENGTH, 3))
    for row, end in enumerate(rng.integers(1, LENGTH + 1, n)):
        steps[row, end:] = 0.0
    known = {
        "numbers": rng.standard_normal((n, 4)),
        "words": words.astype("int32"),
        "steps": steps,
        "scalar": rng.integers(0, WORDS, n).astype("int32"),
        "unused": rng.standard_normal((n, 2)),
        "image": rng.standard_normal((n, 2, 2, 3)),
    }
    names = [x.name for x in model.inputs]
    x = {name: known[name] for name in names}
    if not isinstance(model.input, dict):
        x = [known[name] for name in names]
    flat = list(model.output.values()) if isinstance(model.output, dict) else model.outputs
    targets, weights = [], []
    for kind, output in zip(kinds, flat):
        shape = (n, *output.shape[1:])
        if kind == "steps":
            targets.append(rng.integers(0, 3, (n, LENGTH)))
            weights.append(rng.random((n, LENGTH if plan.weights == "steps" else 1)))
        elif kind == "class":
            targets.append(rng.integers(0, 3, n))
            weights.append(rng.random(n))
        else:
            targets.append(rng.standard_normal(shape))
            weights.append(rng.random(n))
    return x, targets, weights


def losses_of(kinds):
    crossed = lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made = {
        "mse": lambda: keras.losses.MeanSquaredError(),
        "huber": lambda: keras.losses.Huber(),
        "sum": lambda: keras.losses.LogCosh(reduction="sum"),
        "steps": crossed,
        "class": crossed,
        "none": lambda: None,
    }
    return [made[kind]() for kind in kinds]


def case_of(seed):
    """(plan, function that builds the plain model, data, arguments of compile)."""
    plan = plan_of(seed)
    maker = Maker(seed)
    keras.utils.set_random_seed(0)
    model = maker.model()
    kinds = maker.kinds
    if isinstance(model.output, dict):
        kinds = [maker.kind_of[name] for name in model.output]
    embeds = any(isinstance(x, L.Embedding) for x in model._flatten_layers())
    if embeds and plan.optimizer not in DENSE:
        plan = dataclasses.replace(plan, optimizer=DENSE[seed % len(DENSE)])
    x, y, weights = data_of(seed, model, kinds, plan)
    loss = losses_of(kinds)
    scale = [0.3 + 0.4 * k for k in range(len(kinds))]
    metrics = [["mae"] if kind in ("mse", "huber") else None for kind in kinds]
    if isinstance(model.output, dict):
        named = lambda values: dict(zip(model.output, values))
        y, weights, scale, loss, metrics = map(named, (y, weights, scale, loss, metrics))
    if len(kinds) == 1 and not isinstance(model.output, dict):
        (y,), (weights,), (metrics,), (loss,) = y, weights, metrics, loss
    data = (x, y) if plan.weights == "none" else (x, y, weights)
    compile_args = dict(steps_per_execution=plan.steps_per_execution)
    if plan.loss_weights and len(kinds) > 1 and "none" not in kinds:
        compile_args["loss_weights"] = scale
    return plan, lambda: Maker(seed).model(), data, loss, metrics, compile_args


def cuts_of(seed, model, stages):
    """The names of the calls at which stages begin, drawn at random."""
    graph = Graph(model)
    names = [call.name for call in graph.calls]
    rng = rng_of(seed, "cuts")
    starts = sorted(rng.choice(np.arange(1, len(names)), stages - 1, replace=False))
    return [names[k] for k in starts]


def describe(seed):
    """What a seed decides, for people."""
    plan, build, _, _, _, _ = case_of(seed)
    return "\n".join([str(plan), *(call.name for call in Graph(build()).calls)])


def check(seed, **changes):
    plan, build, data, loss, metrics, compile_args = case_of(seed)
    plan = dataclasses.replace(plan, **changes)
    devices = [f"CPU:{i}" for i in range(plan.pipe * plan.data * plan.model)]
    mesh = tfpar.Mesh(pipe=plan.pipe, data=plan.data, model=plan.model, devices=devices)
    layouts = {"^wide/kernel": (None, "model")} if plan.model > 1 else None
    strategy = tfpar.MeshStrategy(mesh, layouts, zero=plan.zero)

    def made():
        if not tf.distribute.has_strategy():
            return build()
        model = build()
        stages = "auto"
        if plan.cut_at_random:
            chunks = 2 if plan.schedule == "interleaved" else 1
            stages = cuts_of(seed, model, plan.pipe * chunks)
        return tfpar.Pipeline(
            model, plan.micro_batches, plan.schedule, stages=stages, recompute=plan.recompute
        )

    def optimizer():
        inner = OPTIMIZERS[plan.optimizer]()
        return inner if plan.steps == 1 else tfpar.AccumulatingOptimizer(inner, plan.steps)

    return assert_same_training(
        made,
        data,
        strategy,
        optimizer=optimizer,
        loss=loss,
        metrics=metrics if plan.metrics else None,
        compile_args={**compile_args, "jit_compile": False},
        batch_size=plan.batch_size,
        epochs=2 if plan.use_fit else 1,
        use_fit=plan.use_fit,
        tolerance=1e-9,
        seed=seed,
    )


QUICK = (1, 16, 27, 29, 32, 34, 40, 43)


@pytest.mark.parametrize("seed", QUICK)
def test_random_models(seed, float64):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted(set(range(48)) - set(QUICK)))
def test_more_random_models(seed, float64):
    check(seed)
