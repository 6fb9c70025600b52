"""Checkpoints of a run: a folder is there complete with its manifest, or not at all, and the newest is found again.

`global_step_N/` holds the training state of the roles, which their workers write, and `manifest.json`:

    {"format": 1, "step": N, "created": "<UTC>", "state": {...}, "files": {"actor/...": {"bytes": ..., "sha256": ...}}}

Nothing in a checkpoint is a pickle: tensors are safetensors, the rest is JSON.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose files are as they were written."""

    folder: Path
    step: int
    state: dict[str, Any]
    """What the trainer and the record of its run keep beside the models; JSON values."""


class DamagedCheckpoint(ValueError):
    """A checkpoint that is not as it was written; the message names the file."""


def folder_of_step(run_dir: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return run_dir / f"global_step_{step}"


def begin(run_dir: Path, step: int) -> Path:
    """An empty folder for the files of a checkpoint, until `commit` gives it its name."""
    partial = run_dir / f"global_step_{step}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    return partial


def commit(partial: Path, step: int, state: dict[str, Any]) -> Checkpoint:
    """Makes what is in `partial` the checkpoint of the step, on the disk before it has its name.

    One that is there already is replaced. Raises OSError, and leaves earlier checkpoints as they are.
    """
    files = {str(path.relative_to(partial)): _digest(path, sync=True) for path in _files(partial)}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = {"format": FORMAT, "step": step, "created": created, "state": state, "files": files}
    for path in filter(Path.is_dir, partial.rglob("*")):
        _sync_folder(path)
    write(partial / MANIFEST, json.dumps(manifest, indent=1))
    folder = folder_of_step(partial.parent, step)
    if folder.exists():
        remove(folder)
    os.rename(partial, folder)
    _sync_folder(folder.parent)
    _sync_folder(folder.parent.parent)  # the run's own entry
    return Checkpoint(folder, step, state)


def write(path: Path, text: str) -> None:
    """Writes a file that is there as a whole or as it was, also after a loss of power."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    _sync_folder(path.parent)


def read(folder: Path, *, hashes: bool = True) -> Checkpoint:
    """Reads and checks a checkpoint, without `hashes` by the sizes of its files alone.

    Raises DamagedCheckpoint, naming the first file that is not as it was written.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        version, step, state, files = (manifest[name] for name in ("format", "step", "state", "files"))
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{folder} has no {MANIFEST}: it was not written to its end.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{folder / MANIFEST} cannot be read ({error}).") from error
    if version != FORMAT:
        raise DamagedCheckpoint(f"{folder / MANIFEST} has format {version}; this version reads format {FORMAT}.")
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{path} is missing.")
        if (found := _digest(path) if hashes else expected | {"bytes": path.stat().st_size}) != expected:
            raise DamagedCheckpoint(
                f"{path} is not as it was written: {found['bytes']} bytes with sha256 {found['sha256'][:12]}..., the "
                f"manifest says {expected['bytes']} with {expected['sha256'][:12]}..."
            )
    for path in folder.rglob("*.safetensors"):  # a load would take it in
        if str(path.relative_to(folder)) not in files:
            raise DamagedCheckpoint(f"{path} is not in the manifest.")
    return Checkpoint(folder, step, state)


def newest(run_dir: Path, *, hashes: bool = True) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint of a run that is as it was written, by `read`, and what is wrong with newer ones."""
    damages: list[str] = []
    for step in reversed(steps(run_dir)):
        try:
            return read(folder_of_step(run_dir, step), hashes=hashes), damages
        except DamagedCheckpoint as damage:
            damages.append(str(damage))
    return None, damages


def steps(run_dir: Path) -> list[int]:
    """The steps of a run that have a checkpoint with a manifest, rising."""
    return sorted(int(path.parent.name.rpartition("_")[2]) for path in run_dir.glob(f"global_step_*/{MANIFEST}")
                  if path.parent.name.rpartition("_")[2].isdecimal())  # fmt: skip


def keep(run_dir: Path, num_newest: int, others: Iterable[int] = ()) -> None:
    """Removes all checkpoints but the newest ones and those of the steps `others`; warns of one that stays."""
    kept = {*steps(run_dir)[-num_newest:], *others}
    for step in steps(run_dir):
        if step not in kept:
            try:
                remove(folder_of_step(run_dir, step))
            except OSError as error:
                logger.warning("An old checkpoint is not removed: %s", error)


def remove(folder: Path) -> None:
    """Removes a checkpoint, which loses its name first: `remove_partial` takes what a killed run leaves of it."""
    partial = folder.with_name(f"{folder.name}.old.partial")
    shutil.rmtree(partial, ignore_errors=True)
    os.rename(folder, partial)
    shutil.rmtree(partial)


def remove_partial(run_dir: Path) -> None:
    """Removes what saves and removals of a run left that did not come to their end."""
    for partial in run_dir.glob("global_step_*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def set_aside(run_dir: Path, after: int) -> None:
    """Renames the checkpoints after a step to `global_step_N.damaged`, so that they are not counted."""
    for folder in [folder_of_step(run_dir, step) for step in steps(run_dir) if step > after]:
        damaged = folder.with_name(f"{folder.name}.damaged")
        shutil.rmtree(damaged, ignore_errors=True)
        os.rename(folder, damaged)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _digest(path: Path, *, sync: bool = False) -> dict[str, Any]:
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
