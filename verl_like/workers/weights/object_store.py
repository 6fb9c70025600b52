"""Weights that travel with the driver's call, through Ray's object store."""

from collections.abc import Sequence

import numpy as np

from verl_like.single_controller.worker import Worker
from verl_like.workers.weights.exports import WeightExport, allocate_memory


class ObjectStoreTransport:
    """The values of an export are part of it. The object store has one copy of them on every
    node."""

    def allocate(self, num_bytes: int, pinned: bool) -> np.ndarray:
        return allocate_memory(num_bytes, pinned)

    def publish(self, export: WeightExport) -> WeightExport:
        return export

    def receive(self, exports: Sequence[WeightExport], worker: Worker) -> Sequence[WeightExport]:
        return exports
