"""Computes how much memory models take on a GPU, as a sum for each phase, before anything starts.

Weights, Adam, gradients and the engine's share are exact. FSDP2 gathers, computes and reduces in
three streams. Memory that one stream has used is not used by another, so their largest amounts add
up, although they are not needed at one time. Activations are the tensors that autograd saves in a
layer (`activations.py`). `python -m verl_like.rehearse` measures the same memory. CONTEXT and
ASLEEP are assumptions. `pools.py` says which models are on the GPUs of a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verl_like.trainer.config.run_config import RunConfig
from verl_like.trainer.memory.activations import TokenValues
from verl_like.workers.config.engine import ForwardFsdpConfig, TrainedFsdpConfig
from verl_like.workers.config.models import ModelConfig, TrainedModelConfig
from verl_like.workers.models.distributed_experts import experts_of
from verl_like.workers.models.linear_log_prob import LOGITS_PER_CHUNK
from verl_like.workers.models.lora import model_buffers, trained_parameters
from verl_like.workers.models.packed_models import PackedModel, decoder_layers
from verl_like.workers.models.pretrained import empty_model
from verl_like.workers.planning.partition import MicroBatching
from verl_like.workers.weights.exports import DEFAULT_BUCKET_BYTES

GB = 1e9
CONTEXT = 1.0 * GB
"""Bytes that a training process takes for the CUDA context, NCCL and libraries."""
ASLEEP = 1.5 * GB
"""Bytes that a sleeping engine keeps for its CUDA context and captured graphs."""
REDUCTION_BYTES = 4
"""Bytes of a number in the reduction of gradients, which is in float32."""
BETWEEN_TENSORS = 0.03
"""Memory that torch's allocator leaves unused in a load or a pass, as a share of the memory that
these take. Its segments can grow."""
BETWEEN_SHARDS = 0.012
"""Memory that torch's allocator leaves unused between calls, as a share of the memory in use."""
WORKSPACES = 0.15 * GB
"""Bytes that a process keeps after it has computed: the workspaces of cuBLAS, and the ends of
torch's segments."""
STREAMS = 0.1 * GB
"""Bytes that the streams of a pass leave unused at the ends of their segments."""
WITHOUT_LOGITS = 0.25 * GB
"""Further bytes that are unused in updates of a model whose head has one output. This was measured.
The reason is not known."""
HIDDEN_GRADIENTS = 6
"""How many gradients of the size of the hidden states exist at one time in the backward pass of a
layer. This is an estimate."""
EXPERT_GRADIENTS = 3
"""How many of them exist for each expert that computes a token. This is an estimate."""
LAYERS_NOT_OFFLOADED = 5
"""Of how many layers the saved activations are on the device at one time with activation offload,
because they are on their way to the host or back. This is an estimate."""

Parts = dict[str, float]
"""The bytes of each part of the memory that something takes. The name of an estimate ends in *."""


