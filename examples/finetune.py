"""Fine-tune a KerasHub transformer from a plain `.keras` file on a mesh, and save a plain file.

    python examples/finetune.py                            # data=2 x model=4, ZeRO-1
    python examples/finetune.py --data=4 --model=2 --zero=3
    python examples/finetune.py --source=my_gpt2.keras     # a file of your own, see below

Nothing in the model knows of the mesh: `tfpar.LayoutMap.auto` reads its structure and says which
weights are split, and why (needs KerasHub: `pip install tfpar[hub]`). The run has four acts:

1. a small GPT-2 learns English (the reference text that ships with every CPython) with plain Keras
   on one device, and is saved; with --source your file takes its place: a causal model over
   characters with KerasHub's inputs `token_ids` and `padding_mask`, that gives logits;
2. the file is read, its layouts are chosen and explained;
3. on the mesh the model learns Python, from the source of the standard library;
4. it is saved, and a process without tfpar loads the file and must predict the same.

The devices are virtual and share the cores of this machine, so expect no speed-up from them.
"""

import os
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keeps TensorFlow's C++ log to itself

import argparse as some_source
import inspect
import string
from pydoc_data.topics import topics

import keras
import numpy as np
from absl import app, flags

import tfpar

try:
    import keras_hub
except ImportError:
    sys.exit("This example needs KerasHub: pip install tfpar[hub]")

flags.DEFINE_integer("data", 2, "Devices over which each batch is split.", lower_bound=1)
flags.DEFINE_integer("model", 4, "Devices over which weights are split.", lower_bound=1)
flags.DEFINE_integer("zero", 1, "ZeRO stage.", lower_bound=0, upper_bound=3)
flags.DEFINE_integer("steps", 60, "Batches of each of the two trainings.", lower_bound=1)
flags.DEFINE_string("source", None, "A .keras file to fine-tune, in place of one made here.")
flags.DEFINE_string("logdir", "logs/finetune", "Folder for the files.")
flags.DEFINE_bool("quick", False, "A tiny model for a few steps: shows that everything runs.")
FLAGS = flags.FLAGS

SEED = 0
BATCH = 32
CHARACTERS = {c: k for k, c in enumerate(string.printable, start=1)}  # 0 stands for all others
VOCABULARY = len(CHARACTERS) + 1  # 101: no mesh divides it, so it is padded there

# Loads a file in a process that knows nothing of tfpar, and predicts.
ELSEWHERE = """
import sys
import keras, keras_hub, numpy as np
model = keras.models.load_model(sys.argv[1])
tokens = np.load(sys.argv[2])
inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
np.save(sys.argv[3], model.predict(inputs, verbose=0))
assert "tfpar" not in sys.modules
"""


def small_gpt2(length, width):
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        num_heads=4,
        hidden_dim=width,
        intermediate_dim=4 * width,
        max_sequence_length=length,
        dropout=0.0,
    )
    return keras.Model(backbone.input, backbone.token_embedding(backbone.output, reverse=True))


def compile_model(model, rate):
    model.compile(
        keras.optimizers.AdamW(rate, global_clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def windows(text, length, count):
    """(inputs, the same shifted by one) of random windows of a text."""
    tokens = np.array([CHARACTERS.get(c, 0) for c in text], "int32")
    starts = np.random.default_rng(SEED).integers(len(tokens) - length, size=count)
    cut = np.stack([tokens[start : start + length + 1] for start in starts])
    inputs = {"token_ids": cut[:, :-1], "padding_mask": np.ones_like(cut[:, :-1])}
    return inputs, cut[:, 1:]


def title(words):
    print(f"\n== {words}\n", flush=True)


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"Only flags are taken, got {argv[1:]}.")
    length, width, steps = (16, 16, 5) if FLAGS.quick else (64, 64, FLAGS.steps)
    verbose = 1 if sys.stdout.isatty() else 2
    os.makedirs(FLAGS.logdir, exist_ok=True)
    base, tuned, tokens, predictions = (
        os.path.join(FLAGS.logdir, name)
        for name in ("base.keras", "tuned.keras", "tokens.npy", "predictions.npy")
    )
    tfpar.virtual_devices(FLAGS.data * FLAGS.model)  # with GPUs leave this line out
    mesh = tfpar.Mesh(data=FLAGS.data, model=FLAGS.model)

    if FLAGS.source:
        base = FLAGS.source
    else:
        title("Plain Keras on one device learns English")
        keras.utils.set_random_seed(SEED)
        model = small_gpt2(length, width)
        compile_model(model, 3e-3)
        english = windows("\n".join(topics.values()), length, BATCH * steps)
        model.fit(*english, batch_size=BATCH, verbose=verbose)
        model.save(base)

    title(f"Which weights of {base} are split, and why")
    plain = keras.models.load_model(base, compile=False)
    length = min(length, plain.get_layer("position_embedding").sequence_length)
    layouts = tfpar.LayoutMap.auto(plain, mesh)
    print(layouts.explanation, "\n")
    strategy = tfpar.MeshStrategy(mesh, layouts, zero=FLAGS.zero)
    with strategy.scope():
        model = keras.models.load_model(base, compile=False)
        compile_model(model, 1e-3)
    print(strategy.explain(model))

    title("The mesh learns Python")
    source = inspect.getsource(some_source)
    cut = int(0.9 * len(source))
    training = windows(source[:cut], length, BATCH * steps)
    held_out = windows(source[cut:], length, BATCH)
    before = model.evaluate(*held_out, batch_size=BATCH, verbose=0)[0]
    model.fit(*training, batch_size=BATCH, verbose=verbose)
    after = model.evaluate(*held_out, batch_size=BATCH, verbose=0)[0]
    print(f"loss on held-out source before {before:.3f}, after {after:.3f} nats a character")

    title("A process without tfpar loads what the mesh has saved")
    model.save(tuned)
    np.save(tokens, held_out[0]["token_ids"])
    subprocess.run([sys.executable, "-c", ELSEWHERE, tuned, tokens, predictions], check=True)
    gap = np.abs(np.load(predictions) - model.predict(held_out[0], verbose=0)).max()
    print(f"largest difference of a logit: {gap:.1e} (at most 1e-03)")
    if not gap < 1e-3:
        sys.exit("The saved model predicts otherwise than the one on the mesh.")
    print(f"\nThe fine-tuned model is in {tuned}")


if __name__ == "__main__":
    app.run(main)
