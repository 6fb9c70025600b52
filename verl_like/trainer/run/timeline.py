"""Records when each call of a worker ran, and computes the seconds of each phase of a step."""

import json
import threading
from collections import defaultdict
from typing import Any, TextIO

from verl_like.single_controller import CallEvent
from verl_like.trainer.run.display import Display

Rows = list[dict[str, Any]]
"""Calls of workers in one step, as they are in the timeline's file."""


def undisturbed(steps: list[Rows]) -> list[Rows]:
    """Returns the steps that neither validated nor saved, or all steps if there is none."""
    found = [rows for rows in steps if not any(map(_is_disturbance, rows))]
    return found or steps


def _is_disturbance(row: dict[str, Any]) -> bool:
    """Returns whether a call validates or saves."""
    return row["is_validating"] or row["method"].startswith("save_")


class Timeline:
    """Writes each `CallEvent` to `file` as a line of JSON.

    It keeps the rows of the present step and of the steps that the report shows. Times are seconds
    by time.time() of the worker.
    """

    def __init__(self, file: TextIO, display: Display) -> None:
        self.file = file
        self.display = display
        self.stage_of_method: dict[str, int] = {}
        for number, methods in enumerate(display.stages):
            for method in methods:
                self.stage_of_method[method] = number
        self.recording = threading.Lock()  # several threads of the driver report calls
        self.step = 0
        self.is_validating = False
        self.rows: Rows = []
        """The rows of the present step."""
        self.earlier: list[Rows] = []
        """The rows of the earlier steps that the report would show."""

    def start_step(self, step: int) -> None:
        """Begins a step. The calls from now on belong to it."""
        self.earlier = self.last_steps()
        self.step = step
        self.rows = []

    def record(self, event: CallEvent) -> None:
        """Adds a call."""
        # Roles that train share a process. Others have processes of their own.
        kind = self.display.process_of_role.get(event.role, "training")
        row = {
            "step": self.step,
            "is_validating": self.is_validating,
            "process": f"{kind} {event.rank}",
            **vars(event),
        }
        line = json.dumps(row)
        with self.recording:
            self.file.write(line + "\n")
            self.rows.append(row)

    def last_steps(self) -> list[Rows]:
        """The rows of up to three training steps. They are the last ones that neither validated nor
        saved, or just the last ones if there is none."""
        steps = self.earlier
        if self.step and self.rows:
            steps = [*self.earlier, self.rows]
        return undisturbed(steps)[-3:]

    def phase_seconds(self) -> dict[str, float]:
        """The seconds of each phase of this step, from the start of the first call to the end of
        the last. Validations do not count."""
        calls = defaultdict(list)
        for row in self.rows:
            if row["is_validating"]:
                continue
            method = row["method"]
            phase = self.display.phase_of_method.get(method, method)
            calls[phase].append(row)
        seconds = {}
        for phase, rows in calls.items():
            finished = max(row["finished"] for row in rows)
            started = min(row["started"] for row in rows)
            seconds[phase] = finished - started
        return seconds

    def critical_path_seconds(self) -> float:
        """The least time that a training step with the calls of this step can take. It is 0 if the
        step had none.

        A stage takes at least as long as the calls of its busiest process. The critical path is the
        sum of these times over the stages. The part of a call that ran before the previous stage
        ended, such as rewards during generation, counts as nothing.
        """
        stages: list[Rows] = [[] for _ in self.display.stages]
        others = self.display.stages.index(())
        for row in self.rows:
            if _is_disturbance(row):
                continue
            stage = self.stage_of_method.get(row["method"], others)
            stages[stage].append(row)
        total = 0.0
        stage_start = 0.0
        for rows in stages:
            busy: dict[tuple[str, str], float] = defaultdict(float)
            for row in rows:
                process = (row["pool"], row["process"])
                started = max(row["started"], stage_start)
                seconds = row["finished"] - started
                busy[process] += max(0.0, seconds)
            busiest = max(busy.values(), default=0.0)
            total += busiest
            ends = [row["finished"] for row in rows]
            stage_start = max([stage_start, *ends])
        return total
