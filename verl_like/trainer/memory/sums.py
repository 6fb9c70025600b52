"""How much memory a model takes on a GPU: a sum for each phase, made before anything starts.

Weights, Adam, gradients and the engine's share are exact. FSDP2 gathers, computes and reduces in
three streams. Memory that one of them has had is not another's, so what they take at most adds up,
though not at one time. Activations are the tensors that autograd saves in a layer of Llama and
Qwen3. `python -m verl_like.rehearse` measures what is added up here. CONTEXT and ASLEEP are
assumptions. `pools.py` says which models lie on the GPUs of a run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from verl_like.trainer.config.run_config import RunConfig
from verl_like.workers.config.engine import ForwardFsdpConfig, TrainedFsdpConfig
from verl_like.workers.config.models import ModelConfig, TrainedModelConfig
from verl_like.workers.models.linear_log_prob import LOGITS_PER_CHUNK
from verl_like.workers.models.lora import model_buffers, trained_parameters
from verl_like.workers.models.packed_models import PackedModel
from verl_like.workers.models.pretrained import decoder_layers, empty_model
from verl_like.workers.planning.partition import MicroBatching
from verl_like.workers.weights.exports import DEFAULT_BUCKET_BYTES

GB = 1e9
CONTEXT = 1.0 * GB
"""Bytes that a training process takes for the CUDA context, NCCL and libraries."""
ASLEEP = 1.5 * GB
"""Bytes that a sleeping engine keeps for its CUDA context and captured graphs."""
REDUCTION_BYTES = 4
"""Gradients are reduced in float32."""
BETWEEN_TENSORS = 0.03
"""What torch's allocator, with segments that grow, has beside what a load or a pass takes, as a
share of that."""
BETWEEN_SHARDS = 0.012
"""What torch's allocator has beside what lies there between the calls, as a share of that."""
WORKSPACES = 0.15 * GB
"""Bytes that a process keeps once it has computed: those of cuBLAS, and the ends of torch's
segments."""
STREAMS = 0.1 * GB
"""Bytes at the ends of the segments of the streams of a pass."""
WITHOUT_LOGITS = 0.25 * GB
"""Bytes that updates of a model with a head of one number have in addition between tensors. This
was measured; the reason is not known."""


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters, and the widths that activations have."""

    parameters: int
    buffers: int
    """Bytes of the buffers that belong to the model. Every rank has all of them."""
    trained: int
    """Number of trained parameters: those of the adapter, or all where there is none."""
    largest: int
    """Numbers in the largest parameter."""
    largest_trained: int
    """Numbers in the largest parameter that is trained."""
    layer: int
    """Parameters of the largest decoder layer."""
    outer: int
    """Parameters outside the decoder layers: embedding, head, last norm."""
    num_layers: int
    has_adapter: bool
    hidden: int
    activations_per_token: int
    """Values that autograd saves for a token in one decoder layer, without checkpointing: in Llama
    13 hidden sizes and 4 intermediate ones, and with norms of queries and keys, as in Qwen3, up to
    19."""
    live_per_token: int
    """Values that exist at once for a token in a decoder layer without gradients: in Llama 4 hidden
    sizes and 3 intermediate ones, with an adapter 4 intermediate ones."""
    head: int
    """Parameters of the language-model head; 0 where there is none."""
    further_heads: int = 0
    """Trained parameters of heads beside the model's own, as ILQL has them."""

    @classmethod
    def of(cls, config: ModelConfig, key: str, model_class: type[PackedModel]) -> "ModelSize":
        """Count the parameters of a model that is made without memory."""
        model = model_class(empty_model(config, model_class.auto_class, key=key))
        hf = model.hf
        text = hf.config.get_text_config()
        head = hf.get_output_embeddings()
        intermediate = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        layers = [count_parameters(layer) for layer in decoder_layers(hf)]
        total = count_parameters(model)
        trained = [p.numel() for _, p in trained_parameters(hf)]
        has_adapter = sum(trained) < count_parameters(hf)
        of_heads = [p.numel() for p in model.heads.parameters() if p.requires_grad]
        trained += of_heads
        has_norms = any("q_norm" in name for name, _ in hf.named_parameters())
        saved_hidden = 20 if has_norms else 13
        live_intermediate = 4 if has_adapter else 3
        return cls(
            parameters=total,
            buffers=sum(buffer.nbytes for _, buffer in model_buffers(hf)),
            trained=sum(trained),
            largest=max(p.numel() for p in model.parameters()),
            largest_trained=max(trained),
            layer=max(layers),
            outer=total - sum(layers),
            num_layers=len(layers),
            has_adapter=has_adapter,
            hidden=text.hidden_size,
            activations_per_token=saved_hidden * text.hidden_size + 4 * intermediate,
            live_per_token=4 * text.hidden_size + live_intermediate * intermediate,
            head=0 if head is None else head.weight.numel(),
            further_heads=sum(of_heads),
        )


