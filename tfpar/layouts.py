"""Which weights are split over a mesh, and how: path patterns to axes."""

import dataclasses
import difflib
import math
import re

from tfpar import structure
from tfpar.mesh import aligned

SPLIT_AXES = ("data", "model")


@dataclasses.dataclass(frozen=True)
class Constraint:
    """How an activation is laid out (see `tfpar.constrain`).

    Attributes:
      axes: layouts that it takes one after the other, each a tuple of one axis or None per dim.
      gradient: layouts that its gradient takes.
    """

    axes: tuple
    gradient: tuple

    @classmethod
    def of(cls, axes, gradient=None, source="constrain"):
        """A checked constraint.

        Args:
          axes: a tuple with one axis or None per dim, or a list of such tuples.
          gradient: the same for the gradient; by default the reverse of `axes`.
          source: who asks, for messages.

        Raises:
          ValueError: an unknown axis, or one used twice.
        """
        chain = lambda given: tuple(
            check_names(one, source) for one in (given if isinstance(given, list) else [given])
        )
        forward = chain(axes)
        found = cls(forward, forward[::-1] if gradient is None else chain(gradient))
        if not forward or len({len(one) for one in found.axes + found.gradient}) > 1:
            raise ValueError(f"{source}: layouts of one tensor have one rank; received {found}")
        return found

    @property
    def rank(self):
        return len(self.axes[0])


