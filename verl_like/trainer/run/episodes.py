"""Episodes of agents as people see them: the records in `episodes.jsonl`, and what is shown of
them."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel

from verl_like.files import open_regular
from verl_like.trainer.run.display import ShownMetrics, printable
from verl_like.workers.agents.turns import Turn

EPISODES = "episodes.jsonl"
DRAWN = ">"
"""It stands before each line of what the policy drew."""
FAILURES: tuple[ShownMetrics, ...] = (
    (
        "Failures of the policy",
        (
            "agent/num_unreadable_calls",
            "agent/num_unknown_tools",
            "agent/num_turns_used_up",
            "agent/num_room_used_up",
        ),
        "in a step",
    ),
    ("Failures of tools", ("agent/num_tool_errors/",), "in a step"),
    (
        "Failures of the infrastructure",
        ("agent/num_failures/", "agent/num_failed", "agent/num_dropped_prompts"),
        "in a step",
    ),
)
"""The metrics that count each class of failures, as charts."""


class EpisodeRecord(BaseModel):
    """A line of `episodes.jsonl`."""

    step: int
    is_validation: bool
    uid: str
    sample: int
    """The number of the episode among those of its prompt."""
    ended: str
    """How it ended, see `Episode.ended`."""
    reward: float | None
    """None if it has none, or if others score it."""
    failures: list[tuple[str, str]]
    """The kind of each failure, and what happened."""
    seconds: float
    rows: list[list[tuple[str, bool]]]
    """The text of each row in parts, each with whether the policy drew it."""
    turns: list[Turn]

    def lines(self) -> Iterator[str]:
        """Yields the lines that people see of it. Each begins with a sign that says what it is."""
        for sign, text in self._parts():
            for line in printable(text).split("\n"):
                yield f"{sign} {line}"

    def _parts(self) -> Iterator[tuple[str, str]]:
        """Yields the signs and the texts of these lines."""
        what = "step"
        if self.is_validation:
            what = "validation at step"
        yield "#", f"{what} {self.step}, prompt {self.uid}, sample {self.sample}"
        yield "#", f"{self.ended}, reward {self.reward}, {self.seconds:.2f} s"
        for kind, text in self.failures:
            yield "!", f"{kind}: {text}"
        for number, turn in enumerate(self.turns):
            tool_seconds = sum(call.seconds for call in turn.tool_calls)
            yield (
                "-",
                f"turn {number}, row {turn.row}: {turn.num_drawn} tokens drawn, "
                f"model {turn.seconds:.2f} s, tools {tool_seconds:.2f} s",
            )
            for call in turn.tool_calls:
                sign = "="
                if call.is_error:
                    sign = "!"
                yield sign, f"{call.name} {call.arguments} -> {call.result}"
        for number, row in enumerate(self.rows):
            yield "-", f"row {number}"
            for text, is_drawn in row:
                yield DRAWN if is_drawn else "|", text


def read_episodes(file: Path) -> Iterator[EpisodeRecord]:
    """Yields the records of a file. A line that cannot be read is left out, for instance the last
    one of a file that is being written. Raises OSError."""
    with open_regular(file) as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                yield EpisodeRecord.model_validate_json(line)


def newest(records: Iterable[EpisodeRecord]) -> list[EpisodeRecord]:
    """Returns those of the last step and of the last validation, and what came after these of
    earlier ones."""
    found: dict[bool, list[EpisodeRecord]] = {}
    for record in records:
        kept = found.setdefault(record.is_validation, [])
        if kept and kept[0].step < record.step:
            kept.clear()
        kept.append(record)
    return list(itertools.chain(*found.values()))
