"""Settings of a model that learns from examples."""

from typing import Annotated, Literal

from pydantic import Field

from verl_like.config_model import (
    ConfigModel,
    Follows,
    FromZeroToOne,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
)
from verl_like.workers.config.engine import OptimConfig, TrainedFsdpConfig
from verl_like.workers.config.models import PolicyModelConfig, TrainingDtype


class SupervisedFsdpConfig(TrainedFsdpConfig):
    """How the parameters of the model are sharded and stored."""

    dtype: Annotated[TrainingDtype, Follows("${float_of_device:${trainer.device}}")]
    """Data type in which layers compute: float32, which is the default on a CPU, or bfloat16."""


class SupervisedModelConfig(PolicyModelConfig):
    """The pretrained model that learns."""

    fsdp_config: SupervisedFsdpConfig


class TrainingConfig(ConfigModel):
    """How a batch becomes an optimizer step."""

    micro_batch_size_per_gpu: PositiveInt = 8
    """Examples per forward and backward pass on one rank. A pair is one example."""
    use_dynamic_bsz: bool = True
    """Fill passes by tokens, up to max_token_len_per_gpu, instead of by rows, with the same
    loss."""
    max_token_len_per_gpu: PositiveInt = 16384
    """Most tokens, without padding, of a pass on one rank, with use_dynamic_bsz."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ranks that share every sequence (arXiv:2309.14509), for sequences too long for one."""
    grad_clip: PositiveFloat = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""
    optim: OptimConfig = OptimConfig(lr=1e-5)


class SFTTrainingConfig(TrainingConfig):
    """How a batch of conversations becomes an optimizer step of a language model."""

    router_aux_loss_coef: NonNegativeFloat | None = None
    """Weight of the loss that balances the load of a mixture's experts (arXiv:2101.03961). null:
    the value of the model's configuration, where its routers are known and trained, else 0."""


class DPOTrainingConfig(TrainingConfig):
    """How a batch of pairs becomes an optimizer step of a policy."""

    optim: OptimConfig = OptimConfig(lr=1e-6)
    loss_type: Literal["dpo", "ipo"] = "dpo"
    """Loss of a pair: dpo (arXiv:2305.18290; conservative DPO with label_smoothing) or ipo
    (arXiv:2310.12036)."""
    beta: PositiveFloat = 0.1
    """How near the policy stays to the reference: beta of DPO, tau of IPO."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Of dpo: probability that a label is wrong."""


class ILQLTrainingConfig(TrainingConfig):
    """How a batch of scored conversations becomes an optimizer step of ILQL (arXiv:2206.11871)."""

    gamma: FromZeroToOne = 0.99
    """Discount from a learned token to the next."""
    expectile: Annotated[float, Field(gt=0, lt=1)] = 0.7
    """Which expectile of Q over the tokens of the data V is, tau in the paper: 0.5 is the mean,
    near 1 the greatest."""
    polyak: PositiveShare = 0.005
    """Part of the way that the target heads move in a training step."""
    cql_coef: NonNegativeFloat = 0.1
    """Weight of the term that lowers Q of the tokens that are not in the data (CQL,
    arXiv:2006.04779)."""
    lm_coef: NonNegativeFloat = 1.0
    """Weight of the language-model loss."""
    awac_beta: NonNegativeFloat = 0.0
    """A token's language-model loss weighs exp(awac_beta (Q - V)) (AWAC, arXiv:2006.09359); 0 is
    behaviour cloning."""
