"""Backbones that nobody here wrote, split without being told how, train as on one device."""

import keras
import numpy as np
import pytest
from fit_test import assert_close, mesh, scope, strategy_on

import tfpar
from tfpar.strategy.lowered import collectives

hub = pytest.importorskip("keras_hub", reason="pip install 'tfpar[hub]'")
M = hub.models

SMALL = dict(vocabulary_size=67, num_layers=2, num_heads=4, hidden_dim=16, intermediate_dim=32)
GROUPED = dict(vocabulary_size=67, num_layers=2, hidden_dim=32, intermediate_dim=48)

BACKBONES = {
    "gpt2": lambda: M.GPT2Backbone(**SMALL, max_sequence_length=16, dropout=0.0),
    "bert": lambda: M.BertBackbone(**SMALL, max_sequence_length=16, dropout=0.0),
    "llama": lambda: M.LlamaBackbone(**GROUPED, num_query_heads=8, num_key_value_heads=2),
    "gemma": lambda: M.GemmaBackbone(
        **{**GROUPED, "hidden_dim": 16}, num_query_heads=4, num_key_value_heads=1, head_dim=8
    ),
    "mistral": lambda: M.MistralBackbone(
        **GROUPED, num_query_heads=8, num_key_value_heads=4, sliding_window=6
    ),
    "vit": lambda: M.ViTBackbone(
        image_shape=(16, 16, 3), patch_size=4, num_layers=2, num_heads=4, hidden_dim=16, mlp_dim=32
    ),
}
# These compute rotations and norms in float32, whatever their dtype.
TOLERANCE = {"llama": 1e-5, "gemma": 1e-5, "mistral": 1e-5}


def build(name):
    keras.utils.set_random_seed(1)
    backbone = BACKBONES[name]()
    if name == "vit":
        outputs = keras.layers.Dense(5, name="classes")(backbone.output[:, 0])
    else:
        hidden = backbone.output["sequence_output"] if name == "bert" else backbone.output
        outputs = backbone.token_embedding(hidden, reverse=True)
    return keras.Model(backbone.input, outputs)


def batches(name, rows=8):
    r = np.random.default_rng(0)
    if name == "vit":
        return r.standard_normal((rows, 16, 16, 3)), r.integers(0, 5, (rows,))
    x = {
        "token_ids": r.integers(0, 67, (rows, 12)),
        "padding_mask": (np.arange(12) < r.integers(6, 13, (rows, 1))).astype(int),
    }
    if name == "bert":
        x["segment_ids"] = r.integers(0, 2, (rows, 12))
    return x, r.integers(0, 67, (rows, 12))


def compiled(strategy, name):
    with scope(strategy):
        model = build(name)
        model.compile(
            keras.optimizers.AdamW(0.01, global_clipnorm=0.5),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return model


def train(strategy, name):
    model = compiled(strategy, name)
    fit = dict(batch_size=4, epochs=2, shuffle=False, verbose=0)
    return model.fit(*batches(name), **fit).history, model.get_weights()


def auto(name, data, model, **kwargs):
    return tfpar.LayoutMap.auto(lambda: build(name), mesh(data, model), **kwargs)


@pytest.mark.parametrize("name", BACKBONES)
def test_trains_as_on_one_device(name, float64):
    """Losses, accuracies and weights under AdamW with global clipping, on 1x4 and 2x2."""
    want = train(None, name)
    for data, model in [(1, 4), (2, 2)]:
        layouts = auto(name, data, model)
        assert len(layouts) >= 5
        found = train(strategy_on(data, model, layouts), name)
        assert_close(found, want, TOLERANCE.get(name, 1e-9))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("name", BACKBONES)
def test_with_zero(name, zero, float64):
    found = train(strategy_on(2, 2, auto(name, 2, 2), zero=zero), name)
    assert_close(found, train(None, name), TOLERANCE.get(name, 1e-9))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, ends",
    [
        ("gpt2", ("embeddings_add", "^layer_norm")),
        ("llama", ("token_embedding", "sequence_output_layernorm")),
    ],
)
def test_with_sequence_parallelism(name, ends, float64):
    found = train(strategy_on(2, 2, auto(name, 2, 2, sequence=ends)), name)
    assert_close(found, train(None, name), TOLERANCE.get(name, 1e-9))


def test_gpt2_sends_what_megatron_sends():
    """Per block two all-reduces each way; one for the lookup, one for the logits' input."""
    model = compiled(strategy_on(1, 4, auto("gpt2", 1, 4)), "gpt2")
    with collectives() as found:
        model.train_on_batch(*batches("gpt2"))
    activations = [c for c in found if c.bytes == 4 * 8 * 12 * 16]
    assert [c.kind for c in activations] == ["all_reduce"] * (2 * 4 + 2)
    assert all(c.bytes <= 8 * 8 * 12 for c in found if c not in activations)
