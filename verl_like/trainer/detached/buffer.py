"""The buffer of a trainer: makers put groups of samples in, and the training loop takes them
out."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from verl_like.protocol import DataProto, Metric
from verl_like.protocol.samples import SampleRows, concat_samples
from verl_like.trainer.detached.ledger import NO_VERSION, PromptLedger, Ticket

RowRange = tuple[DataProto, int, int]
"""Some rows of a batch: the batch, the first of the rows, and the row after the last."""


class ExperienceBuffer:
    """Keeps the groups of samples that have arrived for a trainer until the trainer takes them.

    `trainer` is the trainer's index. There are at most `limit` groups, because the ledger gives no
    tickets for more. `extend` and `take` may run in different threads.
    """

    def __init__(self, ledger: PromptLedger, trainer: int, limit: int) -> None:
        self.ledger = ledger
        self.trainer = trainer
        self.limit = limit
        self._groups: dict[int, RowRange] = {}
        """The rows of each group, by its number."""
        self._changed = threading.Condition()
        self.metrics: deque[dict[str, Metric]] = deque()
        """The metrics that makers sent with groups that were kept."""

    def __len__(self) -> int:
        """The number of groups in the buffer."""
        return len(self._groups)

    def extend(
        self, maker: str, tickets: Sequence[Ticket], batch: DataProto, metrics: dict[str, Metric]
    ) -> list[int]:
        """Adds the groups of `tickets`, and returns the numbers of those that were kept.

        `batch` has len(tickets) * n samples in the order of the tickets, the n samples of a ticket
        next to each other. Its column `policy_version` says which weights generated each token. The
        age of a group is that of its oldest token. A group whose prompt was given to another maker
        meanwhile is not kept. If no group is kept, `metrics` are not kept either.

        Only `padding` remains of the batch's `meta_info`. The rest belongs to one call of a maker,
        and a step mixes the groups of several calls.
        """
        samples = SampleRows.of(batch)
        num_samples = samples.num_samples
        if not tickets or not num_samples or num_samples % len(tickets):
            raise ValueError(
                f"{num_samples} samples are not whole groups of {len(tickets)} tickets; "
                "send all samples of each prompt."
            )
        kept_info = ["padding"] if "padding" in batch.meta_info else []
        rows = batch.select(meta_info_keys=kept_info)
        versions = []  # of the oldest token of each row
        for spans in batch.non_tensor_batch["policy_version"]:
            # A row that stands for an episode without one has none.
            versions.append(min((version for version, _start, _end in spans), default=NO_VERSION))
        num_samples_of_group = num_samples // len(tickets)
        starts_of_groups = samples.starts[::num_samples_of_group]
        bounds = itertools.pairwise(starts_of_groups.tolist())
        groups = {}
        delivered = []
        for ticket, (start, stop) in zip(tickets, bounds, strict=True):
            groups[ticket.number] = (rows, start, stop)
            oldest = min(versions[start:stop])
            delivered.append((ticket, oldest))
        with self._changed:
            kept = self.ledger.deliver(maker, delivered)
            for number in kept:
                self._groups[number] = groups[number]
            if kept:
                self.metrics.append(metrics)
            assert len(self) <= self.limit, (len(self), self.limit)
            self._changed.notify_all()
        return kept

    def take(
        self,
        num_groups: int,
        version: int,
        deadline_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> tuple[list[int], DataProto]:
        """Waits for `num_groups` groups for the step after `version`, which `PromptLedger.choose`
        chooses. Returns their numbers in ascending order, and their rows in that order.

        Several calls with the same version take a step in parts. `check` is called during the wait
        and can end it by raising an error.

        Raises TimeoutError after `deadline_s` seconds. The error says who has the groups: because
        trainers wait for each other, those of another trainer may be missing. If a maker was given
        up, the seconds count from then.
        """
        started = time.monotonic()
        numbers = None
        with self._changed:
            while True:
                if len(self) >= num_groups:
                    numbers = self.ledger.choose(self.trainer, version, num_groups)
                if numbers:
                    break
                is_late = time.monotonic() - started > deadline_s
                if is_late and self.ledger.seconds_since_loss() > deadline_s:
                    raise TimeoutError(
                        f"each trainer needs {num_groups} groups for the step after version "
                        f"{version}. After {deadline_s:g} s {self.describe_holders()}"
                    )
                check()
                # The wait is short because the ledger's choice can also change when groups of
                # another trainer arrive or are dropped, of which this buffer is not told.
                self._changed.wait(0.1)
            groups = [self._groups.pop(number) for number in numbers]
        # Groups that are next to each other in one batch are cut out together. So a batch that is
        # trained as it was made is not copied.
        ranges: list[RowRange] = []
        for batch, start, stop in groups:
            if ranges:
                last_batch, last_start, last_stop = ranges[-1]
                if last_batch is batch and last_stop == start:
                    ranges[-1] = (batch, last_start, stop)
                    continue
            ranges.append((batch, start, stop))
        parts = [batch.rows(start, stop) for batch, start, stop in ranges]
        rows = parts[0] if len(parts) == 1 else concat_samples(parts)
        return numbers, rows

    def describe_holders(self) -> str:
        """Says for each trainer how many groups its buffer has, and which groups each maker is
        still making for it."""
        described = [
            f"trainer {trainer} has {there}, and in flight for it are, by maker: "
            f"{held or 'none, no maker has started any'}"
            for trainer, (there, held) in enumerate(self.ledger.holders())
        ]
        return "; ".join(described)
