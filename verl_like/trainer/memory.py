"""How much memory a run takes on a GPU: a sum for each phase, made before anything starts.

Weights, Adam, gradients and the engine's share are exact. FSDP2 gathers, computes and reduces in three streams. Memory
that one of them has had is not another's, so what they take at most adds up, though not at one time. Activations are
the tensors that autograd saves in a layer of Llama and Qwen3. `python -m verl_like.rehearse` measures what is added up
here. CONTEXT and ASLEEP are assumptions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.roles import Role, reward_model_key
from verl_like.workers.config.engine import ForwardFsdpConfig, TrainedFsdpConfig
from verl_like.workers.config.models import ModelConfig, TrainedModelConfig
from verl_like.workers.models.linear_log_prob import LOGITS_PER_CHUNK
from verl_like.workers.models.lora import model_buffers, trained_parameters
from verl_like.workers.models.pretrained import TEACHER_PATH, decoder_layers, empty_model
from verl_like.workers.planning.partition import MicroBatching, log_prob_micro_batching

GB = 1e9
CONTEXT = 1.0 * GB
"""Of a training process: CUDA context, NCCL, libraries."""
ASLEEP = 1.5 * GB
"""Of an engine that sleeps: CUDA context and captured graphs."""
REDUCTION_BYTES = 4
"""Gradients are reduced in float32."""
BETWEEN_TENSORS = 0.03
"""Of what a pass takes: what torch's allocator has beside it, with segments that grow."""


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters, and the widths that activations have."""

    parameters: int
    buffers: int
    """Bytes of the buffers that belong to it, which every rank has whole."""
    trained: int
    """Those of the adapter, or all where there is none."""
    layer: int
    """Parameters of the largest decoder layer."""
    outer: int
    """Parameters outside the decoder layers: embedding, head, last norm."""
    num_layers: int
    hidden: int
    activations_per_token: int
    """Values that autograd saves for a token in one decoder layer, without checkpointing: 13 to 19 hidden sizes and 4
    intermediate ones in Llama and Qwen3."""
    live_per_token: int
    """Values that are there at once for a token in a decoder layer without gradients: 6 hidden sizes and 3 intermediate
    ones in Llama."""
    head: int
    """Parameters of the language-model head; 0 where there is none."""

    @classmethod
    def of(cls, config: ModelConfig, key: str, auto_class: Any) -> "ModelSize":
        """Counts the parameters of a model that is made without memory."""
        hf = empty_model(config, auto_class, key=key)
        text, head = hf.config.get_text_config(), hf.get_output_embeddings()
        intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(hf)]
        total = sum(p.numel() for p in hf.parameters())
        return cls(
            parameters=total,
            buffers=sum(buffer.nbytes for _, buffer in model_buffers(hf)),
            trained=sum(p.numel() for _, p in trained_parameters(hf)),
            layer=max(layers),
            outer=total - sum(layers),
            num_layers=len(layers),
            hidden=text.hidden_size,
            activations_per_token=20 * text.hidden_size + 4 * intermediate,
            live_per_token=6 * text.hidden_size + 3 * intermediate,
            head=0 if head is None else head.weight.numel(),
        )


@dataclass(frozen=True)
class Phase:
    """The memory of one GPU of a pool at one time."""

    pool: str
    name: str
    parts: Mapping[str, float]
    """Bytes by what they are; those whose name ends in * are estimates."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def certain(self) -> float:
        """The part that is not an estimate."""
        return sum(size for part, size in self.parts.items() if not part.endswith("*"))

    def __str__(self) -> str:
        parts = " + ".join(f"{part} {size / GB:.1f}" for part, size in self.parts.items() if size >= GB / 20)
        return f"{self.pool}, {self.name}: {parts} = {self.total / GB:.1f} GB"


