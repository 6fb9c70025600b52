"""Settings that workers read: models, optimizers, FSDP, actor, reference, rollout, critic, reward model.

Every default of these keys is written here and nowhere else: a value, or with `Follows` the key whose value it takes.
A field with neither must come from the user (a model path). The text under a field is its documentation: it says what
the key means, its unit and its allowed values, and it becomes docs/config.md. This module imports neither torch, ray
nor vllm, so a configuration is checked before any of them is loaded.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    field_validator,
    model_validator,
)

from verl_like.config_model import ConfigModel, Follows, OpenConfigModel

_DTYPE_SYNONYMS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _spell_out_dtype(value: object) -> object:
    return _DTYPE_SYNONYMS.get(value, value) if isinstance(value, str) else value


# The names are torch's, so a worker turns one into a dtype with getattr(torch, name).
TrainingDtype = Annotated[Literal["float32", "bfloat16"], BeforeValidator(_spell_out_dtype)]
RolloutDtype = Annotated[Literal["float32", "bfloat16", "float16"], BeforeValidator(_spell_out_dtype)]
LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlPenalty = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]


class ModelConfig(ConfigModel):
    """A pretrained model that is only run forward."""

    path: str
    """Folder or hub name of the pretrained model."""
    trust_remote_code: bool = False
    """Whether code that ships with the model may run on this machine. Keep it off for models you have not read."""
    override_config: dict[str, Any] = Field(default={})
    """Attributes that replace those of the model's own configuration, e.g. {attention_dropout: 0.0}; and
    attn_implementation, the attention over packed sequences: sdpa, varlen (torch) or flash_attention_2, by default the
    fastest there is."""

    @property
    def attn_implementation(self) -> str | None:
        """The requested attention; None picks the fastest."""
        return self.override_config.get("attn_implementation")

    @property
    def hf_overrides(self) -> dict[str, Any]:
        """`override_config` without the choice of attention, which is ours and not the model's."""
        return {name: value for name, value in self.override_config.items() if name != "attn_implementation"}

    @field_validator("override_config")
    @classmethod
    def attention_is_one_of_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        choices = ("sdpa", "varlen", "flash_attention_2")
        requested = value.get("attn_implementation")
        if requested not in (None, *choices):
            raise ValueError(f"attn_implementation={requested}: expected {', '.join(choices)} or none")
        return value


class TrainedModelConfig(ModelConfig):
    """A pretrained model that is also trained and saved."""

    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: about a third more compute for far less memory."""
    enable_activation_offload: bool = False
    """Keep what the backward pass needs of each layer in host memory until it is needed."""
    use_torch_compile: bool = False
    """Compile the layers with torch.compile: a slow first step, then fewer and larger kernels."""

    @property
    def tokenizer(self) -> str:
        """Folder or hub name of the tokenizer that is saved with the model."""
        return self.path


class PolicyModelConfig(TrainedModelConfig):
    """The policy's pretrained model."""

    tokenizer_path: str | None = None
    """Folder or hub name of the tokenizer; null means the model's own."""

    @property
    def tokenizer(self) -> str:
        return self.tokenizer_path or self.path


class FsdpConfig(ConfigModel):
    """How the parameters of a model are sharded and stored."""

    param_offload: bool = False
    """Keep the parameters in host memory while the model is idle."""
    dtype: TrainingDtype = "bfloat16"
    """Data type in which layers compute: float32 or bfloat16 (fp32 and bf16 mean the same)."""


class ForwardFsdpConfig(FsdpConfig):
    """A model that is only run forward is stored in its computing data type and sharded over all ranks."""

    @property
    def model_dtype(self) -> str:
        return self.dtype

    @property
    def fsdp_size(self) -> int:
        return -1

    @property
    def reshard_after_forward(self) -> bool:
        return True


