"""The global view: a step is written as for one device, and DTensor splits it over the mesh.

There is one logical replica, so the loss is not divided, clipping sees the whole gradient, every
row of an uneven batch weighs alike and masks normalise over the whole batch. `data` shards the
batch, `model` shards weights by the `LayoutMap`; DTensor inserts the collectives.
"""

import functools

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar import _tf
from tfpar import layouts as layouts_lib
from tfpar import zero as zero_lib
from tfpar.layouts import LayoutMap
from tfpar.mesh import Mesh
from tfpar.strategy import data as data_lib
from tfpar.strategy import rules, trainer
from tfpar.variables import (
    ShardedVariable,
    current_stage,
    in_step,
    on_stage,
    shard_counts,
    step_scope,
    to_host,
    update_scope,
)

# Layers whose split weights a step reads whole: DTensor cannot split a convolution's filters, and
# recurrent cells cut their kernels into gates, across the shards.
READ_WHOLE = (*_tf.CONVOLUTIONS, keras.layers.LSTMCell, keras.layers.GRUCell)

# Optimizers that divide a sparse gradient by a slot. Keras looks for the rows where the slot is
# zero, whose number is known at run time only: DTensor cannot split their width, and cannot add
# them to a slot split by rows. They see tables whole.
DIVIDE_BY_SLOT = (keras.optimizers.Adafactor, keras.optimizers.Adagrad)
DIVIDE_AND_ADD = (keras.optimizers.Adadelta, keras.optimizers.RMSprop)

# Optimizers that treat each element of a weight by itself. To the others a padded weight would look
# longer than it is.
ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Adam,
    keras.optimizers.Adamax,
    keras.optimizers.AdamW,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
    keras.optimizers.Nadam,
    keras.optimizers.RMSprop,
)


def _updates_whole(optimizer, weight):
    """Whether an optimizer must see a weight whole to update it."""
    if issubclass(weight.owned_by, keras.layers.Embedding):
        rows, width = (count > 1 for count in shard_counts(weight.slot_layout))
        if isinstance(optimizer, DIVIDE_AND_ADD) and (rows or width):
            return True
        if isinstance(optimizer, DIVIDE_BY_SLOT) and width:
            return True
    return weight.slots_are_padded and type(optimizer) not in ELEMENTWISE


