"""What each call of a model costs: counted from its ops, or measured by running it."""

import collections
import math
import sys
import time
import warnings
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfpar.mesh import check_positive

ROWS, LENGTH = 8, 64  # what dims known at run time only are taken for: the batch, and all others

# An op also waits for what it reads and writes: how many FLOPs of a product take as long as one such
# element. 32 lies in the middle of what brings `counted` nearest to `measured` on a CPU (16 to 48) over
# two transformers, four convolutional nets and a recurrent one.
ELEMENT = 32


class Cost(NamedTuple):
    """What a call costs.

    Attributes:
      forward, backward: seconds if measured, FLOPs if counted.
      weights: bytes of the variables that no call before it uses.
      activations: bytes of the values that it makes.
    """

    forward: float
    backward: float
    weights: int
    activations: int


def counted(graph, rows=ROWS, length=LENGTH):
    """The `Cost` of every call of a `graph.Graph` in FLOPs, from the ops that it is traced to.

    A product counts 2 FLOPs for each multiply-add, and any op `ELEMENT` for each element that it reads
    or writes. The backward pass of a call with trainable weights, or behind one, counts as two forward
    passes. What it takes to start an op does not count: measure models of hundreds of tiny calls.

    Args:
      graph: the `graph.Graph`.
      rows, length: what the first dim and the others count as where they are known at run time only.

    Warns:
      UserWarning: calls that cannot be traced on their own; they count by the size of what they make.
    """
    blind: list = []

    def cost(call, specs):
        traced = _traced(call, specs)
        if traced is None:
            blind.append(call.name)
            made = sum(_elements(graph.values[number], rows, length) for number in call.gives)
        forward = float(ELEMENT * made if traced is None else _flops(traced))
        return forward, 2 * forward

    found = _costs(graph, rows, length, cost)
    if blind:
        warnings.warn(
            f"the FLOPs of {blind} could not be counted, as they cannot be traced on their own; they "
            "count by the size of what they make. Try stages='measured', or name the stages",
            stacklevel=2,
        )
    return found


def measured(graph, rows=ROWS, length=LENGTH, repeats=5):
    """The `Cost` of every call of a `graph.Graph` in seconds, by running each on its own.

    The median of `repeats` runs of a compiled function on random inputs, less what it takes to call
    one that does nothing. No variable changes.

    Args:
      graph: the `graph.Graph`.
      rows, length: what the first dim and the others are where they are known at run time only.
      repeats: how many runs, besides a first one that compiles.

    Raises:
      ValueError: `repeats` that is no positive int, or a call that cannot be run on its own.
    """
    check_positive(repeats=repeats)
    terminal = sys.stderr.isatty()
    place = 0

    def cost(call, specs):
        nonlocal place
        place += 1
        if terminal:
            line = f"\r\033[Kmeasuring {place} of {len(graph.calls)}: {call.name}"
            print(line, end="", file=sys.stderr, flush=True)
        try:
            return _seconds(call, specs, repeats)
        except Exception as error:
            raise ValueError(
                f"call {call.name!r} cannot be run on its own on {list(specs.values())}; take "
                "stages='auto', or name the stages"
            ) from error

    try:
        return _costs(graph, rows, length, cost)
    finally:
        if terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def crossing(graph, rows=ROWS, length=LENGTH):
    """For each call the bytes that travel if a stage begins with it.

    A value made before it that it or a later call uses counts, and so does an output of the model; one
    that many calls skip over counts at each of them. Inputs of the model come from the host.
    """
    found = [0] * len(graph.calls)
    last: dict = {}  # where each value is used last
    for place, call in enumerate(graph.calls):
        last.update((number, place) for number in call.takes.values())
    last.update((number, len(found) - 1) for number in graph.outputs)
    for number, value in enumerate(graph.values):
        if value.made_by is not None and number in last:
            for place in range(value.made_by + 1, last[number] + 1):
                found[place] += _bytes(value, rows, length)
    return found


