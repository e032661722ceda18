"""A peer's process: one `fit` that trains a block of steps each time the parent asks for one."""

import collections
import os
import resource
import sys
import time

from bench.peers import ALL
from bench.workloads import WORKLOADS

SEED = 0


def serve(connection, peer_name, workload_name, steps, batch_hooks, log_path):
    """Answers the parent over `connection` until it says "stop"; see `bench.__main__.Process`.

    The answers, each a dict: {} when the model is compiled, {"first_step": seconds}, then
    {"block": seconds per whole batch} for every "block" asked for, and at last the memory figures.
    """
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    peer, workload = ALL[peer_name], WORKLOADS[workload_name]
    peer.prepare()

    import keras
    import numpy as np
    import tensorflow as tf

    keras.utils.set_random_seed(SEED)
    with peer.scope(workload.layouts):
        model = peer.build(workload.build)
        optimizer = peer.optimizer(keras.optimizers.Adam(1e-3))
        model.compile(optimizer=optimizer, loss=workload.loss())

        rng = np.random.default_rng(SEED)
        batches = [workload.batch(rng) for _ in range(4)]
        inputs, targets = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        dataset = tf.data.Dataset.from_tensor_slices((inputs, targets))
        rows = len(batches[0][0]) // peer.parts
        dataset = dataset.batch(rows, drop_remainder=True).cache().repeat()
        dataset = dataset.prefetch(2)

        connection.send({})
        if connection.recv() == "block":
            start = time.perf_counter()
            model.fit(dataset, steps_per_epoch=1, verbose=0)
            connection.send({"first_step": time.perf_counter() - start})
            blocks = make_callback(keras.callbacks.Callback, connection, steps, batch_hooks)
            model.fit(
                dataset,
                steps_per_epoch=steps * peer.parts,
                epochs=sys.maxsize,
                verbose=0,
                callbacks=[blocks],
            )

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    variables = {id(v): v for v in [*model.variables, *model.optimizer.variables]}.values()
    held: collections.Counter = collections.Counter()  # of each stage of a pipeline
    for v in variables:
        itemsize = np.dtype(keras.backend.standardize_dtype(v.dtype)).itemsize
        held[getattr(v.value, "stage", 0)] += peer.local_size(v) * itemsize
    connection.send({"peak_bytes": peak, "variable_bytes": max(held.values())})


def make_callback(base, connection, steps, batch_hooks):
    class Blocks(base):
        """Makes every epoch a block: waits for the parent before it, reports its time after it.

        Keras reads the epoch's loss before `on_epoch_end`, so the block's steps are over by then.
        """

        def on_epoch_begin(self, epoch, logs=None):
            self.stopped = connection.recv() == "stop"
            self.model.stop_training = self.stopped
            self.start = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            if not self.stopped:
                connection.send({"block": (time.perf_counter() - self.start) / steps})

    if batch_hooks:
        # As a progress bar does: Keras then reads the loss after every batch.
        Blocks.on_train_batch_end = lambda self, batch, logs=None: None
    return Blocks()