@dataclass(frozen=True)
class TrainingRole:
    """One model of a training process."""

    name: str
    size: ModelSize
    model: ModelConfig
    fsdp: TrainedFsdpConfig | ForwardFsdpConfig
    shards: int
    passes: MicroBatching
    """Its largest micro-batches."""
    has_ema: bool
    ranks_of_sequence: int = 1
    """Ranks that share each sequence, see `ulysses_sequence_parallel_size`."""

    @property
    def stored(self) -> float:
        return self.bytes_of(self.size.parameters) + self.size.buffers

    @property
    def stored_trained(self) -> float:
        return self.bytes_of(self.size.trained)

    def bytes_of(self, num_parameters: int) -> float:
        """Of a rank's shards of that many parameters."""
        return num_parameters / self.shards * getattr(torch, self.fsdp.model_dtype).itemsize

    @property
    def adam(self) -> float:
        """Two moments of each trained parameter, in the parameters' data type, and with it the average in float32."""
        average = self.size.trained / self.shards * torch.float32.itemsize if self.has_ema else 0.0
        return 2 * self.stored_trained + average if isinstance(self.fsdp, TrainedFsdpConfig) else 0.0

    @property
    def offloads_adam(self) -> bool:
        return isinstance(self.fsdp, TrainedFsdpConfig) and self.fsdp.optimizer_offload

    def at_rest(self) -> dict[str, float]:
        """Between the calls of this role."""
        parts = {} if self.fsdp.param_offload else {f"{self.name} weights": self.stored}
        return parts if self.offloads_adam else parts | {f"{self.name} Adam": self.adam}

    @property
    def gathers_whole(self) -> bool:
        """Whether all parameters are there from the forward to the backward pass."""
        return self.shards == 1 or self.fsdp.strategy != "zero3"

    @property
    def num_bytes(self) -> int:
        """Of a number in the layers' computing data type."""
        return getattr(torch, self.fsdp.dtype).itemsize

    def tokens_of_pass(self, sequence_length: int) -> float:
        """Of one rank. A budget of tokens is a rank's, and rows are those of all ranks that share them."""
        if self.passes.by_tokens:
            return self.passes.max_tokens
        return self.passes.num_rows * sequence_length / self.ranks_of_sequence

    def gathered(self) -> dict[str, float]:
        """The parameters that a pass computes with, and the buffers into which they are gathered."""
        size = self.size
        two_units = min(size.parameters, size.outer + size.layer)
        cast = two_units / self.shards if self.fsdp.dtype != self.fsdp.model_dtype else 0.0
        return {
            "gathered layers": (size.parameters if self.gathers_whole else two_units) * self.num_bytes,
            "gathering*": (two_units + cast) * self.num_bytes,
        }

    def head_working(self, sequence_length: int, response_length: int) -> float:
        """Of the scored tokens: a chunk of logits twice, and hidden states with their gradient in float32."""
        size, tokens = self.size, self.tokens_of_pass(sequence_length)
        scored = tokens if self.passes.by_tokens else tokens * response_length / sequence_length
        chunk = min(LOGITS_PER_CHUNK["cuda"], scored * size.head / size.hidden) * 2 * REDUCTION_BYTES
        return chunk + scored * size.hidden * (self.num_bytes + REDUCTION_BYTES) if size.head else 0.0

    def forward(self, sequence_length: int, response_length: int) -> dict[str, float]:
        """A pass without gradients, in addition to `at_rest`."""
        layer = self.size.live_per_token * self.num_bytes * self.tokens_of_pass(sequence_length)
        activations = {"activations*": max(layer, self.head_working(sequence_length, response_length))}
        return self.moved() | with_fragments(self.gathered() | activations)

    def moved(self) -> dict[str, float]:
        """What a call brings to the device of what lies in host memory."""
        return {f"{self.name} weights": self.stored} if self.fsdp.param_offload else {}

    def update(self, sequence_length: int, response_length: int) -> dict[str, float]:
        """The forward and backward passes of a model that is trained, in addition to `at_rest`."""
        assert isinstance(self.fsdp, TrainedFsdpConfig) and isinstance(self.model, TrainedModelConfig)
        size, itemsize, tokens = self.size, self.num_bytes, self.tokens_of_pass(sequence_length)
        trained = size.trained / size.parameters  # all, or an adapter's small part
        # The float32 sum over micro-batches, and the copy in `model_dtype` that the optimizer reads. A model that is
        # gathered whole frees its layers while it makes the copy, which then takes no further memory.
        sums_whole = self.fsdp.strategy in ("zero1", "ddp", "single")
        gradients = size.trained * REDUCTION_BYTES / (1 if sums_whole else self.shards)
        gradients += 0.0 if self.gathers_whole or self.fsdp.model_dtype == "float32" else self.stored_trained
        # In the stream that reduces: the shard of the largest unit, or of all of them where they are reduced once.
        reduced = (size.trained if sums_whole else trained * max(size.outer, size.layer)) / self.shards
        layer = size.activations_per_token * itemsize * tokens
        kept = size.hidden * itemsize * tokens if self.model.enable_gradient_checkpointing else layer
        # Of those in host memory, some are on their way there or back.
        kept *= min(5, size.num_layers) if self.model.enable_activation_offload else size.num_layers
        computed = kept + max(layer, self.head_working(sequence_length, response_length))
        computed += trained * (size.layer * (itemsize + REDUCTION_BYTES) + size.head * itemsize)
        # At the end of the backward pass the activations are gone, and the outermost unit is reduced.
        at_the_end = trained * size.outer * (itemsize + REDUCTION_BYTES)
        parts = {"gradients": gradients} | self.gathered() | {"reduction*": reduced * REDUCTION_BYTES}
        return self.moved() | with_fragments(parts | {"activations*": max(computed, at_the_end)})


def with_fragments(parts: dict[str, float]) -> dict[str, float]:
    return parts | {"fragments*": BETWEEN_TENSORS * sum(parts.values())}


