"""What the configuration of every trainer holds: where a run is recorded, and the Ray that it runs
on."""

import os
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, Strict, model_validator

from verl_like.algorithms.registry import AlgorithmRegistry
from verl_like.config_model import (
    ConfigModel,
    Follows,
    MinusOneOrPositive,
    PositiveFloat,
    PositiveInt,
)
from verl_like.secret_values import Redaction, masked


def list_of_one(value: object) -> object:
    return [value] if isinstance(value, str) else value


# A list becomes a tuple, so that nothing below the entry point can change it.
Strings = Annotated[tuple[str, ...], BeforeValidator(list_of_one), Strict(False)]
Paths = Annotated[Strings, Field(min_length=1)]
Logger = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio"]


class RecordConfig(ConfigModel):
    """The name of a run and where its metrics go."""

    project_name: str = "verl_like"
    """Groups runs in trackers and in the output folder."""
    experiment_name: Annotated[str, Follows("${name_of_trainer:}")]
    """Names the run in trackers and in the output folder: by default ppo, detached, sft, rm, dpo or
    ilql."""
    logger: Annotated[tuple[Logger, ...], BeforeValidator(list_of_one), Strict(False)] = (
        "console",
    )
    """Trackers of the metrics: tensorboard, wandb, mlflow, trackio. console and metrics.jsonl are
    always on."""
    default_local_dir: Annotated[
        str, Follows("outputs/${trainer.project_name}/${trainer.experiment_name}")
    ]
    """Folder of the run's metrics, report and checkpoints."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """Which run continues from its newest checkpoint: the newest unfinished one in
    default_local_dir with the same settings (auto), none (disable), or the one in
    resume_from_path."""
    resume_from_path: str | None = None
    """Folder of the run that continues, for resume_mode=resume_path."""
    damaged_ckpt: Literal["skip", "refuse"] = "skip"
    """What a checkpoint does that is not as it was written: the one before it is taken, or the run
    does not start."""
    max_ckpt_to_keep: PositiveInt = 3
    """Newest checkpoints that are kept; older ones are removed after a newer one is complete."""
    best_ckpt_metric: str | None = None
    """Metric of the validation, e.g. val-core/openai/gsm8k/acc/mean@1: a step after which it is
    higher than ever before (lower, where its name ends in loss or brier) has a checkpoint, and the
    last such one is kept besides. null means that validation makes no checkpoint."""

    @model_validator(mode="after")
    def a_run_to_resume_is_named(self) -> "RecordConfig":
        if (self.resume_mode == "resume_path") != (self.resume_from_path is not None):
            raise ValueError(
                f"resume_mode={self.resume_mode} and "
                f"trainer.resume_from_path={self.resume_from_path}: the folder of a "
                "run goes with trainer.resume_mode=resume_path, and that needs one"
            )
        return self


class LoopConfig(RecordConfig):
    """A run of training steps."""

    device: Literal["cuda", "cpu"] = "cuda"
    """Where workers compute. The preset device=cpu of PPO sets it together with everything else a
    CPU needs."""
    nnodes: PositiveInt = 1
    """Nodes of the run, which the placement presets of PPO divide into pools."""
    n_gpus_per_node: PositiveInt = 1
    """GPUs per node, one training process each; with device cpu, processes per node."""
    total_epochs: PositiveInt = 1
    """Passes over the training data."""
    total_training_steps: PositiveInt | None = None
    """Training steps; null means total_epochs of them."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """The one seed: order of the data, sampling, new heads. Below 2^32, as the order of the data
    needs it."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate once, whatever val_before_train says, and end. Nothing is trained or saved, and no
    earlier run continues."""
    test_freq: MinusOneOrPositive = -1
    """Training steps between validations, the last of which follows the last step; -1 means none,
    or in training on examples only that one."""
    save_freq: MinusOneOrPositive = -1
    """Training steps between checkpoints; -1 means only after the last step, and when SIGTERM ends
    the run. Only then the models are written in Hugging Face format, too."""
    balance_batch: bool = True
    """Give the ranks rows of about equal work, attention included; the rows of a mini-batch stay
    the same."""
    call_timeout_s: PositiveFloat = 3600.0
    """Seconds one call of a worker group may take before the run stops. In detached training a
    trainer waits twice as long: at first for a maker's start, the validation before the first step
    and the experience of a whole batch, later for a push, a validation and that experience. A maker
    waits three times as long: for the start of a trainer, later for update_steps training steps and
    their checkpoints. Both begin anew when a maker is started again."""

    @model_validator(mode="after")
    def a_validation_continues_no_run(self) -> "LoopConfig":
        if self.val_only and self.resume_mode == "resume_path":
            raise ValueError(
                "val_only=true with trainer.resume_mode=resume_path: a run that only validates "
                "continues no other; export the checkpoint with python -m verl_like.export, give "
                "that folder as the path of the model, and remove the two keys of resuming"
            )
        return self


class RayInitConfig(ConfigModel):
    """How the driver joins or starts Ray."""

    num_cpus: PositiveInt | None = None
    """CPU slots of a Ray started here; null means the machine's cores."""
    address: str | None = None
    """Address of a running cluster, or auto; null means that of RAY_ADDRESS, or without it a new
    Ray."""


class RayKwargsConfig(ConfigModel):
    """Settings of Ray."""

    ray_init: RayInitConfig = RayInitConfig()


class RunConfig(ConfigModel):
    """The whole configuration of a run: the base of each trainer's schema."""

    base_name: ClassVar[str]
    """Name of the schema's defaults in a YAML file: `defaults: [<base_name>, _self_]`."""
    presets: ClassVar[dict[str, str]] = {}
    """Groups of YAML files below verl_like/trainer/config that set several keys, and the file that
    is the default."""
    keys_are_listed_by: ClassVar[str] = "--print-config"
    algorithm_keys: ClassVar[dict[str, AlgorithmRegistry]] = {}
    """Keys that name an algorithm, and where it is found. Its own options become keys too."""
    replaced_keys: ClassVar[dict[str, str]] = {}
    """Keys of earlier versions with their successors, which a refusal names; an old run's record
    may have them, and of several with one successor the last counts."""

    plugins: Strings = ()
    """Modules, package.module, that register algorithms, rewards, rollout engines or a trainer."""
    trainer: RecordConfig
    ray_kwargs: RayKwargsConfig = RayKwargsConfig()

    _secret_paths: frozenset[tuple[str, ...]] = PrivateAttr(frozenset())
    """Keys whose values came from an environment variable with the name of a secret."""

    def with_secret_paths(self, paths: frozenset[tuple[str, ...]]) -> Self:
        """The same, knowing which of its values came from such a variable."""
        config = self.model_copy()
        config._secret_paths = paths
        return config

    def shown(self) -> dict[str, Any]:
        """The configuration as plain data, in which `***` stands for each secret."""
        return masked(self.model_dump(mode="json"), self._secret_paths)

    def redaction(self) -> Redaction:
        """What masks the secrets of the configuration in messages."""
        return Redaction.of(self.model_dump(mode="json"), self._secret_paths)

    @property
    def cluster_address(self) -> str | None:
        """The Ray cluster that the run joins: the configured one, or that of RAY_ADDRESS. None if
        the run starts a new one."""
        address = self.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS")
        if address == "local":
            return None
        return address or None

    @property
    def num_steps_of_run(self) -> int:
        """Training steps after which a run is done and is not resumed; 0 as long as they are not
        known."""
        return getattr(self.trainer, "total_training_steps", None) or 0

    @property
    def num_processes_of_run(self) -> int:
        """Processes, one a device, that a run's throughput is divided by."""
        return 1
