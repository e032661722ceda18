"""Which dims of a model's weights belong together, read from its computation.

The model is traced once, without values, and each dim of each tensor is followed through the ops:
the columns of one Dense are the rows of the next, the heads of queries, keys and values meet in the
scores and are summed in the output projection. Dims that an op ties together form a class, which is
split over devices as a whole or not at all. What an op does to a dim tells what a split costs:
nothing (elementwise), one all-reduce (summed against a weight, looked up in a table), or too much
(normalised, sliced, summed between activations): those classes stay whole.

The idea of following dims through a program is that of GSPMD (Xu et al. 2021); the resulting
pattern for transformers is that of Megatron-LM (Shoeybi et al. 2019).
"""

import dataclasses
import math
import random
import re

import keras
import tensorflow as tf

from tfpar import _tf

UNKNOWN = {0: 6, 1: 7}  # sizes for unknown dims of inputs; the others: 32


class Dims:
    """A class of tied dims: the root of a union-find forest."""

    def __init__(self, size):
        self._parent = None
        self.sizes = {size}
        self.weights = []  # (path, dim)
        self.stops = []  # why it cannot be split
        self.sums = []  # ops that sum over it, each costing an all-reduce
        self.lookups = []  # tables that are looked up along it
        self.halves = []  # classes that this one repeats: keys and values shared by query heads
        self.repeated = False  # made by a broadcast

    def root(self):
        found = self
        while found._parent is not None:
            found._parent = found._parent._parent or found._parent
            found = found._parent
        return found

    def tie(self, other):
        a, b = self.root(), other.root()
        if a is b:
            return
        b._parent = a
        a.sizes |= b.sizes
        for name in ("weights", "stops", "sums", "lookups", "halves"):
            getattr(a, name).extend(getattr(b, name))
        a.repeated &= b.repeated

    def stop(self, why):
        self.root().stops.append(why)


@dataclasses.dataclass(frozen=True)
class Structure:
    """What `read` finds.

    Attributes:
      classes: every `Dims` with a weight among its dims, in the order of the weights.
      shapes: {path of a weight: its shape}.
      tensors: the classes of each tensor's dims, a list of tuples.
      summed: the (path, dim) of weights that a product sums over.
    """

    classes: list
    shapes: dict
    tensors: list
    summed: set


def read(model, inputs=None):
    """Follows the dims of a model.

    Args:
      model: a built Keras model, or a function that builds one. A function is run without giving
        any variable a value, and leaves seeds and names as they were.
      inputs: a batch of inputs, or specs of one, for models that do not know theirs.

    Returns:
      A `Structure`.

    Raises:
      ValueError: neither, or a model whose inputs are not known.
    """
    if isinstance(model, keras.Model):
        return _read(model, inputs)
    if not callable(model):
        raise ValueError(f"model must be a built Keras model or a function; received {model!r}")
    state = random.getstate()
    try:
        with _tf.without_traces(), keras.StatelessScope(initialize_variables=False):
            return _read(model(), inputs)
    finally:
        random.setstate(state)


def _read(model, inputs):
    specs = _specs(model, inputs)
    graph = tf.__internal__.FuncGraph("structure")
    with graph.as_default():
        values = [(v, tf.compat.v1.placeholder(v.dtype, v.shape)) for v in _once(model.variables)]
        batch = tf.nest.map_structure(lambda s: tf.compat.v1.placeholder(s.dtype, s.shape), specs)
        with keras.StatelessScope(state_mapping=values):
            model(batch, training=False)
    tracer = _Tracer(model.name)
    weights = {id(v) for v in model.weights}
    for variable, value in values:
        if id(variable) in weights:
            tracer.weight(value, variable.path)
    for op in graph.get_operations():
        tracer.follow(op)
    return tracer.structure()


def _once(variables):
    return {id(v): v for v in variables}.values()


def _specs(model, inputs):
    if inputs is None:
        if not getattr(model, "inputs", None):
            raise ValueError(
                f"model {model.name!r} does not know its inputs; give a batch of them as inputs="
            )
        inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    elif not model.built:
        model.build(tf.nest.map_structure(lambda x: tuple(x.shape), inputs))
    fixed = lambda shape: [UNKNOWN.get(k, 32) if n is None else int(n) for k, n in enumerate(shape)]
    return tf.nest.map_structure(
        lambda x: tf.TensorSpec(fixed(x.shape), keras.backend.standardize_dtype(x.dtype)), inputs
    )


