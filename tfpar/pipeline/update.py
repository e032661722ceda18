"""The update of a pipelined model: one optimizer for the user, a part of it on each stage mesh.

Every mesh updates its own weights. What they share is computed on all of them alike: counters,
learning rate and loss scale, of which each mesh has its own copy. The norm of all gradients, and
whether they are finite, is found mesh by mesh and told to all.
"""

import functools

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar import _tf, accumulation, denominators
from tfpar.collectives import hop
from tfpar.pipeline.functions import compiled
from tfpar.variables import on_stage, to_host


class Update:
    """Makes the updates of a compiled model.

    Args:
      plan: the `plan.Plan`.
    """

    def __init__(self, plan):
        self._plan = plan
        self._optimizer = plan.model.optimizer
        self._inner = self._optimizer.inner_optimizer
        self._functions: dict = {}
        self._touched: dict = {}  # rank: ids of the handles of the variables that its update uses

    @property
    def needs_norms(self):
        """Whether the update of a weight depends on the gradients of others."""
        return bool(self._innermost.global_clipnorm) or self._scales

    @property
    def _innermost(self):
        return _tf.innermost(self._inner)

    @property
    def _scales(self):
        return isinstance(self._inner, keras.optimizers.LossScaleOptimizer)

    def finish_batch(self, divisors):
        """Counts a batch whose gradients have been added, and updates the weights if it is time.

        Args:
          divisors: for each part of the gradient the sum of its denominators, 0 for sums of losses.
        """
        optimizer = self._optimizer
        is_full = int(optimizer.micro_step.numpy()) + 1 >= optimizer.window_size
        extras = self._gather_tied()
        divisors = [tf.constant(divisor, denominators.wide()) for divisor in divisors]
        for rank in self._ranks:
            packed = self._plan.pack(divisors, rank)
            self._call(rank, "tally", self._tally, packed, extras.get(rank, {}))
        if is_full:
            self.update()

    def update(self):
        """Updates the weights with what the window holds, and empties it."""
        self._find_places()
        told = None
        if self.needs_norms:
            found = [self._call(r, "norms", self._norms) for r in self._ranks if self._places[r]]
            squares, finite = zip(*(tf.unstack(to_host(vector)) for vector in found))
            told = tf.sqrt(tf.add_n(squares)), tf.reduce_min(finite)
        for rank in self._ranks:
            args = () if told is None else self._plan.pack(told, rank)
            self._call(rank, "apply", self._apply, *args)
        self._share()

    def forget(self):
        """Empties the window, after a batch that failed."""
        optimizer = self._optimizer
        if not optimizer.built:
            return
        window = [v for held in optimizer._held for v in (held.count, *held.accumulators)]
        for variable in (*window, optimizer.micro_step):
            zeros = tf.zeros(variable.shape, variable.dtype)
            try:
                variable.assign(zeros)
            except tf.errors.CancelledError:  # the last of what the failure has cancelled
                tf.experimental.async_clear_error()
                variable.assign(zeros)

    @property
    def _ranks(self):
        return range(self._plan.ranks)

    def _find_places(self):
        """Which weights have gradients, by the stage mesh that updates them."""
        variables = self._optimizer._trainable_variables
        stepped = set().union(*self._plan.stepped)
        homes = [weight._value.stage for weight in variables]
        self._homes = [[p for p, home in enumerate(homes) if home == r] for r in self._ranks]
        self._places = [[p for p in here if p in stepped] for here in self._homes]

    def _call(self, rank, name, fn, *args):
        places = tuple(self._places[rank]) if name in ("norms", "apply") else ()
        key = rank, name, places
        if key not in self._functions:
            self._functions[key] = compiled(self._plan, rank, functools.partial(fn, rank))
        with on_stage(rank), dtensor.default_mesh(self._plan.meshes[rank].dtensor_mesh):
            return self._functions[key](*args)

    # What the stage meshes compute.

    def _tally(self, rank, divisors, extras):
        """Adds to the window's counters, and to its gradients what copies of weights hold."""
        optimizer = self._optimizer
        for part, divisor in enumerate(divisors):
            optimizer.held(part).count.value.assign_add(divisor)
        optimizer.micro_step.value.assign_add(tf.ones((), tf.int64))
        for part, found in extras.items():
            for place, gradients in found.items():
                accumulator = optimizer.held(part).accumulators[place].value
                accumulator.assign_add(tf.add_n(list(gradients)))

    def _norms(self, rank):
        """[squared norm of this mesh's gradients as the optimizer will see them, 1 if finite]."""
        gradients = self._optimizer.gradients_of(self._places[rank])
        dtype = denominators.wide()
        finite = tf.ones((), tf.bool)
        if self._scales:
            finite = self._inner.check_finite(gradients)
            scale = tf.convert_to_tensor(self._inner.dynamic_scale.value)
            gradients = [gradient / tf.cast(scale, gradient.dtype) for gradient in gradients]
        if self._innermost.loss_scale_factor is not None:
            factor = self._innermost.loss_scale_factor
            gradients = [gradient / factor for gradient in gradients]
        return tf.stack([accumulation.squared_norm(gradients, dtype), tf.cast(finite, dtype)])

    def _apply(self, rank, norm=None, finite=None):
        """Updates this mesh's weights and empties its part of the window.

        Args:
          norm, finite: the norm of all gradients, and 1 if all are finite, where that is needed.
        """
        optimizer, places = self._optimizer, self._places[rank]
        if places:
            gradients = optimizer.gradients_of(places)
            weights = [optimizer._trainable_variables[place] for place in places]
            norm = norm if self._innermost.global_clipnorm else None
            finite = finite > 0 if self._scales else None
            # Averages move on for weights without gradient too.
            part = _tf.updating_part(self._inner, self._homes[rank], norm, finite)
            with part, _tf.reduced_already(self._innermost):
                self._inner.apply(gradients, weights)
        elif self._innermost.use_ema:  # of weights that stay as they are
            averages = self._innermost._model_variables_moving_average
            for place in self._homes[rank]:
                if averages[place] is not None:
                    averages[place].assign(optimizer._trainable_variables[place])
        graph = tf.compat.v1.get_default_graph()
        self._touched[rank] = {id(outside) for outside, _ in graph.captures}
        optimizer.empty(places)
        optimizer.micro_step.value.assign(tf.zeros((), tf.int64))

    # Weights that several stages use.

    def _tied(self):
        """(place, weight) of the trainable weights that have copies."""
        found = enumerate(self._optimizer._trainable_variables)
        return [(place, weight) for place, weight in found if weight._value.copies]

    def _gather_tied(self):
        """{rank: {part: {place: gradients}}} that copies hold for the mesh that updates them."""
        extras: dict = {}
        for place, weight in self._tied():
            home = weight._value.stage
            for part, held in enumerate(self._optimizer._held):
                for rank in held.accumulators[place]._value.copies:
                    gradient = self._call(rank, f"shed {part} {place}", self._shed(part, place))
                    found = extras.setdefault(home, {}).setdefault(part, {})
                    found.setdefault(place, []).append(hop(gradient, self._plan.meshes[home]))
        return extras

    def _shed(self, part, place):
        def shed(rank):
            accumulator = self._optimizer.held(part).accumulators[place].value
            gradient = tf.identity(accumulator)
            accumulator.assign(tf.zeros_like(gradient))
            return gradient

        return shed

    def _share(self):
        """Gives copies the values that their weights have got, and idle meshes the counters."""
        for _, weight in self._tied():
            for copy in weight._value.copies.values():
                weight._value.copy_to(copy)
        active = [rank for rank in self._ranks if self._places[rank]]
        for variable in self._inner.variables:
            held = variable._value
            if not held.copies:
                continue
            everywhere = {held.stage: held, **held.copies}
            if len(variable.shape):
                self._settle(variable, everywhere)
                continue
            for rank in set(everywhere) - set(active):
                everywhere[active[0]].copy_to(everywhere[rank])

    def _settle(self, variable, everywhere):
        """Keeps of a state that belongs to one weight only that of the mesh which updates it."""
        users = [rank for rank, one in everywhere.items() if id(one.handle) in self._touched[rank]]
        if len(users) == 1:
            variable._value = everywhere[users[0]]
            variable._value.copies = {}
