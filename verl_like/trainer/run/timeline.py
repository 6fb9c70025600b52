"""What ran when: every worker call of the run, and the seconds of each phase of a step."""

import json
import threading
from collections import defaultdict
from typing import Any, TextIO

from verl_like.single_controller import CallEvent
from verl_like.trainer.run.display import Display


def undisturbed(steps: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The steps that neither validated nor saved, or all where there is none; each is a list of
    rows."""

    def is_disturbance(row: dict[str, Any]) -> bool:
        return row["is_validating"] or row["method"].startswith("save_")

    without = [rows for rows in steps if not any(map(is_disturbance, rows))]
    return without or steps


class Timeline:
    """Writes each `CallEvent` to `file` as a line of JSON; keeps those of this step and of the
    steps that the report shows. Times are seconds of the worker's clock (time.time())."""

    def __init__(self, file: TextIO, display: Display) -> None:
        self.file = file
        self.display = display
        self.stage_of_method = {
            method: i for i, methods in enumerate(display.stages) for method in methods
        }
        self.recording = threading.Lock()  # threads of the driver report calls
        self.step = 0
        self.is_validating = False
        self.rows: list[dict[str, Any]] = []  # of the present step, as they are in the file
        self.earlier: list[list[dict[str, Any]]] = []

    def start_step(self, step: int) -> None:
        self.earlier = self.last_steps()
        self.step = step
        self.rows = []

    def record(self, event: CallEvent) -> None:
        # The process of its pool that ran the call: roles that train share theirs.
        process = f"{self.display.process_of_role.get(event.role, 'training')} {event.rank}"
        row = {"step": self.step, "is_validating": self.is_validating, "process": process} | vars(
            event
        )
        with self.recording:
            self.file.write(json.dumps(row) + "\n")
            self.rows.append(row)

    def last_steps(self) -> list[list[dict[str, Any]]]:
        """The rows of up to three training steps: the last ones that neither validated nor saved,
        or just the last."""
        steps = [*self.earlier, self.rows] if self.step and self.rows else self.earlier
        return undisturbed(steps)[-3:]

    def phase_seconds(self) -> dict[str, float]:
        """Seconds from the first rank's start to the last rank's end of each method that trained in
        this step."""
        calls: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in self.rows:
            if not row["is_validating"]:
                calls[self.display.phase_of_method.get(row["method"], row["method"])].append(row)
        return {
            phase: max(r["finished"] for r in rows) - min(r["started"] for r in rows)
            for phase, rows in calls.items()
        }

    def critical_path_seconds(self) -> float:
        """The least time of a training step with the calls of this step; 0 if it had none.

        A stage takes at least the seconds of the calls of its busiest process; the critical path is
        the sum of these over the stages. What ran before the previous stage ended, such as rewards
        during generation, costs nothing.
        """
        stages: list[list[dict[str, Any]]] = [[] for _ in self.display.stages]
        others = self.display.stages.index(())
        for row in self.rows:
            if not row["is_validating"] and not row["method"].startswith("save_"):
                stages[self.stage_of_method.get(row["method"], others)].append(row)
        total = 0.0
        stage_start = 0.0
        for rows in stages:
            busy: dict[tuple[str, str], float] = defaultdict(float)
            for r in rows:
                busy[r["pool"], r["process"]] += max(
                    0.0, r["finished"] - max(r["started"], stage_start)
                )
            total += max(busy.values(), default=0.0)
            stage_start = max([stage_start, *(r["finished"] for r in rows)])
        return total
