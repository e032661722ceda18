"""What is trained: models from arithmetic-bound to nothing but host overhead.

Keras is imported inside the functions: the peer decides first which backend it runs on.
"""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its data, and how its weights are split over the axis `model`.

    Attributes:
      build: makes the model.
      batch: makes one batch (inputs, targets) from a `numpy.random.Generator`.
      loss: what `compile` takes, or a function that makes it.
      layouts: patterns of variable paths -> axes, one per dim.
      steps: the steps of a timed block: enough for about a second.
    """

    build: Callable
    batch: Callable
    loss: Callable
    layouts: dict
    steps: int


# Four blocks of width 256 with eight heads, on 32 sequences of 64 tokens.
VOCABULARY, SEQUENCE, WIDTH, HEADS, BLOCKS = 1000, 64, 256, 8, 4


def transformer():
    import keras

    layers = keras.layers
    tokens = keras.Input((SEQUENCE,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, name="embedding")(tokens)
    for i in range(BLOCKS):
        y = layers.LayerNormalization(name=f"attention_norm_{i}")(x)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"attention_{i}")
        x = layers.Add()([x, attention(y, y, use_causal_mask=True)])
        y = layers.LayerNormalization(name=f"mlp_norm_{i}")(x)
        y = layers.Dense(4 * WIDTH, activation="gelu", name=f"mlp_up_{i}")(y)
        x = layers.Add()([x, layers.Dense(WIDTH, name=f"mlp_down_{i}")(y)])
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(tokens, layers.Dense(VOCABULARY, name="logits")(x))


def transformer_loss():
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def transformer_batch(rng):
    tokens = rng.integers(VOCABULARY, size=(32, SEQUENCE + 1), dtype="int32")
    return tokens[:, :-1], tokens[:, 1:]


def gpt2():
    """KerasHub's GPT-2, as small as `transformer`, its table making the logits too."""
    import keras
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=BLOCKS,
        num_heads=HEADS,
        hidden_dim=WIDTH,
        intermediate_dim=4 * WIDTH,
        max_sequence_length=SEQUENCE,
        dropout=0.0,
    )
    tokens = keras.Input((SEQUENCE,), dtype="int32")
    hidden = backbone({"token_ids": tokens, "padding_mask": keras.ops.ones_like(tokens)})
    return keras.Model(tokens, backbone.token_embedding(hidden, reverse=True))


LARGE_VOCABULARY = 32000


def vocabulary():
    """Next to nothing but a table, and logits of 32,000 classes."""
    import keras

    layers = keras.layers
    tokens = keras.Input((SEQUENCE,), dtype="int32")
    x = layers.Embedding(LARGE_VOCABULARY, 64, name="embedding")(tokens)
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(tokens, layers.Dense(LARGE_VOCABULARY, name="logits")(x))


def vocabulary_batch(rng):
    tokens = rng.integers(LARGE_VOCABULARY, size=(16, SEQUENCE + 1), dtype="int32")
    return tokens[:, :-1], tokens[:, 1:]


def mlp(inputs, hidden, outputs):
    import keras

    return keras.Sequential(
        [
            keras.Input((inputs,)),
            keras.layers.Dense(hidden, activation="relu", name="up"),
            keras.layers.Dense(outputs, name="down"),
        ]
    )


def activations():
    """A quarter of a million values a row and layer, and next to no weights."""
    import keras

    layers = keras.layers
    x = row = keras.Input((512,))
    x = layers.Dense(512)(x)
    x = layers.RepeatVector(512)(x)
    for _ in range(12):
        x = layers.Activation("tanh")(layers.Rescaling(1.5)(x))
    return keras.Model(row, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def mlp_batch(rng, rows, inputs, outputs):
    return (
        rng.standard_normal((rows, inputs), dtype="float32"),
        rng.standard_normal((rows, outputs), dtype="float32"),
    )


MLP_LAYOUTS = {
    "up/kernel": (None, "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", None),
}

WORKLOADS = {
    "transformer": Workload(
        build=transformer,
        batch=transformer_batch,
        loss=transformer_loss,
        layouts={
            r"attention_\d+/(query|key|value)/kernel": (None, "model", None),
            r"attention_\d+/(query|key|value)/bias": ("model", None),
            r"attention_\d+/attention_output/kernel": ("model", None, None),
            r"mlp_up_\d+/kernel": (None, "model"),
            r"mlp_up_\d+/bias": ("model",),
            r"mlp_down_\d+/kernel": ("model", None),
            "embedding/embeddings": (None, "model"),
            "logits/kernel": (None, "model"),
            "logits/bias": ("model",),
        },
        steps=4,
    ),
    # What LayoutMap.auto chooses.
    "gpt2": Workload(
        build=gpt2,
        batch=transformer_batch,
        loss=transformer_loss,
        layouts={
            r"self_attention/(query|key|value)/kernel": (None, "model", None),
            r"self_attention/(query|key|value)/bias": ("model", None),
            r"self_attention/attention_output/kernel": ("model", None, None),
            r"feedforward_intermediate_dense/kernel": (None, "model"),
            r"feedforward_intermediate_dense/bias": ("model",),
            r"feedforward_output_dense/kernel": ("model", None),
            r"token_embedding/embeddings": ("model", None),
        },
        steps=4,
    ),
    "vocabulary": Workload(
        build=vocabulary,
        batch=vocabulary_batch,
        loss=transformer_loss,
        layouts={
            "embedding/embeddings": ("model", None),
            "logits/kernel": (None, "model"),
            "logits/bias": ("model",),
        },
        steps=2,
    ),
    "mlp": Workload(
        build=lambda: mlp(512, 2048, 512),
        batch=lambda rng: mlp_batch(rng, 256, 512, 512),
        loss=lambda: "mse",
        layouts=MLP_LAYOUTS,
        steps=40,
    ),
    # For gradient accumulation: activations need more memory than weights.
    "activations": Workload(
        build=activations,
        batch=lambda rng: mlp_batch(rng, 64, 512, 1),
        loss=lambda: "mse",
        layouts={},
        steps=2,
    ),
    "tiny": Workload(
        build=lambda: mlp(8, 16, 1),
        batch=lambda rng: mlp_batch(rng, 32, 8, 1),
        loss=lambda: "mse",
        layouts=MLP_LAYOUTS,
        steps=200,
    ),
}
