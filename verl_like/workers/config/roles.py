"""Settings of the roles: actor, reference, rollout, critic, reward model."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from verl_like.config_model import (
    ConfigModel,
    Follows,
    NonNegativeFloat,
    OpenConfigModel,
    PositiveFloat,
    PositiveInt,
)
from verl_like.workers.config.engine import ForwardFsdpConfig, OptimConfig, TrainedFsdpConfig
from verl_like.workers.config.models import ModelConfig, PolicyModelConfig, TrainedModelConfig
from verl_like.workers.config.rollout import LogProbConfig, RolloutConfig

LossAggMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
KlPenalty = Literal[
    "kl",
    "k1",
    "abs",
    "mse",
    "k2",
    "low_var_kl",
    "k3",
    "kl+",
    "k1+",
    "abs+",
    "mse+",
    "k2+",
    "low_var_kl+",
    "k3+",
]


class PolicyLossConfig(OpenConfigModel):
    """Which policy loss the actor minimises."""

    loss_mode: str = "vanilla"
    """Policy loss: one of docs/algorithms.md, or of a plugin; vanilla is PPO's clipped loss with
    dual clip. Its own options are keys beside this one."""


class RouterReplayConfig(ConfigModel):
    """Router replay: experts of a token are those that were selected elsewhere."""

    mode: Literal["disabled", "R2", "R3"] | None = None
    """For mixtures of experts, which routing the actor replays: R3 that of the rollout engine, for
    old log-probabilities and in the update (arXiv:2510.11370); R2 that of the pass for old
    log-probabilities, in the update; disabled none, so that routers select anew. null is R3 where
    vLLM records the routing, and else disabled; the start of a run says which."""

    @property
    def chosen(self) -> str:
        """The mode. It is `disabled` as long as none is chosen."""
        return self.mode or "disabled"


class ReferenceReplayConfig(ConfigModel):
    """Router replay of the reference policy."""

    mode: Literal["disabled", "R3"] = "disabled"
    """R3: the reference replays the routing of the rollout engine, as the actor does with R3;
    disabled: it has its own."""


class ActorConfig(OpenConfigModel):
    """The trained policy."""

    ppo_mini_batch_size: PositiveInt = 256
    """PROMPTS per optimizer step, over all ranks; each brings rollout.n responses. It divides
    data.train_batch_size."""
    ppo_micro_batch_size_per_gpu: PositiveInt = 8
    """Responses per forward and backward pass on one rank."""
    use_dynamic_bsz: bool = False
    """Fill micro-batches by tokens, up to ppo_max_token_len_per_gpu, instead of by responses:
    faster where lengths differ, with the same loss."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Most tokens, without padding, of a forward and backward pass on one rank, with
    use_dynamic_bsz."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ranks that share every sequence (arXiv:2309.14509), for sequences too long for one; a token
    limit counts for each of them. It divides the pool's size. The reference policy follows."""
    use_prefix_grouper: bool = False
    """Compute a prompt once for all its responses in a micro-batch: the same loss up to rounding,
    and faster where prompts are long. The reference policy and the teacher follow."""
    clip_ratio: NonNegativeFloat = 0.2
    """Clip range of the probability ratio: [1 - clip_ratio, 1 + clip_ratio]."""
    clip_ratio_low: Annotated[NonNegativeFloat, Follows("${actor_rollout_ref.actor.clip_ratio}")]
    """Lower clip range, 1 - clip_ratio_low."""
    clip_ratio_high: Annotated[NonNegativeFloat, Follows("${actor_rollout_ref.actor.clip_ratio}")]
    """Upper clip range, 1 + clip_ratio_high."""
    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    """Dual-clip PPO: bound of the ratio where the advantage is negative (arXiv:1912.09729)."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    loss_agg_mode: Annotated[
        LossAggMode,
        Follows("${aggregation_of_loss:${actor_rollout_ref.actor.policy_loss.loss_mode}}"),
    ]
    """How the per-token loss becomes one number: token-mean, token-sum, seq-mean-token-sum,
    seq-mean-token-mean or seq-mean-token-sum-norm (divided by data.max_response_length). By default
    the one that the policy loss is defined with: seq-mean-token-mean for geo_mean, gspo and sapo,
    token-mean for the others."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus that is subtracted from the loss; 0 switches it off."""
    use_kl_loss: bool = False
    """Add the KL divergence to the reference policy to the loss (GRPO). May be combined with
    algorithm.use_kl_in_reward; both terms then apply."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of the KL loss."""
    kl_loss_type: KlPenalty = "low_var_kl"
    """Per-token KL estimator of the KL loss: kl (k1), abs, mse (k2) or low_var_kl (k3); a trailing
    + keeps the value and takes the gradient of k2."""
    router_replay: RouterReplayConfig = RouterReplayConfig()
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the loss that balances the load of a mixture's experts (Switch Transformers,
    arXiv:2101.03961); 0 switches it off, whatever the model's configuration says."""
    freeze_router: bool = False
    """Leave the parameters of a mixture's routers as they are, while the rest is trained."""
    ptx_coef: NonNegativeFloat = 0.0
    """Weight of the language-model loss on data.ptx_files that is added to the loss (PPO-ptx,
    arXiv:2203.02155); 0 switches it off."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep an average of the weights in float32, which after each optimizer step is ema_decay times
    itself plus 1 - ema_decay times the weights; python -m verl_like.export --ema makes a model of
    it. Of an adapter its factors A and B are averaged, which is not the average of their products.
    null keeps none."""
    ppo_epochs: PositiveInt = 1
    """Passes over one batch of experience."""
    grad_clip: PositiveFloat = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""
    optim: OptimConfig = OptimConfig()
    fsdp_config: TrainedFsdpConfig = TrainedFsdpConfig()

    @model_validator(mode="after")
    def clip_ratio_is_not_overruled(self) -> "ActorConfig":
        default = type(self).model_fields["clip_ratio"].default
        if self.clip_ratio != default and self.clip_ratio not in (
            self.clip_ratio_low,
            self.clip_ratio_high,
        ):
            raise ValueError(
                f"clip_ratio={self.clip_ratio} has no effect because "
                f"clip_ratio_low={self.clip_ratio_low} and "
                f"clip_ratio_high={self.clip_ratio_high} are both set; remove clip_ratio or one of "
                "the two"
            )
        return self


