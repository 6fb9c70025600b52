"""Finds the run that goes on before Ray starts: the newest unfinished one with the same numbers."""

import contextlib
import fcntl
import hashlib
import io
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TextIO

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter

from verl_like.protocol.files import open_regular, read_json, read_text
from verl_like.secret_values import hidden_as, masked, with_masked_urls
from verl_like.trainer.config.compose import default_tree
from verl_like.trainer.config.run_config import RunConfig
from verl_like.trainer.state import checkpoint
from verl_like.trainer.state.checkpoint import Checkpoint
from verl_like.trainer.state.run_state import IS_COMPLETE, LAST_ROW, RecordState

FINGERPRINTS = "inputs.json"
"""File of a run's folder with what `fingerprints_of` returned when it began."""
_FREE_KEYS = """
trainer.project_name trainer.experiment_name trainer.logger trainer.default_local_dir
trainer.call_timeout_s
trainer.nnodes trainer.n_gpus_per_node trainer.total_epochs trainer.total_training_steps
trainer.val_before_train trainer.test_freq trainer.save_freq trainer.log_val_generations
trainer.resume_* trainer.damaged_ckpt trainer.max_ckpt_to_keep trainer.best_ckpt_metric
resource_pool_spec* role_mapping* ray_kwargs.*
reward.num_workers reward.timeout_s data.*_files *.path *_path
*.fsdp_size *.strategy *.enable_gradient_checkpointing *_offload *.ulysses_sequence_parallel_size
*micro_batch_size_per_gpu *max_token_len_per_gpu *use_dynamic_bsz *.tensor_model_parallel_size
*.gpu_memory_utilization *.max_num_seqs *.max_num_batched_tokens *.enforce_eager *.free_cache_engine
*.weight_transport reward.max_memory_gb detached.max_attempts detached.max_restarts
""".split()  # noqa: SIM905  a list would have a line for each
"""Keys that a resumed run may change: names, paths, frequencies, placement, and in how many pieces
what is computed. The files behind a path are compared by their fingerprint."""

_MAX_FILE_BYTES = 1 << 20
_MAX_YAML_DEPTH = 50

_locks: dict[Path, TextIO] = {}
"""The last lock of each file that this process took."""


@dataclass(frozen=True)
class ResumedRun:
    """A run that goes on from a checkpoint."""

    run_dir: Path
    checkpoint: Checkpoint
    lock: TextIO
    """The lock of the folder, held."""


def find_run(
    config: RunConfig, state_schema: type[RecordState] = RecordState
) -> tuple[ResumedRun | None, list[str]]:
    """Returns the run that goes on, as `trainer.resume_mode` says, or None for a new one; and notes
    for the user. A run that only validates is new.

    `state_schema` is what the state of a checkpoint has to be.

    Raises:
        ValueError: the run is live, a checkpoint is damaged where that is refused, the run has
            other numbers or read other files, or the one that is named has no checkpoint or all
            steps.
    """
    trainer = config.trainer
    is_named = trainer.resume_mode == "resume_path"
    parent = Path(trainer.default_local_dir).expanduser().resolve()
    notes = remove_remains(parent)
    run_dirs = sorted((path for path in parent.glob("*") if not path.is_symlink()), reverse=True)
    if is_named:
        run_dirs = [Path(trainer.resume_from_path or "").expanduser().resolve()]
    for run_dir in run_dirs if config.may_continue_a_run else ():
        # A finished run is not hashed at every start.
        whole, _ = checkpoint.newest(run_dir, hashes=False)
        why_not = advice = ""
        if not checkpoint.steps(run_dir):
            why_not = f"has no checkpoint (global_step_N/{checkpoint.MANIFEST})"
            advice = "name a run that saved one"
        elif (
            whole
            and whole.step >= (steps := config.num_steps_of_run)
            and not lacks_validation(whole, steps)
        ):
            why_not = f"already has {whole.step} of {steps} steps"
            advice = "raise trainer.total_training_steps"
        elif differing := differing_keys(config, run_dir):
            why_not = f"has {'; '.join(differing)}"
            advice = "give what changes numbers as it was"
            notes += (
                [] if is_named else [f"{run_dir} is unfinished and is not continued: it {why_not}."]
            )
        if why_not and is_named:
            raise ValueError(
                f"trainer.resume_from_path={run_dir} {why_not}: {advice}, or "
                "trainer.resume_mode=disable."
            )
        if not why_not and (run := go_on(config, run_dir, notes, state_schema)):
            return run, notes
    return None, notes


