"""Which run goes on: the newest unfinished one with the same numbers, found before Ray starts."""

import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TextIO

import yaml

from verl_like.trainer import checkpoint
from verl_like.trainer.checkpoint import Checkpoint
from verl_like.trainer.config.run_config import RunConfig

FINGERPRINTS = "inputs.json"
"""File of a run's folder with what `fingerprints_of` returned when it began."""
_FREE_KEYS = """
trainer.project_name trainer.experiment_name trainer.logger trainer.default_local_dir trainer.call_timeout_s
trainer.nnodes trainer.n_gpus_per_node trainer.total_epochs trainer.total_training_steps
trainer.val_before_train trainer.test_freq trainer.save_freq trainer.log_val_generations
trainer.resume_* trainer.damaged_ckpt trainer.max_ckpt_to_keep trainer.best_ckpt_metric
resource_pool_spec* role_mapping* ray_kwargs.* reward.num_workers reward.timeout_s data.*_files *.path *_path
*.fsdp_size *.reshard_after_forward *.enable_gradient_checkpointing *_offload *.ulysses_sequence_parallel_size
*_micro_batch_size_per_gpu *_max_token_len_per_gpu *.use_dynamic_bsz *.tensor_model_parallel_size
*.gpu_memory_utilization *.max_num_seqs *.max_num_batched_tokens *.enforce_eager *.free_cache_engine
*.weight_transport
""".split()  # noqa: SIM905  a list would have a line for each
"""Keys that a resumed run may change: names, paths, frequencies, placement, and in how many pieces what is computed.
The files behind a path are compared by their fingerprint."""


@dataclass(frozen=True)
class ResumedRun:
    """A run that goes on from a checkpoint."""

    run_dir: Path
    checkpoint: Checkpoint
    lock: TextIO
    """The lock of the folder, held."""


def find_run(config: RunConfig) -> tuple[ResumedRun | None, list[str]]:
    """The run that goes on, as `trainer.resume_mode` says, or None for a new one; and notes for the user.

    Raises:
        ValueError: the run is live, a checkpoint is damaged where that is refused, the run has other numbers or read
            other files, or no checkpoint is where one is named.
    """
    trainer = config.trainer
    notes: list[str] = []
    if trainer.resume_mode == "resume_path":
        run_dir = Path(trainer.resume_from_path or "").expanduser().resolve()
        if not checkpoint.steps(run_dir):
            raise ValueError(
                f"trainer.resume_from_path={run_dir} has no checkpoint (global_step_N/{checkpoint.MANIFEST}): give the "
                "folder of a run that saved one."
            )
        if differing := differing_keys(config, run_dir):
            raise ValueError(
                f"{run_dir} has other settings, which would change its numbers: {'; '.join(differing)}. Give them as "
                "they were, or trainer.resume_mode=disable for a new run."
            )
        return go_on(config, run_dir, notes), notes
    if trainer.resume_mode == "auto":
        parent = Path(trainer.default_local_dir).expanduser().resolve()
        for run_dir in sorted((path for path in parent.glob("*") if not path.is_symlink()), reverse=True):
            steps = checkpoint.steps(run_dir)
            if not steps or steps[-1] >= config.num_steps_of_run:
                continue
            if differing := differing_keys(config, run_dir):
                notes.append(f"{run_dir} is unfinished and is not continued: it has {'; '.join(differing)}.")
                continue
            if run := go_on(config, run_dir, notes):
                return run, notes
    return None, notes


def go_on(config: RunConfig, run_dir: Path, notes: list[str]) -> ResumedRun | None:
    """Locks the run and reads its newest checkpoint; adds to `notes` what is damaged and what goes on.

    None where all checkpoints are damaged and that is not refused. Raises ValueError as `find_run`.
    """
    lock = lock_run(run_dir)
    newest, damages = checkpoint.newest(run_dir)
    if damages and config.trainer.damaged_ckpt == "refuse":
        raise ValueError(f"{' '.join(damages)} Remove it, or set trainer.damaged_ckpt=skip for the one before.")
    notes += [f"Skipped a damaged checkpoint: {damage}" for damage in damages]
    if newest is None:
        lock.close()
        return None
    saved = json.loads((run_dir / FINGERPRINTS).read_text())
    if changed := [key for key, value in fingerprints_of(config).items() if saved.get(key) != value]:
        raise ValueError(
            f"{run_dir} read other files than there are now: {', '.join(changed)}. Restore them, or set "
            "trainer.resume_mode=disable for a new run."
        )
    notes.append(f"Continuing {run_dir} after step {newest.step}.")
    return ResumedRun(run_dir, newest, lock)


def differing_keys(config: RunConfig, run_dir: Path) -> list[str]:
    """`key=there (here: value)` of each key that changes numbers and differs from the run's configuration."""
    there = dict(_values(yaml.safe_load((run_dir / "config.yaml").read_text())))
    here = dict(_values(config.model_dump(mode="json")))
    return [
        f"{key}={there.get(key)} (here: {here.get(key)})"
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key) and not any(fnmatchcase(key, free) for free in _FREE_KEYS)
    ]


def lock_run(run_dir: Path) -> TextIO:
    """Locks a run's folder until the process ends. Raises ValueError, naming the process, if a live run holds it."""
    lock = open(run_dir / ".lock", "a+")  # noqa: SIM115  held as long as the run
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock: a fork of this process must not hold it
    except (BlockingIOError, PermissionError):
        lock.seek(0)
        raise ValueError(
            f"{run_dir} is being written by another run ({lock.read().strip()}): wait for its end, or set "
            "trainer.resume_mode=disable for a run of its own."
        ) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def fingerprints_of(config: RunConfig) -> dict[str, str]:
    """A hash of the files that each path of the configuration names, of large ones their sizes and first MiB."""
    fingerprints = {}
    for key, value in _values(config.model_dump(mode="json")):
        paths = [value] if isinstance(value, str) else value
        if not paths or not key.endswith((".path", "_path", "_files")) or key.startswith("trainer."):
            continue
        digest = hashlib.sha256()
        for path in map(Path, map(os.path.expanduser, paths)):
            for file in sorted(path.glob("*.*")) if path.is_dir() else [path]:
                digest.update(f"{file.name} {file.stat().st_size if file.is_file() else None}".encode())
                if file.is_file():
                    with open(file, "rb") as opened:
                        digest.update(opened.read(1 << 20))
        fingerprints[key] = digest.hexdigest()
    return fingerprints


def _values(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of every setting; a list is a value."""
    if not isinstance(tree, dict) or not tree:
        yield prefix, tree
        return
    for name, value in tree.items():
        yield from _values(value, f"{prefix}.{name}" if prefix else str(name))
