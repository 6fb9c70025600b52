"""Writes and finds the checkpoints of a run. The folder of a checkpoint is complete, with its
manifest, or does not exist.

`global_step_N/` has the training state of the roles, which their workers write while training goes
on, and `manifest.json`:

    {"format": 2, "step": N, "created": "<UTC>", "state": {...}, "files": {"actor/...": {"bytes":
     ..., "sha256": ...}}, "sha256": <of the JSON of the rest>}

Nothing in a checkpoint is a pickle: tensors are safetensors, the rest is JSON.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, JsonValue, ValidationError

from verl_like.files import file_digest, read_json
from verl_like.protocol import Future
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.state.run_state import StateModel

logger = logging.getLogger(__name__)

FORMAT = 2
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 26

Digests = Mapping[str, dict[str, Any]]
"""The `file_digest` of each file of a checkpoint, by its path in the checkpoint's folder."""


def _inside(name: str) -> str:
    """Returns the name of a file. Raises ValueError unless it is below the checkpoint's folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError("expected a path below the checkpoint's folder")
    return name


class FileDigest(StateModel):
    """The size and the hash of a file, as `file_digest` returns them."""

    bytes: int
    sha256: str


class Manifest(StateModel):
    """The content of `manifest.json` without its own hash."""

    format: int
    step: int
    created: str
    state: dict[str, JsonValue]
    files: dict[Annotated[str, AfterValidator(_inside)], FileDigest]


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. Its files are as they were written."""

    folder: Path
    step: int
    state: dict[str, Any]
    """What the trainer and the record of its run save beside the models, as JSON values."""


class DamagedCheckpoint(ValueError):
    """A checkpoint is not as it was written. The message names the file."""


def folder_of_step(run_dir: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return run_dir / f"global_step_{step}"


def partial_of_step(run_dir: Path, step: int) -> Path:
    """The folder of a step's checkpoint until `commit` renames it to `folder_of_step`."""
    return run_dir / f"global_step_{step}.partial"


def begin(run_dir: Path, step: int) -> Path:
    """Makes the empty folder `partial_of_step` and returns it."""
    partial = partial_of_step(run_dir, step)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    return partial


def save_training(groups: Mapping[str, WorkerGroup], folder: Path) -> None:
    """Has every rank copy what it needs to continue the training of its model.

    Then each rank writes its part to `folder/<role>/checkpoint` while training goes on. A
    `PendingCheckpoint` knows when all have done so.
    """
    futures = []
    for role, group in groups.items():
        path = str(folder / role / "checkpoint")
        future = group.save_checkpoint.remote(path, wait=False)
        futures.append(future)
    for future in futures:
        future.get()


def save_models(groups: Mapping[str, WorkerGroup], folder: Path) -> None:
    """Has rank 0 of each role gather its model and write it in Hugging Face format."""
    for role, group in groups.items():
        group.save_hf(str(folder / role / "huggingface"))


@dataclass
class PendingCheckpoint:
    """A checkpoint whose files workers are writing."""

    partial: Path
    step: int
    state: dict[str, Any]
    groups: Mapping[str, WorkerGroup]
    written: Digests = field(default_factory=dict)
    """The files that workers of other drivers have written."""
    _asked: dict[str, Future[list[dict[str, Any] | None]]] = field(default_factory=dict)
    """The question to the ranks of each group, whether they have written their files."""

    def files(self, wait: bool, timeout_s: float | None = None) -> Digests | None:
        """Returns the files of the workers when all of them are on the disk.

        With `wait` it waits for that. Without, it asks the workers, and returns None unless they
        have answered that all files are written. Raises the WorkerError of a rank that cannot
        write, or CallTimeout.
        """
        if wait or not self._asked:
            groups = self.groups.items()
            # Only if all were asked
            self._asked = {role: group.save_result.remote(wait) for role, group in groups}
        futures = self._asked.values()
        if not wait and not all(future.done() for future in futures):
            return None
        answers = {role: future.get(timeout_s) for role, future in self._asked.items()}
        self._asked = {}
        files = dict(self.written)
        for role, files_of_ranks in answers.items():
            for files_of_rank in files_of_ranks:
                if files_of_rank is None:
                    return None
                for name, digest in files_of_rank.items():
                    files[f"{role}/checkpoint/{name}"] = digest
        return files


def commit(partial: Path, step: int, state: dict[str, Any], written: Digests) -> None:
    """Makes the folder `partial` the checkpoint of the step. All its files are on the disk before
    it gets its name.

    `written` has the files that are on the disk already. An earlier checkpoint of the step is
    replaced. Raises OSError, which leaves earlier checkpoints as they are.
    """
    names = {str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file()}
    missing = sorted(written.keys() - names)
    if missing:
        raise OSError(
            f"a worker wrote {partial / missing[0]}, which is not seen from here: all nodes have "
            "to see trainer.default_local_dir."
        )
    files = {}
    for name in sorted(names):
        files[name] = written.get(name) or file_digest(partial / name, sync=True)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = {"format": FORMAT, "step": step, "created": created, "state": state, "files": files}
    for path in partial.rglob("*"):
        if path.is_dir():
            _sync_folder(path)
    _write_manifest(partial, manifest)
    folder = folder_of_step(partial.parent, step)
    if folder.exists():
        remove(folder)
    os.rename(partial, folder)
    _sync_folder(folder.parent)
    _sync_folder(folder.parent.parent)  # it has the entry of the run's folder


def renew(folder: Path, changes: dict[str, Any]) -> None:
    """Changes keys in the state of a complete checkpoint. At any moment it has either the earlier
    state or the new one. Raises OSError."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["sha256"]
    manifest["state"] |= changes
    _write_manifest(folder, manifest)


def write(path: Path, text: str) -> None:
    """Writes a file so that at any moment it has either its earlier content or the new one, even if
    the power fails."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    _sync_folder(path.parent)


def read(
    folder: Path, *, hashes: bool = True, state_schema: type[BaseModel] | None = None
) -> Checkpoint:
    """Reads and checks a checkpoint. Without `hashes` it checks only the sizes of the files.

    `state_schema` is what the state has to be, if the state will be used. Raises DamagedCheckpoint,
    which names the first file that is not as it was written.
    """
    path = folder / MANIFEST
    manifest = _read_manifest(path)
    own_format = manifest.get("format")
    if own_format != FORMAT:
        raise DamagedCheckpoint(
            f"{path} has format {own_format}; this version reads format {FORMAT}."
        )
    is_whole = manifest.pop("sha256", None) == _digest(manifest)
    own_folder = folder_of_step(folder.parent, manifest.get("step", -1))
    if not is_whole or folder.name != own_folder.name:
        raise DamagedCheckpoint(f"{path} is not as it was written, or of another folder.")
    _require(Manifest, manifest, path)
    if state_schema:
        _require(state_schema, manifest["state"], path)
    files = manifest["files"]
    for name, expected in files.items():
        path = folder / name
        try:
            if hashes:
                found = file_digest(path)
            else:
                found = expected | {"bytes": path.stat().st_size}
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read ({error}).") from error
        if found != expected:
            raise DamagedCheckpoint(
                f"{path} is not as it was written: {found['bytes']} bytes with sha256 "
                f"{found['sha256'][:12]}..., the manifest says {expected['bytes']} with "
                f"{expected['sha256'][:12]}..."
            )
    # Loading would read any such file.
    for path in folder.rglob("*.safetensors"):
        name = str(path.relative_to(folder))
        if name not in files:
            raise DamagedCheckpoint(f"{path} is not in the manifest.")
    return Checkpoint(folder, manifest["step"], manifest["state"])


def _read_manifest(path: Path) -> dict[str, Any]:
    """The JSON object in a manifest. Raises DamagedCheckpoint if there is none."""
    try:
        manifest = read_json(path, MAX_MANIFEST_BYTES)
        if not isinstance(manifest, dict):
            raise ValueError(f"it is a {type(manifest).__name__} in JSON, and not an object")
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error}).") from error
    return manifest