class TrainedFsdpConfig(FsdpConfig):
    """A trained model also has stored weights of higher precision, an optimizer state and a backward pass."""

    optimizer_offload: bool = False
    """Keep the optimizer state in host memory except during the optimizer step."""
    fsdp_size: Annotated[int, Field(ge=-1)] = -1
    """Ranks one copy of the parameters is sharded over; -1 means all ranks of the pool. It divides the pool's size."""
    model_dtype: TrainingDtype = "float32"
    """Data type in which the parameters are stored: float32 or bfloat16 (fp32 and bf16 mean the same)."""
    reshard_after_forward: bool = True
    """Free the gathered parameters of a layer after its forward pass and gather them again for the backward pass, and
    keep only a shard of its gradient between micro-batches. false is for models whose parameters and float32 gradients
    fit on every device: gradients then travel once an optimizer step. One rank alone gathers and frees nothing."""

    @field_validator("fsdp_size")
    @classmethod
    def fsdp_size_is_all_ranks_or_positive(cls, value: int) -> int:
        if value == 0:
            raise ValueError("expected -1 (all ranks) or a positive number of ranks")
        return value


class OptimConfig(ConfigModel):
    """AdamW and its learning-rate schedule."""

    lr: NonNegativeFloat
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up: constant, or cosine or linear decay to 0 at the end of the run."""
    lr_warmup_steps: Annotated[int, Field(ge=-1)] = -1
    """Training steps of linear warm-up; -1 means lr_warmup_steps_ratio decides."""
    lr_warmup_steps_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Warm-up as a fraction of all training steps; used while lr_warmup_steps is -1."""

    @model_validator(mode="after")
    def warm_up_is_given_once(self) -> OptimConfig:
        if self.lr_warmup_steps >= 0 and self.lr_warmup_steps_ratio > 0:
            raise ValueError(
                f"lr_warmup_steps={self.lr_warmup_steps} and lr_warmup_steps_ratio={self.lr_warmup_steps_ratio} both "
                "set the warm-up; give one of them (lr_warmup_steps=-1 or lr_warmup_steps_ratio=0 switches one off)"
            )
        return self


class ActorOptimConfig(OptimConfig):
    """AdamW for the actor."""

    lr: NonNegativeFloat = 1e-6
    """Peak learning rate."""


class CriticOptimConfig(OptimConfig):
    """AdamW for the critic."""

    lr: NonNegativeFloat = 1e-5
    """Peak learning rate."""


class PolicyLossConfig(OpenConfigModel):
    """Which policy loss the actor minimises."""

    loss_mode: str = "vanilla"
    """Registered policy loss; vanilla is PPO's clipped loss with dual clip."""