_ELEMENTWISE = frozenset(
    [
        "Abs",
        "Add",
        "AddN",
        "AddV2",
        "BiasAdd",
        "Cast",
        "Ceil",
        "CheckNumerics",
        "ClipByValue",
        "Cos",
        "Div",
        "DivNoNan",
        "Elu",
        "Equal",
        "Erf",
        "Erfc",
        "Exp",
        "Expm1",
        "Floor",
        "FloorDiv",
        "FloorMod",
        "Greater",
        "GreaterEqual",
        "Identity",
        "IdentityN",
        "Inv",
        "Invert",
        "IsFinite",
        "IsInf",
        "IsNan",
        "LeakyRelu",
        "Less",
        "LessEqual",
        "Log",
        "Log1p",
        "LogicalAnd",
        "LogicalNot",
        "LogicalOr",
        "Maximum",
        "Minimum",
        "Mod",
        "Mul",
        "MulNoNan",
        "Neg",
        "NotEqual",
        "OnesLike",
        "Pow",
        "PreventGradient",
        "RealDiv",
        "Reciprocal",
        "Relu",
        "Relu6",
        "Round",
        "Rsqrt",
        "Select",
        "SelectV2",
        "Selu",
        "Sigmoid",
        "Sign",
        "Sin",
        "Softplus",
        "Softsign",
        "Sqrt",
        "Square",
        "SquaredDifference",
        "StopGradient",
        "Sub",
        "Tan",
        "Tanh",
        "Xdivy",
        "Xlogy",
        "ZerosLike",
    ]
)
_REDUCTIONS = frozenset(
    ["All", "Any", "ArgMax", "ArgMin", "EuclideanNorm", "Max", "Mean", "Min", "Prod", "Sum"]
)
_STILL_A_WEIGHT = ("Cast", "Identity", "Reshape", "Transpose", "ExpandDims", "Squeeze")
_FRESH = frozenset(
    [
        "Const",
        "Fill",
        "Placeholder",
        "Range",
        "Rank",
        "Shape",
        "ShapeN",
        "Size",
        "StatelessRandomGetKeyCounter",
        "StatelessRandomNormalV2",
        "StatelessRandomUniformV2",
        "NoOp",
        "Assert",
    ]
)