def training_roles(config: PPOConfig) -> list[TrainingRole]:
    """The built-in training roles of the run; custom roles are not counted."""
    policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    updates, critic_updates = (
        MicroBatching(part.ppo_micro_batch_size_per_gpu, part.ppo_max_token_len_per_gpu, part.use_dynamic_bsz)
        for part in (policy.actor, critic)
    )
    scores = MicroBatching(
        reward.micro_batch_size_per_gpu, reward.forward_max_token_len_per_gpu, reward.use_dynamic_bsz
    )
    log_probs = log_prob_micro_batching(policy.ref)
    classifiers: dict[str, Any] = dict.fromkeys(config.reward_models_by_role, AutoModelForSequenceClassification)
    classifiers[Role.Critic] = AutoModelForTokenClassification
    roles: list[tuple[str, str, ModelConfig | None, TrainedFsdpConfig | ForwardFsdpConfig, MicroBatching]] = [
        (Role.Actor, "actor_rollout_ref.model", policy.model, policy.actor.fsdp_config, updates),
        (Role.RefPolicy, "actor_rollout_ref.model", policy.model, policy.ref.fsdp_config, log_probs),
        (Role.Teacher, TEACHER_PATH, policy.teacher_model, policy.ref.fsdp_config, log_probs),
        (Role.Critic, "critic.model", critic.model, critic.model.fsdp_config, critic_updates),
        *(
            (role, reward_model_key(role), own.model, own.model.fsdp_config, scores)
            for role, own in config.reward_models_by_role.items()
        ),
    ]
    of_policy = policy.actor.ulysses_sequence_parallel_size
    ranks_of_sequence: dict[str, int] = {Role.Actor: of_policy, Role.RefPolicy: of_policy, Role.Teacher: of_policy}
    ranks_of_sequence[Role.Critic] = critic.ulysses_sequence_parallel_size
    found = []
    for role, key, model, fsdp, passes in roles:
        if role in config.active_roles and model:
            size = ModelSize.of(model, key, classifiers.get(role, AutoModelForCausalLM))
            shards = config.num_processes(role) if fsdp.num_shards == -1 else fsdp.num_shards
            has_ema = role == Role.Actor and policy.actor.ema_decay is not None
            shares = ranks_of_sequence.get(role, 1)
            found.append(TrainingRole(str(role), size, model, fsdp, shards, passes, has_ema, shares))
    return found


def memory_phases(config: PPOConfig, device_bytes: float) -> list[Phase]:
    """The phases of a step on one GPU of each pool, whose memory is `device_bytes`."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    sequence, response = data.max_prompt_length + data.max_response_length, data.max_response_length
    built_in = training_roles(config)
    engine, asleep = {"engine's share": rollout.gpu_memory_utilization * device_bytes}, {"sleeping engine*": ASLEEP}
    if rollout.name == "hf":  # has a whole model, reserves nothing, and sleeps in host memory
        actor = built_in[0].size
        weights = actor.parameters * getattr(torch, rollout.dtype).itemsize + actor.buffers
        engine, asleep = {"engine's weights": weights}, {}
    phases = []
    for pool in dict.fromkeys(config.role_mapping[role] for role in config.active_roles):
        roles = [role for role in built_in if config.role_mapping[role.name] == pool]
        rest = {part: size for role in roles for part, size in role.at_rest().items()}
        overhead = {"context*": CONTEXT} if roles else {}
        beside: dict[str, float] = {}
        if pool == config.role_mapping[Role.Rollout]:
            phases.append(Phase(pool, "generation", rest | engine | overhead))
            beside = asleep if rollout.free_cache_engine else engine
        for role in roles:
            is_trained = isinstance(role.fsdp, TrainedFsdpConfig)
            name = "update" if is_trained else "forward pass"
            working = (role.update if is_trained else role.forward)(sequence, response)
            phases.append(Phase(pool, f"{role.name} {name}", rest | working | beside | overhead))
            if role.offloads_adam:
                step = {f"{role.name} Adam": role.adam, "gradients": role.stored_trained}
                weights = {f"{role.name} weights": role.stored}
                phases.append(Phase(pool, f"{role.name} optimizer step", rest | weights | step | beside | overhead))
    return phases


def require_memory(config: PPOConfig, device_bytes: float) -> str:
    """The sum of each pool's largest phase, one line each, beside the memory of a GPU, `device_bytes`.

    Raises ValueError if what is certain does not fit.
    """
    phases = memory_phases(config, device_bytes)
    for phase in phases:
        if phase.certain > device_bytes:
            raise ValueError(
                f"a GPU has {device_bytes / GB:.1f} GB, and this does not fit ({phase}): use more GPUs, lower "
                "actor_rollout_ref.rollout.gpu_memory_utilization, or set param_offload and optimizer_offload of an "
                "fsdp_config (docs/memory.md has the sums)."
            )
    lines = [f"Memory of a GPU at most, of {device_bytes / GB:.1f} GB (* estimated):"]
    for pool in dict.fromkeys(phase.pool for phase in phases):
        largest = max((phase for phase in phases if phase.pool == pool), key=lambda phase: phase.total)
        over = " - may not fit: smaller micro-batches or offload may be needed" if largest.total > device_bytes else ""
        lines.append(f"  {largest}{over}")
    return "\n".join(lines)
