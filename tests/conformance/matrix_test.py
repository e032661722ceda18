"""Layers x optimizers x metrics under MeshStrategy: in float64 all equal one device to 1e-9.

Sizes are odd where the axis allows it, the last batch does not divide over `data`, and the layer
under test has its weights split over `model` where it has any that can be.
"""

import keras
import numpy as np
import pytest

import tfpar
from tfpar.testing import assert_same_training

L = keras.layers
MESHES = {"data=4": (4, 1), "model=4": (1, 4), "2x2": (2, 2)}

FLAT, SERIES, IMAGE, VOLUME = (6,), (5, 6), (6, 5, 4), (4, 4, 3, 4)

# The shape of a row; how to make the layer; rules that split its weights over `model`.
LAST = (None, "model")
LAYERS = {
    "Dense": (FLAT, lambda: L.Dense(8, "tanh"), {"under_test/kernel": LAST}),
    "Dense without bias": (FLAT, lambda: L.Dense(8, use_bias=False), {"under_test/kernel": LAST}),
    "EinsumDense": (
        SERIES,
        lambda: L.EinsumDense("btd,dhk->bthk", (5, 4, 3), bias_axes="hk"),
        {"under_test/kernel": (None, "model", None), "under_test/bias": ("model", None)},
    ),
    "TimeDistributed": (SERIES, lambda: L.TimeDistributed(L.Dense(7)), {}),
    "Conv1D": (SERIES, lambda: L.Conv1D(8, 3), {"under_test/kernel": (None, None, "model")}),
    "Conv1D causal": (SERIES, lambda: L.Conv1D(7, 2, padding="causal", dilation_rate=2), {}),
    "Conv2D": (IMAGE, lambda: L.Conv2D(8, 3), {"under_test/kernel": (None, None, None, "model")}),
    "Conv2D strided": (IMAGE, lambda: L.Conv2D(7, 3, strides=2, padding="same"), {}),
    "Conv2D dilated": (IMAGE, lambda: L.Conv2D(7, 2, dilation_rate=2), {}),
    "Conv3D": (VOLUME, lambda: L.Conv3D(5, 2), {}),
    "Conv1DTranspose": (SERIES, lambda: L.Conv1DTranspose(7, 3, strides=2), {}),
    "Conv2DTranspose": (IMAGE, lambda: L.Conv2DTranspose(7, 3, strides=2), {}),
    "DepthwiseConv1D": (SERIES, lambda: L.DepthwiseConv1D(3), {}),
    "DepthwiseConv2D": (IMAGE, lambda: L.DepthwiseConv2D(3), {}),
    "SeparableConv1D": (SERIES, lambda: L.SeparableConv1D(7, 3), {}),
    "SeparableConv2D": (IMAGE, lambda: L.SeparableConv2D(7, 3), {}),
    "MaxPooling1D": (SERIES, lambda: L.MaxPooling1D(2), {}),
    "MaxPooling2D": (IMAGE, lambda: L.MaxPooling2D(2), {}),
    "AveragePooling1D": (SERIES, lambda: L.AveragePooling1D(2), {}),
    "AveragePooling2D": (IMAGE, lambda: L.AveragePooling2D(2, padding="same"), {}),
    "AveragePooling3D": (VOLUME, lambda: L.AveragePooling3D(2, dtype="float32"), {}),
    "GlobalAveragePooling2D": (IMAGE, lambda: L.GlobalAveragePooling2D(), {}),
    "GlobalMaxPooling1D": (SERIES, lambda: L.GlobalMaxPooling1D(), {}),
    "BatchNormalization": (SERIES, lambda: L.BatchNormalization(momentum=0.8), {}),
    "LayerNormalization": (SERIES, lambda: L.LayerNormalization(), {}),
    "GroupNormalization": (IMAGE, lambda: L.GroupNormalization(2), {}),
    "RMSNormalization": (SERIES, lambda: L.RMSNormalization(), {}),
    "UnitNormalization": (SERIES, lambda: L.UnitNormalization(), {}),
    "SpectralNormalization": (FLAT, lambda: L.SpectralNormalization(L.Dense(7)), {}),
    "PReLU": (SERIES, lambda: L.PReLU(), {}),
    "LeakyReLU": (SERIES, lambda: L.LeakyReLU(), {}),
    "Softmax": (SERIES, lambda: L.Softmax(), {}),
    "LSTM": (SERIES, lambda: L.LSTM(8), {"under_test/lstm_cell/kernel": LAST}),
    "GRU": (SERIES, lambda: L.GRU(7, return_sequences=True), {}),
    "SimpleRNN": (SERIES, lambda: L.SimpleRNN(7, go_backwards=True), {}),
    "Bidirectional": (SERIES, lambda: L.Bidirectional(L.LSTM(3)), {}),
    "stacked cells": (SERIES, lambda: L.RNN([L.GRUCell(3), L.LSTMCell(5)]), {}),
    "ConvLSTM1D": ((3, 5, 4), lambda: L.ConvLSTM1D(3, 2), {}),
    "UpSampling2D": (IMAGE, lambda: L.UpSampling2D(2), {}),
    "UpSampling2D bilinear": (IMAGE, lambda: L.UpSampling2D(2, interpolation="bilinear"), {}),
    "ZeroPadding2D": (IMAGE, lambda: L.ZeroPadding2D(1), {}),
    "Cropping2D": (IMAGE, lambda: L.Cropping2D(1), {}),
    "Permute": (SERIES, lambda: L.Permute((2, 1)), {}),
    "Reshape": (SERIES, lambda: L.Reshape((3, 10)), {}),
    "RepeatVector": (FLAT, lambda: L.RepeatVector(3), {}),
    "Normalization": (FLAT, lambda: L.Normalization(mean=0.5, variance=2.0), {}),
    "Rescaling": (IMAGE, lambda: L.Rescaling(0.5, offset=1.0), {}),
    "Dropout 0": (SERIES, lambda: L.Dropout(0.0), {}),
    "ActivityRegularization": (SERIES, lambda: L.ActivityRegularization(l2=0.1), {}),
    "MultiHeadAttention": (
        SERIES,
        lambda: SelfAttention(L.MultiHeadAttention(4, 3, name="mha")),
        {
            r"mha/(query|key|value)/kernel": (None, "model", None),
            r"mha/(query|key|value)/bias": ("model", None),
            r"mha/attention_output/kernel": ("model", None, None),
        },
    ),
    "GroupQueryAttention": (
        SERIES,
        lambda: SelfAttention(L.GroupQueryAttention(3, 4, 4, name="gqa")),
        {r"gqa/query/kernel": (None, "model", None), r"gqa/query/bias": ("model", None)},
    ),
    "AdditiveAttention": (SERIES, lambda: SelfAttention(L.AdditiveAttention()), {}),
    "Attention": (SERIES, lambda: SelfAttention(L.Attention(use_scale=True)), {}),
}


