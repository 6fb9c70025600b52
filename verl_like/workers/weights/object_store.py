"""Weights that travel with the driver's call, through Ray's object store."""

from verl_like.workers.weights.exports import allocate_memory
from verl_like.workers.weights.transport import WeightTransport


class ObjectStoreTransport(WeightTransport):
    """The values of an export are part of it. The object store has one copy of them on every
    node."""

    allocate = staticmethod(allocate_memory)