def count_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True)
class Phase:
    """The memory of one GPU of a pool at one time."""

    pool: str
    name: str
    parts: Mapping[str, float]
    """Bytes by what takes them. A name that ends in * marks an estimate."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def certain(self) -> float:
        """Bytes that are no estimate."""
        return sum(size for part, size in self.parts.items() if not part.endswith("*"))

    def __str__(self) -> str:
        parts = " + ".join(
            f"{part} {size / GB:.1f}" for part, size in self.parts.items() if size >= GB / 20
        )
        return f"{self.pool}, {self.name}: {parts} = {self.total / GB:.1f} GB"


@dataclass(frozen=True)
class PlannedModel:
    """One model of a training process."""

    name: str
    size: ModelSize
    model: ModelConfig
    fsdp: TrainedFsdpConfig | ForwardFsdpConfig
    shards: int
    sequence_length: int
    """Longest rows in tokens."""
    scored_length: int
    """How many of these tokens the head reads."""
    forward_passes: MicroBatching
    """The largest micro-batches of passes without gradients."""
    update_passes: MicroBatching | None = None
    """The largest micro-batches of updates; None for a model that is not trained."""
    has_ema: bool = False
    ranks_of_sequence: int = 1
    """Ranks that share each sequence, as `ulysses_sequence_parallel_size` says."""
    runs_reference: bool = False
    """True if a reference model of the same size computes in the same calls."""
    export_dtype: str | None = None
    """Name of the dtype in which its weights are sent."""

    @property
    def is_trained(self) -> bool:
        return isinstance(self.fsdp, TrainedFsdpConfig)

    @property
    def stored(self) -> float:
        return self.bytes_of(self.size.parameters) + self.size.buffers

    @property
    def stored_trained(self) -> float:
        return self.bytes_of(self.size.trained)

    @property
    def model_itemsize(self) -> int:
        """Bytes of a number between passes."""
        return getattr(torch, self.fsdp.model_dtype).itemsize

    def bytes_of(self, num_parameters: int) -> float:
        """Bytes of a rank's shards of that many parameters."""
        return num_parameters / self.shards * self.model_itemsize

    @property
    def adam(self) -> float:
        """Two moments of each trained parameter, in the parameters' data type, and with it the
        average in float32."""
        average = self.size.trained / self.shards * torch.float32.itemsize if self.has_ema else 0.0
        return 2 * self.stored_trained + average if self.is_trained else 0.0

    @property
    def offloads_adam(self) -> bool:
        return isinstance(self.fsdp, TrainedFsdpConfig) and self.fsdp.optimizer_offload

    def at_rest(self) -> dict[str, float]:
        """What lies on the GPU between the calls of this role."""
        parts = {} if self.fsdp.param_offload else {f"{self.name} weights": self.stored}
        return parts if self.offloads_adam else parts | {f"{self.name} Adam": self.adam}

    @property
    def gathers_whole(self) -> bool:
        """True if all parameters stay gathered from the forward to the backward pass."""
        return self.shards == 1 or self.fsdp.strategy != "zero3"

    @property
    def num_bytes(self) -> int:
        """Bytes of a number in the data type in which the layers compute."""
        return getattr(torch, self.fsdp.dtype).itemsize

    def tokens_of(self, passes: MicroBatching) -> float:
        """Tokens of one rank in a pass. A budget of tokens counts for each rank; a number of rows
        is that of all ranks which share the sequences."""
        if passes.by_tokens:
            return passes.max_tokens
        return passes.num_rows * self.sequence_length / self.ranks_of_sequence

    def load(self) -> dict[str, float]:
        """What loading takes: whole parameters come to the device one after the other, then Adam is
        made, and what is offloaded leaves."""
        largest = self.size.largest * self.model_itemsize
        beside = (
            {f"{self.name} Adam": self.adam}
            if self.adam > largest
            else {"a whole parameter": largest}
        )
        return with_fragments({f"{self.name} weights": self.stored} | beside)

    def gathered(self, computed: float, gathering: float) -> dict[str, float]:
        """The parameters that a pass computes with, and the buffers into which they are gathered.

        `computed` and `gathering` are the numbers of parameters in them at one time, for a model
        that does not keep all.
        """
        parameters = self.size.parameters
        computed = parameters if self.gathers_whole else min(parameters, computed)
        gathering = min(parameters, gathering)
        is_cast = self.fsdp.dtype != self.fsdp.model_dtype
        cast = gathering / self.shards if is_cast else 0.0
        num_models = 2 if self.runs_reference else 1  # each has streams of its own
        return {
            "gathered layers": computed * self.num_bytes,
            "gathering*": num_models * (gathering + cast) * self.num_bytes,
        }

    def head_working(self, tokens: float, passes: MicroBatching) -> float:
        """What the head takes for the scored tokens: a chunk of logits twice, and hidden states
        with their gradient in float32."""
        size = self.size
        if not size.head:
            return 0.0
        scored = tokens if passes.by_tokens else tokens * self.scored_length / self.sequence_length
        num_logits = min(LOGITS_PER_CHUNK["cuda"], scored * size.head / size.hidden)
        chunk = num_logits * 2 * REDUCTION_BYTES
        return chunk + scored * size.hidden * (self.num_bytes + REDUCTION_BYTES)

    def forward(self) -> dict[str, float]:
        """What a pass without gradients takes in addition to `at_rest`."""
        tokens = self.tokens_of(self.forward_passes)
        layer = self.size.live_per_token * self.num_bytes * tokens
        activations = {"activations*": max(layer, self.head_working(tokens, self.forward_passes))}
        # Layers are short without gradients: one is gathered, and another is there, while one is
        # computed.
        two_layers = 2 * self.size.layer
        gathered = self.gathered(self.size.outer + two_layers, max(self.size.outer, two_layers))
        return self.moved() | with_fragments(gathered | activations, of_streams=STREAMS)

    def moved(self) -> dict[str, float]:
        """Weights that lie in host memory and come to the device for a call."""
        return {f"{self.name} weights": self.stored} if self.fsdp.param_offload else {}

    def update(self) -> dict[str, float]:
        """What the forward and backward passes of a trained model take in addition to `at_rest`."""
        assert isinstance(self.fsdp, TrainedFsdpConfig) and isinstance(
            self.model, TrainedModelConfig
        )
        assert self.update_passes
        size = self.size
        itemsize = self.num_bytes
        tokens = self.tokens_of(self.update_passes)
        trained = size.trained / size.parameters  # all, or an adapter's small part
        # The float32 sum over micro-batches, and the copy in `model_dtype` that the optimizer
        # reads. A model that is gathered whole frees its layers while it makes the copy, which then
        # takes no further memory.
        sums_whole = self.fsdp.strategy in ("zero1", "ddp", "single")
        gradients = size.trained * REDUCTION_BYTES / (1 if sums_whole else self.shards)
        gradients += (
            0.0 if self.gathers_whole or self.fsdp.model_dtype == "float32" else self.stored_trained
        )
        # In the stream that reduces: the shard of the largest unit, or of all of them where they
        # are reduced once.
        reduced = (
            size.trained if sums_whole else trained * max(size.outer, size.layer)
        ) / self.shards
        layer = size.activations_per_token * itemsize * tokens
        # The activations of one layer, and their gradients
        backward = layer + 6 * size.hidden * itemsize * tokens
        kept = (
            size.hidden * itemsize * tokens if self.model.enable_gradient_checkpointing else layer
        )
        # Of the activations in host memory, some are on their way there or back.
        kept *= min(5, size.num_layers) if self.model.enable_activation_offload else size.num_layers
        computed = kept + max(backward, self.head_working(tokens, self.update_passes))
        of_heads = (trained * size.head + size.further_heads) * itemsize
        computed += trained * size.layer * (itemsize + REDUCTION_BYTES) + of_heads
        # At the end of the backward pass the activations are gone, and the outermost unit is
        # reduced.
        at_the_end = trained * size.outer * (itemsize + REDUCTION_BYTES)
        two_units = size.outer + size.layer
        parts = {"gradients": gradients} | self.gathered(two_units, two_units)
        parts |= {"reduction*": reduced * REDUCTION_BYTES}
        parts |= {"activations*": max(computed, at_the_end)}
        of_streams = STREAMS if size.head else STREAMS + WITHOUT_LOGITS
        return self.moved() | with_fragments(parts, of_streams=of_streams)

    def optimizer_step(self) -> dict[str, float]:
        """What an optimizer step takes in addition to `at_rest`: gradients as the optimizer reads
        them."""
        in_float32 = self.has_ema and self.fsdp.model_dtype != "float32"
        parts = {
            f"{self.name} Adam": self.adam,
            "gradients": self.stored_trained,
            "weights for their average": self.size.trained / self.shards * REDUCTION_BYTES
            if in_float32
            else 0.0,
            # With an adapter nothing is reduced at the end, which would free the head.
            "gathered layers": self.size.head * self.num_bytes if self.size.has_adapter else 0.0,
        }
        return self.moved() | parts

    def export(self) -> dict[str, float]:
        """What an export takes in addition to `at_rest`: one bucket of weights is gathered at a
        time and put together from its shards."""
        itemsize = getattr(torch, self.export_dtype or self.fsdp.dtype).itemsize
        largest = self.size.largest_trained * itemsize
        bucket = max(largest, min(DEFAULT_BUCKET_BYTES, self.size.trained * itemsize))
        return self.moved() | {"a bucket of weights*": bucket * (2 + 1 / self.shards)}


