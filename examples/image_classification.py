"""Train a small convolutional network on a data x model mesh.

The images are scikit-learn's 1,797 handwritten digits of 8 x 8 pixels (`pip install
tfpar[examples]`). The script is the one that a Keras user would write for one device, callbacks
and all; two lines under `main` put it on a mesh.

    python examples/image_classification.py                      # 4-way data x 2-way model parallel
    python examples/image_classification.py --data=8 --model=1   # data parallel only

The trained model is saved and loaded again on one device, where it must classify every test image
as it does on the mesh. The devices are virtual and share the cores of this machine, so expect no
speed-up from them.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keeps TensorFlow's C++ log to itself

import keras
import numpy as np
from absl import app, flags

import tfpar

flags.DEFINE_integer("data", 4, "Devices over which each batch is split.", lower_bound=1)
flags.DEFINE_integer("model", 2, "Devices over which the dense layer is split.", lower_bound=1)
flags.DEFINE_integer("epochs", 15, "Epochs to train for, at most.", lower_bound=1)
flags.DEFINE_string("logdir", "logs/image_classification", "Folder for the saved models.")
flags.DEFINE_bool("quick", False, "Three epochs only: shows that everything runs.")
FLAGS = flags.FLAGS

BATCH = 64
HIDDEN = 128

# The convolutions are small and stay replicated; the hidden dense layer is split by units, and the
# layer after it by the same units as inputs.
LAYOUTS = {
    "hidden/kernel": (None, "model"),
    "hidden/bias": ("model",),
    "digit/kernel": ("model", None),
}


def digits():
    """Training and test sets, each (images in [0, 1] of shape (n, 8, 8, 1), labels)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("This example needs scikit-learn: pip install tfpar[examples]")
    data = load_digits()
    images = (data.images[..., np.newaxis] / 16).astype("float32")
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1437], order[1437:]
    return (images[train], data.target[train]), (images[test], data.target[test])


def network():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(HIDDEN, activation="relu", name="hidden"),
            layers.Dropout(0.3),
            layers.Dense(10, activation="softmax", name="digit"),
        ],
        name="digits",
    )


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"Only flags are taken, got {argv[1:]}.")
    if HIDDEN % FLAGS.model:
        raise app.UsageError(f"--model must divide the {HIDDEN} units, got {FLAGS.model}.")
    (images, labels), test = digits()
    epochs = 3 if FLAGS.quick else FLAGS.epochs

    # On a machine with GPUs leave this line out: the mesh then takes the GPUs.
    tfpar.virtual_devices(FLAGS.data * FLAGS.model)
    mesh = tfpar.Mesh(data=FLAGS.data, model=FLAGS.model)
    print(mesh)

    keras.utils.set_random_seed(0)
    layouts = tfpar.LayoutMap(LAYOUTS)
    with tfpar.MeshStrategy(mesh, layouts=layouts).scope():
        model = network()
        model.compile(
            optimizer=keras.optimizers.Adam(2e-3),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )

    best = os.path.join(FLAGS.logdir, "best.keras")
    model.fit(
        images,
        labels,
        batch_size=BATCH,
        epochs=epochs,
        validation_split=0.1,
        callbacks=[
            keras.callbacks.ModelCheckpoint(best, save_best_only=True),
            keras.callbacks.EarlyStopping(patience=4, restore_best_weights=True),
        ],
        verbose=1 if sys.stdout.isatty() else 2,
    )

    path = os.path.join(FLAGS.logdir, "digits.keras")
    model.save(path)
    single = keras.models.load_model(path)
    on_mesh = model.evaluate(*test, verbose=0, return_dict=True)
    on_one = single.evaluate(*test, verbose=0, return_dict=True)
    print(f"\n{'test':>12}{'the mesh':>14}{'one device':>14}")
    for name in ("loss", "accuracy"):
        print(f"{name:>12}{on_mesh[name]:>14.4f}{on_one[name]:>14.4f}")

    same = np.array_equal(
        model.predict(test[0], verbose=0).argmax(-1), single.predict(test[0], verbose=0).argmax(-1)
    )
    if not same:
        sys.exit("The mesh and one device classify some test images differently.")
    print(f"\nBoth classify all {len(test[0])} test images alike. The model is in {path}")


if __name__ == "__main__":
    app.run(main)