class MeshStrategy(tf.distribute.Strategy):
    """Trains a Keras model on a mesh of devices with the numbers of one device.

    Build and compile the model inside `with strategy.scope():`; `fit`, `evaluate`, `predict` and
    the rest work as ever::

        mesh = tfpar.Mesh(data=4, model=2)
        strategy = tfpar.MeshStrategy(mesh, layouts={r"up/kernel": (None, "model")})
        with strategy.scope():
            model = build_model()
            model.compile("adam", "mse")
        model.fit(dataset)

    The batch that `fit` receives is the global batch; each device gets its slice of it along the
    axis `data`. `num_replicas_in_sync` is 1, since the step is one logical replica: a script that
    multiplies its batch size by it should multiply by `mesh.data`.

    Args:
      mesh: a `tfpar.Mesh`. With pipe > 1 make the model a `tfpar.Pipeline` in the scope.
      layouts: a `tfpar.LayoutMap`, a dict of its rules or a `keras.distribution.LayoutMap`: which
        weights are split, and how. Weights without a rule are whole on every device.
      micro_batches: in how many slices a training step takes its batch, one after the other: the
        activations of one slice are alive at a time, and the update is that of the whole batch
        (see `tfpar.AccumulatingOptimizer`). A batch with fewer rows has as many slices as rows.
      zero: what is split over `data`, on top of `layouts`: 0 nothing, 1 optimizer slots, 2 gradients
        too, 3 weights too, which a step then gathers for each use (Rajbhandari et al. 2020, ZeRO).

    Raises:
      ValueError: not a mesh, pipe > 1 on TPUs, micro_batches below 1 or together with pipe > 1, or an
        unknown zero.
    """

    def __init__(self, mesh, layouts=None, micro_batches=1, zero=0):
        if not isinstance(mesh, Mesh):
            raise ValueError(f"mesh must be a tfpar.Mesh; received {mesh!r}")
        if mesh.pipe > 1 and mesh.device_type == "TPU":
            raise ValueError(
                f"pipe={mesh.pipe} is not supported on TPUs: TensorFlow wants all cores in one mesh. "
                "Give the cores to data or model"
            )
        if mesh.pipe > 1 and micro_batches != 1:
            raise ValueError(
                f"with pipe={mesh.pipe} the micro-batches are those of the pipeline: leave out "
                f"micro_batches={micro_batches!r} and say tfpar.Pipeline(model, micro_batches=...)"
            )
        if (
            isinstance(micro_batches, bool)
            or not isinstance(micro_batches, int)
            or micro_batches < 1
        ):
            raise ValueError(
                f"micro_batches must be an int of at least 1; received {micro_batches!r}"
            )
        zero_lib.check(zero)
        rules.switch_off_what_is_wrong()
        rules.allow_replicated(rules.COMMON_WITHOUT_RULE)
        self._mesh = mesh
        self._layouts = LayoutMap.coerce(layouts)
        self._micro_batches = micro_batches
        self._zero = zero
        self._stages = mesh.stages if mesh.pipe > 1 else (mesh,)
        super().__init__(_Extended(self))

    @property
    def mesh(self):
        """The `tfpar.Mesh` that steps run on."""
        return self._mesh

    @property
    def step_mesh(self):
        """The `tfpar.Mesh` with pipe=1 that the calling code runs on: that of its stage.

        Raises:
          ValueError: with pipe > 1, outside of a stage.
        """
        if self._mesh.pipe == 1:
            return self._mesh
        stage = current_stage()
        if stage is None:
            raise ValueError(
                f"on a mesh with pipe={self._mesh.pipe} a step runs on one stage at a time: make "
                "the model a tfpar.Pipeline(model, micro_batches=...) inside the scope, and train "
                "it with fit or train_on_batch; training loops of your own need pipe=1"
            )
        return self._stages[stage]

    @property
    def layouts(self):
        """The `tfpar.LayoutMap` that splits weights."""
        return self._layouts

    @property
    def micro_batches(self):
        """In how many slices a training step takes its batch."""
        return self._micro_batches

    @property
    def zero(self):
        """The ZeRO stage: 0, 1, 2 or 3."""
        return self._zero

    def run(self, fn, args=(), kwargs=None, options=None):
        """Runs `fn` as one step on the mesh; for training loops of one's own.

        Called from Python, it packs the host values in `args` and `kwargs` onto the mesh (dim 0
        over `data`) and returns plain tensors. Inside a `tf.function` it takes and returns
        DTensors.
        """
        if not tf.executing_eagerly():
            return super().run(fn, args, kwargs, options)
        args, kwargs = self.pack((tuple(args), kwargs or {}))
        with dtensor.default_mesh(self.step_mesh.dtensor_mesh):
            outputs = super().run(fn, args, kwargs, options)
        return tf.nest.map_structure(to_host, outputs)

    def make_function(self, model, step_function):
        """What Keras calls once for each execution, with an iterator over batches."""
        return trainer.make_function(model, self, step_function)

    def make_predict_function(self, model):
        """What Keras calls once for each execution, with a list of batches."""
        return trainer.make_predict_function(model, self)

    def pack(self, batch):
        """Packs a nest of host values onto the mesh, dim 0 over `data` (see `data.pack`)."""
        return data_lib.pack(batch, self.step_mesh)

    def explain(self, model):
        """A table of the model's weights: shape, layout, bytes per device, and each rule's catch.

        Under ZeRO also how the slots of each trainable weight are split. In a pipeline a table for each
        stage mesh.

        Args:
          model: a built Keras model.

        Returns:
          A string; print it.
        """
        pipeline = getattr(model, "pipeline", None)
        if pipeline is None or self._mesh.pipe == 1:
            return self._explain(_weights(model))
        parts = []
        for k in range(self._mesh.pipe):
            here = [v for v in _weights(model) if k in (v.value.stage, *v.value.copies)]
            parts.append(f"stage mesh {k}\n{self._explain(here)}")
        return "\n\n".join(parts)

    def _explain(self, weights):
        rows = []
        for v in weights:
            axes = slot_axes = (None,) * len(v.shape)
            if isinstance(v.value, ShardedVariable):
                axes, slot_axes = _axes_of(v.value.layout), _axes_of(v.value.slot_layout)
            rows.append((v.path, tuple(v.shape), v.value.dtype.size, axes, slot_axes))
        return layouts_lib.explain(rows, self._layouts, self._mesh, slots=self._zero > 0)

    def place(self, variable, stages):
        """Gives a Keras variable that was created in the scope its place on stage meshes.

        Args:
          variable: a `keras.Variable` of a layer.
          stages: list of the numbers of the stages that read it; the first one updates it.

        Raises:
          ValueError: it was created elsewhere.
        """
        held = variable._value
        make = getattr(held, "make_on_stage", None)
        if make is None:
            raise ValueError(rules.outside_scope(f"variable {variable.path!r}"))
        variable._value = self.extended.on_stages(make, held.read_value(), stages)

    def check_layouts(self, model):
        """Refuses rules that caught none of the weights of `model`.

        Raises:
          ValueError: names the rule and the nearest paths.
        """
        if model.built:
            self._layouts.check_all_rules_matched(
                [(v.path, tuple(v.shape)) for v in _weights(model)],
                [layer.path for layer in model._flatten_layers() if layer.path],
            )