@dataclass(frozen=True)
class ModelSize:
    """The numbers of a model's parameters, and the sizes of its activations."""

    parameters: int
    buffers: int
    """Bytes of the model's buffers. Every rank has all of them."""
    trained: int
    """Number of trained parameters: those of the adapter, or all if there is no adapter."""
    largest: int
    """Size of the largest parameter tensor, in numbers."""
    largest_trained: int
    """Size of the largest parameter tensor that is trained, in numbers."""
    layer: int
    """Parameters of the largest decoder layer."""
    experts: int
    """Parameters of all experts that can be distributed over ranks."""
    experts_of_layer: int
    """The most such parameters of one layer."""
    outer: int
    """Parameters outside the decoder layers: embedding, head, last norm."""
    num_layers: int
    has_adapter: bool
    hidden: int
    token: TokenValues
    head: int
    """Parameters of the language-model head, or 0 if there is none."""
    further_heads: int = 0
    """Trained parameters of heads other than the model's own, which ILQL has."""

    @classmethod
    def of(cls, config: ModelConfig, key: str, model_class: type[PackedModel]) -> "ModelSize":
        """Counts the parameters of a model, which is made without memory."""
        model = model_class(empty_model(config, model_class.auto_class, key=key))
        hf = model.hf
        text = hf.config.get_text_config()
        hidden = text.hidden_size
        intermediate = getattr(text, "intermediate_size", None) or 4 * hidden
        head = hf.get_output_embeddings()
        layers = [count_parameters(layer) for layer in decoder_layers(hf)]
        experts = [count_parameters(module) for module in experts_of(hf)]
        total = count_parameters(model)
        trained = [parameter.numel() for _name, parameter in trained_parameters(hf)]
        has_adapter = sum(trained) < count_parameters(hf)
        heads = model.heads.parameters()
        of_heads = [parameter.numel() for parameter in heads if parameter.requires_grad]
        trained += of_heads
        has_norms = any("q_norm" in name for name, _parameter in hf.named_parameters())
        token = TokenValues.of(
            decoder_layers(hf),
            hidden=hidden,
            intermediate=intermediate,
            num_selected=getattr(text, "num_experts_per_tok", 0),
            has_norms=has_norms,
            has_adapter=has_adapter,
        )
        return cls(
            parameters=total,
            buffers=sum(buffer.nbytes for _name, buffer in model_buffers(hf)),
            trained=sum(trained),
            largest=max(parameter.numel() for parameter in model.parameters()),
            largest_trained=max(trained),
            layer=max(layers),
            experts=sum(experts),
            experts_of_layer=max(experts, default=0),
            outer=total - sum(layers),
            num_layers=len(layers),
            has_adapter=has_adapter,
            hidden=hidden,
            token=token,
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
    parts: Parts

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def certain(self) -> float:
        """Bytes of the parts that are not estimates."""
        return sum(size for part, size in self.parts.items() if not part.endswith("*"))

    def __str__(self) -> str:
        parts = [f"{part} {size / GB:.1f}" for part, size in self.parts.items() if size >= GB / 20]
        return f"{self.pool}, {self.name}: {' + '.join(parts)} = {self.total / GB:.1f} GB"


@dataclass(frozen=True)
class PlannedModel:
    """A model of a training process, with the settings on which its memory depends."""

    name: str
    size: ModelSize
    model: ModelConfig
    fsdp: TrainedFsdpConfig | ForwardFsdpConfig
    shards: int
    """The number of ranks that share the parameters."""
    sequence_length: int
    """Length of the longest rows, in tokens."""
    scored_length: int
    """The number of these tokens that the head reads."""
    forward_passes: MicroBatching
    """The largest micro-batches of passes without gradients."""
    update_passes: MicroBatching | None = None
    """The largest micro-batches of updates. None for a model that is not trained."""
    has_ema: bool = False
    """True if an average of the weights over training is kept."""
    ranks_of_sequence: int = 1
    """The number of ranks that share each sequence, see `ulysses_sequence_parallel_size`."""
    runs_reference: bool = False
    """True if a reference model of the same size computes in the same calls."""
    export_dtype: str | None = None
    """The name of the dtype in which the weights are sent, or None if they are not sent."""

    @property
    def is_trained(self) -> bool:
        return isinstance(self.fsdp, TrainedFsdpConfig)

    @property
    def stored(self) -> float:
        """Bytes of a rank's weights between passes."""
        parameters_per_rank = self.size.parameters / self.shards
        return parameters_per_rank * self.model_itemsize + self.size.buffers

    @property
    def trained_per_rank(self) -> float:
        """The number of trained parameters in a rank's shards."""
        return self.size.trained / self.shards

    @property
    def stored_trained(self) -> float:
        """Bytes of a rank's trained weights between passes."""
        return self.trained_per_rank * self.model_itemsize

    @property
    def model_itemsize(self) -> int:
        """Bytes of a number of the weights between passes."""
        return getattr(torch, self.fsdp.model_dtype).itemsize

    @property
    def adam(self) -> float:
        """Bytes of Adam's two moments, in the parameters' data type, and of the average of the
        weights, in float32."""
        if not self.is_trained:
            return 0.0
        moments = 2 * self.stored_trained
        if not self.has_ema:
            return moments
        return moments + self.trained_per_rank * torch.float32.itemsize

    def at_rest(self) -> Parts:
        """The memory that is taken between the calls of this role."""
        parts = {}
        if not self.fsdp.param_offload:
            parts[f"{self.name} weights"] = self.stored
        offloads_adam = isinstance(self.fsdp, TrainedFsdpConfig) and self.fsdp.optimizer_offload
        if not offloads_adam:
            parts[f"{self.name} Adam"] = self.adam
        return parts

    @property
    def share_elsewhere(self) -> float:
        """The share of the experts that this rank never has, because they are distributed."""
        return 1 - 1 / self.fsdp.expert_parallel_size

    @property
    def parameters(self) -> float:
        """The number of parameters with which this rank computes."""
        return self.size.parameters - self.share_elsewhere * self.size.experts

    @property
    def layer(self) -> float:
        """Those of the largest decoder layer."""
        return self.size.layer - self.share_elsewhere * self.size.experts_of_layer

    @property
    def gathers_whole(self) -> bool:
        """True if all parameters stay gathered from the forward pass to the backward pass."""
        return self.shards == 1 or self.fsdp.strategy != "zero3"

    @property
    def num_bytes(self) -> int:
        """Bytes of a number in the data type in which the layers compute."""
        return getattr(torch, self.fsdp.dtype).itemsize

    def tokens_of(self, passes: MicroBatching) -> float:
        """The tokens of one rank in a pass. A limit of tokens is one for each rank, but a number of
        rows is that of all ranks that share the sequences."""
        if passes.by_tokens:
            return passes.max_tokens
        return passes.num_rows * self.sequence_length / self.ranks_of_sequence

    def load(self) -> Parts:
        """The memory that loading takes. Whole parameters come to the device one after the other.
        Then Adam is made, and what is offloaded leaves the device."""
        largest = self.size.largest * self.model_itemsize
        parts = {f"{self.name} weights": self.stored}
        if self.adam > largest:
            parts[f"{self.name} Adam"] = self.adam
        else:
            parts["a whole parameter"] = largest
        return with_fragments(parts)

    def gathered(self, computed: float, gathering: float) -> Parts:
        """The memory of the parameters with which a pass computes, and of the buffers in which they
        are gathered.

        `computed` and `gathering` are the numbers of parameters that these have at one time, if the
        model does not keep all of them.
        """
        parameters = self.parameters
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
        """The bytes that the head takes: a chunk of logits twice, and the hidden states of the
        scored tokens with their gradient in float32."""
        size = self.size
        if not size.head:
            return 0.0
        scored = tokens
        if not passes.by_tokens:
            scored = tokens * self.scored_length / self.sequence_length
        num_logits = min(LOGITS_PER_CHUNK["cuda"], scored * size.head / size.hidden)
        chunk = num_logits * 2 * REDUCTION_BYTES
        return chunk + scored * size.hidden * (self.num_bytes + REDUCTION_BYTES)

    def forward(self) -> Parts:
        """The memory that a pass without gradients takes in addition to `at_rest`."""
        tokens = self.tokens_of(self.forward_passes)
        layer = self.size.token.live * self.num_bytes * tokens + self.travelling(tokens)
        head = self.head_working(tokens, self.forward_passes)
        activations = {"activations*": max(layer, head)}
        # Layers take little time without gradients. While one layer is computed, another is there
        # already, and a third is being gathered.
        outer = self.size.outer
        two_layers = 2 * self.layer
        gathered = self.gathered(outer + two_layers, max(outer, two_layers))
        return self.moved() | with_fragments(gathered | activations, of_streams=STREAMS)

    def travelling(self, tokens: float) -> float:
        """Bytes of the hidden states that come to distributed experts and go back: two for each
        expert of a token, if all ranks get equally many."""
        if self.fsdp.expert_parallel_size == 1:
            return 0.0
        size = self.size
        return 2 * size.token.expanded * size.hidden * self.num_bytes * tokens

    def moved(self) -> Parts:
        """The memory of weights that are offloaded, and come to the device for a call."""
        return {f"{self.name} weights": self.stored} if self.fsdp.param_offload else {}

    @property
    def trained_share(self) -> float:
        """The share of the parameters that is trained: 1, or with an adapter a small share."""
        return self.size.trained / self.size.parameters

    @property
    def reduces_once(self) -> bool:
        """True if gradients are reduced once an optimizer step, and whole until then."""
        return self.fsdp.strategy in ("zero1", "ddp", "single")

    def update(self) -> Parts:
        """The memory that the forward and backward passes of a trained model take in addition to
        `at_rest`."""
        assert self.is_trained
        two_units = self.size.outer + self.layer
        parts = {"gradients": self.gradients()}
        parts |= self.gathered(two_units, two_units)
        parts["reduction*"] = self.reduction()
        parts["activations*"] = self.update_activations()
        of_streams = STREAMS if self.size.head else STREAMS + WITHOUT_LOGITS
        return self.moved() | with_fragments(parts, of_streams=of_streams)

    def gradients(self) -> float:
        """Bytes of a rank's gradients, which are summed over micro-batches in float32, and of the
        copy in `model_dtype` that the optimizer reads."""
        num_summed = self.trained_per_rank
        if self.reduces_once:
            num_summed = self.trained_share * self.parameters
        copied = 0.0
        # A model that is gathered whole frees its layers while the copy is made, so that the copy
        # takes no further memory.
        if not self.gathers_whole and self.fsdp.model_dtype != "float32":
            copied = self.stored_trained
        return num_summed * REDUCTION_BYTES + copied

    def reduction(self) -> float:
        """Bytes that the stream takes which reduces gradients: the shard of the largest unit, or of
        all units if they are reduced once."""
        largest_unit = max(self.size.outer, self.size.layer)
        num_reduced = self.trained_share * largest_unit / self.shards
        if self.reduces_once:
            num_reduced = self.trained_per_rank
        return num_reduced * REDUCTION_BYTES

    def update_activations(self) -> float:
        """Bytes of the activations of an update, with the gradients that are not reduced yet."""
        assert isinstance(self.model, TrainedModelConfig)
        assert self.update_passes
        size = self.size
        itemsize = self.num_bytes
        tokens = self.tokens_of(self.update_passes)
        hidden_states = size.hidden * itemsize * tokens
        layer_activations = size.token.saved * itemsize * tokens
        kept = layer_activations
        if self.model.enable_gradient_checkpointing:
            kept = hidden_states
        num_kept = size.num_layers
        if self.model.enable_activation_offload:
            num_kept = min(LAYERS_NOT_OFFLOADED, size.num_layers)
        # The backward pass of a layer has its activations and their gradients.
        num_gradients = HIDDEN_GRADIENTS + EXPERT_GRADIENTS * size.token.expanded
        backward = layer_activations + num_gradients * hidden_states
        head = self.head_working(tokens, self.update_passes)
        during_backward = num_kept * kept + max(backward, head)
        # The gradients of one layer, in the layers' data type and in float32 for the reduction
        during_backward += self.trained_share * self.layer * (itemsize + REDUCTION_BYTES)
        # The gradients of the heads, which are in the outermost unit and wait for its reduction
        during_backward += (self.trained_share * size.head + size.further_heads) * itemsize
        # At the end of the backward pass the activations are freed, and the outermost unit is
        # reduced.
        at_the_end = self.trained_share * size.outer * (itemsize + REDUCTION_BYTES)
        return max(during_backward, at_the_end)

    def optimizer_step(self) -> Parts:
        """The memory that an optimizer step takes in addition to `at_rest`."""
        parts = self.moved()
        parts[f"{self.name} Adam"] = self.adam
        parts["gradients"] = self.stored_trained  # as the optimizer reads them
        is_cast = self.has_ema and self.fsdp.model_dtype != "float32"
        in_float32 = self.trained_per_rank * REDUCTION_BYTES
        parts["weights for their average"] = in_float32 if is_cast else 0.0
        # With an adapter nothing is reduced at the end of the backward pass, which would free the
        # head.
        head = self.size.head * self.num_bytes
        parts["gathered layers"] = head if self.size.has_adapter else 0.0
        return parts

    def export(self) -> Parts:
        """The memory that an export takes in addition to `at_rest`. One bucket of weights at a time
        is gathered, and put together from what is gathered unless it is one parameter."""
        assert self.export_dtype
        itemsize = getattr(torch, self.export_dtype).itemsize
        all_trained = self.size.trained * itemsize
        of_several = min(DEFAULT_BUCKET_BYTES, all_trained) * (2 + 1 / self.shards)
        held = 1 + 1 / self.shards
        num_distributed = self.fsdp.expert_parallel_size
        if 1 < num_distributed < self.shards:  # such experts are gathered in two steps
            held += 1 / num_distributed
        of_the_largest = self.size.largest_trained * itemsize * held
        return self.moved() | {"a bucket of weights*": max(of_several, of_the_largest)}


def with_fragments(parts: Parts, of_streams: float = 0.0) -> Parts:
    """Adds to the parts the memory that torch's allocator leaves unused."""
    between_tensors = BETWEEN_TENSORS * sum(parts.values())
    return parts | {"fragments*": between_tensors + of_streams}


@dataclass(frozen=True)
class RolloutShare:
    """The memory that a rollout engine takes of each GPU of its pool."""

    working: Parts
    """The parts that it takes while it generates."""
    resting: Parts
    """The parts that it takes while other roles of the pool work."""


@dataclass(frozen=True)
class PlannedPool:
    """What is on each GPU of a pool: an engine, and models that share a process, in the order in
    which they are loaded."""

    name: str
    config: RunConfig
    """The configuration of its processes."""
    nodes: Sequence[int]
    """The number of GPUs on each node. Each GPU has one process of the models."""
    models: Sequence[PlannedModel]
    rollout: RolloutShare | None = None

    def phases(self) -> list[Phase]:
        """Returns all phases of loading, of a step, and of saving."""
        rest: Parts = {}
        overhead = {"context*": CONTEXT} if self.models else {}
        phases = []
        for model in self.models:  # the engine starts later
            loading = rest | model.load() | overhead
            phases.append(Phase(self.name, f"{model.name} load", loading))
            rest |= model.at_rest()
        if self.models:
            overhead["workspaces*"] = WORKSPACES + BETWEEN_SHARDS * sum(rest.values())
        resting_engine: Parts = {}
        if self.rollout:
            generation = rest | self.rollout.working | overhead
            phases.append(Phase(self.name, "generation", generation))
            resting_engine = self.rollout.resting
        for model in self.models:
            working = {"forward pass": model.forward()}
            if model.is_trained:
                working["update"] = model.update()
                working["optimizer step"] = model.optimizer_step()
                if model.export_dtype:
                    working["export"] = model.export()
                working["save"] = {}
            for name, parts in working.items():
                all_parts = rest | parts | resting_engine | overhead
                phases.append(Phase(self.name, f"{model.name} {name}", all_parts))
        return phases


def require_memory(pools: Sequence[PlannedPool], device_bytes: float) -> str:
    """Returns a headline, and a line for each pool with the sum of its largest phase.
    `device_bytes` is the memory of a GPU. Raises ValueError for a phase whose certain parts do not
    fit."""
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
        warning = ""
        if largest.total > device_bytes:
            warning = " - may not fit: smaller micro-batches or offload may be needed"
        lines.append(f"  {largest}{warning}")
    return "\n".join(lines)
