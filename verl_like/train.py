"""Training from Python: `train(config, reward_fn=...)` runs what `main_ppo` runs."""

import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import ray
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl_like.rewards.given_function import FUNCTION_NAME, write_reward_function
from verl_like.rewards.loader import require_signature
from verl_like.trainer.config import PPOConfig
from verl_like.trainer.config.roles import Role
from verl_like.trainer.main_ppo import WORKERS
from verl_like.trainer.ppo.run_ppo import run_ppo_or_raise
from verl_like.trainer.run import worker_template
from verl_like.trainer.run.errors import InputRefused
from verl_like.trainer.run.rows import readable_rows
from verl_like.trainer.run.run_recorder import GENERATIONS
from verl_like.trainer.run.shell import cannot_be_written
from verl_like.trainer.state import checkpoint
from verl_like.trainer.state.resume import settings_of

INPUTS = "inputs"
"""Folder below `trainer.default_local_dir` for the models and functions that `train` was given."""
_SECTIONS = ("actor_rollout_ref", "critic", "reward_model", "reward_models")
"""The sections of the configuration that name models."""


@dataclass(frozen=True)
class TrainedRun:
    """What a run has left on the disk."""

    run_dir: Path
    """The folder of the run, with `report.html`."""
    metrics: list[dict[str, float]]
    """The rows of `metrics.jsonl`: a row for each step, which is its entry `step`, and one for a
    validation before the first."""
    generations: list[dict[str, Any]]
    """The rows of `generations.jsonl`: the validation's responses that the run showed."""
    checkpoint: Path | None
    """The folder of the newest checkpoint. None if the run only validated (`trainer.val_only`)."""

    @property
    def model(self) -> Path:
        """The folder of the trained policy, which transformers and vLLM load. It is there after the
        last step of the run. Raises ValueError if the run only validated."""
        if self.checkpoint is None:
            raise ValueError(
                f"the run in {self.run_dir} has no trained model, because it only validated: set "
                "trainer.val_only=false to train"
            )
        return self.checkpoint / Role.Actor / "huggingface"

    @classmethod
    def of(cls, run_dir: Path) -> Self:
        """Reads the folder of a run that has ended."""
        steps = checkpoint.steps(run_dir)
        newest = checkpoint.folder_of_step(run_dir, steps[-1]) if steps else None
        return cls(
            run_dir,
            metrics=readable_rows((run_dir / "metrics.jsonl").read_bytes()),
            generations=readable_rows((run_dir / GENERATIONS).read_bytes()),
            checkpoint=newest,
        )


