"""Finds the run that is continued, before Ray starts. It is the newest unfinished one that computes
the same numbers."""

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

from verl_like.files import open_regular, read_json, read_text
from verl_like.secret_values import hidden_as, masked, with_masked_urls
from verl_like.trainer.config.keys import default_tree
from verl_like.trainer.config.run_config import RunConfig
from verl_like.trainer.state import checkpoint
from verl_like.trainer.state.checkpoint import Checkpoint
from verl_like.trainer.state.run_state import IS_COMPLETE, LAST_ROW, RecordState

FINGERPRINTS = "inputs.json"
"""The file of a run's folder with what `fingerprints_of` returned when the run began."""
_FREE_KEYS = """
trainer.project_name trainer.experiment_name trainer.logger trainer.default_local_dir
trainer.call_timeout_s
trainer.nnodes trainer.n_gpus_per_node trainer.total_epochs trainer.total_training_steps
trainer.val_before_train trainer.test_freq trainer.save_freq trainer.log_val_generations
trainer.resume_* trainer.damaged_ckpt trainer.max_ckpt_to_keep trainer.best_ckpt_metric
resource_pool_spec* role_mapping* ray_kwargs.*
reward.num_workers reward.timeout_s data.*_files *.path *_path
*.fsdp_size *.expert_parallel_size *.strategy *.enable_gradient_checkpointing *_offload
*.ulysses_sequence_parallel_size
*micro_batch_size_per_gpu *max_token_len_per_gpu *use_dynamic_bsz *.tensor_model_parallel_size
*.gpu_memory_utilization *.max_num_seqs *.max_num_batched_tokens *.enforce_eager *.free_cache_engine
*.weight_transport reward.max_memory_gb detached.max_attempts detached.max_restarts
""".split()  # noqa: SIM905  a list would have a line for each
"""The keys that a resumed run may change: names, paths, frequencies, placement, and how computing
is divided into pieces. Files are compared by their fingerprints, whatever their paths are."""

_MAX_FILE_BYTES = 1 << 20
_MAX_YAML_DEPTH = 50

_locks: dict[Path, TextIO] = {}
"""The last lock that this process took of each file."""


@dataclass(frozen=True)
class ResumedRun:
    """A run that is continued from a checkpoint."""

    run_dir: Path
    checkpoint: Checkpoint
    lock: TextIO
    """The lock of the folder, which this process holds."""


def find_run(
    config: RunConfig, state_schema: type[RecordState] = RecordState
) -> tuple[ResumedRun | None, list[str]]:
    """Returns the run to continue, as `trainer.resume_mode` says, or None for a new run. A run that
    only validates is new. The second result has notes for the user. `state_schema` is what the
    state of a checkpoint has to be.

    Raises:
        ValueError: the run is live, a checkpoint is damaged and that is refused, or the run read
            other files. Also if `trainer.resume_from_path` names a run that has no checkpoint, has
            done all steps, or computes other numbers.
    """
    trainer = config.trainer
    parent = Path(trainer.default_local_dir).expanduser().resolve()
    notes = remove_remains(parent)
    only_validates = getattr(trainer, "val_only", False)
    if only_validates or trainer.resume_mode == "disable":
        return None, notes
    is_named = trainer.resume_mode == "resume_path"
    if is_named:
        run_dirs = [Path(trainer.resume_from_path or "").expanduser().resolve()]
    else:
        run_dirs = [path for path in sorted(parent.glob("*")) if not path.is_symlink()]
    for run_dir in reversed(run_dirs):
        obstacle, advice = why_not_continued(config, run_dir)
        differing = []
        if not obstacle:
            differing = differing_keys(config, run_dir)
        if differing:
            obstacle = f"has {'; '.join(differing)}"
            advice = "give what changes numbers as it was"
        if obstacle and is_named:
            raise ValueError(
                f"trainer.resume_from_path={run_dir} {obstacle}: {advice}, or "
                "trainer.resume_mode=disable."
            )
        if differing:
            notes.append(f"{run_dir} is unfinished and is not continued: it {obstacle}.")
        if obstacle:
            continue
        if run := go_on(config, run_dir, notes, state_schema):
            return run, notes
    return None, notes


