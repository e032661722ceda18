"""What each call of a model costs: counted from its ops, or measured by running it."""

import collections
import math
import statistics
import sys
import time
import warnings
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

ROWS, LENGTH = 8, 64  # what dims known at run time only are taken for: the batch, and all others

# An op that is no product reads and writes more than it computes: how many FLOPs of a product take
# as long as one of its elements.
ELEMENT = 8


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
    """The `Cost` of every call of a `graph.Graph` in FLOPs: a product's 2 for each multiply-add.

    The backward pass of a call with trainable weights, or behind one, counts as two forward passes.
    """
    blind: list = []

    def cost(call, specs):
        forward = _flops_of(call, specs)
        if forward is None:
            blind.append(call.name)
            forward = ELEMENT * sum(
                _elements(graph.values[n].shape, rows, length) for n in call.gives
            )
        return forward, 2.0 * forward

    found = _costs(graph, rows, length, cost)
    if blind:
        warnings.warn(
            f"the FLOPs of {blind} could not be counted, as they cannot be traced on their own; they "
            "count by the size of what they make. Try stages='measured', or name the stages",
            stacklevel=2,
        )
    return found


def measured(graph, rows=ROWS, length=LENGTH, repeats=5):
    """The `Cost` of every call of a `graph.Graph` in seconds, the median of some runs on the host."""
    place = 0

    def cost(call, specs):
        nonlocal place
        place += 1
        if sys.stderr.isatty():
            print(
                f"\r\033[Kmeasuring {place} of {len(graph.calls)}: {call.name}",
                end="",
                file=sys.stderr,
            )
        values = {number: _example(spec) for number, spec in specs.items()}
        weights = [v for v in call.variables if v.trainable]

        def forward(values):
            return _made(call, values)

        def both(values):
            with tf.GradientTape() as tape:
                tape.watch([x for x in values.values() if x.dtype.is_floating])
                made = [x for x in _made(call, values) if x.dtype.is_floating]
            wanted = [v.value for v in weights]
            wanted += [x for x in values.values() if x.dtype.is_floating]
            found = tape.gradient(made, wanted) if made and wanted else []
            return [tf.convert_to_tensor(x) for x in found if x is not None]

        alone, together = (_seconds(fn, values, repeats) for fn in (forward, both))
        return alone, max(together - alone, 0.0)

    found = _costs(graph, rows, length, cost)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return found


def _costs(graph, rows, length, cost):
    seen: set = set()
    trains: set = set()
    found = []
    for call in graph.calls:
        specs = _specs(graph, call, rows, length)
        forward, backward = cost(call, specs)
        weights = [v for v in call.variables if id(v) not in seen]
        seen.update(id(v) for v in weights)
        if any(v.trainable for v in call.variables) or trains & set(call.takes.values()):
            trains.update(call.gives)
        else:
            backward = 0.0
        made = sum(_bytes(graph.values[number], rows, length) for number in call.gives)
        held = sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in weights)
        found.append(Cost(forward, backward, held, made))
    return found


def crossing(graph, rows=ROWS, length=LENGTH):
    """For each call the bytes that travel if a stage begins with it.

    A value made before it that it or a later call uses counts, and so does an output of the model; one
    that many calls skip over counts at each of them. Inputs of the model come from the host.
    """
    last = {number: len(graph.calls) for number in graph.outputs}
    for place, call in enumerate(graph.calls):
        for number in call.takes.values():
            last[number] = max(place, last.get(number, 0))
    found = [0] * len(graph.calls)
    for number, value in enumerate(graph.values):
        if value.made_by is not None:
            for place in range(value.made_by + 1, min(last.get(number, 0) + 1, len(found))):
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
    return [(places[0], places[-1]) for places in users.values() if len(places) > 1]


def _state(call):
    for layer in call.layers:
        for generator in getattr(layer, "_seed_generators", []):
            yield generator.state
        if layer.trainable:
            yield from layer._non_trainable_variables


