"""Compression of the gradients that the replicas of a mirrored strategy exchange.

A value of all replicas is a list with one tensor per replica. The gradients of several weights
travel together as one `Bucket`. A `Compressor` turns the gradients of all replicas into their sum;
the tensors that leave a device are smaller than the gradients. `wire` is how they leave it:

* `wire.replicas`: how many replicas there are, n.
* `wire.map(fn, *lists)`: [fn(a, b, ...) for each replica]; `wire.map_with_id` puts the replica's
  number first.
* `wire.all_reduce(tensors, op)`: their sum, or with op="max" their maximum, on every replica.
* `wire.all_gather(tensors)`: all of them, [n, *shape], on every replica.
* `wire.all_to_all(tensors)`: of tensors [n, ...]; row i of replica j becomes row j of replica i.

What compression loses need not be lost for good. With error feedback (Karimireddy et al. 2019,
arXiv:1901.09847) each replica keeps its gradient less what was `sent` of it, and adds that to its
next gradient. The caller does so where `error_feedback` is True.
"""

import dataclasses
import math
import numbers
import zlib
from typing import Any

import numpy as np
import tensorflow as tf

ALL_REDUCE, ALL_GATHER, ALL_TO_ALL = "all_reduce", "all_gather", "all_to_all"


@dataclasses.dataclass
class Bucket:
    """The gradients of some weights on all replicas.

    Attributes:
      gradients: list over replicas of flat vectors of one float dtype and one static size.
      shapes: list of the shapes of the weights whose gradients lie one after the other in a vector.
      wire: the collectives.
      step: int64 scalar tensor, the number of updates so far.
      seed: int, another for each bucket.
      state: {name: list over replicas of the variables that `Compressor.state` asked for}.
    """

    gradients: list
    shapes: list
    wire: Any
    step: Any
    seed: int
    state: dict = dataclasses.field(default_factory=dict)


