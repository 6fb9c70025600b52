"""Compares what two versions of the project recorded of the same run."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

METRICS = ("loss", "pg_loss", "vf_loss", "kl_loss", "grad_norm")
"""The last parts of the names of the metrics that are compared."""
TINY = 1e-300
HUGE = 1e306
CHECKPOINT_FILES = "global_step_*/*/checkpoint/rank_*.safetensors"


@dataclass(frozen=True)
class Difference:
    """How far a quantity of this version is from the other's, over all steps."""

    quantity: str
    num_values: int
    relative: float
    """The largest difference in units of the largest value; of tensors, the norm of the difference
    in units of their norm. 0 only if all are equal bit for bit."""
    first_step: int | None = None
    """The first step in which they differ."""

    def __str__(self) -> str:
        if not self.relative:
            return "equal bit for bit"
        since = f", from step {self.first_step} on" if self.first_step else ""
        return f"{self.relative:.1e} apart{since}"


def compare_steps(here: Path, other: Path) -> Iterator[Difference]:
    """Tokens, rewards and log-probabilities of every step. Raises ValueError if the steps or
    columns differ."""
    names = [[file.name for file in sorted(folder.glob("step_*.npz"))] for folder in (here, other)]
    if names[0] != names[1] or not names[0]:
        raise ValueError(f"{here} has {len(names[0])} recorded steps, {other} has {len(names[1])}")
    pairs = [(np.load(here / name), np.load(other / name)) for name in names[0]]
    for column in pairs[0][1].files:
        missing = [step for step, (mine, _) in enumerate(pairs, 1) if column not in mine.files]
        if missing:
            raise ValueError(f"{here} has no {column} in the steps {missing}")
        yield of_steps(column, [(mine[column], theirs[column]) for mine, theirs in pairs])


def compare_metrics(here: Path, other: Path) -> Iterator[Difference]:
    """Losses, gradient norms and their like, by name. Raises ValueError if one is missing here."""
    mine = rows_of(here)
    theirs = rows_of(other)
    if mine.keys() != theirs.keys():
        raise ValueError(f"{here} has the steps {sorted(mine)}, {other} has {sorted(theirs)}")
    names = {name for row in theirs.values() for name in row if name.rpartition("/")[2] in METRICS}
    if not names:
        raise ValueError(f"{other} has no loss")
    for name in sorted(names):
        steps = [step for step in sorted(theirs) if name in theirs[step]]
        missing = [step for step in steps if name not in mine[step]]
        if missing:
            raise ValueError(f"{here} has no {name} in the steps {missing}")
        values = [(np.array([mine[step][name]]), np.array([theirs[step][name]])) for step in steps]
        yield of_steps(name, values)


def rows_of(run: Path) -> dict[int, dict[str, float]]:
    """The metrics of each training step of a run."""
    rows = [
        json.loads(line) for line in (folder_of(run) / "metrics.jsonl").read_text().splitlines()
    ]
    return {row["step"]: row for row in rows if row["step"] > 0}


def folder_of(run: Path) -> Path:
    """Where a run that was started once wrote: a folder that is named by its date."""
    (folder,) = run.glob("2*")
    return folder


def of_steps(quantity: str, steps: list[tuple[np.ndarray, np.ndarray]]) -> Difference:
    """Raises ValueError where the arrays of a step differ in shape."""
    largest_value = 0.0
    largest_difference = 0.0
    first = None
    for step, (mine, theirs) in enumerate(steps, 1):
        if mine.shape != theirs.shape:
            raise ValueError(
                f"{quantity} of step {step} has shape {mine.shape} here and {theirs.shape} there"
            )
        if mine.tobytes() == theirs.tobytes():
            continue
        first = first or step
        differences = np.abs(mine.astype(np.float64) - theirs.astype(np.float64))
        # Where one alone is no number they are infinitely far apart; -0.0 and 0.0 are apart, too.
        largest_difference = max(
            largest_difference, np.nan_to_num(differences, nan=HUGE).max(), TINY
        )
    for _, theirs in steps:
        largest_value = max(largest_value, float(np.abs(np.nan_to_num(theirs)).max(initial=0.0)))
    num_values = sum(theirs.size for _, theirs in steps)
    return Difference(
        quantity, num_values, float(largest_difference / (largest_value or 1.0)), first
    )


def compare_tensors(
    quantity: str, here: Path, other: Path, wanted: Callable[[str], bool]
) -> Difference:
    """The wanted tensors of all ranks' files in the checkpoints of two runs.

    Raises ValueError if files or tensors are missing.
    """
    folders = folder_of(here), folder_of(other)
    files = [
        sorted(str(file.relative_to(folder)) for file in folder.glob(CHECKPOINT_FILES))
        for folder in folders
    ]
    if files[0] != files[1] or not files[0]:
        raise ValueError(f"{here} has the files {files[0]}, {other} has {files[1]}")
    num_values = 0
    squared_difference = 0.0
    squared_norm = 0.0
    for file in files[0]:
        mine, theirs = (load_file(folder / file) for folder in folders)
        names = {name for name in mine.keys() | theirs.keys() if wanted(name)}
        missing = [name for name in names if name not in mine or name not in theirs]
        if missing:
            raise ValueError(f"{file} lacks the tensors {missing} on one side")
        for name in names:
            value = theirs[name].astype(np.float64)
            num_values += value.size
            squared_norm += float(np.square(value).sum())
            if mine[name].tobytes() != theirs[name].tobytes():
                squared_difference += max(float(np.square(mine[name] - value).sum()), TINY)
    if not num_values:
        raise ValueError(f"{here} has no {quantity}")
    return Difference(quantity, num_values, float(np.sqrt(squared_difference / squared_norm)))


def is_weight(name: str) -> bool:
    """Whether a tensor of a checkpoint is one of the model."""
    return name.startswith("model.")


def is_gradient(name: str) -> bool:
    """Whether a tensor of a checkpoint is, after one optimizer step, (1 - beta_1) times the clipped
    gradient."""
    return name.endswith(".exp_avg")
