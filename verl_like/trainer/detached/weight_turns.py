"""Whose turn it is with the first trainer's weights: a step's, which changes them, or a maker's,
which loads them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from verl_like.single_controller.failure import CallTimeout


class WeightTurns:
    """Lets makers load weights from the trainer's GPUs (`rollout.weight_transport=nccl`) between
    two steps.

    One maker loads at a time. A step waits for the makers that asked before it, so that none waits
    for two steps. A maker is known by its name in the ledger, such as `maker_0.2`, which says how
    often it was started. A transfer that fails ends the run: its error is raised to all who come
    after it.

    Args:
        name: of the trainer, for messages.
        limit_s: how long a step waits for makers, and a maker for its turn, in seconds.
    """

    def __init__(self, name: str, limit_s: float) -> None:
        self.name = name
        self.limit_s = limit_s
        self._changed = threading.Condition()
        self._in_step = False
        self._waiting: set[str] = set()
        self._receiver: str | None = None
        self._failure: Exception | None = None

    def raise_failure(self) -> None:
        """Raises the error of a transfer that failed."""
        if self._failure:
            raise self._failure

    def begin_step(self) -> None:
        """Waits for the makers. From here until `end_step` the weights change.

        Raises CallTimeout if a maker does not end its turn, and the error of a transfer that
        failed.
        """
        with self._changed:
            is_free = self._wait_for(lambda: not (self._waiting or self._receiver))
            if not is_free:
                missing = self._receiver or ", ".join(sorted(self._waiting))
                raise CallTimeout(self.name, "fit", self.limit_s, f"{missing} to load the weights")
            self._in_step = True

    def end_step(self) -> None:
        """The weights are those of a version again."""
        with self._changed:
            self._in_step = False
            self._changed.notify_all()

    def begin_loading(self, maker: str) -> None:
        """Waits for the maker's turn, in which the weights stay as they are until `loading` has
        ended.

        A maker that was started again takes the place of the process before it, which has died.
        Raises CallTimeout if the turn does not come or belongs to a later start of the maker, and
        the error of a transfer that failed.
        """
        with self._changed:
            self._waiting -= {other for other in self._waiting if _is_earlier_start(other, maker)}
            if self._receiver and _is_earlier_start(self._receiver, maker):
                self._receiver = None
            self._waiting.add(maker)
            self._changed.notify_all()
            is_over = self._wait_for(
                lambda: maker not in self._waiting or not (self._in_step or self._receiver)
            )
            if not is_over or maker not in self._waiting:
                self._waiting.discard(maker)
                raise CallTimeout(
                    self.name,
                    "hold_weights",
                    self.limit_s,
                    f"the turn of {maker} to load the weights",
                )
            self._waiting.discard(maker)
            self._receiver = maker

    @contextmanager
    def loading(self, maker: str, *, ends: bool = True) -> Iterator[None]:
        """Around a part of the maker's turn, which is over at the end of the last one. An error
        ends it, and the run.

        Raises CallTimeout if it is not the maker's turn, as when it has been started again.
        """
        with self._changed:
            self.raise_failure()
            if self._receiver != maker:
                raise CallTimeout(
                    self.name, "send_weights", self.limit_s, f"the turn of {maker}, which is over"
                )
        try:
            yield
        except Exception as error:
            self._failure = error
            raise
        finally:
            with self._changed:
                is_over = ends or self._failure
                if is_over and self._receiver == maker:
                    self._receiver = None
                self._changed.notify_all()

    def _wait_for(self, is_so: Callable[[], bool]) -> bool:
        """Whether it is so within the limit. Raises the error of a transfer that failed
        meanwhile."""
        came = self._changed.wait_for(lambda: self._failure is not None or is_so(), self.limit_s)
        self.raise_failure()
        return came


def _is_earlier_start(other: str, maker: str) -> bool:
    """Whether `other` is the same maker before it was started again."""
    return other != maker and other.rpartition(".")[0] == maker.rpartition(".")[0]
