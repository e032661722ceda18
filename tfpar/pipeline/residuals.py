"""A stage's forward pass that keeps what its backward pass needs, instead of running again.

The backward pass is traced inside the graph of the forward pass. What it captures there are the
residuals: the forward pass returns them, and the backward pass is later called with them.
"""

import tensorflow as tf

CONSTANT = 1024  # known values of at most so many elements stay constants


class Kept:
    """A forward and a backward pass, traced for one signature.

    Args:
      trace: takes the arguments of the forward pass; returns (outputs, backward, specs): the outputs,
        the function that makes the backward pass, and the specs of its arguments.
      run: takes the function of a pass, returns it as a step of the stage.
      finish: called at the end of each of the two traces.
      args: arguments of the forward pass.
    """

    def __init__(self, trace, run, finish, args):
        def forward(*args):
            outputs, backward, specs = run(trace)(*args)

            def finished(*args):
                _keep_constants(tf.compat.v1.get_default_graph())
                results = run(backward)(*args)
                finish()
                return results

            self._backward = tf.function(finished, autograph=False).get_concrete_function(*specs)
            graph = tf.compat.v1.get_default_graph()
            finish()
            outside = {id(inner): outer for outer, inner in graph.captures}
            residuals: list = []
            self._sources: list = []  # each a variable, or the place of a residual
            for tensor in self._backward.captured_inputs:
                if isinstance(tensor, tf.__internal__.EagerTensor) or id(tensor) in outside:
                    self._sources.append(outside.get(id(tensor), tensor))
                else:
                    self._sources.append(len(residuals))
                    residuals.append(tensor)
            return outputs, residuals

        self._forward = tf.function(forward, autograph=False).get_concrete_function(*args)

    def forward(self, *args):
        """Returns (outputs, residuals)."""
        return self._forward(*args)

    def backward(self, residuals, *args):
        """Runs the backward pass on what a forward pass has kept."""
        captures = [residuals[k] if isinstance(k, int) else k for k in self._sources]
        self._backward.set_external_captures(captures)
        return self._backward(*args)


def _keep_constants(graph):
    """Has a graph take small tensors of the graph around it whose values are known as constants.

    As residuals they would be values that nobody knows: shapes that depend on them would be unknown.
    """
    capture, known = graph.capture, {}

    def constant_or_captured(tensor, name=None, shape=None):
        eager = isinstance(tensor, tf.__internal__.EagerTensor)
        plain = isinstance(tensor, tf.Tensor) and tensor.dtype not in (tf.resource, tf.variant)
        if eager or not plain or tensor.graph is graph:
            return capture(tensor, name, shape)
        if id(tensor) not in known:
            value = tf.get_static_value(tensor)
            if value is None or value.size > CONSTANT:
                return capture(tensor, name, shape)
            with graph.as_default(), tf.control_dependencies(None):
                known[id(tensor)] = tensor, tf.constant(value, tensor.dtype)
        return known[id(tensor)][1]

    graph.capture = constant_or_captured
