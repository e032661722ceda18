"""What DTensor cannot split, worked round where that is exact, else refused by name.

DTensor splits each op by a rule of its own. For ops without one it has a switch per op that
computes them replicated: inputs are gathered, every device computes the whole. That is exact for
any op that is a pure function of its inputs, so tfpar throws it for every such op it meets. An op
with state of its own (stateful random numbers, Python callbacks, lookup tables) would differ
between devices: it is refused.

The rules were read from ``tensorflow/dtensor/mlir/spmd_expanders.cc``.
"""

import contextlib
import os
import re

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar import _tf
from tfpar.variables import to_mesh

# Ops with state that DTensor has rules for, or that only call other functions.
STATEFUL_WITH_RULE = frozenset(
    [
        "Assert",
        "AssignAddVariableOp",
        "AssignSubVariableOp",
        "AssignVariableOp",
        "BroadcastGradientArgs",
        "DestroyResourceOp",
        "DisableCopyOnRead",
        "If",
        "Placeholder",
        "PlaceholderWithDefault",
        "ReadVariableOp",
        "ResourceApplyAdagradV2",
        "ResourceApplyAdam",
        "ResourceApplyCenteredRMSProp",
        "ResourceApplyGradientDescent",
        "ResourceApplyKerasMomentum",
        "ResourceApplyMomentum",
        "RngReadAndSkip",
        "StatefulPartitionedCall",
        "StatelessIf",
        "StatelessWhile",
        "VarHandleOp",
        "VarIsInitializedOp",
        "VariableShape",
        "While",
        "WriteSummary",
    ]
)

# Ops that only differ from a pure function in how long they live, never in their values.
HARMLESS = frozenset(["AccumulateNV2", "EmptyTensorList", "NoOp", "TensorListReserve"])

CROSS_ENTROPY = "SparseSoftmaxCrossEntropyWithLogits"

# Eager steps have no graph to look into: the ops of common layers that have no rule.
COMMON_WITHOUT_RULE = [
    "AvgPoolGrad",
    "AvgPool3DGrad",
    "BatchToSpaceND",
    "DepthwiseConv2dNativeBackpropFilter",
    "DepthwiseConv2dNativeBackpropInput",
    "FusedBatchNormGradV3",
    "FusedBatchNormV3",
    "MatrixBandPart",
    "ReverseV2",
    "SpaceToBatchND",
    "Mod",
    "Bincount",
    "DenseBincount",
    "UnsortedSegmentMax",
    "SegmentSum",
]


class UnsupportedStep(ValueError):
    """A step that DTensor cannot split over the mesh, with the op and the way out."""


# Two optimisations of DTensor that give wrong numbers; "0" switches them off ("false" does not).
WRONG = (
    # Combined all-reduces move across variable reads: Adam then trains on stale values.
    "DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION",
    # On meshes whose devices are not in sorted order all-to-all mixes shards up, silently; on more
    # than ten CPU devices it fails, since its keys run device numbers together (1, 12 and 11, 2).
    # An all-gather and a slice take its place.
    "DTENSOR_USE_ALL_TO_ALL_RELAYOUT",
)

# DTensor reads them once, when it is first used, be it to ask whether a tensor is a DTensor. So they
# are switched off as tfpar is imported.
_too_late = _tf.dtensor_has_started() and any(os.environ.get(name) != "0" for name in WRONG)
os.environ.update(dict.fromkeys(WRONG, "0"))


def switch_off_what_is_wrong():
    """Sees to it that two optimisations of DTensor are off, process-wide, that give wrong numbers.

    Raises:
      RuntimeError: DTensor was used before tfpar was imported.
    """
    if _too_late:
        raise RuntimeError(
            "DTensor was used before tfpar was imported, and reads its settings once; with those it "
            "has now it computes wrong numbers. Import tfpar first; in a notebook, restart the kernel"
        )
    os.environ.update(dict.fromkeys(WRONG, "0"))


def allow_replicated(op_types):
    """Makes DTensor compute these pure ops replicated where it has no rule for them."""
    for op_type in op_types:
        os.environ[f"DTENSOR_ENABLE_REPLICATED_SPMD_AS_DEFAULT_TF.{op_type.upper()}"] = "1"


