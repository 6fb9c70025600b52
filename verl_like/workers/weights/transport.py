"""The base class of the transports, which carry weights from the trainer to the rollout engines."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from verl_like.single_controller.worker import Worker
from verl_like.workers.weights.exports import Allocate, WeightExport


class WeightTransport(ABC):
    """What carries the weights of a trainer to rollout engines and to copies of its models.

    Every rank of the trainer and every rank of a receiving worker group has an instance of its own.
    At each update every rank of the trainer fills memory of `allocate` (`collect_weights`) and
    calls `publish`. The driver passes what all of them return to every rank of the receivers, and
    each of those calls `receive` with it.
    """

    @property
    @abstractmethod
    def allocate(self) -> Allocate | None:
        """The function that returns memory for a bucket of an export, on a rank of the trainer.

        The values in this memory stay as they are from `publish` to the next `publish` at least.

        None if no host memory holds the values: then the buckets of an export are empty, and the
        values travel while the engines load.
        """

    def publish(self, export: WeightExport) -> WeightExport:
        """Makes an export available to the receivers. Every rank of the trainer calls it.

        The values of its buckets are in memory of `allocate`. Returns the export that the driver
        passes on, in which values may have been replaced by where they are; by default `export`
        itself.
        """
        return export

    def receive(self, exports: Sequence[WeightExport], worker: Worker) -> Sequence[WeightExport]:
        """Brings the values of published exports, one of each rank of the trainer, into memory of
        this node. All ranks of a receiving worker group call it at the same time.

        `worker` is this rank. Returns the exports with values that NumPy can read, if the
        transport has an `allocate`; by default `exports` themselves. They may have been overwritten
        meanwhile, which `check_staged` notices. Raises StaleWeightsError if the trainer has newer
        weights instead.
        """
        return exports
