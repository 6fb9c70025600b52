"""The buffer of a trainer: makers' groups come in, the training loop takes them out."""

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
    """What a buffer asks the ledger: the methods of `PromptLedger`, or of a handle of it."""

    def deliver(self, maker: str, groups: Sequence[tuple[int, int, int]]) -> list[int]:
        """Takes the (number, attempt, oldest version) of groups; returns the numbers that are
        kept."""

    def choose(self, trainer: int, version: int, num_groups: int) -> list[int] | None:
        """The numbers of the groups to train after `version`; None while the trainer must wait."""

    def holders(self) -> list[tuple[int, dict[str, list[int]]]]:
        """Of each trainer the groups in its buffer, and the numbers that makers have in flight for
        it."""

    def seconds_since_loss(self) -> float:
        """Since a maker was last given up."""


class ExperienceBuffer:
    """Groups that wait for trainer number `trainer`, `limit` at most: for more the ledger gives no
    tickets.

    `extend` and `take` may run in different threads.
    """

    def __init__(self, ledger: GroupLedger, trainer: int, limit: int) -> None:
        self.ledger = ledger
        self.trainer = trainer
        self.limit = limit
        # By its number: what came with it, and its rows there
        self._groups: dict[int, tuple[DataProto, int, int]] = {}
        self._changed = threading.Condition()
        self.metrics: deque[dict[str, Metric]] = deque()
        """What makers measured of the groups that were kept."""

    def __len__(self) -> int:
        """Groups that wait here."""
        return len(self._groups)

    def extend(
        self, maker: str, tickets: Sequence[Ticket], batch: DataProto, metrics: dict[str, Metric]
    ) -> list[int]:
        """Takes in the groups of `tickets`: len(tickets) * n samples in their order, the n of a
        ticket side by side.

        Of `meta_info` only `padding` is kept: the rest is of a call, and a step mixes the groups of
        several. The column `policy_version` says how old each group is; its oldest token counts.
        Returns the numbers that were kept; the others were given to another maker meanwhile, and
        where none is kept, neither are `metrics`.
        """
        samples = SampleRows.of(batch)
        if not tickets or not len(batch) or samples.num_samples % len(tickets):
            raise ValueError(
                f"{samples.num_samples} samples are not whole groups of {len(tickets)} tickets; "
                "send all samples of each prompt."
            )
        first_rows = samples.starts[:: samples.num_samples // len(tickets)].tolist()
        of_tickets = list(itertools.pairwise(first_rows))
        rows = batch.select(
            meta_info_keys=[name for name in ("padding",) if name in batch.meta_info]
        )
        versions = [
            min(version for version, _, _ in spans)
            for spans in batch.non_tensor_batch["policy_version"]
        ]
        groups = {
            ticket.number: (rows, *span) for ticket, span in zip(tickets, of_tickets, strict=True)
        }
        oldest = [min(versions[start:stop]) for start, stop in of_tickets]
        with self._changed:
            kept = self.ledger.deliver(
                maker,
                [
                    (ticket.number, ticket.attempt, age)
                    for ticket, age in zip(tickets, oldest, strict=True)
                ],
            )
            self._groups |= {number: groups[number] for number in kept}
            self.metrics += [metrics] if kept else []
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
        """Waits for `num_groups` groups for the step after `version`, as `PromptLedger.choose` says
        which.

        `check` is called meanwhile, and ends the wait by raising.

        Several calls with one version take a step in parts. Returns their numbers, ascending, and
        their rows in that order. Raises TimeoutError, which names who holds them, if they, and
        those of the other trainers for the same step, did not come within `deadline_s`, nor since a
        maker was last given up.
        """
        started = time.monotonic()
        with self._changed:
            while len(self) < num_groups or not (
                numbers := self.ledger.choose(self.trainer, version, num_groups)
            ):
                if (
                    time.monotonic() - started > deadline_s
                    and self.ledger.seconds_since_loss() > deadline_s
                ):
                    have = [
                        f"trainer {trainer} has {there}, and in flight for it are, by maker: "
                        f"{held or 'none, no maker has started any'}"
                        for trainer, (there, held) in enumerate(self.ledger.holders())
                    ]
                    raise TimeoutError(
                        f"each trainer needs {num_groups} groups for the step after version "
                        f"{version}. After {deadline_s:g} s {'; '.join(have)}"
                    )
                check()
                # Short, because what comes for another trainer, or is dropped elsewhere, can end
                # the wait too.
                self._changed.wait(0.1)
            groups = [self._groups.pop(number) for number in numbers]
        # Neighbours stay together, so that what was made together and is trained together is not
        # copied.
        pieces: list[tuple[DataProto, int, int]] = []
        for batch, start, stop in groups:
            if pieces and pieces[-1][0] is batch and pieces[-1][2] == start:
                start = pieces.pop()[1]
            pieces.append((batch, start, stop))
        parts = [batch.rows(start, stop) for batch, start, stop in pieces]
        return numbers, parts[0] if len(parts) == 1 else concat_samples(parts)
