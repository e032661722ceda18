"""What replicas on the devices of one machine tell each other of their gradients.

A value of all replicas is a list with one tensor per replica, on its device.
"""

import tensorflow as tf

from tfpar import _tf
from tfpar.strategy import compression

FIRST_KEY = 1 << 20  # beyond those of DTensor and of TensorFlow's own strategies
KEYS_OF_A_GROUP = 1 << 16


class _Keys(_tf.CollectiveKeys):
    """Group and instance keys that no one else in the process uses."""

    def _get_new_group_key(self, devices):
        key = super()._get_new_group_key(devices)
        first = FIRST_KEY + (key - FIRST_KEY) * KEYS_OF_A_GROUP
        self._instance_key_table[key] = dict.fromkeys(devices, first)
        return key


KEYS = _Keys(group_key_start=FIRST_KEY)


class Wire:
    """The collectives among the devices of a strategy (see `compression`).

    Args:
      devices: list of device names, one per replica.
      options: `tf.distribute.experimental.CommunicationOptions`: ring or NCCL.

    Attributes:
      traffic: list of (kind, dtype name, bytes that one replica hands in), of the collectives of the
        last `exchange` that was traced or run.
    """

    def __init__(self, devices, options):
        self.devices = devices
        self.replicas = len(devices)
        self.traffic: list = []
        group = KEYS.get_group_key(devices)
        self._launchers = [
            _tf.CollectiveReplicaLauncher(group, self.replicas, KEYS, device, options)
            for device in devices
        ]

    def map(self, fn, *lists):
        """[fn(a, b, ...) for each replica], each on its device."""
        return self.map_with_id(lambda replica, *args: fn(*args), *lists)

    def map_with_id(self, fn, *lists):
        """[fn(number of the replica, a, b, ...) for each replica], each on its device."""
        made = []
        for replica, args in enumerate(zip(*lists, strict=True)):
            with tf.device(self.devices[replica]):
                made.append(fn(replica, *args))
        return made

    def all_reduce(self, tensors, op="sum"):
        """The sum, or with op="max" the maximum, of all tensors, on every replica."""
        self._count(compression.ALL_REDUCE, tensors[0])
        if self.replicas == 1:
            return list(tensors)
        # Eager collectives of one thread would wait for each other for ever.
        if op == "sum" and not tf.executing_eagerly():
            return [
                launcher.all_reduce(tensor) for launcher, tensor in zip(self._launchers, tensors)
            ]
        with tf.device(self.devices[0]):
            whole = tf.add_n(tensors) if op == "sum" else tf.reduce_max(tf.stack(tensors), 0)
        return self.map(lambda _: tf.identity(whole), tensors)

    def all_gather(self, tensors):
        """All tensors, [replicas, *shape], on every replica."""
        self._count(compression.ALL_GATHER, tensors[0])
        return self.map(lambda _: tf.stack(tensors), tensors)

    def all_to_all(self, tensors):
        """Of tensors [replicas, ...]: row i of replica j becomes row j of replica i."""
        self._count(compression.ALL_TO_ALL, tensors[0])
        rows = self.map(tf.unstack, tensors)
        return self.map_with_id(
            lambda replica, _: tf.stack([row[replica] for row in rows]), tensors
        )

    def _count(self, kind, tensor):
        size = tensor.shape.num_elements()
        self.traffic.append(
            (kind, tensor.dtype.name, None if size is None else size * tensor.dtype.size)
        )


def fill_buckets(sizes, bucket_bytes):
    """Puts gradients into buckets, in order: a bucket closes when it holds `bucket_bytes` or more.

    Args:
      sizes: list of (key, bytes); gradients of one key alone share a bucket.
      bucket_bytes: int.

    Returns:
      A list of lists of positions in `sizes`, in the order in which the buckets are full.
    """
    open_: dict = {}
    held: dict = {}
    full = []
    for place, (key, size) in enumerate(sizes):
        open_.setdefault(key, []).append(place)
        held[key] = held.get(key, 0) + size
        if held[key] >= bucket_bytes:
            full.append(open_.pop(key))
            held[key] = 0
    return full + [bucket for bucket in open_.values() if bucket]


def exchange(gradients, wire, bucket_bytes):
    """The sums of gradients over all replicas, on every replica.

    Dense gradients travel fused, in the order in which the backward pass makes them, each dtype in
    buckets of its own; the rows of sparse ones are put together in the order of the replicas, which
    is that of the batch.

    Args:
      gradients: list over weights of lists over replicas of tensors, `tf.IndexedSlices` or None.
      wire: a `Wire`.
      bucket_bytes: int.

    Returns:
      The same nest.
    """
    wire.traffic.clear()
    sums = list(gradients)
    dense = []
    for place, parts in enumerate(gradients):
        if isinstance(parts[0], tf.IndexedSlices):
            sums[place] = _gathered_rows(parts, wire)
        elif parts[0] is not None:
            dense.append(place)
    dense = _in_order_of_making(dense, gradients)
    sizes = []
    for place in dense:
        tensor = gradients[place][0]
        sizes.append((tensor.dtype, tensor.shape.num_elements() * tensor.dtype.size))
    for k, bucket in enumerate(fill_buckets(sizes, bucket_bytes)):
        places = [dense[i] for i in bucket]
        with tf.name_scope(f"bucket_{k}"):
            for place, parts in zip(places, _all_reduced([gradients[p] for p in places], wire)):
                sums[place] = parts
    return sums


def _all_reduced(gradients, wire):
    """Sums of gradients of one dtype: one collective."""
    first = [parts[0] for parts in gradients]
    real = {tf.complex64: tf.float32, tf.complex128: tf.float64}.get(first[0].dtype)

    def pack(*tensors):
        flat = compression.flatten(tensors)
        return (
            flat if real is None else compression.flatten([tf.math.real(flat), tf.math.imag(flat)])
        )

    def unpack(flat):
        if real is not None:
            flat = tf.complex(*tf.split(flat, 2))
        return compression.unflatten(flat, [t.shape for t in first])

    flat = wire.map(pack, *gradients)
    return zip(*wire.map(unpack, wire.all_reduce(flat)))


def _gathered_rows(parts, wire):
    def gather(part):
        values = tf.concat([p.values for p in parts], 0)
        indices = tf.concat([p.indices for p in parts], 0)
        return tf.IndexedSlices(values, indices, part.dense_shape)

    return wire.map(gather, parts)


def _in_order_of_making(places, gradients):
    """`places` in the order in which the first replica's gradients stand in the traced graph."""
    if tf.executing_eagerly():
        return places[::-1]
    operations = tf.compat.v1.get_default_graph().get_operations()
    number = {op.name: k for k, op in enumerate(operations)}
    return sorted(places, key=lambda place: number[gradients[place][0].op.name])
