"""Train a small language model on a pipe x data x model mesh.

The text is the reference documentation that ships with every CPython; the model is a causal
transformer of stock Keras layers that reads it character by character. Its definition does not
know that it will be split: `LAYOUTS` and `tfpar.Pipeline` say so from outside, in six lines.

    python examples/language_model.py                               # pipe=2 x data=2 x model=2
    python examples/language_model.py --pipe=4 --data=1             # another mesh, the same numbers
    python examples/language_model.py --pipe=1 --data=4 --model=2   # no pipeline
    tensorboard --logdir logs/language_model

The run has four acts:

1. the mesh, the model, its stages, and what every device holds of it;
2. the first steps under the mesh beside the same steps on one device, compared;
3. training through `model.fit`, with the validation loss beside the unigram entropy: the loss of
   a model that knows how common each character is, and nothing else;
4. the trained model, saved, loaded on one device, and asked for some text.

The eight devices are virtual and share the cores of this machine, so expect no speed-up from them:
what runs here is the program that runs, unchanged, on eight GPUs.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keeps TensorFlow's C++ log to itself

from pydoc_data.topics import topics

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfpar

flags.DEFINE_integer("pipe", 2, "Stages that the layers are cut into.", lower_bound=1)
flags.DEFINE_integer("micro_batches", 4, "Slices of a batch in the pipeline.", lower_bound=1)
flags.DEFINE_string("schedule", "1f1b", "Of the pipeline: 1f1b, gpipe or interleaved.")
flags.DEFINE_integer("data", 2, "Devices over which each batch is split.", lower_bound=1)
flags.DEFINE_integer("model", 2, "Devices over which heads and MLPs are split.", lower_bound=1)
flags.DEFINE_integer("epochs", 4, "Epochs to train for.", lower_bound=1)
flags.DEFINE_integer("steps", 30, "Batches in an epoch.", lower_bound=1)
flags.DEFINE_integer("compare", 10, "Steps compared with one device; 0 for none.", lower_bound=0)
flags.DEFINE_float("dropout", 0.0, "Dropout rate.", lower_bound=0.0, upper_bound=0.9)
flags.DEFINE_string("logdir", "logs/language_model", "Folder for TensorBoard and the saved model.")
flags.DEFINE_bool("quick", False, "A tiny model for a few steps: shows that everything runs.")
FLAGS = flags.FLAGS

SEED = 0
BATCH = 32
HELD_OUT = 0.1  # the share of the text, at its end, that is kept for validation

# How far the mesh may stray from one device in float32: sums are taken in another order, and Adam
# enlarges the last bits of small gradients.
LOSS_TOLERANCE = 1e-4
WEIGHT_TOLERANCE = 1e-3

# Attention is split by heads and the MLP by hidden units: one all-reduce each on the way forward.
# Whatever no rule matches is replicated.
LAYOUTS = {
    r"attention_\d+/(query|key|value)/kernel": (None, "model", None),  # width, heads, head size
    r"attention_\d+/attention_output/kernel": ("model", None, None),  # heads, head size, width
    r"mlp_up_\d+/kernel": (None, "model"),
    r"mlp_up_\d+/bias": ("model",),
    r"mlp_down_\d+/kernel": ("model", None),
}


# The model: plain Keras.


@keras.saving.register_keras_serializable("language_model")
class Positions(keras.layers.Layer):
    """Adds a learned vector for each position."""

    def build(self, shape):
        _, length, width = shape
        self.table = self.add_weight(
            name="table", shape=(length, width), initializer=keras.initializers.RandomNormal(0.02)
        )

    def call(self, x):
        return x + self.table


def block(x, index, heads, dropout):
    """One transformer block: attention, then an MLP, each on a normalised copy of the stream."""
    width = x.shape[-1]
    y = keras.layers.LayerNormalization(name=f"attention_norm_{index}")(x)
    y = keras.layers.MultiHeadAttention(
        heads, width // heads, use_bias=False, name=f"attention_{index}"
    )(y, y, use_causal_mask=True)
    x = x + keras.layers.Dropout(dropout)(y)
    y = keras.layers.LayerNormalization(name=f"mlp_norm_{index}")(x)
    y = keras.layers.Dense(4 * width, "gelu", name=f"mlp_up_{index}")(y)
    y = keras.layers.Dense(width, name=f"mlp_down_{index}")(y)
    return x + keras.layers.Dropout(dropout)(y)


def language_model(vocabulary, length, width, heads, blocks, dropout):
    tokens = keras.Input((length,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(vocabulary, width, name="embedding")(tokens)
    x = Positions(name="positions")(x)
    for index in range(blocks):
        x = block(x, index, heads, dropout)
    x = keras.layers.LayerNormalization(name="norm")(x)
    logits = keras.layers.Dense(vocabulary, name="logits")(x)
    return keras.Model(tokens, logits, name="language_model")


def compiled_model(config, steps, pipelined=False):
    """The model with its optimizer; called inside `strategy.scope()`, or outside for one device."""
    keras.utils.set_random_seed(SEED)
    model = language_model(**config)
    if pipelined:
        model = tfpar.Pipeline(model, FLAGS.micro_batches, FLAGS.schedule)
    rate = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        warmup_target=3e-3,
        warmup_steps=max(1, steps // 10),
        decay_steps=steps,
        alpha=0.05,
    )
    optimizer = keras.optimizers.AdamW(rate, weight_decay=0.01, global_clipnorm=1.0)
    if FLAGS.pipe > 1:
        # Micro-batches add up the gradients of a character that occurs twice, as the formula says;
        # Keras alone clips, and gives to Adam, each occurrence by itself. This makes it add them up.
        optimizer = tfpar.AccumulatingOptimizer(optimizer, steps=1)
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


# The data.


class Text:
    """The text as integers: `train` and `held_out`, and the characters that they stand for."""

    def __init__(self, text):
        self.characters = sorted(set(text))
        self.index = {character: i for i, character in enumerate(self.characters)}
        tokens = self.encode(text)
        cut = int(len(tokens) * (1 - HELD_OUT))
        self.train, self.held_out = tokens[:cut], tokens[cut:]

    def encode(self, text):
        return np.array([self.index[character] for character in text], "int32")

    def decode(self, tokens):
        return "".join(self.characters[token] for token in tokens)

    def unigram_entropy(self):
        """Nats a character of the held-out text costs under the frequencies of the rest."""
        counts = np.bincount(self.train, minlength=len(self.characters)) + 1
        return -np.log(counts / counts.sum())[self.held_out].mean()


def windows(tokens, length, starts):
    """A dataset of batches (inputs, the same shifted by one) of windows from `starts` on."""
    tokens = tf.constant(tokens)

    def cut(start):
        window = tokens[start : start + length + 1]
        window.set_shape([length + 1])
        return window[:-1], window[1:]

    return tf.data.Dataset.from_tensor_slices(starts).map(cut).batch(BATCH, drop_remainder=True)


def training_batches(tokens, length, steps):
    starts = np.random.default_rng(SEED).integers(len(tokens) - length, size=steps * BATCH)
    return windows(tokens, length, starts).prefetch(2)


def validation_batches(tokens, length, limit):
    starts = np.arange(0, len(tokens) - length, length)
    return windows(tokens, length, starts).take(limit).cache()


# The comparison with one device.


class StepLosses(keras.callbacks.Callback):
    """Records each batch's own loss; Keras' logs hold the mean since the start of the epoch."""

    def on_train_begin(self, logs=None):
        self.losses = []

    def on_train_batch_begin(self, batch, logs=None):
        self.model.reset_metrics()

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


def compare(model, single, batches):
    """Trains both on `batches` from the same weights and reports how far they part."""
    single.set_weights(model.get_weights())
    losses = []
    for name, each in (("one device", single), ("the mesh", model)):
        print(f"training on {name} ...", flush=True)
        record = StepLosses()
        each.fit(batches, verbose=0, shuffle=False, callbacks=[record])
        losses.append(record.losses)

    print(f"{'step':>6}{'one device':>14}{'the mesh':>14}{'difference':>14}")
    for step, (one, mesh) in enumerate(zip(*losses, strict=True), start=1):
        if step == 1 or step % 5 == 0:
            print(f"{step:>6}{one:>14.6f}{mesh:>14.6f}{abs(one - mesh):>14.1e}")

    loss_gap = np.abs(np.subtract(*losses)).max()
    weight_gap = max(
        np.abs(a - b).max() for a, b in zip(single.get_weights(), model.get_weights(), strict=True)
    )
    print(f"largest difference of a loss:   {loss_gap:.1e} (at most {LOSS_TOLERANCE:.0e})")
    print(f"largest difference of a weight: {weight_gap:.1e} (at most {WEIGHT_TOLERANCE:.0e})")
    return loss_gap <= LOSS_TOLERANCE and weight_gap <= WEIGHT_TOLERANCE


# The text that it writes.


def generate(model, text, prompt, count, temperature=0.7):
    """Continues `prompt` by `count` characters, drawn one by one from what the model predicts."""
    draw = np.random.default_rng(SEED)
    length = model.input_shape[1]
    tokens = list(text.encode(prompt))
    for _ in range(count):
        context = tokens[-length:]
        padded = np.zeros((1, length), "int32")
        padded[0, : len(context)] = context  # causal: what follows the context is not looked at
        logits = model.predict_on_batch(padded)[0, len(context) - 1] / temperature
        odds = np.exp(logits - logits.max())
        tokens.append(draw.choice(len(odds), p=odds / odds.sum()))
    return text.decode(tokens)


def title(words):
    print(f"\n== {words}\n", flush=True)


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"Only flags are taken, got {argv[1:]}.")
    text = Text("\n".join(topics.values()))
    config = dict(vocabulary=len(text.characters), length=128, width=128, heads=4, blocks=4)
    epochs, steps, compared, sample = FLAGS.epochs, FLAGS.steps, FLAGS.compare, 400
    if FLAGS.quick:
        config.update(length=32, width=32, blocks=1)
        epochs, steps, compared, sample = 2, 10, min(compared, 5), 20
    if config["heads"] % FLAGS.model:
        raise app.UsageError(f"--model must divide the {config['heads']} heads, got {FLAGS.model}.")
    if BATCH % FLAGS.data:
        raise app.UsageError(f"--data must divide the batch of {BATCH}, got {FLAGS.data}.")

    title("The mesh")
    # On a machine with GPUs leave this line out: the mesh then takes the GPUs.
    tfpar.virtual_devices(FLAGS.pipe * FLAGS.data * FLAGS.model)
    mesh = tfpar.Mesh(pipe=FLAGS.pipe, data=FLAGS.data, model=FLAGS.model)
    print(mesh)
    print("\nThe devices are virtual and share the cores of this machine: no speed-up is expected.")

    layouts = tfpar.LayoutMap(LAYOUTS)
    strategy = tfpar.MeshStrategy(mesh, layouts=layouts)
    config["dropout"] = FLAGS.dropout
    total = compared + epochs * steps
    with strategy.scope():
        model = compiled_model(config, total, pipelined=FLAGS.pipe > 1)
    if FLAGS.pipe > 1:
        print(f"\n{model.pipeline.explain()}\n")
        os.makedirs(FLAGS.logdir, exist_ok=True)
        picture = os.path.join(FLAGS.logdir, "timeline.svg")
        model.pipeline.save_timeline(picture)
        print(f"The timeline as a picture: {picture}\n")
    print(strategy.explain(model))

    batches = training_batches(text.train, config["length"], total)
    if compared and FLAGS.dropout:
        print("\nNo comparison with one device: dropout draws other masks on another mesh.")
    elif compared:
        title(f"The first {compared} steps, beside one device")
        single = compiled_model(config, total)
        if not compare(model, single, batches.take(compared)):
            sys.exit("The mesh and one device part by more than is allowed.")

    title("Training on the mesh")
    entropy = text.unigram_entropy()
    history = model.fit(
        batches.skip(compared),
        epochs=epochs,
        steps_per_epoch=steps,
        validation_data=validation_batches(text.held_out, config["length"], limit=10),
        callbacks=[keras.callbacks.TensorBoard(FLAGS.logdir, write_graph=False, update_freq=10)],
        shuffle=False,  # the windows are drawn at random already
        verbose=1 if sys.stdout.isatty() else 2,
    )
    loss = history.history["val_loss"][-1]
    print(f"\nvalidation loss  {loss:.3f} nats a character")
    print(f"unigram entropy  {entropy:.3f} nats a character")

    title("Saved on the mesh, loaded on one device")
    path = os.path.join(FLAGS.logdir, "language_model.keras")
    model.save(path)
    print(generate(keras.models.load_model(path), text, "The ", sample))
    print(f"\nThe model is in {path}; for the curves: tensorboard --logdir {FLAGS.logdir}")


if __name__ == "__main__":
    app.run(main)