class RefConfig(LogProbConfig):
    """The frozen reference policy."""

    log_prob_micro_batch_size_per_gpu: Annotated[
        PositiveInt, Follows("${actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu}")
    ]
    """Responses per forward pass on one rank when reference log-probabilities are computed."""
    router_replay: ReferenceReplayConfig = ReferenceReplayConfig()
    fsdp_config: ForwardFsdpConfig = ForwardFsdpConfig()


class ActorRolloutRefConfig(ConfigModel):
    """The policy in its roles actor, rollout and ref, and its teacher."""

    model: PolicyModelConfig
    actor: ActorConfig
    ref: RefConfig
    rollout: RolloutConfig

    @model_validator(mode="after")
    def an_adapter_has_an_engine_that_takes_it(self) -> "ActorRolloutRefConfig":
        rollout = self.rollout
        untried = None
        if rollout.quantization:
            untried = f"quantization={rollout.quantization}"
        elif rollout.sends_directly:
            untried = f"weight_transport={rollout.weight_transport}"
        elif rollout.tensor_model_parallel_size > 1:
            untried = f"tensor_model_parallel_size={rollout.tensor_model_parallel_size}"
        if self.model.lora_rank and untried:
            raise ValueError(
                f"model.lora_rank={self.model.lora_rank} with rollout.{untried}: adapters do not "
                "travel there; leave the latter as it is by default, or set lora_rank=0"
            )
        return self

    @property
    def teacher_model(self) -> PolicyModelConfig | None:
        """The model of the teacher, if the policy loss has the option `teacher_path`. The rest is
        the policy's."""
        path = (self.actor.policy_loss.model_extra or {}).get("teacher_path")
        if not path:
            return None
        own = {"path": path, "tokenizer_path": None, "lora_rank": 0}
        return self.model.model_copy(update=own)