class SelfAttention(L.Layer):
    """An attention layer with one input for query and value."""

    def __init__(self, attention):
        super().__init__(name="under_test")
        self.attention = attention

    def build(self, shape):
        if isinstance(self.attention, (L.MultiHeadAttention, L.GroupQueryAttention)):
            self.attention.build(shape, shape)
        else:
            self.attention.build([shape, shape])

    def call(self, x):
        if isinstance(self.attention, (L.MultiHeadAttention, L.GroupQueryAttention)):
            return self.attention(x, x, use_causal_mask=True)
        return self.attention([x, x])


def around(shape, make):
    """A model of the layer between two Dense layers with an output of 3 values."""

    def build():
        i = L.Input(shape)
        z = L.Dense(shape[-1], activation="tanh", name="before")(i)
        layer = make()
        layer.name = "under_test"
        z = layer(z)
        if len(z.shape) > 2:
            z = L.Flatten()(z)
        return keras.Model(i, L.Dense(3, name="after")(z))

    return build


def rows(shape, n=16):
    r = np.random.default_rng(len(shape))
    return r.standard_normal((n, *shape)), r.standard_normal((n, 3))


def check(build, data, mesh, layouts, **kwargs):
    data_degree, model_degree = MESHES[mesh]
    devices = [f"CPU:{i}" for i in range(4)]
    strategy = tfpar.MeshStrategy(
        tfpar.Mesh(data=data_degree, model=model_degree, devices=devices), layouts
    )
    defaults = dict(loss="mse", batch_size=8, tolerance=1e-9)
    return assert_same_training(build, data, strategy, **{**defaults, **kwargs})


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, float64):
    shape, make, layouts = LAYERS[name]
    adam = lambda: keras.optimizers.Adam(0.01)
    # TensorFlow has no AvgPool3D in float64 for CPUs.
    tolerance = 1e-6 if name == "AveragePooling3D" else 1e-9
    check(around(shape, make), rows(shape), "2x2", layouts, optimizer=adam, tolerance=tolerance)


