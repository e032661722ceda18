"""A Keras model as a list of calls that can be cut anywhere.

Sequential and Functional models become the calls of their layers and ops, in the order in which
Keras runs them; models inside models are opened, so that a cut may run through them. What flows
between two calls is a value, known by its number.
"""

import dataclasses
from typing import Any

import keras

from tfpar import _tf

tree = keras.tree


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor that flows through the model.

    Attributes:
      name: of the call that makes it, for messages.
      shape: its shape, None for dims that are known at run time only, the first among them.
      dtype: its dtype's name.
      made_by: the number of the call that makes it; None for an input of the model.
    """

    name: str
    shape: tuple
    dtype: str
    made_by: int | None


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a layer or op.

    Attributes:
      name: the path of the layer, such as "backbone/dense", with "#2" for its second call.
      operation: the layer or op.
      arguments: what Keras keeps of the arguments, to be filled in.
      takes: {id of a Keras tensor in `arguments`: the number of its value}.
      gives: the numbers of the values that it makes.
      training: the training flag that a model around it was called with, or None.
    """

    name: str
    operation: Any
    arguments: Any
    takes: dict
    gives: tuple
    training: bool | None = None

    @property
    def layers(self):
        """The layers that the call runs through: the layer itself and those inside it."""
        if not isinstance(self.operation, keras.layers.Layer):
            return []
        return self.operation._flatten_layers()

    @property
    def variables(self):
        """The variables that the call may read, seed states among them."""
        if not isinstance(self.operation, keras.layers.Layer):
            return []
        return self.operation.variables

    def run(self, values, training):
        """Makes its values from those in `values`, {number: tensor}, and adds them there."""
        # As in Keras, where the flag of the outer call goes before that of a model inside.
        training = self.training if training is None else training
        filled = {tensor: values[number] for tensor, number in self.takes.items()}
        args, kwargs = self.arguments.fill_in(filled)
        outputs = _tf.operation_fn(self.operation, training=training)(*args, **kwargs)
        values.update(zip(self.gives, tree.flatten(outputs), strict=True))


class _Cast:
    """What a model does to an input of another dtype."""

    def __init__(self, dtype):
        self.name = "cast"
        self._dtype = dtype

    def __call__(self, x):
        mask = _tf.get_keras_mask(x)
        x = keras.ops.convert_to_tensor(x, dtype=self._dtype)
        if mask is not None:
            _tf.set_keras_mask(x, mask)
        return x