class CriticModelConfig(TrainedModelConfig):
    """The critic's pretrained model; a scalar value head replaces its language-model head."""

    path: Annotated[str, Follows("${actor_rollout_ref.model.path}")]
    """Folder or hub name of the pretrained model."""
    fsdp_config: TrainedFsdpConfig = TrainedFsdpConfig()


class CriticConfig(ConfigModel):
    """The value function of PPO."""

    enable: bool | None = None
    """Train a critic; null means only where the advantage estimator needs values."""
    model: CriticModelConfig
    optim: OptimConfig = OptimConfig(lr=1e-5)
    ppo_mini_batch_size: Annotated[
        PositiveInt, Follows("${actor_rollout_ref.actor.ppo_mini_batch_size}")
    ]
    """PROMPTS per optimizer step, over all ranks; each brings rollout.n responses. It divides
    data.train_batch_size."""
    ppo_micro_batch_size_per_gpu: PositiveInt = 8
    """Responses per forward and backward pass on one rank."""
    forward_micro_batch_size_per_gpu: Annotated[
        PositiveInt, Follows("${critic.ppo_micro_batch_size_per_gpu}")
    ]
    """Responses per forward pass on one rank when values are computed."""
    use_dynamic_bsz: Annotated[bool, Follows("${actor_rollout_ref.actor.use_dynamic_bsz}")]
    """Fill micro-batches by tokens, up to the two limits below, instead of by responses."""
    ppo_max_token_len_per_gpu: PositiveInt = 32768
    """Most tokens, without padding, of a forward and backward pass on one rank, with
    use_dynamic_bsz."""
    forward_max_token_len_per_gpu: Annotated[
        PositiveInt, Follows("${critic.ppo_max_token_len_per_gpu}")
    ]
    """Most tokens of a forward pass on one rank when values are computed, with use_dynamic_bsz."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ranks that share every sequence (arXiv:2309.14509), for sequences too long for one; a token
    limit counts for each of them. It divides the pool's size."""
    ppo_epochs: Annotated[PositiveInt, Follows("${actor_rollout_ref.actor.ppo_epochs}")]
    """Passes over one batch of experience."""
    grad_clip: PositiveFloat = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""
    cliprange_value: PositiveFloat = 0.5
    """Clip range of the new value around the old one in the value loss."""
    loss_agg_mode: Annotated[LossAggMode, Follows("${actor_rollout_ref.actor.loss_agg_mode}")]
    """How the per-token loss becomes one number: token-mean, token-sum, seq-mean-token-sum,
    seq-mean-token-mean or seq-mean-token-sum-norm (divided by data.max_response_length)."""


class RewardModelModelConfig(ModelConfig):
    """The reward model's pretrained sequence classifier."""

    # A rule demands it of a reward model that is on, and workers get no other.
    path: str | None = None  # type: ignore[assignment]
    """Folder or hub name of the pretrained reward model; needed when reward_model.enable is
    true."""
    fsdp_config: ForwardFsdpConfig = ForwardFsdpConfig()


class RewardModelConfig(ConfigModel):
    """A learned reward that scores whole responses."""

    enable: bool = False
    """Score every response with a reward model. Rules are added to it: a custom_reward_function on
    every row, the built-in rewards on rows whose reward_model.style is not "model"."""
    weight: float = 1.0
    """Of its score in the reward, the weighted sum of all scores."""
    model: RewardModelModelConfig = RewardModelModelConfig()
    micro_batch_size_per_gpu: PositiveInt = 8
    """Responses per forward pass on one rank."""
    use_dynamic_bsz: Annotated[bool, Follows("${critic.use_dynamic_bsz}")]
    """Fill those passes by tokens, up to forward_max_token_len_per_gpu, instead of by responses."""
    forward_max_token_len_per_gpu: Annotated[
        PositiveInt, Follows("${critic.forward_max_token_len_per_gpu}")
    ]
    """Most tokens, without padding, of such a pass on one rank."""


class FurtherRewardModelConfig(ConfigModel):
    """What is a further reward model's own; its other settings are those of `reward_model`."""

    path: Annotated[str, Field(min_length=1)]
    """Folder or hub name of the pretrained reward model."""
    weight: float = 1.0
    """Of its score in the reward."""
