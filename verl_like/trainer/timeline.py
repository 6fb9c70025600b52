"""What ran when: every worker call of the run, and the seconds of each phase of a step."""

from collections import defaultdict
from collections.abc import Iterator
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
    "score": "reward",
}
# Each stage of a step needs all results of the stage before. Any other method is inference.
_GENERATION, _SLEEP, _INFERENCE, _UPDATE, _EXPORT, _LOAD = range(6)
_STAGE_OF_METHOD = {
    "generate_sequences": _GENERATION,
    "sleep": _SLEEP,
    "update_critic": _UPDATE,
    "update_actor": _UPDATE,
    "export_weights": _EXPORT,
    "load_weights": _LOAD,
}
_KIND_OF_PROCESS = {Role.Rollout: "rollout", "rules": "reward"}  # by role; all others train


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
        for event in self._training_events(step):
            spans[PHASE_OF_METHOD.get(event.method, event.method)].append(event)
        return {
            phase: max(e.finished for e in events) - min(e.started for e in events) for phase, events in spans.items()
        }

    def critical_path_seconds(self, step: int) -> float:
        """The least time that the calls of `step` leave a training step, were nothing lost between them.

        A stage (generation, inference, updates, export, load) takes at least as long as its busiest process: the sum
        of the seconds of that process's calls. The critical path is the sum of these over the stages. What ran before
        the stage in front was over, such as rewards while others generate, costs nothing.
        """
        stages: list[list[CallEvent]] = [[] for _ in range(6)]
        for event in self._training_events(step):
            if not event.method.startswith("save_"):
                stages[_STAGE_OF_METHOD.get(event.method, _INFERENCE)].append(event)
        total, stage_start = 0.0, 0.0
        for events in stages:
            busy: dict[tuple[str, str], float] = defaultdict(float)
            for e in events:
                busy[e.pool, _process(e)] += max(0.0, e.finished - max(e.started, stage_start))
            total += max(busy.values(), default=0.0)
            stage_start = max([stage_start, *(e.finished for e in events)])
        return total

    def _training_events(self, step: int) -> Iterator[CallEvent]:
        """The events of `step` without those of a validation, the latest first."""
        for event_step, is_validating, event in reversed(self.events):
            if event_step < step:
                break
            if event_step == step and not is_validating:
                yield event

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
                "process": _process(e),
                "started": e.started,
                "finished": e.finished,
            }
            for step, is_validating, e in self.events
            if only_step is None or step == only_step
        ]


def _process(event: CallEvent) -> str:
    """The process of its pool that ran a call: roles that train share theirs."""
    return f"{_KIND_OF_PROCESS.get(event.role, 'training')} {event.rank}"
