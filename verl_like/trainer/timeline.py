"""What ran when: every worker call of the run, and the seconds of each phase of a step."""

from collections import defaultdict
from typing import Any

from verl_like.single_controller.call import CallEvent
from verl_like.trainer.roles import Role

# verl's timer names for the worker methods; any other method is timed under its own name.
PHASE_OF_METHOD = {
    "generate_sequences": "gen",
    "compute_log_prob": "old_log_prob",
    "compute_ref_log_prob": "ref",
    "compute_values": "values",
    "compute_rm_score": "reward_model",
}


class Timeline:
    """Collects `CallEvent`s. Times are seconds of the worker's clock (time.time())."""

    def __init__(self) -> None:
        self.events: list[tuple[int, bool, CallEvent]] = []
        self.step = 0
        self.is_validating = False

    def record(self, event: CallEvent) -> None:
        self.events.append((self.step, self.is_validating, event))

    def phase_seconds(self, step: int) -> dict[str, float]:
        """Seconds from the first rank's start to the last rank's end of each method that trained in `step`."""
        spans: dict[str, list[CallEvent]] = defaultdict(list)
        for event_step, is_validating, event in reversed(self.events):
            if event_step != step:
                break
            if not is_validating:
                spans[PHASE_OF_METHOD.get(event.method, event.method)].append(event)
        return {
            phase: max(e.finished for e in events) - min(e.started for e in events) for phase, events in spans.items()
        }

    def rows(self, only_step: int | None = None) -> list[dict[str, Any]]:
        """The events of all steps, or of one, as plain values for `timeline.jsonl` and the report."""
        return [
            {
                "step": step,
                "is_validating": is_validating,
                "pool": e.pool,
                "role": e.role,
                "method": e.method,
                "rank": e.rank,
                "process": f"{'rollout' if e.role == Role.Rollout else 'training'} {e.rank}",
                "started": e.started,
                "finished": e.finished,
            }
            for step, is_validating, e in self.events
            if only_step is None or step == only_step
        ]