class LayoutMap:
    """Rules that split weights: pattern of a variable's path -> the axis of each dim.

    A pattern is a regular expression, searched (not full-matched) in a variable's Keras path such
    as "block_1/mlp_up/kernel". Its axes are a tuple with one entry per dim of the variable: None
    (whole), "model" or "data". Variables without a rule are whole on every device. ::

        LayoutMap({
            r"mlp_up/kernel": (None, "model"),
            r"mlp_up/bias": ("model",),
            r"mlp_down/kernel": ("model", None),
        })

    A pattern that ends in "/output" or "/input" is for the output or the inputs of a layer, whose
    path stands before it: its axes say how that activation is split, or are a dict of the
    arguments `axes` and `gradient` of `tfpar.constrain`.

    It is strict: a rule that matches nothing, two rules that match one variable, and a dim that the
    axis does not divide are errors, never ignored.

    Args:
      rules: a dict of pattern -> axes.
      pad: patterns among them whose weights may be padded where the axis does not divide a dim.
        That is for the last dim of the kernel and bias of a Dense layer that makes logits: the
        padding never enters a softmax. Tables of Embedding layers are padded without being told.

    Attributes:
      explanation: of a map that `auto` made, what it chose and why; else "".

    Raises:
      ValueError: a pattern that does not compile, an unknown axis, an axis used twice in one rule,
        a pattern in `pad` that is no rule.
    """

    def __init__(self, rules=None, pad=()):
        self._rules: dict = {}
        self.explanation = ""
        for pattern, axes in dict(rules or {}).items():
            self[pattern] = axes
        self._pad = frozenset(pad)
        if not self._pad <= set(self._rules):
            raise ValueError(f"pad names no rules: {sorted(self._pad - set(self._rules))}")

    @classmethod
    def auto(cls, model, mesh, inputs=None, sequence=None):
        """A map for a model, read from its structure and not from its names.

        Splits over `model` what needs one all-reduce for two matrices: pairs of Dense layers (also
        gated ones) by their hidden units, attention by its heads (keys and values with the query
        heads that share them, or whole if there are too few), tables and output projections by
        the vocabulary, biases with their kernels. All else stays whole. `explanation` says what
        was chosen, and why::

            layouts = tfpar.LayoutMap.auto(build_model, mesh)
            print(layouts.explanation)
            with tfpar.MeshStrategy(mesh, layouts).scope():
                model = build_model()

        Args:
          model: a function that builds the model (it is run once, without giving weights values,
            and leaves seeds and names as they were), or a built model with the same weights' paths
            as the one to train.
          mesh: the `Mesh`.
          inputs: a batch of inputs, or specs of one, for models that do not know theirs.
          sequence: for sequence parallelism, two patterns: of the layer whose output, of shape
            (batch, sequence, features), enters the first block, and of the one behind the last
            block whose output is whole again, such as ("embeddings_add", "^layer_norm"). What lies
            between, and between the split layers, works on a shard of the sequence.

        Raises:
          ValueError: no model, or one whose inputs are not known; `sequence` is no such pair.
        """
        found = structure.read(model, inputs)
        choice = structure.choose(found, mesh.model)
        rules = structure.rules(choice.axes, found.shapes)
        pad = [p for p in rules if any(re.search(p, path) for path in choice.padded)]
        if sequence is not None:
            rules |= _sequence_rules(sequence, choice)
        layouts = cls(rules, pad)
        layouts.explanation = "\n".join(choice.reasons)
        return layouts

    @classmethod
    def coerce(cls, layouts):
        """A LayoutMap from None, a dict, a LayoutMap or a `keras.distribution.LayoutMap`."""
        if layouts is None or isinstance(layouts, dict):
            return cls(layouts)
        if isinstance(layouts, cls):
            return layouts
        if hasattr(layouts, "device_mesh") and hasattr(layouts, "items"):
            return cls.from_keras(layouts)
        raise ValueError(
            "layouts must be a tfpar.LayoutMap, a dict of pattern -> axes or a "
            f"keras.distribution.LayoutMap; received {layouts!r}"
        )

    @classmethod
    def from_keras(cls, layout_map, axes=None):
        """The same rules as a `keras.distribution.LayoutMap`.

        Args:
          layout_map: its values may be TensorLayouts or tuples of axis names.
          axes: new names for its axes; by default {"batch": "data"}, others stay.
        """
        names = {"batch": "data"} if axes is None else axes
        rules = {}
        for pattern, layout in layout_map.items():
            given = getattr(layout, "axes", layout)
            rules[pattern] = tuple(names.get(axis, axis) for axis in given)
        return cls(rules)

    def __setitem__(self, pattern, axes):
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(f"rule {pattern!r} is not a regular expression: {error}") from None
        source = f"rule {pattern!r}"
        if _is_for_activation(pattern):
            given = axes if isinstance(axes, dict) else {"axes": axes}
            self._rules[pattern] = Constraint.of(source=source, **given)
        else:
            self._rules[pattern] = check_names(axes, source)

    def __getitem__(self, pattern):
        return self._rules[pattern]

    def __delitem__(self, pattern):
        del self._rules[pattern]
        self._pad -= {pattern}

    def __iter__(self):
        return iter(self._rules)

    def __len__(self):
        return len(self._rules)

    def __or__(self, other):
        other = LayoutMap.coerce(other)
        return LayoutMap({**self._rules, **other._rules}, self._pad | other._pad)

    def __eq__(self, other):
        if not isinstance(other, LayoutMap):
            return False
        return self._rules == other._rules and self._pad == other._pad

    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def __repr__(self):
        return f"LayoutMap({self._rules!r}{f', pad={sorted(self._pad)}' if self._pad else ''})"

    def items(self):
        """(pattern, axes) pairs, in order."""
        return self._rules.items()

    def matching(self, path):
        """The patterns of all rules for weights that match `path`."""
        return [p for p in self._rules if not _is_for_activation(p) and re.search(p, path)]

    @property
    def of_activations(self):
        """The patterns of rules for inputs and outputs of layers."""
        return [pattern for pattern in self._rules if _is_for_activation(pattern)]

    def of_activation(self, path):
        """The rule for the input or output of a layer: (pattern, `Constraint`), or None.

        Args:
          path: of the layer, with "/input" or "/output" behind it.

        Raises:
          ValueError: two rules match.
        """
        found = [p for p in self.of_activations if re.search(p, path)]
        self._refuse_several(found, repr(path))
        return (found[0], self[found[0]]) if found else None

    def may_pad(self, path):
        """Whether the rule of the variable at `path` is one of `pad`."""
        return any(pattern in self._pad for pattern in self.matching(path))

    def lookup(self, path, shape, mesh, pad=False):
        """The axes of a variable: of the rule that matches it, else all None.

        Args:
          path: the variable's path.
          shape: its shape, a tuple of ints.
          mesh: the `Mesh` whose degrees the split dims must divide by.
          pad: whether dims need not divide.

        Raises:
          ValueError: two rules match, the rule has another rank, or a dim does not divide.
        """
        found = self.matching(path)
        if not found:
            return (None,) * len(shape)
        self._refuse_several(found, f"variable {path!r} of shape {tuple(shape)}")
        source = f"rule {found[0]!r}: {self[found[0]]}"
        check_axes(self[found[0]], path, shape, mesh, source, pad)
        return self[found[0]]

    def _refuse_several(self, found, what):
        if len(found) > 1:
            raise ValueError(
                f"{what} is matched by {len(found)} rules: "
                f"{', '.join(f'{p!r}: {self[p]}' for p in found)}. Make the patterns narrower so "
                "that one matches"
            )

    def check_all_rules_matched(self, variables, layers=()):
        """Refuses rules that match no weight and no layer's output.

        Args:
          variables: a list of (path, shape).
          layers: paths of layers.

        Raises:
          ValueError: names the rules and the nearest paths.
        """
        paths = [path for path, _ in variables] + [
            f"{path}/{end}" for path in layers for end in ("input", "output")
        ]
        unused = [p for p in self._rules if not any(re.search(p, path) for path in paths)]
        if not unused:
            return
        lines = []
        for pattern in unused:
            near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.0)
            what = "layer" if _is_for_activation(pattern) else "variable"
            lines.append(f"rule {pattern!r} matches no {what}; nearest paths: {near}")
        raise ValueError("; ".join(lines))