def lacks_validation(newest: Checkpoint, num_steps: int) -> bool:
    """Returns whether the run ended between its last step and the record of its last validation."""
    state = newest.state
    return newest.step == num_steps and bool(state.get(LAST_ROW)) and not state.get(IS_COMPLETE)


def remove_remains(parent: Path) -> list[str]:
    """Removes what runs in a folder were saving when they were killed; returns a note for each
    checkpoint.

    A run is known to be dead by its lock, which nobody holds.
    """
    notes: list[str] = []
    locks = sorted(parent.glob("*/.lock"))
    run_dirs = [lock.parent for lock in locks if not lock.parent.is_symlink()]
    for run_dir in run_dirs:
        partials = sorted(run_dir.glob("global_step_*.partial"))
        if partials:
            # A run that is alive, or cannot be locked, is left alone.
            with contextlib.suppress(ValueError), lock_run(run_dir):
                checkpoint.remove_partial(run_dir)
            gone = [partial for partial in partials if not partial.exists()]
            notes += [f"Removed {partial}, which a killed run left." for partial in gone]
    return notes


def go_on(
    config: RunConfig,
    run_dir: Path,
    notes: list[str],
    state_schema: type[RecordState] = RecordState,
) -> ResumedRun | None:
    """Locks the run and reads its newest checkpoint; adds to `notes` what is damaged and what goes
    on.

    None where all checkpoints are damaged and that is not refused. Raises ValueError as `find_run`.
    """
    if changed := changed_inputs(read_fingerprints(run_dir), config):
        raise ValueError(
            f"{run_dir} read other files than there are now: {', '.join(changed)}. Restore them, "
            "or set trainer.resume_mode=disable for a new run."
        )
    lock = lock_run(run_dir)
    newest, damages = checkpoint.newest(run_dir, state_schema=state_schema)
    is_named = config.trainer.resume_mode == "resume_path"
    is_refused = damages and (
        config.trainer.damaged_ckpt == "refuse" or (is_named and newest is None)
    )
    if is_refused or newest is None:
        lock.close()
    if is_refused:
        raise ValueError(
            f"{' '.join(damages)} Remove it, or set trainer.damaged_ckpt=skip for the one before."
        )
    notes += [f"Skipped a damaged checkpoint: {damage}" for damage in damages]
    if newest is None:
        return None
    notes.append(f"Continuing {run_dir} after step {newest.step}.")
    num_steps = OmegaConf.select(read_config(run_dir), "trainer.total_training_steps")
    if num_steps != config.num_steps_of_run:
        notes.append(
            f"It was to have {num_steps} training steps: a schedule of the learning rate may now "
            "be another."
        )
    return ResumedRun(run_dir, newest, lock)


def differing_keys(config: RunConfig, run_dir: Path) -> list[str]:
    """`key=there (here: value)` of each key that changes numbers and differs from the run's
    configuration.

    A key that the run did not have, as of an earlier version, has its default there, but not those
    of a whole block, which is another trainer's.
    """
    try:
        read_fingerprints(run_dir)
        saved = read_config(run_dir)
        rename_keys(saved, type(config).replaced_keys)
        merged = OmegaConf.merge(default_tree(type(config)), saved)
        tree = OmegaConf.to_container(merged, resolve=True)
    except (OSError, ValueError, OmegaConfBaseException) as error:
        return [f"no config.yaml and {FINGERPRINTS} that can be read ({error})"]
    # The secrets are those of the new command, and are not compared.
    tree = hidden_as(config.shown(), masked(tree))
    values = settings_of(tree)
    there = {key: value for key, value in values if key.split(".")[0] in saved}
    here = dict(settings_of(hidden_as(tree, config.shown())))
    differing = []
    for key in sorted({*there, *here}):
        is_free = any(fnmatchcase(key, free) for free in _FREE_KEYS)
        if there.get(key) != here.get(key) and not is_free:
            differing.append(f"{key}={there.get(key)} (here: {here.get(key)})")
    return differing