class ActorConfig(OpenConfigModel):
    """The trained policy."""

    ppo_mini_batch_size: PositiveInt = 256
    """PROMPTS per optimizer step, over all ranks; each brings rollout.n responses. It divides data.train_batch_size."""
    ppo_micro_batch_size_per_gpu: PositiveInt = 8
    """Responses per forward and backward pass on one rank. It divides a rank's share of the mini-batch."""
    use_dynamic_bsz: bool = False
    """Fill micro-batches by tokens, up to ppo_max_token_len_per_gpu, instead of by responses: faster where lengths
    differ, with the same loss."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Most tokens, without padding, of a forward and backward pass on one rank, with use_dynamic_bsz."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ranks that share every sequence (arXiv:2309.14509), for sequences too long for one; a token limit counts for each
    of them. It divides the pool's size. The reference policy follows."""
    clip_ratio: NonNegativeFloat = 0.2
    """Clip range of the probability ratio: [1 - clip_ratio, 1 + clip_ratio]."""
    clip_ratio_low: Annotated[NonNegativeFloat, Follows("${actor_rollout_ref.actor.clip_ratio}")]
    """Lower clip range, 1 - clip_ratio_low."""
    clip_ratio_high: Annotated[NonNegativeFloat, Follows("${actor_rollout_ref.actor.clip_ratio}")]
    """Upper clip range, 1 + clip_ratio_high."""
    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    """Dual-clip PPO: bound of the ratio where the advantage is negative (arXiv:1912.09729)."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    loss_agg_mode: LossAggMode = "token-mean"
    """How the per-token loss becomes one number: token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean or
    seq-mean-token-sum-norm (divided by the padded response length)."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus that is subtracted from the loss; 0 switches it off."""
    use_kl_loss: bool = False
    """Add the KL divergence to the reference policy to the loss (GRPO). May be combined with
    algorithm.use_kl_in_reward; both terms then apply."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of the KL loss."""
    kl_loss_type: KlPenalty = "low_var_kl"
    """Per-token KL estimator of the KL loss: kl (k1), abs, mse (k2) or low_var_kl (k3); a trailing + keeps the value
    and takes the gradient of k2."""
    ppo_epochs: PositiveInt = 1
    """Passes over one batch of experience."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""
    optim: ActorOptimConfig = ActorOptimConfig()
    fsdp_config: TrainedFsdpConfig = TrainedFsdpConfig()

    @model_validator(mode="after")
    def clip_ratio_is_not_overruled(self) -> ActorConfig:
        default = type(self).model_fields["clip_ratio"].default
        if self.clip_ratio != default and self.clip_ratio not in (self.clip_ratio_low, self.clip_ratio_high):
            raise ValueError(
                f"clip_ratio={self.clip_ratio} has no effect because clip_ratio_low={self.clip_ratio_low} and "
                f"clip_ratio_high={self.clip_ratio_high} are both set; remove clip_ratio or one of the two"
            )
        return self


class RefConfig(ConfigModel):
    """The frozen reference policy."""

    log_prob_micro_batch_size_per_gpu: Annotated[
        PositiveInt, Follows("${actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu}")
    ]
    """Responses per forward pass on one rank when reference log-probabilities are computed."""
    log_prob_use_dynamic_bsz: Annotated[bool, Follows("${actor_rollout_ref.actor.use_dynamic_bsz}")]
    """Fill those passes by tokens, up to log_prob_max_token_len_per_gpu, instead of by responses."""
    log_prob_max_token_len_per_gpu: Annotated[
        PositiveInt, Follows("${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}")
    ]
    """Most tokens, without padding, of such a pass on one rank."""
    fsdp_config: ForwardFsdpConfig = ForwardFsdpConfig()


class SamplingConfig(ConfigModel):
    """How responses are sampled in validation."""

    temperature: NonNegativeFloat = 0.0
    """Softmax temperature; 0 decodes greedily."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample among the k most likely tokens; -1 means all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the most likely tokens that hold this share of the probability."""
    n: PositiveInt = 1
    """Responses per prompt."""

    @property
    def do_sample(self) -> bool:
        """Whether responses are sampled rather than decoded greedily."""
        return self.temperature > 0

    @model_validator(mode="after")
    def several_responses_are_sampled(self) -> SamplingConfig:
        if self.n > 1 and not self.do_sample:
            raise ValueError(f"n={self.n} greedy responses to one prompt are all the same; set temperature > 0 or n=1")
        return self


class RolloutConfig(ConfigModel):
    """The engine that generates responses."""

    name: Literal["vllm", "hf"] = "vllm"
    """Engine: vllm, or hf (transformers; small and slow, for debugging)."""
    prompt_length: Annotated[PositiveInt, Follows("${data.max_prompt_length}")]
    """Padded prompt length in tokens."""
    response_length: Annotated[PositiveInt, Follows("${data.max_response_length}")]
    """Longest response in tokens."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Softmax temperature; log-probabilities everywhere are taken at the same temperature."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample among the k most likely tokens; -1 means all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the most likely tokens that hold this share of the probability."""
    n: PositiveInt = 1
    """Responses per prompt; GRPO needs at least 2."""
    ignore_eos: bool = False
    """Generate response_length tokens even after the end-of-sequence token; for measuring speed."""
    dtype: RolloutDtype = "bfloat16"
    """Data type of the engine's weights: bfloat16, float16 or float32 (fp32, bf16 and fp16 mean the same)."""
    tensor_model_parallel_size: PositiveInt = 1
    """Processes that share one engine. It divides the number of processes of the rollout's pool."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the device's memory for the engine's weights and key-value cache."""
    enforce_eager: bool = False
    """Run without CUDA graphs: starts faster, decodes slower."""
    free_cache_engine: bool = True
    """Free the engine's weights and cache while training runs; for pools that roll out and train in turn."""
    max_num_batched_tokens: PositiveInt | None = None
    """Most tokens the engine processes in one iteration; null means vLLM's own number for the GPU (16384 with 70 GiB or
    more, A100: 8192) and 8192 on a CPU. On a CPU it is at least the longest sequence."""
    max_num_seqs: PositiveInt | None = None
    """Most sequences the engine processes at once; null means vLLM's own number for the GPU (1024 with 70 GiB or more,
    A100: 256), and 256 on a CPU and for the hf engine."""
    log_prob_micro_batch_size_per_gpu: PositiveInt = 8
    """Responses per forward pass on one rank when the actor recomputes log-probabilities."""
    log_prob_use_dynamic_bsz: Annotated[bool, Follows("${actor_rollout_ref.actor.use_dynamic_bsz}")]
    """Fill those passes by tokens, up to log_prob_max_token_len_per_gpu, instead of by responses."""
    log_prob_max_token_len_per_gpu: Annotated[
        PositiveInt, Follows("${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}")
    ]
    """Most tokens, without padding, of such a pass on one rank."""
    val_kwargs: SamplingConfig = SamplingConfig()


