"""The configuration of training on examples: data, one model, and how a batch becomes an optimizer
step."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from verl_like.config_model import ConfigModel, MinusOneOrPositive, PositiveInt
from verl_like.trainer.config.run_config import LoopConfig, Paths, RunConfig, Strings
from verl_like.workers.config.engine import TrainedFsdpConfig
from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.config.supervised import (
    DPOTrainingConfig,
    ILQLTrainingConfig,
    SFTTrainingConfig,
    SupervisedModelConfig,
    TrainingConfig,
)

RECORDS_ROUTING = (
    "needs what routers select while their code runs, which compiled layers do not tell"
)
"""Why routers are not balanced in compiled layers, for messages."""
TRAINS_ROUTERS = "balances the experts by training routers, which an adapter leaves as they are"
"""Why they are not with an adapter."""


class ExamplesConfig(ConfigModel):
    """Conversations, or pairs of them: where they are and how they become batches."""

    train_files: Paths
    """Training rows: one file or a list of files (parquet, JSON, JSONL). Conversations have
    messages, or prompt and response, for ILQL also score; pairs have prompt, chosen and
    rejected."""
    val_files: Strings = ()
    """Validation rows: one file or a list of files; none means no validation."""
    max_length: PositiveInt = 2048
    """Longest conversation in tokens."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """What a row with a longer one does: error, it is left out, or what is too long is cut at its
    end."""
    train_batch_size: PositiveInt = 64
    """Rows of one training step, which is one optimizer step, over all ranks."""
    shuffle: bool = True
    """Draw the rows of an epoch in random order, a function of trainer.seed and the epoch."""
    train_max_samples: MinusOneOrPositive = -1
    """Use only the first training rows; -1 means all."""
    val_max_samples: MinusOneOrPositive = -1
    """Use only the first validation rows; -1 means all."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default={})
    """Further arguments of the tokenizer's chat template, e.g. {enable_thinking: false}."""


class SupervisedConfig(RunConfig):
    """The whole configuration of training on examples."""

    data: ExamplesConfig
    model: SupervisedModelConfig
    training: TrainingConfig = TrainingConfig()
    trainer: LoopConfig

    @property
    def num_processes_of_run(self) -> int:
        return self.trainer.nnodes * self.trainer.n_gpus_per_node


class SFTConfig(SupervisedConfig):
    """The configuration of supervised fine-tuning."""

    base_name: ClassVar[str] = "sft_trainer"

    training: SFTTrainingConfig = SFTTrainingConfig()


class RMConfig(SupervisedConfig):
    """The configuration of training a reward model."""

    base_name: ClassVar[str] = "rm_trainer"


class DPOConfig(SupervisedConfig):
    """The configuration of direct preference optimization."""

    base_name: ClassVar[str] = "dpo_trainer"

    training: DPOTrainingConfig = DPOTrainingConfig()


class ILQLConfig(SupervisedConfig):
    """The configuration of implicit language Q-learning."""

    base_name: ClassVar[str] = "ilql_trainer"

    training: ILQLTrainingConfig = ILQLTrainingConfig()


def broken_supervised_rules(config: SupervisedConfig) -> Iterator[str]:
    """A sentence for each rule that the configuration breaks."""
    metric = config.trainer.best_ckpt_metric
    if metric is not None and not config.data.val_files:
        yield f"trainer.best_ckpt_metric={metric} is a metric of the validation; set data.val_files"
    if config.trainer.val_only and not config.data.val_files:
        yield "trainer.val_only=true needs rows to validate with; set data.val_files"
    ranks = config.num_processes_of_run
    shared = config.training.ulysses_sequence_parallel_size
    if config.model.fsdp_config.strategy == "single" and ranks > 1:
        yield (
            f"model.fsdp_config.strategy=single is for one process, and the run has {ranks} "
            "ranks; set ddp, or shard"
        )
    yield from distributed_experts(
        config.model.fsdp_config, config.model, ranks, key="model.fsdp_config", model_key="model"
    )
    if ranks % shared:
        yield (
            f"training.ulysses_sequence_parallel_size={shared} does not divide the {ranks} ranks "
            "(trainer.nnodes x trainer.n_gpus_per_node)"
        )
    if shared > 1 and isinstance(config, RMConfig):
        yield (
            f"training.ulysses_sequence_parallel_size={shared}: a reward model reads whole "
            "sequences; set it to 1"
        )
    coefficient = getattr(config.training, "router_aux_loss_coef", None)
    key = f"training.router_aux_loss_coef={coefficient}"
    if coefficient and config.model.use_torch_compile:
        yield f"{key} {RECORDS_ROUTING}; set model.use_torch_compile=false, or the key to 0"
    if coefficient and config.model.lora_rank:
        yield f"{key} {TRAINS_ROUTERS}; set model.lora_rank=0, or the key to 0"
    if (
        isinstance(config, DPOConfig)
        and config.training.loss_type == "ipo"
        and config.training.label_smoothing
    ):
        yield (
            f"training.label_smoothing={config.training.label_smoothing} has no effect on ipo: "
            "set it to 0"
        )


def distributed_experts(
    fsdp: TrainedFsdpConfig,
    model: TrainedModelConfig,
    num_processes: int,
    *,
    key: str,
    model_key: str,
) -> Iterator[str]:
    """Yields what is wrong with the `expert_parallel_size` of a model on so many processes. It is a
    rule of PPO, too."""
    size = fsdp.expert_parallel_size
    if size == 1:
        return
    num_shards = num_processes if fsdp.num_shards == -1 else fsdp.num_shards
    if num_shards % size:
        yield (
            f"{key}.expert_parallel_size={size} does not divide the {num_shards} processes that "
            "share the parameters; set it to a divisor of that"
        )
    if model.use_torch_compile:
        yield (
            f"{key}.expert_parallel_size={size} with {model_key}.use_torch_compile=true: how many "
            "tokens travel is known only when a layer runs, and that cannot be compiled; set one "
            "of them to its default"
        )