def rename_keys(saved: DictConfig, replaced: Mapping[str, str]) -> None:
    """Gives the keys of a run of an earlier version, some of which have successors, their names of
    today."""
    for key, successor in replaced.items():
        section, _, name = key.rpartition(".")
        if section in saved and name in saved[section]:
            OmegaConf.update(saved, successor, saved[section].pop(name), force_add=True)


def read_fingerprints(run_dir: Path) -> dict[str, str]:
    """What `fingerprints_of` returned when the run began. Raises OSError or ValueError for another
    file."""
    values = read_json(run_dir / FINGERPRINTS, _MAX_FILE_BYTES)
    return TypeAdapter(dict[str, str]).validate_python(values, strict=True)


def read_config(run_dir: Path) -> DictConfig:
    """The run's `config.yaml`. Raises OSError or ValueError for another file."""
    path = run_dir / "config.yaml"
    text = read_text(path, _MAX_FILE_BYTES)
    try:
        _check_yaml(text)
        config = OmegaConf.load(io.StringIO(text))
    except (yaml.YAMLError, OSError, ValueError) as error:
        raise ValueError(f"{path} is not YAML that a run writes ({error})") from error
    if not isinstance(config, DictConfig) or not config:
        raise ValueError(f"{path} is empty, or is no mapping")
    return config


def _check_yaml(text: str) -> None:
    """Raises ValueError for YAML that would fill the memory or the stack when it is loaded."""
    depth = 0
    for event in yaml.parse(text):
        if isinstance(event, yaml.AliasEvent):  # OmegaConf copies what it stands for
            raise ValueError("it has an alias")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > _MAX_YAML_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_YAML_DEPTH} levels deep")


def lock_run(run_dir: Path) -> TextIO:
    """Locks a run's folder until the process ends. Raises ValueError, naming the process, if a live
    run holds it."""
    path = run_dir / ".lock"
    # A second lock of a process would replace its first.
    if path in _locks and not _locks[path].closed:
        raise ValueError(
            f"{run_dir} is being written by this process: wait for the end of that run."
        )
    try:
        lock = open(path, "a+")  # noqa: SIM115  held as long as the run
        # flock would not do: a fork of this process must not hold the lock.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"{run_dir} is being written by another run ({path.read_text().strip()}): wait for "
            "its end, or set trainer.resume_mode=disable for a run of its own."
        ) from None
    except OSError as error:
        raise ValueError(
            f"{run_dir} cannot be locked ({error}): give another trainer.default_local_dir."
        ) from error
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    _locks[path] = lock
    return lock


def fingerprints_of(config: RunConfig) -> dict[str, str]:
    """A hash of what is behind each path of the configuration.

    A file counts whole; of those in a folder, as of a model, names, sizes, and first and last MiB;
    and by its name what is not on the disk: a model of the hub, a module, a URL.
    """
    fingerprints = {}
    for key, value in settings_of(config.model_dump(mode="json")):
        paths = [value] if isinstance(value, str) else value
        if (
            not paths
            or not key.endswith((".path", "_path", "_files"))
            or key.startswith("trainer.")
        ):
            continue
        digest = hashlib.sha256()
        for name in paths:
            path = Path(name).expanduser()
            if path.is_file():
                with open_regular(path) as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            elif not path.is_dir():
                digest.update(with_masked_urls(name).encode())
            for part in sorted(path.glob("*.*")):
                size = part.stat().st_size
                digest.update(f"{part.name} {size}".encode())
                if part.is_file():
                    with open(part, "rb") as file:
                        digest.update(file.read(1 << 20))
                        file.seek(max(0, size - (1 << 20)))
                        digest.update(file.read())
        fingerprints[key] = digest.hexdigest()
    return fingerprints


def changed_inputs(saved: Mapping[str, str], config: RunConfig) -> list[str]:
    """The keys of paths behind which there is something else now than what `saved` are the
    fingerprints of."""
    here = fingerprints_of(config)
    return [key for key in sorted({*saved, *here}) if saved.get(key) != here.get(key)]


def settings_of(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields key and value of every setting.

    A list is a value, and so are the reward's arguments, whose names mean nothing.
    """
    if not isinstance(tree, dict) or not tree or prefix.endswith(".reward_kwargs"):
        yield prefix, tree
        return
    for name, value in tree.items():
        yield from settings_of(value, f"{prefix}.{name}" if prefix else str(name))