class _Tracer:
    """Follows dims through the ops of a graph, in their order."""

    def __init__(self, name):
        self._name = name
        self._dims = {}  # id of a tensor -> its Dims
        self._kept = []  # tensors, so that ids stay theirs
        self._weights = {}  # id of a tensor that is but a weight: that weight's path
        self._shapes = {}
        self._parts = set()  # of the paths of weights
        self._summed = set()

    def weight(self, tensor, path):
        dims = self._new(tensor)
        for k, dim in enumerate(dims):
            dim.weights.append((path, k))
        self._weights[id(tensor)] = path
        self._shapes[path] = tuple(tensor.shape)

    def structure(self):
        classes = {}
        for dims in self._dims.values():
            for dim in dims:
                root = dim.root()
                if root.weights:
                    classes[id(root)] = root
        tensors = [tuple(dim.root() for dim in dims) for dims in self._dims.values()]
        return Structure(list(classes.values()), self._shapes, tensors, self._summed)

    def of(self, tensor):
        return self._dims[id(tensor)] if id(tensor) in self._dims else self._new(tensor)

    def follow(self, op):
        if not op.outputs or op.type in _FRESH or id(op.outputs[0]) in self._dims:
            return  # nothing to follow, or a weight
        if any(t.shape.rank is None for t in (*op.inputs, *op.outputs)):
            return self._stop_all(op, "of unknown shape")
        rule = getattr(self, "_" + op.type, None)
        if op.type in _ELEMENTWISE:
            self._elementwise(op)
        elif op.type in _REDUCTIONS:
            self._reduce(op)
        elif rule is not None:
            rule(op)
        else:
            self._stop_all(op, f"used by {op.type}")
        if op.type in _STILL_A_WEIGHT and id(op.inputs[0]) in self._weights:
            self._weights[id(op.outputs[0])] = self._weights[id(op.inputs[0])]

    def _where(self, op):
        """The path of the layer that an op belongs to."""
        if not self._parts:
            self._parts = {part for path in self._shapes for part in path.split("/")}
        names = op.name.split("/")[:-1]
        parts = [x if x in self._parts else re.sub(r"_\d+$", "", x) for x in names]
        return "/".join(part for part in parts if part != self._name) or op.name

    def _new(self, tensor):
        self._kept.append(tensor)
        self._dims[id(tensor)] = [Dims(size) for size in tensor.shape]
        return self._dims[id(tensor)]

    def _stop_all(self, op, why):
        for tensor in (*op.inputs, *op.outputs):
            if tensor.shape.rank is not None:
                for dim in self.of(tensor):
                    dim.stop((why, self._where(op)))

    def _same(self, source, target):
        """Ties the dims of two tensors, aligned at the end, except those that are broadcast."""
        for k in range(1, source.shape.rank + 1):
            if source.shape[-k] == target.shape[-k]:
                self.of(source)[-k].tie(self.of(target)[-k])

    def _elementwise(self, op):
        if op.type == "IdentityN":
            for source, target in zip(op.inputs, op.outputs):
                self._same(source, target)
            return
        for source in op.inputs:
            self._same(source, op.outputs[0])

    def _reduce(self, op):
        data, out = op.inputs[0], op.outputs[0]
        axes = tf.get_static_value(op.inputs[1])
        if axes is None:
            return self._stop_all(op, f"used by {op.type}")
        rank = data.shape.rank
        reduced = {int(axis) % rank for axis in axes.reshape(-1)}
        verb = {"Mean": "averaged", "Sum": "summed"}.get(op.type, f"reduced by {op.type}")
        for k, dim in enumerate(self.of(data)):
            if k in reduced:
                dim.stop((verb, self._where(op)))
        kept = [k for k in range(rank) if k not in reduced]
        targets = self.of(out)
        if len(targets) == rank:
            targets = [targets[k] for k in kept]
        for k, target in zip(kept, targets):
            self.of(data)[k].tie(target)

    # Products.

    def _product(self, op, left, right, out):
        """A product of two tensors, the names of whose dims are given."""
        a, b = op.inputs
        dims: dict = {}
        for tensor, names in ((a, left), (b, right), (op.outputs[0], out)):
            for name, dim, size in zip(names, self.of(tensor), tensor.shape):
                if name in dims and (size == dims[name][1]):
                    dims[name][0].tie(dim)
                dims.setdefault(name, (dim, size))
        by_weight = id(a) in self._weights or id(b) in self._weights
        for name in set(left) & set(right) - set(out):
            if by_weight:
                dims[name][0].root().sums.append(self._where(op))
                for tensor, names in ((a, left), (b, right)):
                    if id(tensor) in self._weights:
                        self._summed |= set(self._origins(tensor, names.index(name)))
            else:
                dims[name][0].stop(("summed between activations", self._where(op)))

    def _origins(self, tensor, k):
        """The (path, dim) of the weight whose dim `k` of a tensor is."""
        path = self._weights[id(tensor)]
        own = self.of(tensor)[k]
        size = tensor.shape[k]
        shape = self._shapes[path]
        matches = [(p, dim) for p, dim in own.root().weights if p == path and shape[dim] <= size]
        return matches[:1]

    def _MatMul(self, op):
        left = "km" if op.get_attr("transpose_a") else "mk"
        right = "nk" if op.get_attr("transpose_b") else "kn"
        self._product(op, left, right, "mn")

    def _BatchMatMulV2(self, op):
        ranks = [t.shape.rank for t in (*op.inputs, *op.outputs)]
        batch = "abcdefgh"[: max(ranks) - 2]
        left = batch[len(batch) - ranks[0] + 2 :] + ("km" if op.get_attr("adj_x") else "mk")
        right = batch[len(batch) - ranks[1] + 2 :] + ("nk" if op.get_attr("adj_y") else "kn")
        self._product(op, left, right, batch + "mn")

    _BatchMatMul = _BatchMatMulV3 = _BatchMatMulV2

    def _Einsum(self, op):
        equation = op.get_attr("equation").decode()
        terms = re.split(r",|->", equation.replace(" ", ""))
        if "..." in equation or len(terms) != 3 or any(len(set(t)) < len(t) for t in terms):
            return self._stop_all(op, f"used by Einsum {equation}")
        self._product(op, *terms)

    # Shapes.

    def _Reshape(self, op):
        source, target = op.inputs[0], op.outputs[0]
        i = j = 0
        while i < source.shape.rank or j < target.shape.rank:
            first, second = [i], [j]
            m = source.shape[i] if i < source.shape.rank else 1
            n = target.shape[j] if j < target.shape.rank else 1
            while m != n:
                if m < n:
                    i += 1
                    first.append(i)
                    m *= source.shape[i]
                else:
                    j += 1
                    second.append(j)
                    n *= target.shape[j]
            self._regroup(op, source, first, target, second)
            i, j = i + 1, j + 1

    _ExpandDims = _Squeeze = _Reshape

    def _regroup(self, op, source, first, target, second):
        """Dims of one tensor that become dims of another: the outermost of both go together."""
        take = lambda tensor, places: [
            (self.of(tensor)[k], tensor.shape[k])
            for k in places
            if k < tensor.shape.rank and tensor.shape[k] != 1
        ]
        a, b = take(source, first), take(target, second)
        if not a or not b:
            return
        repeats = [dim for dim, _ in a[1:] if dim.root().repeated]
        if repeats and len(a) == 2 and len(b) == 1:
            b[0][0].root().halves.append(a[0][0])
        else:
            a[0][0].tie(b[0][0])
        for dim, _ in a[1:] + b[1:]:
            if not dim.root().repeated:
                dim.stop(("merged into another dim by a reshape", self._where(op)))

    def _Transpose(self, op):
        order = tf.get_static_value(op.inputs[1])
        if order is None:
            return self._stop_all(op, "used by Transpose")
        for k, place in enumerate(order):
            self.of(op.inputs[0])[place].tie(self.of(op.outputs[0])[k])

    def _BroadcastTo(self, op):
        source, target = op.inputs[0], op.outputs[0]
        for k in range(1, source.shape.rank + 1):
            self._repeat(
                op,
                self.of(source)[-k],
                self.of(target)[-k],
                source.shape[-k],
                target.shape[-k],
            )

    _Tile = _BroadcastTo

    def _repeat(self, op, a, b, n, m):
        if n == m:
            a.tie(b)
        elif n == 1:
            b.root().repeated = True
        else:
            for dim in (a, b):
                dim.stop(("tiled", self._where(op)))

    def _StridedSlice(self, op):
        source, target = op.inputs[0], op.outputs[0]
        mask = lambda name, k: op.get_attr(name) >> k & 1
        given = op.inputs[1].shape[0]
        indexed = sum(not mask("new_axis_mask", k) for k in range(given))
        i = j = 0
        for k in range(given):
            if mask("new_axis_mask", k):
                j += 1
            elif mask("ellipsis_mask", k):
                for _ in range(source.shape.rank - indexed + 1):
                    self._slice(op, source, i, target, j)
                    i, j = i + 1, j + 1
            elif mask("shrink_axis_mask", k):
                self.of(source)[i].stop(("indexed", self._where(op)))
                i += 1
            else:
                self._slice(op, source, i, target, j)
                i, j = i + 1, j + 1
        while i < source.shape.rank:
            self._slice(op, source, i, target, j)
            i, j = i + 1, j + 1

    def _slice(self, op, source, i, target, j, verb="sliced"):
        a, b = self.of(source)[i], self.of(target)[j]
        if source.shape[i] == target.shape[j]:
            a.tie(b)
        else:
            a.stop((verb, self._where(op)))
            b.stop((verb, self._where(op)))

    def _resized(self, op, source, target, verb):
        """Ties the dims of two tensors of one rank, and stops those that change their size."""
        for k in range(source.shape.rank):
            self._slice(op, source, k, target, k, verb)

    def _Slice(self, op):
        self._resized(op, op.inputs[0], op.outputs[0], "sliced")

    def _Pad(self, op):
        self._resized(op, op.inputs[0], op.outputs[0], "padded")

    _PadV2 = _MirrorPad = _Pad

    def _Split(self, op, data=1):
        for part in op.outputs:
            self._resized(op, op.inputs[data], part, "cut into parts")

    def _SplitV(self, op):
        self._Split(op, data=0)

    def _ConcatV2(self, op):
        for part in op.inputs[:-1]:
            self._resized(op, part, op.outputs[0], "joined with others")

    def _Pack(self, op):
        out = op.outputs[0]
        axis = op.get_attr("axis") % out.shape.rank
        for part in op.inputs:
            for k, dim in enumerate(self.of(part)):
                dim.tie(self.of(out)[k + (k >= axis)])

    def _Unpack(self, op):
        data = op.inputs[0]
        axis = op.get_attr("axis") % data.shape.rank
        self.of(data)[axis].stop(("cut into parts", self._where(op)))
        for out in op.outputs:
            for k, dim in enumerate(self.of(out)):
                dim.tie(self.of(data)[k + (k >= axis)])

    def _GatherV2(self, op):
        table, ids, axis = op.inputs
        axis = tf.get_static_value(axis)
        if op.get_attr("batch_dims") or axis is None:
            return self._stop_all(op, "looked up")
        axis = int(axis) % table.shape.rank
        for k, dim in enumerate(self.of(table)):
            if k == axis and id(table) in self._weights:
                dim.root().lookups.append(self._where(op))
            elif k == axis:
                dim.stop(("looked up", self._where(op)))
            else:
                place = k if k < axis else k + ids.shape.rank - 1
                dim.tie(self.of(op.outputs[0])[place])
        for k, dim in enumerate(self.of(ids)):
            dim.tie(self.of(op.outputs[0])[axis + k])

    def _OneHot(self, op):
        axis = op.get_attr("axis") % op.outputs[0].shape.rank
        for k, dim in enumerate(self.of(op.inputs[0])):
            dim.tie(self.of(op.outputs[0])[k + (k >= axis)])

    def _Softmax(self, op):
        self._same(op.inputs[0], op.outputs[0])
        self.of(op.inputs[0])[-1].stop(("normalised by a softmax", self._where(op)))

    _LogSoftmax = _Softmax