@contextlib.contextmanager
def unrolled(model):
    """Unrolls the recurrent layers of `model` in a trace, whose sequence lengths are all known.

    DTensor computes a loop's gradient replicated only, and two loops in one process clash by
    name; an unrolled layer is split over the batch like any other and equals the loop exactly.
    """
    layers = [x for x in model._flatten_layers() if isinstance(x, keras.layers.RNN)]
    before = [layer.unroll for layer in layers]
    for layer in layers:
        layer.unroll = True
    try:
        yield
    finally:
        for layer, unroll in zip(layers, before):
            layer.unroll = unroll


def check_graph(graph, mesh, variable_names):
    """At the end of a trace: makes the step fit for the mesh or refuses it.

    Args:
      graph: the `FuncGraph` just traced, its body complete.
      mesh: the `Mesh` that it will run on.
      variable_names: {id of a variable's handle: its name}, for messages.

    Raises:
      UnsupportedStep: a stateful op without a rule, one that DTensor computes wrong, or a variable
        that is not on the mesh.
    """
    pure = set()
    for inner in _graphs(graph):
        for op in inner.get_operations():
            if op.type in STATEFUL_WITH_RULE:
                continue
            if op.op_def.is_stateful and op.type not in HARMLESS:
                raise UnsupportedStep(_stateful(op))
            if op.type == CROSS_ENTROPY and op.get_attr("T") != tf.float32:
                raise UnsupportedStep(
                    f"op {op.type!r} ({op.name!r}) in {op.get_attr('T').name}: DTensor computes it "
                    "wrong where the classes are split. Use keras.losses, or "
                    "tf.nn.sparse_softmax_cross_entropy_with_logits, which tfpar mends"
                )
            pure.add(op.type)
    allow_replicated(pure)
    for outside, inside in list(graph.captures):
        if not isinstance(outside, tf.__internal__.EagerTensor):
            continue  # a tensor of an outer graph
        with tf.init_scope():
            on_mesh = dtensor.is_dtensor(outside)
            if on_mesh:
                _same_mesh(outside, mesh, variable_names)
                continue
            if outside.dtype in (tf.resource, tf.variant):
                raise UnsupportedStep(outside_scope(variable_names.get(id(outside), "a variable")))
            packed = to_mesh(outside, mesh.layout((None,) * outside.shape.rank))
        graph.function_captures.pop(id(outside))
        graph.replace_capture(packed, inside)


def _graphs(graph, seen=None):
    """`graph` and the graphs of all functions it calls."""
    seen = {} if seen is None else seen
    if id(graph) not in seen:
        seen[id(graph)] = graph
        for function in graph._functions.values():
            _graphs(function.graph, seen)
    return seen.values()


def _stateful(op):
    python = op.type in ("EagerPyFunc", "PyFunc", "PyFuncStateless")
    way_out = (
        "do its work in the tf.data pipeline, or write it with TensorFlow ops"
        if python
        else "use its stateless form (keras.random with a keras.random.SeedGenerator for random "
        "numbers), or do its work in the tf.data pipeline"
    )
    return (
        f"op {op.type!r} ({op.name!r}) has state of its own, which would differ between the "
        f"devices of a mesh; {way_out}"
    )


def outside_scope(what):
    """The message for `what` that was created outside the strategy's scope."""
    return (
        f"{what} was created outside strategy.scope(), so it does not live on the mesh and a step "
        "would compute wrong numbers with it; build models, optimizers, metrics and seed "
        "generators, and call compile, inside `with strategy.scope():`"
    )


def _same_mesh(tensor, mesh, variable_names):
    """Refuses a variable of another strategy."""
    other = dtensor.fetch_layout(tensor).mesh
    if other != mesh.dtensor_mesh:
        name = variable_names.get(id(tensor), "a variable")
        raise UnsupportedStep(
            f"{name} lives on another mesh ({other.num_local_devices()} devices) than the step "
            f"that uses it; build it inside the scope of the strategy that runs the step"
        )


def explain_failure(error):
    """The `UnsupportedStep` for an error of DTensor's compiler, or None for any other error."""
    text = str(error)
    found = re.search(r"'tf\.(\w+)' op (.*?)(?:\n|$)", text)
    if "DTensor" not in text and "layout" not in text and "SPMD" not in text:
        return None
    what = f"op {found.group(1)!r}: {found.group(2)}" if found else text.splitlines()[0]
    return UnsupportedStep(
        f"DTensor cannot split this step over the mesh: {what}. Leave the weights of that layer "
        "whole (drop its rules from the LayoutMap), or choose dims that the mesh's axes divide. "
        f"DTensor's own words: {text[:2000]}"
    )