# One call.


def _made(call, values):
    """What a call makes of values, changing no variable."""
    values = dict(values)
    with keras.StatelessScope():
        call.run(values, training=True)
    return [tf.convert_to_tensor(values[number]) for number in call.gives]


def _flops_of(call, specs):
    """The FLOPs of a call, or None if it cannot be traced."""
    try:
        traced = tf.function(lambda values: _made(call, values), autograph=False)
        graph = traced.get_concrete_function(specs).graph
    except Exception:
        return None
    return float(_flops(graph, {}))


def _flops(graph, seen):
    """The FLOPs of a graph and of the functions that it calls."""
    total = 0
    for op in graph.get_operations():
        inner = [op.get_attr(name) for name in ("f", "then_branch") if name in op.node_def.attr]
        for function in inner:
            total += _flops(graph._get_function(function.name).graph, seen)
        if not inner:
            total += flops(op)
    return total


def flops(op):
    """The FLOPs of one op of a graph whose shapes are known."""
    kind = op.type
    if kind in FREE or not op.outputs:
        return 0
    made = _size(op.outputs[0])
    if kind == "MatMul":
        a = op.inputs[0].shape
        return 2 * made * a[0 if op.get_attr("transpose_a") else 1]
    if kind in ("BatchMatMulV2", "BatchMatMulV3", "BatchMatMul"):
        a = op.inputs[0].shape
        return 2 * made * a[-2 if op.get_attr("adj_x") else -1]
    if kind == "Einsum":
        return _einsum(op)
    if kind.startswith("Conv") and len(op.inputs) > 1 and op.inputs[1].shape.rank:
        return 2 * made * _size(op.inputs[1]) // op.inputs[1].shape[-1]
    if kind == "DepthwiseConv2dNative":
        height, width = op.inputs[1].shape[:2]
        return 2 * made * height * width
    return ELEMENT * made


FREE = frozenset(
    [
        "Const",
        "Identity",
        "IdentityN",
        "NoOp",
        "Placeholder",
        "ReadVariableOp",
        "Reshape",
        "ExpandDims",
        "Squeeze",
        "Shape",
        "StopGradient",
        "PreventGradient",
        "StridedSlice",
        "Pack",
        "Range",
        "Fill",
        "Cast",
    ]
)


def _einsum(op):
    """Two FLOPs for each combination of the indices of an einsum."""
    terms = op.get_attr("equation").decode().split("->")[0].split(",")
    if any("." in term for term in terms):
        return 2 * _size(op.outputs[0]) * (op.inputs[0].shape[-1] or 1)
    sizes: dict = {}
    for term, tensor in zip(terms, op.inputs):
        sizes.update(zip(term, tensor.shape))
    return 2 * math.prod(n or 1 for n in sizes.values())


def _size(tensor):
    return math.prod(n or 1 for n in tensor.shape) if tensor.shape.rank is not None else 1


def _seconds(fn, values, repeats):
    """The median time of a compiled function."""
    compiled = tf.function(fn, autograph=False)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for result in compiled(values):
            result.numpy()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _specs(graph, call, rows, length):
    found = {}
    for number in call.takes.values():
        value = graph.values[number]
        found[number] = tf.TensorSpec(_filled(value.shape, rows, length), value.dtype)
    return found


def _example(spec):
    if spec.dtype.is_floating:
        return tf.cast(np.random.default_rng(0).standard_normal(spec.shape), spec.dtype)
    return tf.zeros(spec.shape, spec.dtype)


def _filled(shape, rows, length):
    """A shape with `rows` and `length` for what is known at run time only."""
    return tuple((rows if k == 0 else length) if n is None else n for k, n in enumerate(shape))


def _elements(shape, rows, length):
    return math.prod(_filled(shape, rows, length))


def _bytes(value, rows, length):
    return _elements(value.shape, rows, length) * tf.as_dtype(value.dtype).size