def together(graph):
    """Pairs (first, last) of calls that must share a stage: they move the same state in training.

    State is what seed generators hold, and weights that a layer itself made not trainable, such as the
    statistics of BatchNormalization. Shared trainable weights may lie on several stages.
    """
    users: dict = collections.defaultdict(list)
    for place, call in enumerate(graph.calls):
        for variable in {id(v): v for v in _state(call)}.values():
            users[id(variable)].append(place)
    pairs = {(places[0], places[-1]) for places in users.values() if len(places) > 1}
    return sorted(pairs)


def _state(call):
    for layer in call.layers:
        for generator in getattr(layer, "_seed_generators", []):
            yield generator.state
        if layer.trainable:
            yield from layer._non_trainable_variables


def _costs(graph, rows, length, cost):
    """A `Cost` for each call; `cost` says what its passes take, given specs of its inputs."""
    seen: set = set()
    trains: set = set()  # values behind a trainable weight
    found = []
    for call in graph.calls:
        specs = {n: _spec(graph.values[n], rows, length) for n in call.takes.values()}
        forward, backward = cost(call, specs)
        if any(v.trainable for v in call.variables) or trains & set(specs):
            trains.update(call.gives)
        else:
            backward = 0.0
        own = [v for v in call.variables if id(v) not in seen]
        seen.update(id(v) for v in own)
        held = sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in own)
        made = sum(_bytes(graph.values[number], rows, length) for number in call.gives)
        found.append(Cost(forward, backward, held, made))
    return found


def _spec(value, rows, length):
    shape = [(length if k else rows) if n is None else n for k, n in enumerate(value.shape)]
    return tf.TensorSpec(shape, value.dtype)


def _elements(value, rows, length):
    return _spec(value, rows, length).shape.num_elements()


def _bytes(value, rows, length):
    return _elements(value, rows, length) * tf.as_dtype(value.dtype).size


def bytes_a_row(value, length=LENGTH):
    """Bytes of a `graph.Value` for each row of the batch."""
    row = (length if n is None else n for n in value.shape[1:])
    return math.prod(row) * tf.as_dtype(value.dtype).size


def _made(call, values):
    """What a call makes of values, changing no variable."""
    values = dict(values)
    with keras.StatelessScope():
        call.run(values, training=True)
    return [tf.convert_to_tensor(values[number]) for number in call.gives]


# Measuring.


def _seconds(call, specs, repeats):
    """(seconds forward, seconds backward) of a call."""
    values = {number: _example(spec) for number, spec in specs.items()}
    weights = [v.value for v in call.variables if v.trainable]
    floats = lambda tensors: [x for x in tensors if x.dtype.is_floating]

    def nothing(values):
        return values

    def forward(values):
        return _made(call, values)

    def both(values):
        with tf.GradientTape() as tape:
            tape.watch(floats(values.values()))
            made = floats(_made(call, values))
        # A gradient of what was made, not of its sum: nothing is pruned then, and nothing constant.
        found = tape.gradient(made, [*weights, *floats(values.values())], made) if made else []
        return made, [x for x in tf.nest.flatten(found, expand_composites=True) if x is not None]

    empty, alone, all_ = _medians((nothing, forward, both), values, repeats)
    return max(alone - empty, 0.0), max(all_ - alone, 0.0)


def _medians(functions, values, repeats):
    """The median seconds of each function, compiled, its first run left out.

    They take turns, so that what else the machine does slows all of them down.
    """
    compiled = [tf.function(fn, autograph=False) for fn in functions]
    rounds = []
    for _ in range(repeats + 1):
        times = [time.perf_counter()]
        for fn in compiled:
            fn(values)
            tf.test.experimental.sync_devices()
            times.append(time.perf_counter())
        rounds.append(np.diff(times))
    return [float(t) for t in np.median(rounds[1:], axis=0)]


