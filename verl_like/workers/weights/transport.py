"""The interface of the ways that weights take, which is also the simplest of them."""

from collections.abc import Sequence

import numpy as np

from verl_like.single_controller.worker import Worker
from verl_like.workers.weights.exports import WeightExport, allocate_memory


class WeightTransport:
    """Weights travel with the call, through the object store, which has one copy of them on every
    node.

    Each rank of the trainer and of the rollout has an end. What `publish` returns goes to all ranks
    of the rollout, where `receive` makes it whole again.
    """

    def allocate(self, num_bytes: int, pinned: bool) -> np.ndarray:
        """Host memory for a bucket of an export, see `collect_weights`."""
        return allocate_memory(num_bytes, pinned)

    def publish(self, export: WeightExport) -> WeightExport:
        """On a rank of the trainer: what travels of its export, whose buckets are in memory of
        `allocate`."""
        return export

    def receive(self, exports: Sequence[WeightExport], worker: Worker) -> Sequence[WeightExport]:
        """On all ranks of the rollout at the same time: the exports with their values in memory of
        this node.

        Raises StaleWeightsError if the trainer does not have them any more.
        """
        return exports