class Graph:
    """The calls of a model.

    Args:
      model: a built Sequential or Functional model.

    Attributes:
      model: the model.
      calls: list of `Call` in the order in which they run.
      values: list of `Value`; a value's number is its place.
      inputs, outputs: the numbers of the model's inputs and outputs, flat.

    Raises:
      ValueError: a model that is not built, or whose `call` is its own.
    """

    def __init__(self, model):
        function = functional(model)
        if function is None:
            raise ValueError(_opaque(model))
        self.model = model
        self._function = function
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self._times: dict = {}
        known: dict = {}
        for tensor in function.inputs:
            known[id(tensor)] = self._new(tensor, tensor.name, None)
        self.inputs = list(known.values())
        self._inline(function, known, "", None)
        self.outputs = [known[id(tensor)] for tensor in function.outputs]

    def structured(self, outputs):
        """The model's outputs, given flat, as it returns them."""
        return _tf.unpack_singleton(tree.pack_sequence_as(self._function._outputs_struct, outputs))

    def structured_inputs(self, inputs):
        """The model's inputs, given flat, as `fit` was given them."""
        return tree.pack_sequence_as(self._function._inputs_struct, inputs)

    def standardized(self, inputs):
        """What `fit` was given as x, as the flat list of tensors that the model computes with."""
        return self._function._standardize_inputs(inputs)

    def _new(self, tensor, name, made_by):
        shape = tuple(tensor.shape)
        self.values.append(Value(name, shape, tensor.dtype, made_by))
        return len(self.values) - 1

    def _inline(self, function, known, prefix, training):
        for node in _nodes(function):
            operation = node.operation
            name = f"{prefix}{operation.name}"
            inner = self._to_open(node, known)
            if inner is None:
                self._add(name, operation, node, known, training)
                continue
            given, flag = inner
            inside = {}
            for number, tensor in given:
                if self.values[number].dtype != tensor.dtype:
                    number = self._cast(number, tensor, f"{name}/cast", training)
                inside[id(tensor)] = number
            opened = functional(operation)
            self._inline(opened, inside, f"{name}/", training if flag is None else flag)
            for outside, made in zip(node.outputs, opened.outputs, strict=True):
                known[id(outside)] = inside[id(made)]

    def _add(self, name, operation, node, known, training):
        takes = {id(tensor): known[id(tensor)] for tensor in node.input_tensors}
        gives = self._call(name, operation, node.arguments, takes, node.outputs, training)
        known.update((id(tensor), number) for tensor, number in zip(node.outputs, gives))

    def _cast(self, number, tensor, name, training):
        arguments = _tf.SymbolicArguments(tensor)
        takes = {id(tensor): number}
        return self._call(name, _Cast(tensor.dtype), arguments, takes, [tensor], training)[0]

    def _call(self, name, operation, arguments, takes, made, training):
        """Adds a call; returns the numbers of the values that it makes."""
        times = self._times[name] = self._times.get(name, 0) + 1
        name = name if times == 1 else f"{name}#{times}"
        gives = tuple(self._new(tensor, name, len(self.calls)) for tensor in made)
        self.calls.append(Call(name, operation, arguments, takes, gives, training))
        return gives

    def _to_open(self, node, known):
        """(values for the inputs of a model inside, its training flag); None if it stays shut.

        A model is opened that is called with its inputs and a training flag alone.
        """
        function = functional(node.operation)
        if function is None:
            return None
        args, kwargs = node.arguments.args, dict(node.arguments.kwargs)
        flag = kwargs.pop("training", None)
        if "inputs" in kwargs and not args:
            args = (kwargs.pop("inputs"),)
        if len(args) != 1:
            return None
        masks = [_tf.get_keras_mask(tensor) for tensor in tree.flatten(args[0])]
        if list(map(id, tree.flatten(kwargs.get("mask")))) == list(map(id, masks)):
            kwargs.pop("mask", None)  # they travel with the inputs anyway
        if any(value is not None for value in kwargs.values()):
            return None
        given, wanted = args[0], function._inputs_struct
        if len(tree.flatten(given)) == len(tree.flatten(wanted)) == 1:
            pass
        elif isinstance(given, dict) and not isinstance(wanted, dict):
            names = [tensor.name for tensor in function.inputs]
            if not set(names) <= set(given):
                return None
            given = [given[name] for name in names]
        else:
            try:
                tree.assert_same_structure(
                    tree.lists_to_tuples(given), tree.lists_to_tuples(wanted)
                )
            except ValueError:
                return None
        pairs = list(zip(tree.flatten(given), function.inputs, strict=True))
        for outer, inner in pairs:
            if not isinstance(outer, keras.KerasTensor) or len(outer.shape) != len(inner.shape):
                return None
        return [(known[id(outer)], inner) for outer, inner in pairs], flag


def functional(model):
    """The Functional behind a Sequential or Functional model whose calls can be read, or None."""
    if isinstance(model, keras.Sequential):
        ours = type(model).call is keras.Sequential.call and model.built
        return model._functional if ours else None
    if not isinstance(model, _tf.Functional) or not hasattr(model, "_nodes_by_depth"):
        return None
    return model if type(model).call is _tf.Functional.call else None


def _nodes(function):
    """The nodes of a Functional in the order in which Keras runs them."""
    for depth in sorted(function._nodes_by_depth, reverse=True):
        for node in function._nodes_by_depth[depth]:
            if node.operation and not node.is_input:
                yield node


def _opaque(model):
    kind = type(model).__name__
    if isinstance(model, keras.Sequential):
        return (
            f"model {model.name!r} cannot be cut into stages before it is built; begin it with "
            "keras.Input(shape)"
        )
    if not isinstance(model, keras.Model):
        return f"a pipeline needs a keras.Model; received {model!r}"
    return (
        f"model {model.name!r} cannot be cut into stages: the call of {kind} is its own, and nobody "
        "can see into it. Write it as a Functional model, keras.Model(inputs, outputs), whose layers "
        "may be of your own; or give tfpar.Pipeline a list of stage models, cut by hand"
    )


def chained(models):
    """One Functional model of a list of stage models, each fed with what the one before returns.

    Args:
      models: list of built Keras models, or of models and layers that take the first one's output.

    Returns:
      A Functional model.
    """
    if not models:
        raise ValueError("a pipeline needs at least one stage model; received an empty list")
    first = functional(models[0])
    if first is None:
        raise ValueError(
            f"the first of the stage models must be a built Sequential or Functional model; "
            f"{_opaque(models[0])}"
        )
    inputs = tree.map_structure(
        lambda x: keras.Input(batch_shape=x.shape, dtype=x.dtype, name=x.name),
        first._inputs_struct,
    )
    x = inputs
    for model in models:
        x = model(x)
    return keras.Model(inputs, x)