O = keras.optimizers
OPTIMIZERS = {
    "SGD": lambda: O.SGD(0.1),
    "SGD momentum": lambda: O.SGD(0.1, momentum=0.9),
    "SGD nesterov": lambda: O.SGD(0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda: O.RMSprop(0.01, momentum=0.5),
    "RMSprop centered": lambda: O.RMSprop(0.01, centered=True),
    "Adam": lambda: O.Adam(0.01),
    "Adam amsgrad": lambda: O.Adam(0.01, amsgrad=True),
    "AdamW": lambda: O.AdamW(0.01, weight_decay=0.1),
    "Adamax": lambda: O.Adamax(0.01),
    "Nadam": lambda: O.Nadam(0.01),
    "Adagrad": lambda: O.Adagrad(0.1),
    "Adadelta": lambda: O.Adadelta(1.0),
    "Adafactor": lambda: O.Adafactor(0.01),
    "Ftrl": lambda: O.Ftrl(0.1),
    "Lion": lambda: O.Lion(0.001),
    "Lamb": lambda: O.Lamb(0.01),
    "Muon": lambda: O.Muon(0.01),
    "clipnorm": lambda: O.Adam(0.01, clipnorm=0.1),
    "clipvalue": lambda: O.Adam(0.01, clipvalue=0.01),
    "global_clipnorm": lambda: O.Adam(0.01, global_clipnorm=0.1),
    "EMA": lambda: O.Adam(0.01, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2),
    "schedule": lambda: O.Adam(O.schedules.CosineDecay(0.02, 4)),
    "accumulation": lambda: O.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
    "weight_decay": lambda: O.SGD(0.1, weight_decay=0.1),
    "loss scale": lambda: O.LossScaleOptimizer(O.Adam(0.01), initial_scale=4.0),
}


def transformer():
    """A block with what a language model has, tied together small."""
    i = L.Input((5,), dtype="int32")
    x = L.Embedding(12, 8, name="embedding")(i)
    y = L.LayerNormalization()(x)
    x = x + L.MultiHeadAttention(4, 2, name="attention")(y, y, use_causal_mask=True)
    y = L.Dense(12, "gelu", name="up")(L.LayerNormalization()(x))
    x = x + L.Dense(8, name="down")(y)
    return keras.Model(i, L.Dense(9, name="logits")(L.LayerNormalization()(x)))


TRANSFORMER_LAYOUTS = {
    r"embedding": (None, "model"),
    r"attention/(query|key|value)/kernel": (None, "model", None),
    r"attention/(query|key|value)/bias": ("model", None),
    r"attention/attention_output/kernel": ("model", None, None),
    r"up/kernel": (None, "model"),
    r"up/bias": ("model",),
    r"down/kernel": ("model", None),
}

# Optimizers whose table is split by its rows here, not by its width.
BY_ROWS = ("RMSprop centered", "Adagrad", "SGD", "AdamW", "loss scale")


def sentences(n=8):
    r = np.random.default_rng(0)
    return r.integers(0, 9, (n, 5)).astype("int32"), r.integers(0, 9, (n, 5)).astype("int32")


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def check_optimizer(name, mesh):
    table = ("model", None) if name in BY_ROWS else (None, "model")
    layouts = {**TRANSFORMER_LAYOUTS, "embedding": table}
    # Updates of fixed size (a sign, a normalised matrix) that rounding alone decides where the
    # true gradient is zero: the key's bias moves the outputs by nothing.
    kwargs = dict(loss=cross_entropy(), batch_size=4, through_outputs=("key/bias",))
    check(transformer, sentences(), mesh, layouts, optimizer=OPTIMIZERS[name], **kwargs)


# One of each kind of rule; the others are their neighbours and run with the slow sweeps.
TELLING = ("RMSprop", "AdamW", "Adafactor", "Muon", "global_clipnorm", "loss scale")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in TELLING else pytest.mark.slow) for n in OPTIMIZERS]
)
def test_optimizers_on_split_weights(name, float64):
    check_optimizer(name, "2x2")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=4", "model=4"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_on_other_meshes(name, mesh, float64):
    check_optimizer(name, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("k, name", enumerate(LAYERS))
def test_layers_with_other_optimizers_and_uneven_batches(k, name, float64):
    shape, make, layouts = LAYERS[name]
    tolerance = 1e-6 if name == "AveragePooling3D" else 1e-9
    optimizer = ("SGD momentum", "RMSprop", "Adafactor", "global_clipnorm")[k % 4]
    kwargs = dict(optimizer=OPTIMIZERS[optimizer], tolerance=tolerance)
    kwargs["through_outputs"] = ("key/bias",)
    # Over data=4 a width of 6 is refused for TimeDistributed, see below.
    mesh = "2x2" if k % 2 == 0 or name == "TimeDistributed" else "data=4"
    check(around(shape, make), rows(shape, 11), mesh, layouts, **kwargs)


def test_what_dtensor_cannot_split_is_refused_with_the_way_out():
    shape, make, layouts = LAYERS["TimeDistributed"]
    with pytest.raises(tfpar.UnsupportedStep, match="cannot split this step.*choose dims that"):
        check(around(shape, make), rows(shape), "data=4", layouts, optimizer="adam")


M = keras.metrics
METRICS = {
    "regression": (
        3,
        lambda: [
            M.MeanAbsoluteError(),
            M.RootMeanSquaredError(),
            M.R2Score(),
            M.CosineSimilarity(),
            M.MeanAbsolutePercentageError(),
            M.LogCoshError(),
            M.PearsonCorrelation(),
        ],
    ),
    "binary": (
        2,
        lambda: [
            M.BinaryAccuracy(),
            M.AUC(name="auc"),
            M.AUC(curve="PR", multi_label=True, num_labels=3, name="pr"),
            M.Precision(name="precision"),
            M.Recall(name="recall"),
            M.F1Score(average="macro", threshold=0.5),
            M.FBetaScore(beta=2.0),
            M.TruePositives(name="tp"),
            M.SensitivityAtSpecificity(0.5, name="sensitivity"),
            M.BinaryIoU(name="iou"),
        ],
    ),
    "classes": (
        1,
        lambda: [
            M.SparseCategoricalAccuracy(),
            M.SparseTopKCategoricalAccuracy(2),
            M.SparseCategoricalCrossentropy(from_logits=True),
            M.MeanIoU(3, sparse_y_pred=False, name="iou"),
        ],
    ),
}


@pytest.mark.parametrize("mesh", ["data=4", pytest.param("2x2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", METRICS)
def test_metrics(kind, mesh, request):
    """Counts and ratios over uneven batches: a mean of batches' metrics is another number."""
    values, metrics = METRICS[kind]
    exact = kind != "classes"  # TensorFlow's top-k takes float32 only
    if exact:
        request.getfixturevalue("float64")
    r = np.random.default_rng(1)
    x, y = rows(FLAT, 19)
    y = {3: y, 2: r.integers(0, 2, (19, 3)).astype(float), 1: r.integers(0, 3, (19,))}[values]
    activation = "sigmoid" if kind == "binary" else None

    def build():
        i = L.Input(FLAT)
        z = L.Dense(8, "tanh", name="up")(i)
        return keras.Model(i, L.Dense(3, activation=activation)(z))

    loss = cross_entropy() if kind == "classes" else "mse"
    kwargs = dict(loss=loss, metrics=metrics, tolerance=1e-9 if exact else 2e-5)
    for use_fit in (False, True):
        check(build, (x, y), mesh, {"up/kernel": LAST}, use_fit=use_fit, **kwargs)
