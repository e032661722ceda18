"""Compressed gradients: sums, what of each replica is in them, error feedback, bytes, odd values."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tfpar.strategy import compression
from tfpar.strategy.compression import (
    BFloat16,
    Bucket,
    Compressor,
    Float16,
    Int8,
    NoCompression,
    PowerSGD,
    TopK,
)

SHAPES = [(12, 17), (17,), (3, 5, 11), ()]  # 387 elements; rank 2: matrices of 12 x 17 and 15 x 11
SIZE = 387


class LocalWire:
    """The collectives by plain operations on one device.

    Attributes:
      sent: list of (kind, dtype, elements per replica) of what was handed to it.
    """

    def __init__(self, replicas):
        self.replicas = replicas
        self.sent = []

    def map(self, fn, *lists):
        return [fn(*values) for values in zip(*lists, strict=True)]

    def map_with_id(self, fn, *lists):
        return self.map(fn, list(range(self.replicas)), *lists)

    def all_reduce(self, tensors, op="sum"):
        self._note("all_reduce", tensors)
        assert not tensors[0].dtype.is_integer or tensors[0].dtype.size >= 4
        if op == "max":
            return [tf.reduce_max(tf.stack(tensors), 0)] * self.replicas
        total = tensors[0]
        for tensor in tensors[1:]:
            total += tensor
        return [total] * self.replicas

    def all_gather(self, tensors):
        self._note("all_gather", tensors)
        return [tf.stack(tensors)] * self.replicas

    def all_to_all(self, tensors):
        self._note("all_to_all", tensors)
        return [tf.stack([tensor[row] for tensor in tensors]) for row in range(self.replicas)]

    def bytes(self):
        return sum(dtype.size * elements for _, dtype, elements in self.sent)

    def _note(self, kind, tensors):
        assert len(tensors) == self.replicas
        assert len({(tensor.dtype, tuple(tensor.shape)) for tensor in tensors}) == 1
        if kind == "all_to_all":
            assert tensors[0].shape[0] == self.replicas
        self.sent.append((kind, tensors[0].dtype, tensors[0].shape.num_elements()))


class Replicas:
    """A compressor and its state, exchanging one bucket in a tf.function."""

    def __init__(self, compressor, shapes, n, dtype="float32", seed=1):
        self.wire = LocalWire(n)
        self.dtype = dtype
        self.state = {
            name: [
                tf.Variable(tf.zeros(shape, of) if initial is None else tf.constant(initial, of))
                for _ in range(n)
            ]
            for name, (shape, of, initial) in compressor.state(shapes, dtype).items()
        }

        @tf.function(autograph=False)
        def run(gradients, step):
            bucket = Bucket(tf.unstack(gradients), shapes, self.wire, step, seed, self.state)
            sums, sent = compressor.exchange(bucket)
            assert all(x.dtype == dtype and x.shape == gradients.shape[1:] for x in sums)
            return tf.stack(sums), gradients if sent is None else tf.stack(sent)

        self.run = run

    def __call__(self, gradients, step=0):
        """The sum and what was sent [n, size], in float64, of gradients [n, size]."""
        gradients = tf.cast(tf.constant(gradients), self.dtype)
        sums, sent = self.run(gradients, tf.constant(step, tf.int64))
        sums = tf.cast(sums, "float64").numpy()
        for other in sums[1:]:
            np.testing.assert_array_equal(other, sums[0])
        return sums[0], tf.cast(sent, "float64").numpy()


class Sign(Compressor):
    """A user's own: signs, and one scale (arXiv:1802.04434)."""

    error_feedback = True

    def encode(self, gradient, seed):
        scale = tf.reduce_mean(tf.abs(gradient))
        return {"positive": gradient > 0, "scales": (scale, tf.cast(scale, "float16"))}

    def decode(self, payload, size):
        scale = payload["scales"][0]
        return tf.where(payload["positive"], scale, -scale)