def _sequence_rules(sequence, choice):
    """Rules that split the sequence over `model` between split layers.

    Row-split products are reduced and scattered, column-split layers gather their input; their
    gradients do the reverse (Korthikanti et al. 2022, section 4.2.2).
    """
    if not isinstance(sequence, (tuple, list)) or len(sequence) != 2:
        raise ValueError(
            "sequence must be two patterns of layers, where the split of the sequence begins and "
            f"where it ends; received {sequence!r}"
        )
    whole, split = ("data", None, None), ("data", "model", None)
    first, last = (pattern.rstrip("$") for pattern in sequence)
    rules: dict = {
        f"{first}/output": {"axes": [whole, split]},
        f"{last}/output": {"axes": [split, whole]},
    }
    layer_rules = lambda paths: structure.rules(dict.fromkeys(paths, True), paths)
    for pattern in layer_rules(choice.columns):
        rules[pattern.rstrip("$") + "/input$"] = {"axes": [split, whole]}
    for pattern in layer_rules(choice.rows):
        rules[pattern.rstrip("$") + "/output$"] = {"axes": split, "gradient": whole}
    return rules


def _is_for_activation(pattern):
    return pattern.rstrip("$").endswith(("/output", "/input"))


def check_names(axes, source):
    """The axes of a rule as a tuple, if they are right.

    Raises:
      ValueError: no tuple, an unknown axis, one used twice.
    """
    if not isinstance(axes, (tuple, list)):
        raise ValueError(
            f"{source}: axes must be a tuple with one entry per dim, such as "
            f'(None, "model"); received {axes!r}'
        )
    for axis in axes:
        if axis is not None and axis not in SPLIT_AXES:
            raise ValueError(
                f"{source}: unknown axis {axis!r} in {tuple(axes)}; a dim's axis is None or one of "
                f"{SPLIT_AXES}"
            )
    used = [axis for axis in axes if axis is not None]
    if len(used) != len(set(used)):
        raise ValueError(f"{source}: an axis may split one dim only; got {tuple(axes)}")
    return tuple(axes)


