"""Reads the folders of runs. Runs may be running: nothing in their folders is changed or locked."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_like.files import open_regular
from verl_like.secret_values import masked
from verl_like.trainer.run.rows import readable_rows
from verl_like.trainer.run.timeline import Rows, undisturbed
from verl_like.trainer.state.resume import read_config, settings_of

TIMELINE_BYTES = 1 << 24
"""So many bytes of a timeline are read, from its end, because only one step is shown."""
GREATEST_NUMBER = sys.float_info.max / 1e10
"""The greatest number that is drawn, because an axis has no room for greater ones."""

TEXTS_OF_CALL = ("pool", "process", "method")
NUMBERS_OF_CALL = ("step", "started", "finished")


@dataclass(frozen=True)
class RunFolder:
    """The contents of a run's folder."""

    path: Path
    name: str
    """The folder's name, with the names of as many parents as are needed to tell the runs apart."""
    project: str
    experiment: str
    settings: dict[str, Any]
    """Every value of the configuration by its key, with secrets masked."""
    metrics: list[dict[str, float]]
    """A row for each step or validation. It has "step", and only finite numbers."""
    newest_row: str
    """The date and time of the newest row of metrics, or "" if there is none."""
    calls: Rows
    """The calls of workers in one complete step, as rows of the run's timeline."""
    generations: list[dict[str, Any]]
    """Rows with "step", "prompt" and further texts, in the order of the validations."""

    @property
    def steps(self) -> str:
        """Says how many steps the run has done."""
        if not self.metrics:
            return "no step yet"
        last = max(row["step"] for row in self.metrics)
        num_steps = self.settings.get("trainer.total_training_steps")
        return f"{last} of {num_steps}" if num_steps else str(last)


def read_runs(folders: Sequence[Path]) -> list[RunFolder]:
    """Reads the folders of runs.

    Raises ValueError if a folder is not that of a run, if a file cannot be read, and if a run is
    given twice.
    """
    paths: list[Path] = []
    for folder in folders:
        path = Path(os.path.realpath(folder))
        if path in paths:
            raise ValueError(f"{folder} is given twice, here or by a link: name each run once.")
        paths.append(path)
    names = _names(paths)
    return [_read_run(path, name) for path, name in zip(paths, names, strict=True)]


def _names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path. There are as many parts as are needed to make the names
    differ."""
    num_parts = 0
    names: list[str] = []
    while len(set(names)) < len(paths):
        num_parts += 1
        last_parts = [path.parts[-num_parts:] for path in paths]
        names = ["/".join(parts) for parts in last_parts]
    return names


def _read_run(path: Path, name: str) -> RunFolder:
    """Reads one folder. Raises ValueError."""
    if not os.path.exists(path / "config.yaml"):
        raise ValueError(
            f"{path} is no folder of a run, which has a config.yaml: give folders such as "
            "outputs/verl_like/ppo/latest."
        )
    metrics_file = path / "metrics.jsonl"
    try:
        config = OmegaConf.to_container(read_config(path), resolve=False)
        metrics = _rows(metrics_file)
        calls = _rows(path / "timeline.jsonl", TIMELINE_BYTES)
        generations = _rows(path / "generations.jsonl")
    except (OSError, ValueError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    drawn = []
    for row in metrics:
        numbers = {name: value for name, value in row.items() if _is_number(value)}
        if "step" in numbers:
            drawn.append(numbers)
    shown = [row for row in generations if _is_generation(row)]
    settings = dict(settings_of(masked(config)))
    return RunFolder(
        path=path,
        name=name,
        project=str(settings.get("trainer.project_name", "")),
        experiment=str(settings.get("trainer.experiment_name", "")),
        settings=settings,
        metrics=drawn,
        newest_row=_time_of(metrics_file) if metrics else "",
        calls=_calls_of_a_step(calls),
        generations=shown,
    )


def _rows(file: Path, num_bytes: int | None = None) -> list[dict[str, Any]]:
    """The rows of a file, or of its last `num_bytes`. There are none if there is no file. Raises
    OSError."""
    if not os.path.lexists(file):
        return []
    with open_regular(file) as opened:
        if num_bytes is not None:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - num_bytes))
        return readable_rows(opened.read())


def _time_of(file: Path) -> str:
    """The local time at which a file was written last."""
    written = datetime.fromtimestamp(file.stat().st_mtime)
    return written.isoformat(" ", "seconds")


def _is_number(value: Any) -> bool:
    """Returns whether a value of JSON is a finite number that can be drawn."""
    return type(value) in (int, float) and abs(value) <= GREATEST_NUMBER


def _is_call(row: dict[str, Any]) -> bool:
    """Returns whether a row has what a timeline shows."""
    for name in TEXTS_OF_CALL:
        if not isinstance(row.get(name), str):
            return False
    for name in NUMBERS_OF_CALL:
        if not _is_number(row.get(name)):
            return False
    return "is_validating" in row


def _is_generation(row: dict[str, Any]) -> bool:
    """Returns whether a row has a step and a prompt."""
    has_prompt = isinstance(row.get("prompt"), str)
    return has_prompt and _is_number(row["step"])


def _calls_of_a_step(rows: Rows) -> Rows:
    """The calls of the last complete step that neither validated nor saved.

    The newest step may be incomplete. It is taken only if there is no other.
    """
    by_step: dict[float, Rows] = {}
    for row in rows:
        if _is_call(row) and row["step"] > 0:
            calls = by_step.setdefault(row["step"], [])
            calls.append(row)
    steps = [by_step[step] for step in sorted(by_step)]
    if not steps:
        return []
    complete = steps[:-1] or steps
    return undisturbed(complete)[-1]