ALL = {
    "none": NoCompression,
    "bfloat16": BFloat16,
    "float16": Float16,
    "int8": lambda: Int8(block=32),
    "top_k": lambda: TopK(0.1),
    "power_sgd": lambda: PowerSGD(2),
    "sign": Sign,
}
LOSSY = [name for name in ALL if name != "none"]
FEEDBACK = ["int8", "top_k", "power_sgd", "sign"]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(
    "name, tolerance", [("none", 1e-6), ("bfloat16", 2**-6), ("float16", 2**-8), ("int8", 0.06)]
)
def test_the_sum_is_right_to_the_rounding(name, tolerance, n):
    for shapes in [SHAPES, {2: [(1,)], 3: [(2, 2), (7,)], 4: [(0,), (3,)]}[n]]:
        gradients = normal(n, compression._elements(shapes))
        sums, _ = Replicas(ALL[name](), shapes, n)(gradients)
        true = gradients.astype("float32").sum(0)
        np.testing.assert_allclose(sums, true, rtol=0, atol=tolerance * np.abs(gradients).max())


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("name", LOSSY)
def test_what_was_sent_adds_up_to_the_sum(name, n):
    gradients = normal(n, SIZE)
    if name in ("bfloat16", "float16"):  # numbers whose addition rounds nothing
        gradients = np.round(gradients * 8) / 8
    sums, sent = Replicas(ALL[name](), SHAPES, n)(gradients)
    np.testing.assert_allclose(sent.sum(0), sums, rtol=1e-5, atol=1e-5)
    if name not in ("bfloat16", "float16"):
        assert np.abs(sent - gradients).max() > 1e-3


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_short_floats_know_what_their_rounding_lost(name):
    gradients = normal(3, SIZE)
    _, sent = Replicas(ALL[name](), SHAPES, 3)(gradients)
    short = tf.cast(tf.cast(gradients, "float32"), name)
    np.testing.assert_array_equal(sent, tf.cast(short, "float64"))


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ALL)
def test_gradients_of_other_dtypes(name, dtype):
    gradients = np.round(normal(3, SIZE) * 8) / 8
    replicas = Replicas(ALL[name](), SHAPES, 3, dtype)
    sums, sent = replicas(gradients)
    tolerance = {"float64": 1e-12, "float16": 0.01, "bfloat16": 0.08}[dtype]
    np.testing.assert_allclose(sent.sum(0), sums, rtol=tolerance, atol=tolerance)
    for variables in replicas.state.values():
        assert variables[0].dtype == ("float64" if dtype == "float64" else "float32")