class Compressor:
    """Base of all compressors. One of your own defines `encode` and `decode`::

        class Sign(Compressor):
            error_feedback = True

            def encode(self, gradient, seed):
                return {"sign": tf.cast(tf.sign(gradient), "int8"),
                        "scale": tf.reduce_mean(tf.abs(gradient))}

            def decode(self, payload, size):
                return payload["scale"] * tf.cast(payload["sign"], payload["scale"].dtype)

    Every replica then receives what every other encoded, in one all-gather of bytes, and adds it up.
    A compressor that exchanges otherwise defines `exchange`, `traffic` and `collectives`.

    Attributes:
      error_feedback: whether the caller adds what was lost of a gradient to the next one.
    """

    error_feedback = False

    def state(self, shapes, dtype):
        """The variables that each replica keeps for a bucket.

        Returns:
          {name: (shape, dtype, initial NumPy array or None for zeros)}.
        """
        return {}

    def exchange(self, bucket):
        """Adds up the gradients of all replicas.

        Returns:
          (sums, sent), lists over replicas of vectors like the gradients. The sums are the same on
          all replicas. `sent` is what of each replica's gradient is in the sum: all of them add up
          to the sum. It is None if nothing is lost.
        """
        wire, like = bucket.wire, bucket.gradients[0]
        size = like.shape[0]

        def encode(replica, gradient):
            payload = self.encode(_wide(gradient), _seed(bucket, replica))
            return tf.nest.map_structure(tf.convert_to_tensor, payload)

        payloads = wire.map_with_id(encode, bucket.gradients)
        gathered = wire.all_gather(wire.map(_pack, payloads))

        def total(rows):
            result = tf.zeros([size], _wide_dtype(like.dtype))
            for row in range(wire.replicas):
                result = self.add(result, _unpack(rows[row], payloads[0]))
            return tf.cast(result, like.dtype)

        def own(payload):
            return self.add(tf.zeros([size], _wide_dtype(like.dtype)), payload)

        sent = wire.map(lambda payload: tf.cast(own(payload), like.dtype), payloads)
        return wire.map(total, gathered), sent

    def encode(self, gradient, seed):
        """What one replica sends of its gradient.

        Args:
          gradient: vector of static size, float32 or float64 (of 16 bit gradients: float32).
          seed: int64 tensor [2] for `tf.random.stateless_uniform` and the like; another one for
            each step, bucket and replica.

        Returns:
          A nest of tensors of static shape.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define encode and decode, or exchange"
        )

    def decode(self, payload, size):
        """The vector of `size` elements that a nest of tensors from `encode` stands for."""
        raise NotImplementedError(
            f"{type(self).__name__} must define encode and decode, or exchange"
        )

    def add(self, total, payload):
        """The vector `total` plus what `payload` stands for."""
        size = total.shape[0]
        vector = self.decode(payload, size)
        if vector.shape != total.shape:
            raise ValueError(
                f"{type(self).__name__}.decode must return a vector of the {size} elements it was "
                f"asked for; received shape {vector.shape}"
            )
        return total + tf.cast(vector, total.dtype)

    def traffic(self, shapes, dtype, replicas):
        """The collectives of a bucket.

        Returns:
          [(kind, bytes that a replica hands to it)], in the order they run.
        """
        gradient = tf.TensorSpec([_elements(shapes)], _wide_dtype(dtype))
        traced = tf.function(self.encode, autograph=False).get_concrete_function(
            gradient, tf.TensorSpec([2], tf.int64)
        )
        payload = tf.nest.flatten(traced.structured_outputs)
        return [(ALL_GATHER, sum(math.prod(_static(x)) * x.dtype.size for x in payload))]

    def payload_bytes(self, shapes, dtype, replicas):
        """Bytes that one replica hands to the collectives for a bucket.

        Args:
          shapes: the shapes of the weights of the bucket.
          dtype: the dtype of their gradients.
          replicas: how many replicas there are.
        """
        return sum(size for _, size in self.traffic(shapes, dtype, replicas))

    def wire_bytes(self, shapes, dtype, replicas):
        """Bytes that one replica sends for a bucket; the arguments are those of `payload_bytes`.

        Of b bytes handed in, rings of n replicas send 2 (n - 1) / n b to all-reduce, (n - 1) b to
        all-gather, (n - 1) / n b to all-to-all.
        """
        share = (replicas - 1) / replicas
        factors = {ALL_REDUCE: 2 * share, ALL_GATHER: replicas - 1, ALL_TO_ALL: share}
        return sum(factors[kind] * size for kind, size in self.traffic(shapes, dtype, replicas))

    def collectives(self):
        """How many collectives a bucket takes at most."""
        return 1

    def get_config(self):
        """The arguments that make a compressor like this one."""
        return {}


class NoCompression(Compressor):
    """All-reduce in the dtype of the gradients."""

    def exchange(self, bucket):
        return bucket.wire.all_reduce(bucket.gradients, op="sum"), None

    def traffic(self, shapes, dtype, replicas):
        return [(ALL_REDUCE, _elements(shapes) * tf.as_dtype(dtype).size)]


class BFloat16(Compressor):
    """All-reduce in bfloat16 (Kalamkar et al. 2019, arXiv:1905.12322).

    Finite gradients stay finite, NaN and Inf stay what they are. What the addition itself rounds no
    replica can know: `sent` adds up to the sum but for that, about 2**-9 of it per addition.

    Args:
      error_feedback: whether to send what rounding a gradient lost with the next one.
    """

    def __init__(self, error_feedback=False):
        self.error_feedback = _flag(error_feedback)

    def exchange(self, bucket):
        most = float(tf.bfloat16.max)

        def shorten(gradient):
            gradient = _wide(gradient)
            clipped = tf.clip_by_value(gradient, -most, most)
            return tf.cast(tf.where(tf.math.is_finite(gradient), clipped, gradient), tf.bfloat16)

        wire, dtype = bucket.wire, bucket.gradients[0].dtype
        short = wire.map(shorten, bucket.gradients)
        lengthen = lambda tensor: tf.cast(tensor, dtype)
        return wire.map(lengthen, wire.all_reduce(short, op="sum")), wire.map(lengthen, short)

    def traffic(self, shapes, dtype, replicas):
        return [(ALL_REDUCE, _elements(shapes) * 2)]

    def get_config(self):
        return {"error_feedback": self.error_feedback}


class Float16(Compressor):
    """All-reduce in float16, scaled into its range (the scaling of Micikevicius et al. 2018,
    arXiv:1710.03740, chosen for each bucket and step).

    The replicas first agree on the largest finite magnitude of the bucket. A power of two then
    brings the sum just below 65504: nothing overflows, and a bucket of small gradients does not vanish.
    What is below n 2**-29 of the largest loses digits, below n 2**-40 it comes out as zero. NaN and
    Inf stay in their elements.
    What the addition itself rounds no replica can know: `sent` adds up to the sum but for that,
    about 2**-11 of it per addition.

    Args:
      error_feedback: whether to send what rounding a gradient lost with the next one.
    """

    def __init__(self, error_feedback=False):
        self.error_feedback = _flag(error_feedback)

    def exchange(self, bucket):
        wire, dtype = bucket.wire, bucket.gradients[0].dtype
        wide = _wide_dtype(dtype)
        n = wire.replicas
        # Each of the n roundings of a sum may lengthen it by 2**-11.
        room = math.log2(65504 / n / (1 + 2**-11) ** n)
        # The scale and its inverse are normal numbers.
        least, most = (-1020, 1000) if wide == tf.float64 else (-125, 120)

        def largest(gradient):
            size = tf.abs(_wide(gradient))
            size = tf.where(tf.math.is_finite(size), size, tf.zeros_like(size))
            return tf.maximum(tf.reduce_max(size), 0)  # of an empty vector 0

        def scale(largest):
            # log2 is right to 1e-4; of 0 it is -inf, which the clipping makes `most`.
            exponent = tf.floor(room - 1e-3 - tf.math.log(largest) / math.log(2))
            return tf.pow(tf.constant(2, wide), tf.clip_by_value(exponent, least, most))

        scales = wire.map(scale, wire.all_reduce(wire.map(largest, bucket.gradients), op="max"))
        shorten = lambda gradient, scale: tf.cast(_wide(gradient) * scale, tf.float16)
        short = wire.map(shorten, bucket.gradients, scales)
        lengthen = lambda tensor, scale: tf.cast(tf.cast(tensor, wide) / scale, dtype)
        sums = wire.map(lengthen, wire.all_reduce(short, op="sum"), scales)
        return sums, wire.map(lengthen, short, scales)

    def traffic(self, shapes, dtype, replicas):
        return [(ALL_REDUCE, _wide_dtype(dtype).size), (ALL_REDUCE, _elements(shapes) * 2)]

    def collectives(self):
        return 2

    def get_config(self):
        return {"error_feedback": self.error_feedback}


class Int8(Compressor):
    """8 bits an element, rounded stochastically (QSGD: Alistarh et al. 2017, arXiv:1610.02132).

    A block of elements shares a float32 scale, its largest magnitude / 127. An all-to-all brings
    the same part of all gradients to one replica, which adds them up in float32 (of float64
    gradients in float64) and rounds the sum again; an all-gather spreads it. Both roundings are
    right in the mean. A block with NaN or Inf comes out as NaN.

    Args:
      block: how many elements share a scale at most. The blocks of a bucket are equally long, as
        long as leaves the least padding.
      error_feedback: whether to send what rounding lost with the next gradient; what rounding a sum
        lost is kept by the replica that rounded it.
    """

    def __init__(self, block=256, error_feedback=True):
        self.block = _positive("block", block, "elements that share a scale")
        self.error_feedback = _flag(error_feedback)

    def exchange(self, bucket):
        wire, like = bucket.wire, bucket.gradients[0]
        size, dtype = like.shape[0], _wide_dtype(like.dtype)
        blocks, block = self._layout(size, wire.replicas)

        def shorten(replica, gradient):
            padding = wire.replicas * blocks * block - size
            padded = tf.pad(_wide(gradient), [[0, padding]])
            return self._round(
                tf.reshape(padded, [wire.replicas, blocks, block]), _seed(bucket, replica)
            )

        def vector(tensor):
            return tf.cast(tf.reshape(tensor, [-1])[:size], like.dtype)

        def sent(replica, own, part, rounded):
            lost = self._values(rounded, dtype) - part
            mine = tf.equal(tf.range(wire.replicas), replica)[:, tf.newaxis, tf.newaxis]
            return vector(self._values(own, dtype) + tf.where(mine, lost, tf.zeros_like(lost)))

        own = wire.map_with_id(shorten, bucket.gradients)
        add = lambda rows: tf.reduce_sum(self._values(rows, dtype), 0)
        parts = wire.map(add, wire.all_to_all(own))
        again = lambda replica, part: self._round(part, _seed(bucket, replica, use=1))
        rounded = wire.map_with_id(again, parts)
        sums = wire.map(lambda rows: vector(self._values(rows, dtype)), wire.all_gather(rounded))
        return sums, wire.map_with_id(sent, own, parts, rounded)

    def traffic(self, shapes, dtype, replicas):
        blocks, block = self._layout(_elements(shapes), replicas)
        part = blocks * (block + 4)
        return [(ALL_TO_ALL, replicas * part), (ALL_GATHER, part)]

    def collectives(self):
        return 2

    def get_config(self):
        return {"block": self.block, "error_feedback": self.error_feedback}

    def _layout(self, size, replicas):
        """(blocks of the part of one replica, elements of a block)."""
        blocks = max(1, -(-size // (replicas * self.block)))
        return blocks, -(-size // (replicas * blocks))

    def _round(self, values, seed):
        """Blocks [..., block] as int8 [..., block + 4]: the elements, and the bytes of the scale."""
        finite = tf.reduce_all(tf.math.is_finite(values), -1, keepdims=True)
        values = tf.where(finite, values, tf.zeros_like(values))
        scale = tf.cast(tf.reduce_max(tf.abs(values), -1, keepdims=True) / 127, tf.float32)
        steps = tf.math.divide_no_nan(values, tf.cast(scale, values.dtype))
        noise = tf.random.stateless_uniform(values.shape, seed, dtype=values.dtype)
        steps = tf.clip_by_value(tf.floor(steps + noise), -127, 127)
        scale = tf.where(finite, scale, tf.fill(scale.shape, tf.constant(np.nan, tf.float32)))
        return tf.concat(
            [tf.cast(steps, tf.int8), tf.bitcast(tf.squeeze(scale, -1), tf.int8)], axis=-1
        )

    def _values(self, rounded, dtype):
        """The blocks [..., block] of `dtype` that `_round` made int8 [..., block + 4]."""
        scale = tf.bitcast(rounded[..., -4:], tf.float32)[..., tf.newaxis]
        return tf.cast(rounded[..., :-4], dtype) * tf.cast(scale, dtype)


class TopK(Compressor):
    """The largest elements of a bucket and where they are (Lin et al. 2018, arXiv:1712.01887).

    NaN counts as largest, like Inf.

    Args:
      fraction: the share of the elements that is sent, above 0 up to 1; at least one element is.
      error_feedback: whether what was not sent is added to the next gradient. Without, it is lost.
    """

    def __init__(self, fraction=0.01, error_feedback=True):
        known = isinstance(fraction, (int, float, np.floating)) and not isinstance(fraction, bool)
        if not known or not 0 < fraction <= 1:
            raise ValueError(
                f"fraction must be a share of the elements, above 0 and up to 1; received {fraction!r}"
            )
        self.fraction = float(fraction)
        self.error_feedback = _flag(error_feedback)

    def encode(self, gradient, seed):
        rank = tf.abs(gradient)
        infinite = tf.fill(rank.shape, tf.constant(np.inf, rank.dtype))
        rank = tf.where(tf.math.is_nan(rank), infinite, rank)
        _, indices = tf.math.top_k(rank, self._count(gradient.shape[0]), sorted=False)
        return {"values": tf.gather(gradient, indices), "indices": indices}

    def decode(self, payload, size):
        return self.add(tf.zeros([size], payload["values"].dtype), payload)

    def add(self, total, payload):
        # As int64 the indices stay on a GPU. Those of one replica differ: their order is no matter.
        indices = tf.cast(payload["indices"], tf.int64)[:, tf.newaxis]
        return tf.tensor_scatter_nd_add(total, indices, payload["values"])

    def traffic(self, shapes, dtype, replicas):
        return [(ALL_GATHER, self._count(_elements(shapes)) * (_wide_dtype(dtype).size + 4))]

    def get_config(self):
        return {"fraction": self.fraction, "error_feedback": self.error_feedback}

    def _count(self, size):
        return min(size, max(1, math.ceil(self.fraction * size)))


class PowerSGD(Compressor):
    """Low rank gradients by one step of power iteration (Vogels et al. 2019, arXiv:1905.13727).

    A weight of rank 2 or more is a matrix M of [product of its leading dims, last dim]. With Q from
    the step before, P = sum of M Q is made orthonormal, Q = sum of M^T P, and P Q^T is taken for the
    sum of the gradients. Weights for which P and Q are no smaller than M travel whole, with the P's.
    The computation is in float32, of float64 gradients in float64. NaN or Inf in a matrix makes that
    matrix NaN in the sum; Q then stays what it was.

    Args:
      rank: columns of P and Q.
      error_feedback: whether what P Q^T leaves out is added to the next gradient. Without, it is
        lost.
    """

    def __init__(self, rank=4, error_feedback=True):
        self.rank = _positive("rank", rank, "columns of the factors")
        self.error_feedback = _flag(error_feedback)

    def state(self, shapes, dtype):
        columns = [matrix[1] for matrix in self._matrices(shapes) if matrix]
        if not columns:
            return {}
        seed = zlib.crc32(repr((self.rank, [tuple(shape) for shape in shapes])).encode())
        initial = np.random.default_rng(seed).standard_normal(self.rank * sum(columns))
        wide = _wide_dtype(dtype)
        return {"q": (initial.shape, wide, initial.astype(wide.as_numpy_dtype))}

    def exchange(self, bucket):
        wire, matrices = bucket.wire, self._matrices(bucket.shapes)
        known = [matrix for matrix in matrices if matrix]
        if not known:
            return wire.all_reduce(bucket.gradients, op="sum"), None
        dtype = bucket.gradients[0].dtype
        p_shapes = [(rows, self.rank) for rows, _ in known]
        q_shapes = [(columns, self.rank) for _, columns in known]
        rest_shapes = [shape for shape, matrix in zip(bucket.shapes, matrices) if not matrix]

        def split(gradient):
            pieces = unflatten(_wide(gradient), [m or s for m, s in zip(matrices, bucket.shapes)])
            rest = [piece for piece, matrix in zip(pieces, matrices) if not matrix]
            return [piece for piece, matrix in zip(pieces, matrices) if matrix], rest

        def project(pieces, q):
            return flatten([m @ q for m, q in zip(pieces[0], unflatten(q, q_shapes))] + pieces[1])

        def bases(reduced):
            pieces = unflatten(reduced, p_shapes + rest_shapes)
            return _orthonormal(pieces[: len(known)]), pieces[len(known) :]

        def back(pieces, bases):
            products = zip(pieces[0], bases[0])
            return flatten([tf.matmul(m, p, transpose_a=True) for m, p in products])

        def join(p, q, rest):
            products = zip(p, unflatten(q, q_shapes))
            whole = iter(rest)
            low = iter([tf.matmul(p, q, transpose_b=True) for p, q in products])
            return tf.cast(flatten([next(low if m else whole) for m in matrices]), dtype)

        def keep(variable, q):
            pairs = zip(unflatten(q, q_shapes), unflatten(variable.read_value(), q_shapes))
            return variable.assign(flatten([_new_q(new, old) for new, old in pairs]))

        pieces = wire.map(split, bucket.gradients)
        first = wire.map(
            lambda pieces, q: project(pieces, q.read_value()), pieces, bucket.state["q"]
        )
        reduced = wire.map(bases, wire.all_reduce(first, op="sum"))
        own = wire.map(back, pieces, reduced)
        total = wire.all_reduce(own, op="sum")
        wire.map(keep, bucket.state["q"], total)
        sums = wire.map(lambda bases, q: join(bases[0], q, bases[1]), reduced, total)
        sent = wire.map(lambda bases, q, own: join(bases[0], q, own[1]), reduced, own, pieces)
        return sums, sent

    def traffic(self, shapes, dtype, replicas):
        matrices = self._matrices(shapes)
        if not any(matrices):
            return [(ALL_REDUCE, _elements(shapes) * tf.as_dtype(dtype).size)]
        rest = _elements([shape for shape, matrix in zip(shapes, matrices) if not matrix])
        p = self.rank * sum(matrix[0] for matrix in matrices if matrix)
        q = self.rank * sum(matrix[1] for matrix in matrices if matrix)
        size = _wide_dtype(dtype).size
        return [(ALL_REDUCE, (p + rest) * size), (ALL_REDUCE, q * size)]

    def collectives(self):
        return 2

    def get_config(self):
        return {"rank": self.rank, "error_feedback": self.error_feedback}

    def _matrices(self, shapes):
        """Of each shape the (rows, columns) of its matrix, or None if it travels whole."""
        return [self._matrix(tuple(shape)) for shape in shapes]

    def _matrix(self, shape):
        if len(shape) < 2:
            return None
        rows, columns = math.prod(shape[:-1]), shape[-1]
        return (rows, columns) if self.rank * (rows + columns) < rows * columns else None


def get(identifier):
    """The compressor of a name, with its defaults.

    Args:
      identifier: None for no compression, one of "bfloat16", "float16", "int8", "top_k",
        "power_sgd", or a `Compressor`, which is returned.

    Raises:
      ValueError: anything else.
    """
    if identifier is None:
        return NoCompression()
    if isinstance(identifier, Compressor):
        return identifier
    if isinstance(identifier, str) and identifier in _NAMES:
        return _NAMES[identifier]()
    names = ", ".join(repr(name) for name in _NAMES)
    raise ValueError(
        f"compression must be None, one of {names}, or a Compressor; received {identifier!r}"
    )


_NAMES = {
    "bfloat16": BFloat16,
    "float16": Float16,
    "int8": Int8,
    "top_k": TopK,
    "power_sgd": PowerSGD,
}


def _flag(error_feedback):
    if not isinstance(error_feedback, bool):
        raise ValueError(f"error_feedback must be True or False; received {error_feedback!r}")
    return error_feedback


def _positive(name, value, what):
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name} must be a number of {what}, 1 or more; received {value!r}")
    return int(value)


def _elements(shapes):
    return sum(math.prod(shape) for shape in shapes)


def _wide_dtype(dtype):
    """The dtype to compute in: float64 for float64, float32 for all others."""
    return tf.float64 if tf.as_dtype(dtype) == tf.float64 else tf.float32


def _wide(tensor):
    return tf.cast(tensor, _wide_dtype(tensor.dtype))


def _seed(bucket, replica, use=0):
    """A seed, int64 [2], for each step, bucket, replica and use (0 or 1) of random numbers."""
    stream = tf.cast(replica, tf.int64) + (bucket.seed % 2**40 * 2 + use) * 2**20
    return tf.stack([stream, tf.cast(bucket.step, tf.int64)])


def _static(tensor):
    """The static shape of a tensor from `encode`.

    Raises:
      ValueError: it is not known, or the tensor is no numbers.
    """
    if not tensor.shape.is_fully_defined() or not _numeric(tensor.dtype):
        raise ValueError(
            "encode must return tensors of numbers whose shape is known while the step is traced; "
            f"received {tensor.dtype.name} of shape {tensor.shape}"
        )
    return tuple(tensor.shape)


def _numeric(dtype):
    return dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool


def _pack(payload):
    """A nest of tensors as one int8 vector of their bytes."""
    pieces = []
    for tensor in tf.nest.flatten(payload):
        size = math.prod(_static(tensor)) * tensor.dtype.size
        tensor = tf.cast(tensor, tf.int8) if tensor.dtype.is_bool else tf.bitcast(tensor, tf.int8)
        pieces.append(tf.reshape(tensor, [size]))
    return tf.concat(pieces, 0)


def _unpack(packed, like):
    """The nest of tensors like `like` that `_pack` made the vector `packed`."""
    tensors, start = [], 0
    for spec in tf.nest.flatten(like):
        shape, dtype = _static(spec), spec.dtype
        end = start + math.prod(shape) * dtype.size
        # Bytes are given their shape as int8: a GPU reshapes int32 by way of the host.
        piece = tf.reshape(packed[start:end], shape + ((dtype.size,) if dtype.size > 1 else ()))
        tensors.append(tf.cast(piece, dtype) if dtype.is_bool else tf.bitcast(piece, dtype))
        start = end
    return tf.nest.pack_sequence_as(like, tensors)


def flatten(tensors):
    """The elements of tensors of one dtype, one after the other in a vector."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def unflatten(vector, shapes):
    """The tensors of `shapes` that lie one after the other in a vector."""
    pieces = tf.split(vector, [math.prod(shape) for shape in shapes])
    return [tf.reshape(piece, shape) for piece, shape in zip(pieces, shapes)]


