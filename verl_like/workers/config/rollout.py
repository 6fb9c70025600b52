"""Settings of the engine that generates responses."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from verl_like.config_model import (
    ConfigModel,
    Follows,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
)
from verl_like.workers.config.agent import MultiTurnConfig
from verl_like.workers.config.models import RolloutDtype


class SamplingConfig(ConfigModel):
    """How responses are sampled."""

    temperature: NonNegativeFloat = 0.0
    """Softmax temperature; 0 decodes greedily."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample among the k most likely tokens; -1 means all."""
    top_p: PositiveShare = 1.0
    """Sample among the most likely tokens that hold this share of the probability."""
    n: PositiveInt = 1
    """Responses per prompt."""

    @model_validator(mode="after")
    def several_responses_are_sampled(self) -> "SamplingConfig":
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n={self.n} greedy responses to one prompt are all the same; set temperature > 0 "
                "or n=1"
            )
        return self


class LogProbConfig(ConfigModel):
    """The passes in which a role of the policy computes log-probabilities."""

    log_prob_micro_batch_size_per_gpu: PositiveInt = 8
    """Responses per forward pass on one rank when log-probabilities are computed."""
    log_prob_use_dynamic_bsz: Annotated[bool, Follows("${actor_rollout_ref.actor.use_dynamic_bsz}")]
    """Fill those passes by tokens, up to log_prob_max_token_len_per_gpu, instead of by
    responses."""
    log_prob_max_token_len_per_gpu: Annotated[
        PositiveInt, Follows("${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}")
    ]
    """Most tokens, without padding, of such a pass on one rank."""


class RolloutConfig(LogProbConfig, SamplingConfig):
    """The engine that generates responses."""

    name: str = "vllm"
    """Engine: vllm, vllm_async (vLLM in a process of its own), hf (transformers; small and slow,
    for debugging), or one of a plugin."""
    prompt_length: Annotated[PositiveInt, Follows("${data.max_prompt_length}")]
    """Padded prompt length in tokens."""
    response_length: Annotated[PositiveInt, Follows("${data.max_response_length}")]
    """Longest response in tokens."""
    temperature: PositiveFloat = 1.0
    """Softmax temperature; log-probabilities everywhere are taken at the same temperature."""
    n: PositiveInt = 1
    """Responses per prompt; GRPO needs at least 2."""
    ignore_eos: bool = False
    """Generate response_length tokens even after the end-of-sequence token; for measuring speed."""
    dtype: RolloutDtype = "bfloat16"
    """Data type of the engine's weights: bfloat16, float16 or float32 (fp32, bf16 and fp16 mean the
    same)."""
    quantization: Literal["fp8_per_channel"] | None = None
    """What vLLM makes of the weights of linear layers as they arrive: fp8_per_channel (float8, a
    scale for each output channel, and for each token of what goes in), or null, which leaves them
    as they are."""
    tensor_model_parallel_size: PositiveInt = 1
    """Processes that share one engine. It divides the number of processes of the rollout's pool."""
    expert_parallel_size: PositiveInt = 1
    """Processes of an engine over which vLLM distributes the experts of a mixture of experts: 1,
    where each has a part of every expert, or tensor_model_parallel_size, where each has whole
    experts. vLLM's build for CPUs does not compute these."""
    gpu_memory_utilization: PositiveShare = 0.5
    """Share of the device's memory for the engine's weights and key-value cache."""
    enforce_eager: bool | None = None
    """Run vLLM without compiled layers and CUDA graphs: it starts faster and generates slower. null
    is false on a GPU, and true on a CPU, where vLLM needs g++ to compile."""
    free_cache_engine: bool = True
    """Free the engine's weights and cache while training runs; for pools that roll out and train in
    turn."""
    max_num_batched_tokens: PositiveInt | None = None
    """Most tokens the engine processes in one iteration; null means vLLM's own number for the GPU
    (16384 with 70 GiB or more, A100: 8192) and 8192 on a CPU. On a CPU it is at least the longest
    sequence."""
    max_num_seqs: PositiveInt | None = None
    """Most sequences the engine processes at once; null means vLLM's own number for the GPU (1024
    with 70 GiB or more, A100: 256), and 256 on a CPU and for the hf engine."""
    weight_transport: Literal["object_store", "shared_memory", "gloo", "nccl", "ipc"] = (
        "object_store"
    )
    """How weights reach engines and copies: by Ray, in memory of the trainer's node, or by gloo,
    once to each node. nccl: from GPU to GPU, to engines on a pool of their own. ipc: on one GPU, to
    engines on the actor's pool. Neither was ever run."""
    routing: Annotated[
        Literal["fixed", "least_loaded"],
        Follows("${default_routing:${trainer.device},${trainer.max_staleness}}"),
    ] = "fixed"
    """Which replica takes a request. fixed: each has an equal part of the prompts of a call, from
    its start. least_loaded: they wait in one queue for the replica with most free places, so none
    stands idle while others work, but a rounding may then differ from run to run. By default fixed
    on a CPU, unless makers of detached training may be ahead, and least_loaded elsewhere."""
    kv_after_update: Literal["recompute", "keep"] = "recompute"
    """Keys and values of unfinished responses when new weights arrive: computed again with them, or
    kept."""
    val_kwargs: SamplingConfig = SamplingConfig()
    multi_turn: MultiTurnConfig = MultiTurnConfig()

    @property
    def sends_directly(self) -> bool:
        """True if the actor sends the values while engines load them, and nothing is staged."""
        return self.weight_transport in ("nccl", "ipc")

    @model_validator(mode="after")
    def experts_are_distributed_over_all_processes_of_an_engine(self) -> "RolloutConfig":
        if self.expert_parallel_size not in (1, self.tensor_model_parallel_size):
            raise ValueError(
                f"expert_parallel_size={self.expert_parallel_size}: vLLM distributes experts over "
                "all processes of an engine or over none; set it to 1, or to "
                f"tensor_model_parallel_size={self.tensor_model_parallel_size}"
            )
        if self.expert_parallel_size > 1 and self.name == "hf":
            raise ValueError(
                f"expert_parallel_size={self.expert_parallel_size} is for vLLM, and name=hf has a "
                "whole model in each process; set it to 1"
            )
        return self

    @field_validator("quantization", mode="before")
    @classmethod
    def quantised_weights_can_be_updated(cls, value: object) -> object:
        if value not in (None, "fp8_per_channel"):
            raise ValueError(
                "only fp8_per_channel takes new weights: on a CPU vLLM computes NaN with int8 "
                "after an update, and other forms do not start or leave linear layers as they "
                "are; set fp8_per_channel or null"
            )
        return value

    @model_validator(mode="after")
    def an_engine_in_another_process_can_map_the_weights(self) -> "RolloutConfig":
        if self.name == "vllm_async" and self.weight_transport == "object_store":
            raise ValueError(
                "name=vllm_async has an engine in a process outside of Ray, which does not see "
                "weight_transport="
                "object_store; set weight_transport=shared_memory, between nodes gloo, or name=vllm"
            )
        if self.name == "vllm_async" and self.tensor_model_parallel_size > 1:
            raise ValueError(
                "name=vllm_async with "
                f"tensor_model_parallel_size={self.tensor_model_parallel_size}: the processes of "
                "a replica have one engine together only with name=vllm; set that, or "
                "tensor_model_parallel_size=1"
            )
        return self