def check_axes(axes, path, shape, mesh, source, pad=False):
    """Refuses axes that do not fit a variable.

    Args:
      axes: one of None, "data", "model" per dim.
      path: the variable's path.
      shape: its shape.
      mesh: the `Mesh`.
      source: what asked for these axes, for the message.
      pad: whether dims need not divide.

    Raises:
      ValueError: another rank, or a dim that its axis does not divide.
    """
    if len(axes) != len(shape):
        raise ValueError(
            f"{source} has {len(axes)} axes, but variable {path!r} has shape {tuple(shape)}: give "
            f"one axis or None for each of its {len(shape)} dims"
        )
    for dim, (size, axis) in enumerate(zip(shape, axes)):
        if axis is not None and size % mesh.shape[axis] and not pad:
            raise ValueError(
                f"{source} splits dim {dim} of variable {path!r} of shape {tuple(shape)} over "
                f"axis {axis!r}, but {size} is not a multiple of {axis}={mesh.shape[axis]}. Split "
                f"another dim, leave it whole (None), or change {size} to "
                f"{-(-size // mesh.shape[axis]) * mesh.shape[axis]}"
            )


def bytes_per_device(shape, itemsize, axes, mesh):
    """Bytes of a variable that each device holds: itemsize * prod(ceil(size / degree)).

    A dim that its axis does not divide is padded.

    Args:
      shape: the global shape.
      itemsize: bytes of one element.
      axes: one of None, "data", "model" per dim.
      mesh: the `Mesh`.
    """
    degrees = [1 if axis is None else mesh.shape[axis] for axis in axes]
    return itemsize * math.prod(-(-size // n) for size, n in zip(shape, degrees))


def explain(variables, layouts, mesh, slots=False):
    """A table of variables and of what each rule caught.

    Args:
      variables: a list of (path, shape, itemsize, axes, axes of its slots).
      layouts: the `LayoutMap`.
      mesh: the `Mesh`.
      slots: whether to show the axes of slots, and what a slot takes on a device.

    Returns:
      A string.
    """
    header = ["variable", "shape", "axes", "bytes/device", "of"]
    rows = [header + ["slots' axes", "bytes/device"] if slots else header]
    here = total = of_slots = 0
    for path, shape, itemsize, axes, slot_axes in variables:
        part, whole = bytes_per_device(shape, itemsize, axes, mesh), itemsize * math.prod(shape)
        slot = bytes_per_device(shape, itemsize, slot_axes, mesh)
        here, total, of_slots = here + part, total + whole, of_slots + slot
        row = [path, str(tuple(shape)), _written(axes, shape, mesh), f"{part:,}", f"{whole:,}"]
        rows.append(row + [_written(slot_axes, shape, mesh), f"{slot:,}"] if slots else row)
    sums = ["total", "", "", f"{here:,}", f"{total:,}"]
    rows.append(sums + ["", f"{of_slots:,}"] if slots else sums)
    lines = [repr(mesh), *aligned(rows, right=(3, 4, 6))]
    for pattern, axes in layouts.items():
        caught = [path for path, *_ in variables if re.search(pattern, path)]
        if caught or mesh.pipe == 1:  # a stage need not have a weight for each rule
            names = ", ".join(caught) or "-"
            lines.append(f"rule {pattern!r}: {axes} caught {len(caught)}: {names}")
    return "\n".join(lines)


def _written(axes, shape, mesh):
    """Axes as text; a padded dim shows the size it is padded to."""
    cells = []
    for size, axis in zip(shape, axes):
        n = 1 if axis is None else mesh.shape[axis]
        cells.append((axis or "-") + (f" padded to {-(-size // n) * n}" if size % n else ""))
    return "(" + ", ".join(cells) + ")"