def _example(spec):
    if spec.dtype.is_floating:
        return tf.cast(np.random.default_rng(0).standard_normal(spec.shape), spec.dtype)
    return tf.zeros(spec.shape, spec.dtype)


# Counting.


def _traced(call, specs):
    """The graph of a call, or None if it cannot be traced."""
    try:
        traced = tf.function(lambda values: _made(call, values), autograph=False)
        return traced.get_concrete_function(specs).graph
    except Exception:
        return None


def _flops(graph):
    """The FLOPs of a graph and of the functions that it calls."""
    return sum(_flops_of(op, graph) for op in graph.get_operations())


def _flops_of(op, graph):
    attrs = op.node_def.attr.values()
    names = [f.name for attr in attrs for f in (attr.func, *attr.list.func) if f.name]
    if names:  # one of several branches runs; of a loop the body outweighs the condition
        return _trips(op) * max(_flops(graph._get_function(name).graph) for name in names)
    if op.type in FREE or not op.outputs:
        return 0
    made = _size(op.outputs[0])
    read = made if op.type in LOOKUPS else sum(map(_size, op.inputs))
    return 2 * _multiplications(op, made) + ELEMENT * (read + made)


def _multiplications(op, made):
    """How many multiply-adds an op does that makes `made` elements; 0 if it is no product."""
    if op.type == "Einsum":
        return _combinations(op)
    if op.type == "MatMul":
        return made * op.inputs[0].shape[0 if op.get_attr("transpose_a") else 1]
    if op.type.startswith("BatchMatMul"):
        return made * op.inputs[0].shape[-2 if op.get_attr("adj_x") else -1]
    if op.type in ("Conv2D", "Conv3D"):  # filters are [..., channels, filters]
        return made * math.prod(op.inputs[1].shape[:-1])
    if op.type == "DepthwiseConv2dNative":  # filters are [height, width, channels, multiplier]
        return made * math.prod(op.inputs[1].shape[:2])
    if op.type in TRANSPOSED:  # filters are [..., filters, channels]
        return _size(op.inputs[2]) * math.prod(op.inputs[1].shape[:-1])
    return 0


FREE = frozenset(
    ["Const", "ExpandDims", "Fill", "Identity", "IdentityN", "NoOp", "Pack", "Placeholder"]
    + ["PreventGradient", "Range", "ReadVariableOp", "Reshape", "Shape", "Squeeze", "StopGradient"]
)
LOOKUPS = frozenset(  # they read of their input only what they give
    ["Gather", "GatherNd", "GatherV2", "ResourceGather", "Slice", "Split", "SplitV"]
    + ["StridedSlice", "TensorListGetItem", "Unpack"]
)
TRANSPOSED = frozenset(["Conv2DBackpropInput", "Conv3DBackpropInputV2"])


def _combinations(op):
    """How many combinations of its indices an einsum runs through."""
    terms = op.get_attr("equation").decode().split("->")[0].split(",")
    sizes: dict = {}
    for term, tensor in zip(terms, op.inputs):
        left, dots, right = term.partition("...")
        # Dims under an ellipsis are counted from its end, as they broadcast.
        spread = range(tensor.shape.rank - len(left) - len(right), 0, -1) if dots else ()
        for index, n in zip([*left, *spread, *right], tensor.shape):
            sizes[index] = max(sizes.get(index, 1), n or 1)
    return math.prod(sizes.values())


def _trips(op):
    """How often a loop runs at most, as far as its trace tells; 1 for ops that are no loops."""
    if op.type not in ("While", "StatelessWhile"):
        return 1
    most = op.inputs[1]
    if most.op.type == "Max":  # Keras' recurrent layers take that of one number
        most = most.op.inputs[0]
    known = tf.get_static_value(most)
    return 1 if known is None else max(int(known), 1)


def _size(tensor):
    """The elements of a tensor; dims that not even the trace knows count 1."""
    return math.prod(n or 1 for n in tensor.shape) if tensor.shape.rank is not None else 1