def train(
    config: PPOConfig,
    reward_fn: Callable[..., Any] | None = None,
    *,
    models: Mapping[str, PreTrainedModel] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> TrainedRun:
    """Trains a language model with PPO, GRPO or another estimator, in a script or a notebook.

    Args:
        config: what `load_ppo_config` returns.
        reward_fn: scores a response: `reward_fn(data_source, solution_str, ground_truth,
            extra_info)`. It may be defined anywhere, also in a notebook, and takes the place of
            `custom_reward_function.path`. The reward processes get a copy of it.
        models: models of transformers, each by a name that stands for it where the configuration
            has the path of a model. They stay as they are: what is trained are copies.
        tokenizer: the tokenizer of these models.

    Raises:
        ValueError: an input is wrong. It is raised before Ray starts.
        RunFailed: a part of the run failed.
        KeyboardInterrupt: the run was interrupted. What it wrote is valid.
    """
    require_free_process()
    require_ppo_config(config)
    models = models or {}
    require_reward_fn(config, reward_fn)
    require_models(config, models, tokenizer)
    folder = None
    if reward_fn is not None or models:
        folder = new_folder(config)
        try:
            config = write_inputs(config, folder, reward_fn, models, tokenizer)
        except BaseException:
            shutil.rmtree(folder)
            raise
    try:
        # On a GPU an import may start CUDA, which a fork cannot use.
        template = worker_template.start(WORKERS) if config.trainer.device == "cpu" else None
        run_dir = run_ppo_or_raise(config, template)
    except InputRefused:
        if folder:
            shutil.rmtree(folder)
        raise
    return TrainedRun.of(run_dir)


def require_free_process() -> None:
    """Raises InputRefused unless a run can handle signals and start Ray in this process."""
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        raise InputRefused(
            f"train() is called in the thread {thread.name!r}, and a run handles signals, which "
            "Python does in the main thread alone: call it there"
        )
    if ray.is_initialized():
        raise InputRefused(
            "train() starts or joins a Ray of its own, and this process is connected to one: call "
            "ray.shutdown() before; set ray_kwargs.ray_init.address to train on a cluster"
        )


def require_ppo_config(config: object) -> None:
    """Raises InputRefused unless the configuration is one of `main_ppo`."""
    if not isinstance(config, PPOConfig) or config.has_makers:
        raise InputRefused(
            f"train(config=...) is a {type(config).__name__}: give what load_ppo_config of "
            "verl_like.trainer.config returns; the other trainers are run by their commands"
        )


def require_reward_fn(config: PPOConfig, reward_fn: object) -> None:
    """Raises InputRefused unless a function, if there is one, can score responses."""
    if reward_fn is None:
        return
    if not callable(reward_fn):
        raise InputRefused(
            f"train(reward_fn={reward_fn!r}) is a {type(reward_fn).__name__}: give a function, or "
            "set custom_reward_function.path in the configuration"
        )
    function = config.custom_reward_function
    if function.path is not None:
        raise InputRefused(
            f"train(reward_fn={reward_fn!r}) and custom_reward_function.path={function.path} are "
            "two reward functions: remove one of them"
        )
    name = getattr(reward_fn, "__name__", type(reward_fn).__name__)
    try:
        require_signature(reward_fn, f"train(reward_fn=...): {name}", "", {})
    except ValueError as error:
        raise InputRefused(str(error)) from None


def require_models(
    config: PPOConfig, models: Mapping[str, object], tokenizer: object | None
) -> None:
    """Raises InputRefused unless each model is one of transformers, has a name that the
    configuration has as a path, and a tokenizer."""
    if bool(models) != (tokenizer is not None):
        raise InputRefused(
            f"train(models={sorted(models)}, tokenizer={type(tokenizer).__name__}): models and "
            "their tokenizer go together; give both, or give folders in the configuration"
        )
    paths = paths_of_models(config)
    for name, model in models.items():
        if not isinstance(model, PreTrainedModel):
            raise InputRefused(
                f"train(models={{{name!r}: ...}}) is a {type(model).__name__}, which has no "
                "configuration from which another process makes it: give a PreTrainedModel of "
                "transformers, such as AutoModelForCausalLM makes"
            )
        if not re.fullmatch(r"[\w-]+", name):
            raise InputRefused(
                f"train(models={{{name!r}: ...}}): the name becomes that of a folder; give one of "
                "letters, digits, _ and -, and the same in the configuration"
            )
        if name not in paths.values():
            shown = ", ".join(f"{key}={path}" for key, path in paths.items())
            raise InputRefused(
                f"train(models={{{name!r}: ...}}): no path of a model in the configuration is "
                f"{name} ({shown}): set the path of the role that begins with this model to {name}"
            )
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise InputRefused(
            f"train(tokenizer=...) is a {type(tokenizer).__name__}: give a tokenizer of "
            "transformers, such as AutoTokenizer makes"
        )


def paths_of_models(config: PPOConfig) -> dict[str, str]:
    """The paths of models and tokenizers in the configuration, by their keys."""
    tree = config.model_dump(mode="json", include=set(_SECTIONS))
    return {
        key: value
        for key, value in settings_of(tree)
        if key.endswith("path") and isinstance(value, str)
    }


def new_folder(config: PPOConfig) -> Path:
    """Makes a folder for what `train` was given, which only its user can read. Raises
    InputRefused if it cannot be made."""
    parent = Path(config.trainer.default_local_dir).expanduser().resolve() / INPUTS
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{stamp}_", dir=parent))
    except OSError as error:
        raise InputRefused(cannot_be_written(config, error)) from None


def write_inputs(
    config: PPOConfig,
    folder: Path,
    reward_fn: Callable[..., Any] | None,
    models: Mapping[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase | None,
) -> PPOConfig:
    """Writes the function and the models into the folder. Returns the configuration with their
    paths. Raises InputRefused for a function that cannot be copied, and where there is no room."""
    try:
        if reward_fn is not None:
            file = write_reward_function(reward_fn, folder)
            config = config.updated(
                {
                    "custom_reward_function.path": str(file),
                    "custom_reward_function.name": FUNCTION_NAME,
                }
            )
        for name, model in models.items():
            assert tokenizer, "models and their tokenizer go together"
            model.save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
        return with_paths(config, {name: str(folder / name) for name in models})
    except (OSError, SafetensorError) as error:
        raise InputRefused(cannot_be_written(config, error)) from None
    except ValueError as error:
        raise InputRefused(str(error)) from None


def with_paths(config: PPOConfig, folders: Mapping[str, str]) -> PPOConfig:
    """The configuration with a folder in the place of each name that stands for it."""
    values = {
        key: folders[path]
        for key, path in paths_of_models(config).items()
        if path in folders and not key.startswith("reward_models.")
    }
    further = {
        name: model.updated({"path": folders.get(model.path, model.path)})
        for name, model in config.reward_models.items()
    }
    return config.updated(values | {"reward_models": further})