def why_not_continued(config: RunConfig, run_dir: Path) -> tuple[str, str]:
    """Says why there is nothing left to continue of a run, and what to do about it. Both texts are
    "" for an unfinished run."""
    if not checkpoint.steps(run_dir):
        obstacle = f"has no checkpoint (global_step_N/{checkpoint.MANIFEST})"
        return obstacle, "name a run that saved one"
    # Only the sizes of files are checked, because a finished run is not read at every start.
    newest, _ = checkpoint.newest(run_dir, hashes=False)
    steps = config.num_steps_of_run
    if newest and newest.step >= steps and not lacks_validation(newest, steps):
        obstacle = f"already has {newest.step} of {steps} steps"
        return obstacle, "raise trainer.total_training_steps"
    return "", ""


def lacks_validation(newest: Checkpoint, num_steps: int) -> bool:
    """Returns whether the run ended between its last step and the record of its last validation."""
    state = newest.state
    has_row = bool(state.get(LAST_ROW))
    return newest.step == num_steps and has_row and not state.get(IS_COMPLETE)


def remove_remains(parent: Path) -> list[str]:
    """Removes the checkpoints that runs in a folder were writing when they were killed. Returns a
    note for each of them.

    A run is dead if nobody holds its lock.
    """
    notes = []
    for lock in sorted(parent.glob("*/.lock")):
        run_dir = lock.parent
        if run_dir.is_symlink():
            continue
        partials = sorted(run_dir.glob("global_step_*.partial"))
        if partials:
            # A run that is alive, or cannot be locked, is left alone.
            with contextlib.suppress(ValueError), lock_run(run_dir):
                checkpoint.remove_partial(run_dir)
        for partial in partials:
            if not partial.exists():
                notes.append(f"Removed {partial}, which a killed run left.")
    return notes


def go_on(
    config: RunConfig, run_dir: Path, notes: list[str], state_schema: type[RecordState]
) -> ResumedRun | None:
    """Locks a run and reads its newest checkpoint. Adds to `notes` which checkpoints are damaged,
    and from where the run goes on.

    Returns None if all checkpoints are damaged and that is not refused. Raises ValueError as
    `find_run` does.
    """
    if changed := changed_inputs(read_fingerprints(run_dir), config):
        raise ValueError(
            f"{run_dir} read other files than there are now: {', '.join(changed)}. Restore them, "
            "or set trainer.resume_mode=disable for a new run."
        )
    lock = lock_run(run_dir)
    newest, damages = checkpoint.newest(run_dir, state_schema=state_schema)
    is_named = config.trainer.resume_mode == "resume_path"
    lacks_checkpoint = is_named and newest is None
    is_refused = damages and (config.trainer.damaged_ckpt == "refuse" or lacks_checkpoint)
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
    """Returns `key=there (here: value)` for each key that changes numbers and differs from the
    run's configuration.

    A run of an earlier version may lack keys, which then have their defaults there. Keys of a whole
    block that the run lacks have none, because the run is another trainer's.
    """
    try:
        read_fingerprints(run_dir)
        saved = read_config(run_dir)
        rename_keys(saved, type(config).replaced_keys)
        defaults = default_tree(type(config))
        merged = OmegaConf.merge(defaults, saved)
        tree = OmegaConf.to_container(merged, resolve=True)
    except (OSError, ValueError, OmegaConfBaseException) as error:
        return [f"no config.yaml and {FINGERPRINTS} that can be read ({error})"]
    # Secrets are not compared: the run has only their masks, and those of the command are used.
    tree = hidden_as(config.shown(), masked(tree))
    there = {}
    for key, value in settings_of(tree):
        section, _, _ = key.partition(".")
        if section in saved:
            there[key] = value
    without_secrets = hidden_as(tree, config.shown())
    here = dict(settings_of(without_secrets))
    differing = []
    for key in sorted({*there, *here}):
        is_free = any(fnmatchcase(key, free) for free in _FREE_KEYS)
        value = there.get(key)
        value_here = here.get(key)
        if value != value_here and not is_free:
            differing.append(f"{key}={value} (here: {value_here})")
    return differing


def rename_keys(saved: DictConfig, replaced: Mapping[str, str]) -> None:
    """Renames the keys of a run of an earlier version that have a successor. `replaced` maps such
    keys to their successors."""
    for key, successor in replaced.items():
        section, _, name = key.rpartition(".")
        if section in saved and name in saved[section]:
            value = saved[section].pop(name)
            OmegaConf.update(saved, successor, value, force_add=True)