class ActorRolloutRefConfig(ConfigModel):
    """The policy in its three roles: actor, rollout, ref."""

    model: PolicyModelConfig
    actor: ActorConfig
    ref: RefConfig
    rollout: RolloutConfig


class CriticModelConfig(TrainedModelConfig):
    """The critic's pretrained model; a scalar value head replaces its language-model head."""

    path: Annotated[str, Follows("${actor_rollout_ref.model.path}")]
    """Folder or hub name of the pretrained model."""
    fsdp_config: TrainedFsdpConfig = TrainedFsdpConfig()


class CriticConfig(ConfigModel):
    """The value function of PPO."""

    enable: bool | None = None
    """Train a critic; null means only where the advantage estimator needs values (gae)."""
    model: CriticModelConfig
    optim: CriticOptimConfig = CriticOptimConfig()
    ppo_mini_batch_size: Annotated[PositiveInt, Follows("${actor_rollout_ref.actor.ppo_mini_batch_size}")]
    """PROMPTS per optimizer step, over all ranks; each brings rollout.n responses. It divides data.train_batch_size."""
    ppo_micro_batch_size_per_gpu: PositiveInt = 8
    """Responses per forward and backward pass on one rank. It divides a rank's share of the mini-batch."""
    forward_micro_batch_size_per_gpu: Annotated[PositiveInt, Follows("${critic.ppo_micro_batch_size_per_gpu}")]
    """Responses per forward pass on one rank when values are computed."""
    use_dynamic_bsz: Annotated[bool, Follows("${actor_rollout_ref.actor.use_dynamic_bsz}")]
    """Fill micro-batches by tokens, up to the two limits below, instead of by responses."""
    ppo_max_token_len_per_gpu: PositiveInt = 32768
    """Most tokens, without padding, of a forward and backward pass on one rank, with use_dynamic_bsz."""
    forward_max_token_len_per_gpu: Annotated[PositiveInt, Follows("${critic.ppo_max_token_len_per_gpu}")]
    """Most tokens of a forward pass on one rank when values are computed, with use_dynamic_bsz."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Ranks that share every sequence (arXiv:2309.14509), for sequences too long for one; a token limit counts for each
    of them. It divides the pool's size."""
    ppo_epochs: Annotated[PositiveInt, Follows("${actor_rollout_ref.actor.ppo_epochs}")]
    """Passes over one batch of experience."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""
    cliprange_value: Annotated[float, Field(gt=0)] = 0.5
    """Clip range of the new value around the old one in the value loss."""
    loss_agg_mode: Annotated[LossAggMode, Follows("${actor_rollout_ref.actor.loss_agg_mode}")]
    """How the per-token loss becomes one number: token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean or
    seq-mean-token-sum-norm (divided by the padded response length)."""


class RewardModelModelConfig(ModelConfig):
    """The reward model's pretrained sequence classifier."""

    path: str | None = None
    """Folder or hub name of the pretrained reward model; needed when reward_model.enable is true."""
    fsdp_config: ForwardFsdpConfig = ForwardFsdpConfig()


class RewardModelConfig(ConfigModel):
    """A learned reward that scores whole responses."""

    enable: bool = False
    """Score every response with a reward model. Rules are added to it: a custom_reward_function on every row, the
    built-in rewards on rows whose reward_model.style is not "model"."""
    model: RewardModelModelConfig = RewardModelModelConfig()
    micro_batch_size_per_gpu: PositiveInt = 8
    """Responses per forward pass on one rank."""
    use_dynamic_bsz: Annotated[bool, Follows("${critic.use_dynamic_bsz}")]
    """Fill those passes by tokens, up to forward_max_token_len_per_gpu, instead of by responses."""
    forward_max_token_len_per_gpu: Annotated[PositiveInt, Follows("${critic.forward_max_token_len_per_gpu}")]
    """Most tokens, without padding, of such a pass on one rank."""