# The choice.


@dataclasses.dataclass(frozen=True)
class Choice:
    """How the weights of a model are split over `model`.

    Attributes:
      axes: {path: axes}, of split weights only.
      padded: the paths among them with a dim that `model` does not divide.
      columns: paths of layers that take whole inputs and make split outputs.
      rows: paths of layers that take split inputs and whose products are summed.
      reasons: lines of text: what was split and why, what was left whole and why.
    """

    axes: dict
    padded: frozenset
    columns: list
    rows: list
    reasons: list


def choose(structure, degree):
    """Chooses which classes to split over `degree` devices.

    A tensor is split along one dim at most: of the classes that meet in a tensor, those are taken
    that split the most weights together.

    Args:
      structure: a `Structure`.
      degree: of the axis `model`.

    Returns:
      A `Choice`.
    """
    size_of = lambda path: math.prod(structure.shapes[path])
    total = sum(size_of(path) for path in structure.shapes)
    matrices = lambda dims: {p for p, _ in dims.weights if len(structure.shapes[p]) > 1}
    gains = {id(dims): sum(map(size_of, matrices(dims))) for dims in structure.classes}
    sharing = {id(half.root()): dims for dims in structure.classes for half in dims.halves}
    candidates, whole = [], []
    for dims in structure.classes if degree > 1 else []:
        if not matrices(dims):
            continue
        why = _obstacle(dims, degree)
        if id(dims) in sharing:
            why = why or _obstacle(sharing[id(dims)], degree)
        elif len(matrices(dims)) == 1 and not dims.lookups:
            if dims.sums:
                why = why or "not worth it: an all-reduce for one matrix"
            elif gains[id(dims)] * 20 < total:
                why = why or "not worth it: less than 5% of the weights"
        if why is None:
            candidates.append(dims)
        else:
            whole.append((dims, why))
    chosen = _compatible(candidates, structure.tensors, gains)
    left = [dims for dims in candidates if id(dims) not in chosen]
    whole += [(dims, "another dim of the same tensors is split") for dims in left]
    axes, padded = {}, set()
    for dims in chosen.values():
        for path, k in dims.weights:
            shape = structure.shapes[path]
            axes[path] = tuple("model" if i == k else None for i in range(len(shape)))
            if shape[k] % degree:
                padded.add(path)
    reasons = []
    for dims in chosen.values():
        cost = "repeated for the query heads" if id(dims) in sharing else _cost(dims)
        reasons.append(f"split {_members(dims, structure)}: {cost}")
    for path, shape in structure.shapes.items():
        if path not in axes and degree > 1:
            found = [f"dim {k}: {why}" for dims, why in whole for p, k in dims.weights if p == path]
            reasons.append(f"whole {path} {shape}: {'; '.join(found) or 'no matrix goes with it'}")
    columns, rows = _ends(structure, chosen)
    return Choice(axes, frozenset(padded), columns, rows, _collapsed(reasons))