def _axes_of(layout):
    """The axes of a `dtensor.Layout`: None, "data" or "model" per dim."""
    return tuple(None if spec == dtensor.UNSHARDED else spec for spec in layout.sharding_specs)


def _weights(model):
    """The layers' own weights, each once, without the states of seed generators."""
    once = {id(v): v for v in model.weights}.values()
    return [v for v in once if not v.path.endswith("seed_generator_state")]


class _Replica(_tf.ReplicaContextBase):
    """The one logical replica that sees the whole batch: reductions have nothing to do."""

    def all_reduce(self, reduce_op, value, options=None):
        """Returns `value`, in which sparse gradients know their dense shape.

        Made dense without it, their shape would be known at run time only: DTensor cannot split
        that.
        """
        del reduce_op, options
        return tf.nest.map_structure(_with_static_shape, value)

    def all_gather(self, value, axis, options=None):
        del axis, options
        return value


def _with_static_shape(gradient):
    if not isinstance(gradient, tf.IndexedSlices) or gradient.dense_shape is None:
        return gradient
    shape = tf.get_static_value(gradient.dense_shape)
    dense_shape = gradient.dense_shape if shape is None else tf.constant(shape)
    return tf.IndexedSlices(gradient.values, gradient.indices, dense_shape)


def _as_update(variable, arg):
    """An argument of an update: a gradient in the shape and layout of the variable's slots."""
    if not isinstance(variable, ShardedVariable):
        return arg
    dense = isinstance(arg, tf.Tensor) and arg.shape in (variable.shape, variable.padded_shape)
    return variable.as_update(arg) if dense or isinstance(arg, tf.IndexedSlices) else arg