@pytest.mark.parametrize("name", FEEDBACK)
def test_error_feedback_loses_nothing_for_good(name):
    n, steps = 3, 150
    replicas = Replicas(ALL[name](), SHAPES, n)
    residual, true, total, norms = np.zeros((n, SIZE)), 0, 0, []
    mean = normal(SIZE, seed=9)
    for step in range(steps):
        gradients = mean + 0.5 * normal(n, SIZE, seed=step)
        sums, sent = replicas(gradients + residual, step)
        residual = gradients + residual - sent
        true, total = true + gradients.sum(0), total + sums
        norms.append(np.linalg.norm(residual))
        # All of the error is in the residuals.
        np.testing.assert_allclose(total + residual.sum(0), true, rtol=1e-4, atol=2e-3)
    assert max(norms[steps // 2 :]) < 1.5 * max(norms[: steps // 2])  # bounded
    if name != "sign":
        assert np.linalg.norm(total - true) < 0.1 * np.linalg.norm(true)


def test_int8_rounds_right_in_the_mean():
    n, steps = 3, 400
    gradients = normal(n, 40)
    replicas = Replicas(Int8(block=16), [(40,)], n)
    found = np.stack([replicas(gradients, step)[0] for step in range(steps)])
    error = found.mean(0) - gradients.sum(0)
    deviation = found.std(0) / math.sqrt(steps)
    assert deviation.max() > 0
    assert (np.abs(error) < 5 * deviation + 1e-5).all()
    assert np.abs(error).mean() < 1.2 * deviation.mean()  # sqrt(2 / pi) is expected


def test_int8_draws_by_step_bucket_and_replica():
    gradients = np.repeat(normal(1, SIZE), 2, 0)
    replicas = Replicas(Int8(), SHAPES, 2)
    first, sent = replicas(gradients, 7)
    np.testing.assert_array_equal(replicas(gradients, 7)[0], first)
    np.testing.assert_array_equal(Replicas(Int8(), SHAPES, 2)(gradients, 7)[0], first)
    assert (replicas(gradients, 8)[0] != first).any()
    assert (Replicas(Int8(), SHAPES, 2, seed=2)(gradients, 7)[0] != first).any()
    assert (sent[0] != sent[1]).any()


@pytest.mark.parametrize("size", [6e4, 1e6, 3e37, 1e-9, 1e-34])
@pytest.mark.parametrize("n", [3, 4])
def test_float16_neither_overflows_nor_vanishes(size, n):
    gradients = np.full((n, 5), size) * [1, -1, 0.5, 0, 1e-3]
    sums, sent = Replicas(Float16(), [(5,)], n)(gradients)
    np.testing.assert_allclose(sums, gradients.sum(0), rtol=2e-3 if n == 3 else 1e-3)
    np.testing.assert_allclose(sent, gradients, rtol=1e-3)


@pytest.mark.parametrize("n", [3, 4, 18])  # 18 roundings upwards reach infinity
def test_float16_stays_in_range_wherever_the_largest_lies(n):
    """Just below, at and just above every step of the scale."""
    for size in [*np.geomspace(1, 2, 30), *np.linspace(0.998, 1, 50) * 65504 / n]:
        gradients = [tf.constant([size], "float32")] * n
        bucket = Bucket(gradients, [(1,)], LocalWire(n), tf.constant(0, tf.int64), 0)
        sums, _ = Float16().exchange(bucket)  # eagerly: in a graph Grappler adds n numbers at once
        assert sums[0].numpy() == pytest.approx(n * size, rel=n * 2**-11)  # and is no Inf


def test_float64_beyond_float32_comes_through_float16():
    for size in [1e300, 1e-300]:
        sums, _ = Replicas(Float16(), [(2,)], 4, "float64")(np.full((4, 2), size))
        np.testing.assert_allclose(sums, 4 * size, rtol=1e-3)


def test_bfloat16_clamps_what_rounds_to_infinity():
    most = np.finfo("float32").max
    sums, _ = Replicas(BFloat16(), [(3,)], 2)([[most, -most, 1], [0, 0, 1]])
    assert np.isfinite(sums).all()
    np.testing.assert_allclose(sums, [most, -most, 2], rtol=0.01)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [5, 210])  # in a matrix, in a bias
@pytest.mark.parametrize("name", [name for name in ALL if name != "sign"])
def test_what_is_not_finite_stays_visible(name, where, bad):
    gradients = normal(3, SIZE)
    gradients[1, where] = bad
    replicas = Replicas(ALL[name](), SHAPES, 3)
    before = {name: variables[0].numpy() for name, variables in replicas.state.items()}
    sums, _ = replicas(gradients)
    assert not np.isfinite(sums[where])
    spread = {"int8": 32, "power_sgd": 12 * 17 if where == 5 else 1}.get(name, 1)
    assert 1 <= (~np.isfinite(sums)).sum() <= spread
    for name, variables in replicas.state.items():
        assert np.isfinite(variables[0]).all()
        first = slice(0, 17 * 2)  # the factor of the matrix with the NaN
        assert np.array_equal(variables[0][first], before[name][first]) == (where == 5)
    assert np.isfinite(replicas(normal(3, SIZE), 1)[0]).all()


def test_many_that_are_not_finite_and_zeros():
    """NaN among zeros: nothing is there to hide behind, and nothing to divide by."""
    for name in LOSSY[:-1]:
        gradients = np.zeros((2, SIZE))
        gradients[0, :30] = np.nan
        sums, _ = Replicas(ALL[name](), SHAPES, 2)(gradients)
        assert np.isnan(sums).any() and not np.isinf(sums).any(), name


@pytest.mark.parametrize("name", ALL)
def test_zeros(name):
    sums, sent = Replicas(ALL[name](), SHAPES, 3)(np.zeros((3, SIZE)))
    assert not sums.any() and not sent.any()


@pytest.mark.parametrize("name", [name for name in ALL if name != "sign"])
def test_an_empty_bucket(name):
    sums, _ = Replicas(ALL[name](), [(0, 3)], 2)(np.zeros((2, 0)))
    assert sums.shape == (0,)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", ALL)
def test_bytes_are_those_on_the_wire(name, dtype):
    for n, shapes in [(3, SHAPES), (4, [(5,), (2, 2)])]:
        compressor = ALL[name]()
        replicas = Replicas(compressor, shapes, n, dtype)
        replicas(np.ones((n, compression._elements(shapes))))
        wire = replicas.wire
        assert compressor.payload_bytes(shapes, dtype, n) == wire.bytes()
        share = {"all_reduce": 2 * (n - 1) / n, "all_gather": n - 1, "all_to_all": (n - 1) / n}
        on_wire = sum(share[kind] * of.size * elements for kind, of, elements in wire.sent)
        assert compressor.wire_bytes(shapes, dtype, n) == pytest.approx(on_wire)
        assert len(wire.sent) <= compressor.collectives()
        if shapes == SHAPES:
            assert len(wire.sent) == compressor.collectives()


def test_the_bytes_of_the_formulas():
    """By hand, for 1000 x 500 weights in float32 on 4 replicas."""
    bytes_of = lambda compressor: compressor.payload_bytes([(1000, 500)], "float32", 4)
    assert bytes_of(NoCompression()) == 2_000_000
    assert bytes_of(BFloat16()) == 1_000_000
    assert bytes_of(Float16()) == 1_000_004
    blocks = math.ceil(500_000 / 4 / 256)  # of a replica's part
    length = math.ceil(500_000 / 4 / blocks)
    assert bytes_of(Int8()) == 5 * blocks * (length + 4)
    assert bytes_of(Int8()) < 1.02 * 625_000
    assert bytes_of(TopK(0.01)) == 5000 * 8
    assert bytes_of(PowerSGD(4)) == 4 * 1500 * 4
    assert bytes_of(Sign()) == 500_000 + 4 + 2
    assert Int8().wire_bytes([(1000, 500)], "float32", 4) == bytes_of(Int8()) * 4 / 5 * 1.5


def test_power_sgd_is_exact_on_low_rank():
    """Also where the rank is below that of the factors, and after steps without a gradient."""
    shapes, n = [(20, 30), (4, 5, 30), (3,)], 3
    compressor = PowerSGD(4)
    replicas = Replicas(compressor, shapes, n)
    left, right = normal(2, 20, 3), normal(2, 3, 30, seed=1)

    def gradients(rank, step):
        mixed = normal(n, 2, 3, seed=step)[..., np.newaxis, :rank] * left[:, :, :rank]
        matrices = mixed @ right[:, :rank]
        return np.concatenate([matrices.reshape(n, -1), normal(n, 3, seed=step)], -1)

    for step, rank in enumerate([0, 1, 1, 0, 2, 3, 3]):
        given = gradients(rank, step)
        sums, sent = replicas(given, step)
        assert np.isfinite(sums).all()
        np.testing.assert_allclose(sent.sum(0), sums, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(sums, given.sum(0), rtol=1e-3, atol=1e-3)
    for q in replicas.state["q"]:
        np.testing.assert_array_equal(q, replicas.state["q"][0])


@pytest.mark.parametrize("noise, rank", [(0, 3), (1e-8, 3), (3e-5, 4), (1e-3, 4)])
def test_nearly_dependent_columns_become_orthogonal_or_zero(noise, rank):
    p = normal(200, 4)
    p[:, 2] = p[:, 0] - p[:, 1] + noise * p[:, 2]
    p = compression._orthonormal([tf.constant(p, "float32")] * 2)[1].numpy()
    want = np.diag([1, 1, rank == 4, 1])
    np.testing.assert_allclose(p.T @ p, want, atol=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_power_sgd_of_any_size(size):
    gradients = size * normal(2, 20, 1) @ normal(1, 30)
    sums, _ = Replicas(PowerSGD(4), [(20, 30)], 2)(gradients.reshape(2, -1))
    np.testing.assert_allclose(sums, gradients.sum(0).ravel(), rtol=1e-3, atol=1e-4 * size)


def test_power_sgd_converges_to_the_best_rank():
    """Of the same gradient again and again: the truncated singular value decomposition."""
    matrix = np.linalg.qr(normal(20, 20))[0] * 0.5 ** np.arange(20) @ normal(20, 30)
    u, s, v = np.linalg.svd(matrix)
    replicas = Replicas(PowerSGD(2), [(20, 30)], 2)
    for step in range(30):
        sums, _ = replicas(np.stack([matrix.ravel() / 2] * 2), step)
    np.testing.assert_allclose(sums.reshape(20, 30), u[:, :2] * s[:2] @ v[:2], atol=1e-2 * s[0])


def test_power_sgd_starts_the_same_everywhere():
    of = lambda shapes, rank=2: PowerSGD(rank).state(shapes, "float32")["q"][2]
    np.testing.assert_array_equal(of(SHAPES), of([list(shape) for shape in SHAPES]))
    assert of(SHAPES).shape == (2 * (17 + 11),)
    assert (of([(12, 17)]) != of([(13, 17)])).any()
    assert PowerSGD(2).state([(5,), (4, 4)], "float32") == {}


def test_top_k_is_exact_on_sparse_gradients():
    gradients = np.zeros((3, 1000))
    for replica in range(3):
        chosen = np.random.default_rng(replica).choice(1000, 10, replace=False)
        gradients[replica, chosen] = normal(10, seed=replica)
    gradients[:, 5] = 3  # on every replica
    sums, sent = Replicas(TopK(0.011), [(1000,)], 3)(gradients)
    np.testing.assert_allclose(sums, gradients.sum(0), rtol=1e-6)
    np.testing.assert_allclose(sent, gradients, rtol=1e-6)


def test_top_k_sends_the_largest():
    sums, sent = Replicas(TopK(1e-9), [(4,)], 2)([[1, -5, 2, 0], [0, 1, 2, 4]])
    np.testing.assert_array_equal(sent, [[0, -5, 0, 0], [0, 0, 0, 4]])
    np.testing.assert_array_equal(sums, [0, -5, 0, 4])
    np.testing.assert_array_equal(Replicas(TopK(1), [(2,)], 2)([[1, 2], [3, 4]])[0], [4, 6])


def test_a_compressor_with_random_numbers_of_its_own():
    class Dither(Compressor):
        def encode(self, gradient, seed):
            noise = tf.random.stateless_uniform(gradient.shape, seed, -0.5, 0.5)
            return [tf.cast(tf.round(gradient * 8 + noise), "int16")]

        def decode(self, payload, size):
            return tf.cast(payload[0], "float32") / 8

    replicas = Replicas(Dither(), [(100,)], 2)
    gradients = np.repeat(normal(1, 100), 2, 0)
    sums, sent = replicas(gradients, 3)
    np.testing.assert_allclose(sums, gradients.sum(0), atol=0.25)
    np.testing.assert_array_equal(sums, replicas(gradients, 3)[0])
    assert (sums != replicas(gradients, 4)[0]).any() and (sent[0] != sent[1]).any()
    assert Dither().payload_bytes([(100,)], "float32", 2) == 200 == replicas.wire.bytes()


class NoDecode(Compressor):
    def encode(self, gradient, seed):
        return gradient


class Shorter(NoDecode):
    def decode(self, payload, size):
        return payload[1:]


class Text(Compressor):
    def encode(self, gradient, seed):
        return tf.strings.as_string(gradient)


@pytest.mark.parametrize(
    "compressor, error, match",
    [
        (Compressor, NotImplementedError, "Compressor must define encode and decode"),
        (NoDecode, NotImplementedError, "NoDecode must define encode and decode"),
        (Shorter, ValueError, r"vector of the 4 elements .* received shape \(3,\)"),
        (Text, ValueError, "tensors of numbers .* received string"),
    ],
)
def test_faults_of_a_compressor_of_ones_own(compressor, error, match):
    bucket = Bucket([tf.ones([4])] * 2, [(4,)], LocalWire(2), tf.constant(0, tf.int64), 0, {})
    with pytest.raises(error, match=match):
        compressor().exchange(bucket)


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: Int8(block=0), "block must be .* 1 or more; received 0"),
        (lambda: Int8(block=2.5), "received 2.5"),
        (lambda: Int8(block=True), "received True"),
        (lambda: PowerSGD(rank=-1), "rank must be .* received -1"),
        (lambda: PowerSGD(rank="4"), "received '4'"),
        (lambda: TopK(0), "fraction must be .* received 0"),
        (lambda: TopK(1.5), "received 1.5"),
        (lambda: TopK(math.nan), "received nan"),
        (lambda: TopK("0.1"), "received '0.1'"),
        (lambda: BFloat16("yes"), "error_feedback must be True or False; received 'yes'"),
        (lambda: Float16(1), "received 1"),
        (lambda: compression.get("int4"), "one of 'bfloat16', .*'power_sgd'.* received 'int4'"),
        (lambda: compression.get(Int8), "or a Compressor; received <class"),
        (lambda: compression.get(["int8"]), "received"),
    ],
)
def test_bad_arguments_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_get():
    own = TopK(0.5)
    assert compression.get(own) is own
    assert type(compression.get(None)) is NoCompression
    for name in ["bfloat16", "float16", "int8", "top_k", "power_sgd"]:
        compressor = compression.get(name)
        config = compressor.get_config()
        assert type(compressor)(**config).get_config() == config
        assert compressor.error_feedback == (name not in ("bfloat16", "float16"))
    assert Int8(block=7, error_feedback=False).get_config() == {"block": 7, "error_feedback": False}
