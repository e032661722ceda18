"""What DTensor made of a step: the collectives of the program that each device runs.

Read from the lowered program itself, so the counts are exact and need no profile.
"""

import contextlib
import dataclasses
import re

import tensorflow as tf

from tfpar import _tf

# By the op, and where it serves several purposes by the name that DTensor gave it.
_OPS = {
    "CollectiveGatherV2": "all_gather",
    "CollectiveReduceScatterV2": "reduce_scatter",
    "CollectiveAllToAllV2": "all_to_all",
    "CollectiveReduceV2": "all_reduce",
    "XlaAllReduce": "all_reduce",
    "XlaReduceScatter": "reduce_scatter",
}
_NAMED = {"DTensorAllGatherOp": "all_gather", "DTensorAllToAllOp": "all_to_all"}
_NAME = re.compile(r"/?(DTensor(?:AllReduce|AllGather|AllToAll)Op)")

# Of the payload, how much each of n devices sends (ring algorithms).
_SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a step.

    Attributes:
      kind: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
      bytes: the payload: of an all-reduce its tensor, of an all-gather the whole output, of a
        reduce-scatter the whole input.
      devices: how many devices take part.
      cause: the name of the op that needed it, which begins with its layer's path.
    """

    kind: str
    bytes: int
    devices: int
    cause: str

    @property
    def wire_bytes(self):
        """Bytes that each device sends in a ring: payload x (n-1)/n, twice that to all-reduce."""
        return self.bytes * _SENT[self.kind](self.devices)


@contextlib.contextmanager
def collectives():
    """Collects the collectives of the steps that are compiled inside the `with`.

    ::

        with collectives() as found:
            model.train_on_batch(x, y)  # for the first time

    CPUs have no all-gather or reduce-scatter: DTensor sums shards that are padded with zeros, and
    sums whole tensors of which each device keeps its slice. They are listed as what they stand for,
    and are on GPUs (with NCCL) and TPUs.

    Yields:
      A list that fills with `Collective`s, in the program's order, when the `with` ends.
    """
    before = set(_tf.function_names())
    found: list[Collective] = []
    yield found
    for name in _tf.function_names():
        if name in before:
            continue
        # A dataset's functions may be gone meanwhile; a step's stay while the model lives.
        with contextlib.suppress(tf.errors.NotFoundError):
            found.extend(_read(_tf.function_def(name)))


def _read(function):
    nodes = {node.name: node for node in function.node_def}
    sliced = {
        (source.split(":")[0], _stem(node.name))
        for node in function.node_def
        if node.op == "Slice"
        for source in node.input
    }
    for node in function.node_def:
        kind = _OPS.get(node.op)
        if kind is None:
            continue
        found = _NAME.search(node.name)
        if kind == "all_reduce" and found:
            kind = _NAMED.get(found.group(1), kind)
            if (node.name, _stem(node.name)) in sliced:
                kind = "reduce_scatter"
        groups = tf.make_ndarray(nodes[node.input[1].split(":")[0]].attr["value"].tensor)
        shape = tf.TensorShape(node.attr["_output_shapes"].list.shape[0])
        devices = groups.shape[-1] if groups.ndim else int(groups)
        scattered = devices if node.op.endswith(("ReduceScatterV2", "XlaReduceScatter")) else 1
        yield Collective(
            kind=kind,
            bytes=shape.num_elements() * scattered * tf.dtypes.as_dtype(node.attr["T"].type).size,
            devices=devices,
            cause=node.name[: found.start()] if found else node.name,
        )


def _stem(name):
    """A node's name without the numbers that make it unique."""
    return re.sub(r"(_\d+)+$", "", name)
