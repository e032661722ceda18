"""A stage of a pipeline: consecutive calls of a model, run as one."""

import keras
import tensorflow as tf

from tfpar import _tf
from tfpar.strategy import rules


class _Calls(keras.layers.Layer):
    """Runs consecutive calls of a model as one layer, so that Keras knows whether it trains."""

    def __init__(self, calls, name, policy):
        super().__init__(name=name, dtype=policy, autocast=False)
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True
        self._calls = calls
        layers = {id(call.operation): call.operation for call in calls if call.layers}
        self.parts = list(layers.values())
        self.supports_masking = True
        self.built = True

    def call(self, values, masks, training=None):
        values = dict(values)
        for number, mask in masks.items():
            _tf.set_keras_mask(values[number], mask)
        for call in self._calls:
            call.run(values, training)
        return values

    def compute_mask(self, inputs, previous_mask):
        return None


class Stage:
    """Consecutive calls of a model.

    Args:
      graph: the model's `graph.Graph`.
      start, stop: its calls are `graph.calls[start:stop]`.
      index: its place among the virtual stages.
      rank: on which stage mesh it runs.
      is_last: whether it computes the loss.

    Attributes:
      span: the numbers of its first call and of the one after its last.
      takes: the numbers of the values that it needs from others, the model's inputs among them.
      gives: the numbers of its values that others need.
      state: list of the variables that its forward pass has been seen to change.
      adds_losses: whether its layers were seen to add losses that depend on the batch.
    """

    def __init__(self, graph, start, stop, index, rank, is_last):
        self.index, self.rank, self.is_last = index, rank, is_last
        self.span = start, stop
        self.calls = graph.calls[start:stop]
        made = {number for call in self.calls for number in call.gives}
        needed = {number for call in self.calls for number in call.takes.values()}
        if is_last:
            needed |= set(graph.outputs)
        later = {number for call in graph.calls[stop:] for number in call.takes.values()}
        self.takes = sorted(needed - made)
        self.gives = sorted(made & (later | set(graph.outputs)))
        self.names = [call.name for call in self.calls]
        self.layer = _Calls(self.calls, f"tfpar_stage_{index}", graph.model.dtype_policy)
        self.state: list = []
        self._places: dict = {}
        self.adds_losses = False
        self._earlier = {id(v) for call in graph.calls[:start] for v in call.variables}

    @property
    def variables(self):
        """The variables of its layers, seed states among them."""
        return self.layer.variables

    @property
    def trainable(self):
        """The trainable weights of its layers."""
        return self.layer.trainable_variables

    def run(self, values, masks, training, kept=None):
        """In a step: runs the calls, changing no variable.

        Args:
          values: {number: tensor} of what the stage takes.
          masks: {number: mask} of those that have one.
          training: the training flag.
          kept: {place in `state`: value} of the state that the calls shall start from.

        Returns:
          (all values, losses that its layers add, pairs of a variable and its new value).
        """
        mapping = [(self.state[place], value) for place, value in (kept or {}).items()]
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            before = dict(scope.state_mapping)
            values = self.layer(values, masks, training=training)
            losses = [x for y in self.layer._flatten_layers() for x in y._get_own_losses()]
            self.adds_losses = bool(losses)
            changed = []
            for variable in self.variables:
                new = scope.get_current_value(variable)
                if new is not None and new is not before.get(id(variable)):
                    changed.append((variable, new))
        for weight in self.trainable:  # one that earlier stages use is theirs to regularize
            if weight.regularizer is not None and id(weight) not in self._earlier:
                losses.append(weight.regularizer(weight))
        return values, losses, changed

    def remember(self, changed):
        """In a step: writes changed state, and returns {place in `state`: value before}."""
        kept = {}
        for variable, new in changed:
            if variable._value.is_copied:
                raise rules.UnsupportedStep(
                    f"variable {variable.path!r} changes as the model runs, and is used by several "
                    "stages, each of which would have a value of its own; keep the layers that use "
                    "it in one stage"
                )
            place = self._places.setdefault(id(variable), len(self.state))
            if place == len(self.state):
                self.state.append(variable)
            kept[place] = tf.identity(variable._value)
            variable.assign(new)
        return kept


def masks_of(values, numbers):
    """{number: mask} of the values that have a Keras mask."""
    found = {number: _tf.get_keras_mask(values[number]) for number in numbers}
    return {number: mask for number, mask in found.items() if mask is not None}