def _orthonormal(matrices):
    """Orthonormal columns for each matrix; those that depend on columns before them become zero.

    Matrices of one shape are treated together.
    """
    shapes = [tuple(matrix.shape) for matrix in matrices]
    done = {}
    for shape in dict.fromkeys(shapes):
        same = [matrix for matrix, other in zip(matrices, shapes) if other == shape]
        done[shape] = iter(tf.unstack(_gram_schmidt(tf.stack(same))))
    return [next(done[shape]) for shape in shapes]


def _gram_schmidt(matrices):
    """Modified Gram-Schmidt of [..., rows, columns], twice for each column.

    What is left of a column and less than 1e-5 of it (float64: 1e-12) is rounding: a direction made
    of that would not be orthogonal to the others.
    """
    least = 1e-12 if matrices.dtype == tf.float64 else 1e-5
    done: list[tf.Tensor] = []
    for column in tf.unstack(matrices, axis=-1):
        column = _unit_size(column)
        before = tf.norm(column, axis=-1, keepdims=True)
        for other in done * 2:
            column -= other * tf.reduce_sum(other * column, -1, keepdims=True)
        after = tf.norm(column, axis=-1, keepdims=True)
        # Of NaN no comparison holds: it is divided, and stays.
        done.append(tf.where(after <= least * before, tf.zeros_like(column), column / after))
    return tf.stack(done, -1)


def _new_q(new, old):
    """The columns of `new`, of length 1; in place of those that are zero or not finite, `old`'s."""
    new = _unit_size(new, axis=0)
    norm = tf.norm(new, axis=0, keepdims=True)
    return tf.where(tf.math.is_finite(norm) & (norm > 0), new / norm, old)


def _unit_size(tensor, axis=-1):
    """A tensor scaled to a largest magnitude of 1 along an axis, so that squares neither overflow
    nor vanish; zeros stay zeros, and NaN NaN."""
    largest = tf.reduce_max(tf.abs(tensor), axis, keepdims=True)
    return tensor / tf.where(largest > 0, largest, tf.ones_like(largest))