def _compatible(candidates, tensors, gains):
    """The classes to take, no two of which meet in a tensor, with the largest gain: {id: class}."""
    known = {id(dims): dims for dims in candidates}
    meets: dict = {key: set() for key in known}
    for tensor in tensors:
        here = [id(dims) for dims in tensor if id(dims) in known]
        for key in here:
            meets[key] |= {other for other in here if other != key}
            if here.count(key) > 1:  # it would be split twice
                known.pop(key, None)
    taken: set = set()
    rest = set(known)
    while rest:
        group, stack = set(), [next(iter(rest))]
        while stack:
            key = stack.pop()
            if key not in group:
                group.add(key)
                stack += meets[key] & rest
        rest -= group
        taken |= _heaviest(sorted(group, key=lambda key: -gains[key]), meets, gains)
    return {key: dims for key, dims in known.items() if key in taken}


def _heaviest(group, meets, gains):
    """Of keys in the order of their gains, those with the largest sum no two of which meet.

    Exact for groups of up to 16, which blocks of layers make; of larger ones greedily.
    """
    if not group:
        return set()
    first, *others = group
    apart = [key for key in others if key not in meets[first]]
    with_first = {first} | _heaviest(apart, meets, gains)
    if len(group) > 16 or len(apart) == len(others):
        return with_first
    without = _heaviest(others, meets, gains)
    weight = lambda keys: sum(gains[key] for key in keys)
    return with_first if weight(with_first) >= weight(without) else without


