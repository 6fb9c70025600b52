"""Decides when the engines of makers are compared with the actor, which is between two steps of the
first trainer."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

from verl_like.single_controller.failure import CallTimeout

LATE_S = 120.0
"""For how many seconds a step waits for a maker that was started again."""


class Comparisons:
    """Lets makers compare their engines with an actor while its weights do not change.

    The first step waits until all makers have done so. If a maker asks during a step, or while the
    actor has other weights than the maker, the maker asks again when it has newer ones, and the
    next step waits for it.

    Args:
        name: the trainer's name, for messages.
        makers: the names of the makers for which the first step waits.
        limit_s: for how many seconds the first step waits.
    """

    def __init__(self, name: str, makers: Iterable[str], limit_s: float) -> None:
        self.name = name
        self.limit_s = limit_s
        self.awaited = set(makers)
        """The makers for which the next step waits."""
        self.is_first = True
        """True before the first step."""
        self.in_step = False
        """True while a step changes the weights."""
        self._turn = threading.Condition()

    def begin_step(self) -> list[str]:
        """Waits for the makers. Then the weights may change until `in_step` is set to False.

        Before the first step it raises CallTimeout if a maker does not come in time. Later only
        makers that were started again are awaited. If one of them does not come, the step begins
        without it, and the returned list has a note for the user.
        """
        notes = []
        with self._turn:
            limit_s = self.limit_s if self.is_first else LATE_S
            have_come = self._turn.wait_for(lambda: not self.awaited, limit_s)
            if not have_come:
                missing = ", ".join(sorted(self.awaited))
                if self.is_first:
                    raise CallTimeout(
                        self.name, "fit", limit_s, f"the engines of {missing} to be compared"
                    )
                notes.append(
                    f"after its restart the engines of {missing} were not compared within "
                    f"{limit_s:g} s"
                )
                self.awaited.clear()
            self.is_first = False
            self.in_step = True
        return notes

    def score(self, maker: str, has_weights: Callable[[], bool], compute: Callable[[], Any]) -> Any:
        """Returns what `compute` returns, and steps do not wait for the maker any more. While a
        step runs, or if `has_weights` says that the actor does not have the maker's weights, it
        returns None, and the next step waits for the maker."""
        with self._turn:
            if self.in_step or not has_weights():
                self.awaited.add(maker)
                return None
            scored = compute()
            self.awaited.discard(maker)
            self._turn.notify_all()
            return scored