def with_fragments(parts: dict[str, float], of_streams: float = 0.0) -> dict[str, float]:
    """Return the parts with what torch's allocator has beside them."""
    return parts | {"fragments*": BETWEEN_TENSORS * sum(parts.values()) + of_streams}


@dataclass(frozen=True)
class RolloutShare:
    """What a rollout engine takes of each GPU of its pool."""

    working: Mapping[str, float]
    """What it takes while it generates."""
    resting: Mapping[str, float]
    """What it takes while other roles of the pool work."""


@dataclass(frozen=True)
class PlannedPool:
    """What lies on each GPU of a pool: an engine, and models that share a process, in the order in
    which they load."""

    name: str
    config: RunConfig
    """The configuration that its processes read."""
    nodes: Sequence[int]
    """GPUs on each node, each with one process of the models."""
    models: Sequence[PlannedModel]
    rollout: RolloutShare | None = None

    def phases(self) -> list[Phase]:
        """Return all phases of a step, and those before and after it."""
        rest: dict[str, float] = {}
        overhead = {"context*": CONTEXT} if self.models else {}
        phases = []
        for model in self.models:  # the engine starts after them
            phases.append(Phase(self.name, f"{model.name} load", rest | model.load() | overhead))
            rest |= model.at_rest()
        workspaces = WORKSPACES + BETWEEN_SHARDS * sum(rest.values())
        overhead |= {"workspaces*": workspaces} if self.models else {}
        beside: Mapping[str, float] = {}
        if self.rollout:
            phases.append(
                Phase(self.name, "generation", {**rest, **self.rollout.working, **overhead})
            )
            beside = self.rollout.resting
        for model in self.models:
            working = {"forward pass": model.forward()}
            if model.is_trained:
                working |= {"update": model.update(), "optimizer step": model.optimizer_step()}
                working |= {"export": model.export()} if model.export_dtype else {}
                working |= {"save": {}}
            for name, parts in working.items():
                phases.append(
                    Phase(
                        self.name, f"{model.name} {name}", {**rest, **parts, **beside, **overhead}
                    )
                )
        return phases


def require_memory(pools: Sequence[PlannedPool], device_bytes: float) -> str:
    """The sum of each pool's largest phase, one line each, beside the memory of a GPU,
    `device_bytes`.

    Raises ValueError if what is certain does not fit.
    """
    lines = [f"Memory of a GPU at most, of {device_bytes / GB:.1f} GB (* estimated):"]
    for pool in pools:
        phases = pool.phases()
        for phase in phases:
            if phase.certain > device_bytes:
                raise ValueError(
                    f"a GPU has {device_bytes / GB:.1f} GB, and this does not fit ({phase}): use "
                    "more GPUs, set param_offload and optimizer_offload of an fsdp_config, or, if "
                    "the engine's share is in the sum, lower "
                    "actor_rollout_ref.rollout.gpu_memory_utilization (docs/memory.md has the "
                    "sums)."
                )
        largest = max(phases, key=lambda phase: phase.total)
        over = (
            " - may not fit: smaller micro-batches or offload may be needed"
            if largest.total > device_bytes
            else ""
        )
        lines.append(f"  {largest}{over}")
    return "\n".join(lines)