def _ends(structure, chosen):
    """The layers at which splits begin (columns) and end in a sum (rows), by their paths."""
    columns: list[str] = []
    rows: list[str] = []
    layer_of = lambda path: path.rpartition("/")[0]
    tables = {layer_of(p) for dims in structure.classes if dims.lookups for p, _ in dims.weights}
    for dims in chosen.values():
        for path, k in dims.weights:
            layer = layer_of(path)
            if len(structure.shapes[path]) < 2 or layer in tables:
                continue
            summed = (path, k) in structure.summed
            (rows if summed else columns).append(layer)
    return list(dict.fromkeys(columns)), list(dict.fromkeys(rows))


def _obstacle(dims, degree):
    """Why a class cannot be split, or None."""
    if dims.stops:
        verb, where = dims.stops[0]
        return f"{verb} in {where}"
    sizes = sorted(size for size in dims.sizes if size % degree)
    if not sizes:
        return None
    if dims.lookups and len(dims.sizes) == 1 and (-sizes[0] % degree) * 8 <= sizes[0]:
        return None  # a vocabulary is padded
    return f"{sizes[0]} is not a multiple of model={degree}"


def _members(dims, structure):
    members = (f"{path} {structure.shapes[path]} dim {k}" for path, k in dims.weights)
    return ", ".join(dict.fromkeys(_starred(text) for text in members))


def _starred(text):
    """A text without the numbers that tell one block of a model from the next."""
    return re.sub(r"(?<=[a-z])_\d+(?=[/_ ])", "_*", text)


def _cost(dims):
    parts = [f"one all-reduce after {where}" for where in dict.fromkeys(dims.sums)]
    parts += [
        f"one all-reduce after the lookup in {where}" for where in dict.fromkeys(dims.lookups)
    ]
    if not dims.sums:
        parts.append("no sum over it" if dims.lookups else "its outputs stay split")
    return "; ".join(parts)


def _collapsed(lines):
    """Lines that differ in their numbers only, once, with how often they occur."""
    counts: dict = {}
    for line in map(_starred, lines):
        counts[line] = counts.get(line, 0) + 1
    return [line if n == 1 else f"{n} x {line}" for line, n in counts.items()]


def rules(axes, paths):
    """Patterns that say the same as {path: axes}: one for paths that differ in their numbers only.

    Args:
      axes: {path: axes}, of split weights.
      paths: the paths of all weights.

    Returns:
      A dict of pattern -> axes.
    """
    pattern = lambda path: "^" + re.sub(r"\d+", r"\\d+", re.escape(path)) + "$"
    groups: dict = {}
    for path in paths:
        groups.setdefault(pattern(path), set()).add(axes.get(path))
    found = {}
    for path, split in axes.items():
        key = pattern(path) if len(groups[pattern(path)]) == 1 else f"^{re.escape(path)}$"
        found[key] = split
    return found