def _require(schema: type[BaseModel], values: Any, path: Path) -> None:
    """Raises DamagedCheckpoint, which names the first wrong key, unless the values of the manifest
    fit the schema."""
    try:
        schema.model_validate_json(json.dumps(values))
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        key = ".".join(map(str, problem["loc"]))
        raise DamagedCheckpoint(
            f"{path} is not what a run of this kind writes: {key}: {problem['msg']}."
        ) from error


def newest(
    run_dir: Path, *, hashes: bool = True, state_schema: type[BaseModel] | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """Returns the newest checkpoint of a run that `read` accepts, and what is wrong with newer
    ones."""
    damages: list[str] = []
    for step in reversed(steps(run_dir)):
        folder = folder_of_step(run_dir, step)
        try:
            return read(folder, hashes=hashes, state_schema=state_schema), damages
        except DamagedCheckpoint as damage:
            damages.append(str(damage))
    return None, damages


def steps(run_dir: Path) -> list[int]:
    """The steps of a run that have a checkpoint with a manifest, in ascending order."""
    found = []
    for path in run_dir.glob(f"global_step_*/{MANIFEST}"):
        folder = path.parent.name
        _, _, number = folder.rpartition("_")
        if number.isdecimal():
            found.append(int(number))
    return sorted(found)


def keep(run_dir: Path, num_newest: int, others: Iterable[int] = ()) -> None:
    """Removes all checkpoints but the newest ones and those of the steps `others`. If one cannot be
    removed, a warning names it."""
    all_steps = steps(run_dir)
    kept = {*all_steps[-num_newest:], *others}
    for step in all_steps:
        if step in kept:
            continue
        folder = folder_of_step(run_dir, step)
        try:
            remove(folder)
        except OSError as error:
            logger.warning("An old checkpoint is not removed: %s", error)


def remove(folder: Path) -> None:
    """Removes a checkpoint. It is renamed first, so that `remove_partial` removes the rest of it if
    the run is killed meanwhile."""
    partial = folder.with_name(f"{folder.name}.old.partial")
    shutil.rmtree(partial, ignore_errors=True)
    os.rename(folder, partial)
    shutil.rmtree(partial)


def remove_partial(run_dir: Path) -> None:
    """Removes what is left of saves and removals that were interrupted."""
    for partial in run_dir.glob("global_step_*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def set_aside(run_dir: Path, after: int) -> None:
    """Renames the checkpoints of later steps to `global_step_N.damaged`, so that they are not used
    any more."""
    for step in steps(run_dir):
        if step <= after:
            continue
        folder = folder_of_step(run_dir, step)
        damaged = folder.with_name(f"{folder.name}.damaged")
        shutil.rmtree(damaged, ignore_errors=True)
        os.rename(folder, damaged)


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    digest = _digest(manifest)
    with_hash = manifest | {"sha256": digest}
    text = json.dumps(with_hash, indent=1)
    write(folder / MANIFEST, text)


def _digest(manifest: dict[str, Any]) -> str:
    """The hash of a manifest that does not have it yet."""
    text = json.dumps(manifest)
    return hashlib.sha256(text.encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    """Has the entries of a folder written to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
