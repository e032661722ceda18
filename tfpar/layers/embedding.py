"""The table of a vocabulary, split by its rows."""

import keras


def SplitEmbedding(vocabulary_size, width, tied=False, **kwargs):
    """A `keras.layers.Embedding` whose rows are split over the axis `model`.

    Each device looks up the ids whose rows it holds; one all-reduce of the rows that were looked up
    adds them (Shoeybi et al. 2019, Megatron-LM). A vocabulary that `model` does not divide is
    padded on the mesh; `shape`, files and outputs have no padding.

    Args:
      vocabulary_size: number of rows.
      width: features of a row.
      tied: whether it also makes the logits, as a `keras.layers.ReversibleEmbedding`:
        `layer(x, reverse=True)` multiplies by the same table. The logits stay split in
        `keras.losses.SparseCategoricalCrossentropy(from_logits=True)` and in accuracies.
      **kwargs: as the Keras layer.

    Returns:
      The Keras layer. A copy made from its config is plain: split it by a `LayoutMap`.
    """
    base = keras.layers.ReversibleEmbedding if tied else keras.layers.Embedding
    layer = base(vocabulary_size, width, **kwargs)
    layer.axes_of_weights = {
        "embeddings": ("model", None),
        "reverse_embeddings": (None, "model"),
    }
    return layer