class _Extended(_tf.StrategyExtendedV1):
    def __init__(self, strategy):
        super().__init__(strategy)
        self._strategy = strategy
        self._retrace_functions_for_each_device = False

    @property
    def _mesh(self):
        return self._strategy.step_mesh

    def _create_variable(self, next_creator, **kwargs):
        initial = kwargs.pop("initial_value")
        with tf.device("CPU:0"):
            initial = initial() if callable(initial) else initial
            initial = tf.convert_to_tensor(initial, dtype=kwargs.get("dtype"))
        if initial.dtype == tf.string:  # tables and names: never part of a step
            return next_creator(initial_value=initial, **kwargs)
        path, owner = _tf.creating(kwargs.get("name") or "Variable")
        make = functools.partial(self._make, kwargs, path, owner)
        if self._strategy.mesh.pipe == 1:
            return make(initial)
        if isinstance(owner, keras.metrics.Metric):
            return self.on_stages(make, initial, [self._strategy.mesh.pipe - 1])
        if isinstance(owner, keras.optimizers.Optimizer):
            weight = kwargs.get("colocate_with")
            weight = getattr(weight, "original", weight)
            if not isinstance(weight, ShardedVariable):  # such as a counter: each stage has its own
                return self.on_stages(make, initial, range(self._strategy.mesh.pipe))
            if not getattr(owner, "holds_gradients", False):
                return self.on_stages(make, initial, [weight.stage])
            variable = self.on_stages(make, initial, [weight.stage, *weight.copies])
            variable.copies_add = True
            return variable
        # Which stage a weight belongs to is known when the model has been cut.
        variable = next_creator(initial_value=initial, **kwargs)
        variable.make_on_stage = make
        return variable

    def on_stages(self, make, initial, stages):
        """The variable of the first of `stages`, with copies for the others."""
        made = {}
        for stage in stages:
            with on_stage(stage):
                made[stage] = make(initial)
            made[stage].stage = stage
        first = made.pop(stages[0])
        first.copies = made
        for copy in made.values():
            copy._unique_id = first._unique_id  # by which optimizers know a weight
            copy.original = first
        return first

    def _make(self, kwargs, path, owner, initial):
        """The variable on the mesh of the current step."""
        shape = tuple(initial.shape)
        weight = kwargs.get("colocate_with")  # of an optimizer's slot
        if isinstance(weight, ShardedVariable):
            weight = weight.original.copies.get(current_stage(), weight.original)
        if isinstance(weight, ShardedVariable) and weight.shape == initial.shape:
            layouts = self._layouts_of_slot(weight, owner)
        else:
            layouts = self._layouts_of(path, owner, kwargs, shape)
        keep = ("trainable", "dtype", "name", "synchronization", "aggregation", "constraint")
        variable = ShardedVariable(
            initial,
            path=path,
            owned_by=type(owner),
            **layouts,
            **{key: value for key, value in kwargs.items() if key in keep},
        )
        variable._distribute_strategy = self._strategy
        return variable

    def _layouts_of_slot(self, weight, optimizer):
        """How a variable of an optimizer is held that goes with a weight of its shape."""
        if getattr(optimizer, "holds_gradients", False):
            layout = weight.slot_layout if self._strategy.zero >= 2 else weight.layout
            return dict(layout=layout, slot_layout=weight.slot_layout, pad=True)
        if _updates_whole(optimizer, weight):
            weight.update_whole()
        return dict(layout=weight.slot_layout, pad=True, updated_whole=weight.is_updated_whole)

    def _layouts_of(self, path, owner, kwargs, shape):
        """How the weight of a layer, or any other variable, is held."""
        pad = isinstance(owner, keras.layers.Layer) and self._may_pad(path, owner)
        axes = self._axes(path, owner, kwargs.get("name"), shape, pad)
        layout = self._mesh.layout(axes)
        zero = self._strategy.zero
        if zero and isinstance(owner, keras.layers.Layer) and kwargs.get("trainable", True):
            split = self._mesh.layout(zero_lib.split_over_data(shape, axes, self._mesh.data))
        else:
            split, zero = layout, 0
        whole = self._mesh.layout((None,) * len(shape)) if isinstance(owner, READ_WHOLE) else None
        return dict(
            layout=split if zero == 3 else layout,
            read_layout=whole or layout,
            slot_layout=split,
            gradient_layout=split if zero >= 2 else (whole or layout) if whole or zero else None,
            pad=zero == 3 or pad,
        )

    def _axes(self, path, layer, name, shape, pad):
        """The axes of a new variable: by rule, else as its layer states, else whole."""
        if not isinstance(layer, keras.layers.Layer):
            return (None,) * len(shape)
        axes = self._strategy.layouts.lookup(path, shape, self._mesh, pad)
        stated = getattr(layer, "axes_of_weights", {}).get(name)
        if stated is None:
            return axes
        if self._strategy.layouts.matching(path) and axes != stated:
            raise ValueError(
                f"variable {path!r} is split as {stated} by its layer and as {axes} by the rule "
                f"{self._strategy.layouts.matching(path)[0]!r}; drop one of them"
            )
        source = f"{layer.name!r} splits as {stated} and"
        layouts_lib.check_axes(stated, path, shape, self._mesh, source, pad)
        return stated

    def _may_pad(self, path, layer):
        """Whether the dims of a weight need not divide: a vocabulary is padded.

        Raises:
          ValueError: the LayoutMap pads the weight of a layer for which that is not supported.
        """
        if isinstance(layer, keras.layers.Embedding) or getattr(layer, "pads_classes", False):
            return True
        if not self._strategy.layouts.may_pad(path):
            return False
        if not isinstance(layer, keras.layers.Dense):
            raise ValueError(
                f"variable {path!r} cannot be padded: only the classes of a Dense layer and the "
                f"rows of an Embedding are; received a {type(layer).__name__}"
            )
        return True

    def _validate_colocate_with_variable(self, colocate_with_variable):
        pass

    def _call_for_each_replica(self, fn, args, kwargs):
        with _Replica(self._container_strategy(), 0), step_scope():
            return fn(*args, **kwargs)

    def _reduce_to(self, reduce_op, value, destinations, options):
        return value

    def _gather_to_implementation(self, value, destinations, axis, options):
        return value

    def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
        return [value for value, _ in value_destination_pairs]

    def _update(self, var, fn, args, kwargs, group):
        if in_step():
            args = [_as_update(var, arg) for arg in args]
        with update_scope():
            result = fn(var, *args, **kwargs)
        return tf.group(result) if group else result

    def _update_non_slot(self, colocate_with, fn, args, kwargs, group):
        result = fn(*args, **kwargs)
        return tf.group(result) if group else result

    def _local_results(self, value):
        return (value,)

    def value_container(self, value):
        return value

    def read_var(self, variable):
        return variable.read_value()

    def non_slot_devices(self, var_list):
        return list(self._strategy.mesh.devices)

    def _use_merge_call(self):
        return False

    def _default_device_scope(self):
        return None

    def _experimental_distribute_dataset(self, dataset, options):
        # Slices are cut, and packed, when their turn comes.
        whole = self._strategy.micro_batches == 1 and self._strategy.mesh.pipe == 1
        return data_lib.PackedDataset(dataset, self._mesh if whole else None)

    def _distribute_datasets_from_function(self, dataset_fn, options):
        dataset = dataset_fn(tf.distribute.InputContext())
        return data_lib.PackedDataset(dataset, self._mesh)

    @property
    def _num_replicas_in_sync(self):
        return 1

    @property
    def worker_devices(self):
        return tuple(self._strategy.mesh.devices)

    @property
    def parameter_devices(self):
        return tuple(self._strategy.mesh.devices)

    @property
    def should_checkpoint(self):
        return True

    @property
    def should_save_summary(self):
        return True

    def _in_multi_worker_mode(self):
        return False

    def _get_local_replica_id(self, replica_id_in_sync_group):
        return replica_id_in_sync_group

    def _get_replica_id_in_sync_group(self, replica_id):
        return replica_id
