"""The buffer of a trainer: makers put groups of samples in, and the training loop takes them
out."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from verl_like.protocol import DataProto, Metric
from verl_like.protocol.samples import SampleRows, concat_samples
from verl_like.trainer.detached.ledger import Ticket


class GroupLedger(Protocol):
    """The methods of `PromptLedger` that a buffer calls, which a handle of the ledger has too."""

    def deliver(self, maker: str, groups: Sequence[tuple[int, int, int]]) -> list[int]:
        """Takes the (number, attempt, oldest version) of groups that have come, and returns the
        numbers of those to keep."""

    def choose(self, trainer: int, version: int, num_groups: int) -> list[int] | None:
        """The numbers of the groups to train after `version`, or None while the trainer must
        wait."""

    def holders(self) -> list[tuple[int, dict[str, list[int]]]]:
        """For each trainer the number of groups in its buffer, and the numbers of the groups that
        makers are still making for it."""

    def seconds_since_loss(self) -> float:
        """Seconds since a maker was last given up."""


class ExperienceBuffer:
    """The groups of samples that wait for the trainer with index `trainer`.

    There are at most `limit`, because the ledger gives no tickets for more. `extend` and `take` may
    run in different threads.
    """

    def __init__(self, ledger: GroupLedger, trainer: int, limit: int) -> None:
        self.ledger = ledger
        self.trainer = trainer
        self.limit = limit
        # number of the group -> (batch it came in, its first row there, the row after its last)
        self._groups: dict[int, tuple[DataProto, int, int]] = {}
        self._changed = threading.Condition()
        self.metrics: deque[dict[str, Metric]] = deque()
        """What makers measured of the groups that were kept."""

    def __len__(self) -> int:
        """The number of groups that wait here."""
        return len(self._groups)

    def extend(
        self, maker: str, tickets: Sequence[Ticket], batch: DataProto, metrics: dict[str, Metric]
    ) -> list[int]:
        """Takes the groups of `tickets` in, and returns the numbers of those that were kept.

        `batch` has len(tickets) * n samples in the order of the tickets, the n of a ticket next to
        each other. Its column `policy_version` says which weights generated each token, and the
        oldest token of a group is the age of the group. A group whose prompt was given to another
        maker meanwhile is not kept. If none is, `metrics` are not kept either.

        Only `padding` remains of the batch's `meta_info`: the rest belongs to one call of a maker,
        and a step mixes the groups of several.
        """
        samples = SampleRows.of(batch)
        if not tickets or not len(batch) or samples.num_samples % len(tickets):
            raise ValueError(
                f"{samples.num_samples} samples are not whole groups of {len(tickets)} tickets; "
                "send all samples of each prompt."
            )
        kept_info = ["padding"] if "padding" in batch.meta_info else []
        rows = batch.select(meta_info_keys=kept_info)
        versions: list[int] = []  # of the oldest token of each row
        for spans in batch.non_tensor_batch["policy_version"]:
            versions.append(min(version for version, _start, _end in spans))
        num_samples_of_group = samples.num_samples // len(tickets)
        bounds = itertools.pairwise(samples.starts[::num_samples_of_group].tolist())
        groups: dict[int, tuple[DataProto, int, int]] = {}
        delivered: list[tuple[int, int, int]] = []
        for ticket, (start, stop) in zip(tickets, bounds, strict=True):
            groups[ticket.number] = (rows, start, stop)
            oldest = min(versions[start:stop])
            delivered.append((ticket.number, ticket.attempt, oldest))
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
        """Waits for `num_groups` groups for the step after `version`; `PromptLedger.choose` says
        which they are. Returns their numbers, ascending, and their rows in that order.

        Several calls with the same version take a step in parts. `check` is called during the wait,
        and ends it by raising an error.

        Raises TimeoutError after `deadline_s` seconds, which says who holds the groups. As trainers
        wait for each other, groups of another trainer may be missing. If a maker was given up, the
        seconds count from then.
        """
        started = time.monotonic()
        numbers: list[int] | None = None
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
                # The wait is short because what comes for another trainer, or is dropped, can end
                # it too, and nobody is told of that here.
                self._changed.wait(0.1)
            groups = [self._groups.pop(number) for number in numbers]
        # Groups that came side by side in one batch are cut out together. So a batch that is
        # trained as it was made is not copied.
        pieces: list[tuple[DataProto, int, int]] = []
        for batch, start, stop in groups:
            if pieces:
                last_batch, last_start, last_stop = pieces[-1]
                if last_batch is batch and last_stop == start:
                    pieces[-1] = (batch, last_start, stop)
                    continue
            pieces.append((batch, start, stop))
        parts = [batch.rows(start, stop) for batch, start, stop in pieces]
        rows = parts[0] if len(parts) == 1 else concat_samples(parts)
        return numbers, rows

    def describe_holders(self) -> str:
        """Says for each trainer how many groups its buffer has, and which groups are with which
        maker."""
        described: list[str] = []
        for trainer, (there, held) in enumerate(self.ledger.holders()):
            described.append(
                f"trainer {trainer} has {there}, and in flight for it are, by maker: "
                f"{held or 'none, no maker has started any'}"
            )
        return "; ".join(described)
