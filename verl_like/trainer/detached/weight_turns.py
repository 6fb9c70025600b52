"""Takes turns with the first trainer's weights: either a step changes them, or one maker loads
them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from verl_like.single_controller.failure import CallTimeout


class WeightTurns:
    """Lets makers load weights from the trainer's GPUs (`rollout.weight_transport=nccl`) between
    two steps.

    One maker loads at a time. A step waits until no maker loads or waits for its turn, also for
    makers that ask while it waits. So no maker waits for two steps. A maker is called by its name
    in the ledger, such as `maker_0.2`. The number at the end says how often it was started. A
    transfer that fails ends the run: every later call raises its error.

    Args:
        name: the trainer's name, for messages.
        limit_s: for how many seconds a step waits for makers, and a maker for its turn.
    """

    def __init__(self, name: str, limit_s: float) -> None:
        self.name = name
        self.limit_s = limit_s
        self._changed = threading.Condition()
        self._in_step = False
        """True while a step may change the weights."""
        self._waiting: set[str] = set()
        """The makers that wait for their turn."""
        self._receiver: str | None = None
        """The maker whose turn it is."""
        self._failure: Exception | None = None
        """The error of a transfer."""

    def raise_failure(self) -> None:
        """Raises the error of a transfer, if one failed."""
        if self._failure:
            raise self._failure

    def begin_step(self) -> None:
        """Waits for the makers that load or wait for their turn. Then the weights may change until
        `end_step`.

        Raises CallTimeout if a maker does not end its turn, and the error of a transfer that
        failed.
        """
        with self._changed:
            is_free = self._wait_for(lambda: not (self._waiting or self._receiver))
            if not is_free:
                missing = self._receiver or ", ".join(sorted(self._waiting))
                waited_for = f"{missing} to load the weights"
                raise CallTimeout(self.name, "fit", self.limit_s, waited_for)
            self._in_step = True

    def end_step(self) -> None:
        """Notes that all weights are of one version again, so that makers may load them."""
        with self._changed:
            self._in_step = False
            self._changed.notify_all()

    def begin_loading(self, maker: str) -> None:
        """Waits for the maker's turn. Then the weights do not change until `loading` has ended the
        turn.

        A maker that was started again takes the place of its earlier process, which has died.
        Raises CallTimeout if the turn does not come in time, or if a later start of this maker has
        taken its place. Raises the error of a transfer that failed.
        """
        with self._changed:
            for other in list(self._waiting):
                if _is_same_maker(other, maker):
                    self._waiting.discard(other)
            if self._receiver and _is_same_maker(self._receiver, maker):
                self._receiver = None
            self._waiting.add(maker)
            self._changed.notify_all()

            def need_not_wait() -> bool:
                is_free = not (self._in_step or self._receiver)
                return is_free or maker not in self._waiting

            came = self._wait_for(need_not_wait)
            is_replaced = maker not in self._waiting
            self._waiting.discard(maker)
            if is_replaced or not came:
                waited_for = f"the turn of {maker} to load the weights"
                raise CallTimeout(self.name, "hold_weights", self.limit_s, waited_for)
            self._receiver = maker

    @contextmanager
    def loading(self, maker: str, *, ends: bool = True) -> Iterator[None]:
        """Surrounds a part of the maker's turn. The turn ends after this part if `ends`, and after
        an error, which ends the run too.

        Raises CallTimeout if it is not the maker's turn any more, because the maker was started
        again.
        """
        with self._changed:
            self.raise_failure()
            if self._receiver != maker:
                waited_for = f"the turn of {maker}, which is over"
                raise CallTimeout(self.name, "send_weights", self.limit_s, waited_for)
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
        """Waits until `is_so` returns True. Returns whether it does so within the limit. Raises the
        error of a transfer that fails meanwhile."""

        def is_over() -> bool:
            return self._failure is not None or is_so()

        came = self._changed.wait_for(is_over, self.limit_s)
        self.raise_failure()
        return came


def _is_same_maker(other: str, maker: str) -> bool:
    """Returns whether `other` is another start of the same maker."""
    name, _, _start = maker.rpartition(".")
    other_name, _, _start = other.rpartition(".")
    return other != maker and other_name == name
