"""Weights that travel with the driver's call, through Ray's object store."""

import numpy as np

from verl_like.workers.weights.exports import allocate_memory
from verl_like.workers.weights.transport import WeightTransport


class ObjectStoreTransport(WeightTransport):
    """The values of an export are part of it. The object store has one copy of them on every
    node."""

    def allocate(self, num_bytes: int, pinned: bool) -> np.ndarray:
        return allocate_memory(num_bytes, pinned)
