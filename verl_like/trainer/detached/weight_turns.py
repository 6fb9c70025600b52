"""Whose turn it is with the first trainer's weights: a step's, which changes them, or a maker's, which loads them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from verl_like.single_controller.failure import CallTimeout


class WeightTurns:
    """Lets makers load weights from the trainer's GPUs (`rollout.weight_transport=nccl`) between two steps.

    One maker loads at a time. A step waits for the makers that asked before it, so that none waits for two steps.

    Args:
        name: of the trainer, for messages.
        limit_s: how long a step waits for makers, and a maker for its turn, in seconds.
    """

    def __init__(self, name: str, limit_s: float) -> None:
        self.name, self.limit_s = name, limit_s
        self._changed = threading.Condition()
        self._in_step = False
        self._waiting: set[str] = set()
        self._receiver: str | None = None
        self._failure: Exception | None = None

    def begin_step(self) -> None:
        """Waits for the makers. From here until `end_step` the weights change.

        Raises CallTimeout if a maker does not end its turn, and the error of a transfer that failed.
        """
        with self._changed:
            is_free = self._changed.wait_for(self._may_step, self.limit_s)
            if self._failure:
                raise self._failure
            if not is_free:
                missing = self._receiver or ", ".join(sorted(self._waiting))
                raise CallTimeout(self.name, "fit", self.limit_s, f"{missing} to load the weights")
            self._in_step = True

    def _may_step(self) -> bool:
        return self._failure is not None or not (self._waiting or self._receiver)

    def end_step(self) -> None:
        """The weights are those of a version again."""
        with self._changed:
            self._in_step = False
            self._changed.notify_all()

    def begin_loading(self, maker: str) -> None:
        """Waits for the maker's turn, in which the weights stay as they are until `loading` has ended.

        A maker that was started again has its turn at once where the process before it died in its own. Raises
        CallTimeout if the turn does not come.
        """

        def may_load() -> bool:
            return not self._in_step and self._receiver in (None, maker)

        with self._changed:
            self._waiting.add(maker)
            has_turn = self._changed.wait_for(may_load, self.limit_s)
            self._waiting.discard(maker)
            if not has_turn:
                raise CallTimeout(self.name, "hold_weights", self.limit_s, f"the turn of {maker} to load the weights")
            self._receiver = maker

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around the transfer: the maker's turn ends with it. The next step raises its error, too."""
        try:
            yield
        except Exception as error:
            self._failure = error
            raise
        finally:
            with self._changed:
                self._receiver = None
                self._changed.notify_all()
