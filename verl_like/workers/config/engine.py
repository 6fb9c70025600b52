"""Settings of the engine that runs and trains a model: sharding and optimizer."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from verl_like.config_model import ConfigModel, MinusOneOrPositive, NonNegativeFloat, PositiveInt
from verl_like.workers.config.models import TrainingDtype


class FsdpConfig(ConfigModel):
    """How the parameters of a model are sharded and stored."""

    param_offload: bool = False
    """Keep the parameters in host memory while the model is idle."""
    dtype: TrainingDtype = "bfloat16"
    """Data type in which layers compute: float32 or bfloat16 (fp32 and bf16 mean the same)."""


class ForwardFsdpConfig(FsdpConfig):
    """A model that is only run forward is stored in its computing data type and sharded over all
    ranks."""

    strategy: ClassVar[str] = "zero3"
    num_shards: ClassVar[int] = -1
    expert_parallel_size: ClassVar[int] = 1

    @property
    def model_dtype(self) -> str:
        return self.dtype


class TrainedFsdpConfig(FsdpConfig):
    """A trained model also has stored weights of higher precision, an optimizer state and a
    backward pass."""

    optimizer_offload: bool = False
    """Keep the optimizer state in host memory except during the optimizer step."""
    strategy: Literal["single", "ddp", "zero1", "zero2", "zero3"] = "zero3"
    """What each rank holds. single: all there is, on a pool of one process. ddp: whole parameters,
    gradients and optimizer state on every rank. zero1, zero2 and zero3 shard the optimizer state
    and, between the calls, the parameters, which zero1 and zero2 keep whole from the first forward
    pass of an optimizer step to its last backward pass; zero1 keeps the gradients whole so long
    too, so that they travel once. zero3 gathers a layer for each pass."""
    fsdp_size: MinusOneOrPositive = -1
    """Ranks one copy of the parameters is sharded over with zero1, zero2 and zero3; -1 means all
    ranks of the pool. It divides the pool's size."""
    expert_parallel_size: PositiveInt = 1
    """Ranks among which the experts of a mixture of experts are distributed, with zero1, zero2 and
    zero3. Tokens travel to the ranks of their experts. It divides the number of ranks that one copy
    of the parameters is sharded over, and that number divides the number of experts. With 1 experts
    are sharded and gathered as all other parameters."""
    model_dtype: TrainingDtype = "float32"
    """Data type in which the parameters and AdamW's two averages are stored: float32 or bfloat16
    (fp32 and bf16 mean the same). In bfloat16 a change below 1/512 of a number is rounded away:
    weights stay where they are with a small learning rate, and the average of squared gradients
    does not fall."""

    @property
    def num_shards(self) -> int:
        """Ranks one copy of the parameters is sharded over, -1 for all of the pool."""
        return 1 if self.strategy in ("single", "ddp") else self.fsdp_size

    @model_validator(mode="after")
    def fsdp_size_is_of_what_is_sharded(self) -> "TrainedFsdpConfig":
        if self.fsdp_size != -1 and self.num_shards == 1:
            raise ValueError(
                f"strategy={self.strategy} with fsdp_size={self.fsdp_size}: single and ddp have a "
                "whole copy on every rank, zero1, zero2 and zero3 shard one over 2 or more; set "
                "strategy=ddp and leave fsdp_size at -1, or set one of the three and more ranks"
            )
        return self

    @model_validator(mode="after")
    def distributed_experts_are_sharded(self) -> "TrainedFsdpConfig":
        if self.expert_parallel_size > 1 and self.num_shards == 1:
            raise ValueError(
                f"expert_parallel_size={self.expert_parallel_size} with "
                f"strategy={self.strategy}, which has all experts on every rank; set zero1, zero2 "
                "or zero3, or expert_parallel_size=1"
            )
        return self


class OptimConfig(ConfigModel):
    """AdamW and its learning-rate schedule."""

    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up: constant, or cosine or linear decay to 0 at the end of the
    run."""
    lr_warmup_steps: Annotated[int, Field(ge=-1)] = -1
    """Training steps of linear warm-up; -1 means lr_warmup_steps_ratio decides."""
    lr_warmup_steps_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Warm-up as a fraction of all training steps; used while lr_warmup_steps is -1."""

    @model_validator(mode="after")
    def warm_up_is_given_once(self) -> "OptimConfig":
        if self.lr_warmup_steps >= 0 and self.lr_warmup_steps_ratio > 0:
            raise ValueError(
                f"lr_warmup_steps={self.lr_warmup_steps} and "
                f"lr_warmup_steps_ratio={self.lr_warmup_steps_ratio} both set the warm-up; give "
                "one of them (lr_warmup_steps=-1 or lr_warmup_steps_ratio=0 switches one off)"
            )
        return self