def read_fingerprints(run_dir: Path) -> dict[str, str]:
    """Reads what `fingerprints_of` returned when the run began. Raises OSError or ValueError if the
    file cannot be read or is another one."""
    values = read_json(run_dir / FINGERPRINTS, _MAX_FILE_BYTES)
    schema = TypeAdapter(dict[str, str])
    return schema.validate_python(values, strict=True)


def read_config(run_dir: Path) -> DictConfig:
    """Reads the run's `config.yaml`. Raises OSError or ValueError if the file cannot be read, or is
    one that no run writes: no YAML, no mapping, empty, too deeply nested, or with an alias."""
    path = run_dir / "config.yaml"
    text = read_text(path, _MAX_FILE_BYTES)
    try:
        _check_yaml(text)
        config = OmegaConf.load(io.StringIO(text))
    # OmegaConf raises OSError for YAML that is a number.
    except (yaml.YAMLError, OSError, ValueError) as error:
        raise ValueError(f"{path} is not YAML that a run writes ({error})") from error
    if not isinstance(config, DictConfig) or not config:
        raise ValueError(f"{path} is empty, or is no mapping")
    return config


def _check_yaml(text: str) -> None:
    """Raises ValueError for YAML that would fill the memory or the stack when it is loaded."""
    depth = 0
    for event in yaml.parse(text):
        if isinstance(event, yaml.AliasEvent):  # OmegaConf copies the value that it stands for
            raise ValueError("it has an alias")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        if isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MAX_YAML_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_YAML_DEPTH} levels deep")


def lock_run(run_dir: Path) -> TextIO:
    """Locks a run's folder until the process ends. Raises ValueError, which names the process, if a
    live run holds the lock."""
    path = run_dir / ".lock"
    # A second lock by the same process would replace the first one.
    if path in _locks and not _locks[path].closed:
        raise ValueError(
            f"{run_dir} is being written by this process: wait for the end of that run."
        )
    try:
        lock = open(path, "a+")  # noqa: SIM115  held as long as the run
        # flock cannot be used, because a fork of this process would hold its lock too.
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
    """Returns a hash for each key whose value is a path or paths.

    Of a file the whole content is hashed. Of each file in a folder, such as that of a model, it is
    name, size, and the first and the last MiB. Of what is not on the disk, such as a model of the
    hub, a module or a URL, it is the name.
    """
    fingerprints = {}
    values = config.model_dump(mode="json")
    for key, value in settings_of(values):
        paths = [value] if isinstance(value, str) else value
        is_input = key.endswith((".path", "_path", "_files")) and not key.startswith("trainer.")
        if not is_input or not paths:
            continue
        digest = hashlib.sha256()
        for name in paths:
            path = Path(name).expanduser()
            if path.is_file():
                with open_regular(path) as file:
                    digest_of_file = hashlib.file_digest(file, "sha256")
                digest.update(digest_of_file.digest())
            elif not path.is_dir():
                digest.update(with_masked_urls(name).encode())
            for part in sorted(path.glob("*.*")):
                size = part.stat().st_size
                digest.update(f"{part.name} {size}".encode())
                if part.is_file():
                    with open(part, "rb") as file:
                        digest.update(file.read(1 << 20))
                        start_of_end = max(0, size - (1 << 20))
                        file.seek(start_of_end)
                        digest.update(file.read())
        fingerprints[key] = digest.hexdigest()
    return fingerprints


def changed_inputs(saved: Mapping[str, str], config: RunConfig) -> list[str]:
    """The keys of paths whose fingerprints differ from the `saved` ones."""
    here = fingerprints_of(config)
    keys = sorted({*saved, *here})
    return [key for key in keys if saved.get(key) != here.get(key)]


def settings_of(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the key and the value of every setting.

    A list is a value, and so is an empty block. So are all arguments of the reward function
    together, because their names are those of the user's function.
    """
    if not isinstance(tree, dict) or not tree or prefix.endswith(".reward_kwargs"):
        yield prefix, tree
        return
    for name, value in tree.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        yield from settings_of(value, key)
