"""vLLM's end of the weights: a transfer back end that loads updates, and fingerprints of what was
loaded.

vLLM imports this module in the process of its worker, where it registers the back end; nothing else
imports it.
"""

import ctypes
import multiprocessing
import operator
import os
import signal
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

from verl_like.workers.weights.exports import WeightBucket, iterate_buckets
from verl_like.workers.weights.fingerprints import (
    fingerprint_sum,
    read_fingerprints,
    sum_over_ranks,
)
from verl_like.workers.weights.shared_memory import SharedPages
from verl_like.workers.weights.vllm_adapter import Adapter
from verl_like.workers.weights.vllm_direct import DirectInitInfo, IpcReceiver
from verl_like.workers.weights.vllm_gpt_oss import GptOssUpdates
from verl_like.workers.weights.vllm_pieces import Source, cut_parameter

Sums = dict[str, Tensor]
"""By the name of a Hugging Face tensor, the `fingerprint_sum` of the part of it that is in a
parameter of vLLM."""
_PR_SET_PDEATHSIG = 1
"""Linux: the option of prctl that sets the signal which a process gets when its parent ends."""


@dataclass
class StagedUpdate(WeightTransferUpdateInfo):
    """All buckets of an update that was staged and checked."""

    buckets: list[Any]

    def __post_init__(self) -> None:
        # A message between processes makes dictionaries of data classes.
        if isinstance(self.buckets[0], dict):
            self.buckets = [
                WeightBucket(**fields | {"data": SharedPages(**fields["data"])})
                for fields in self.buckets
            ]


class StagedTransfer(WeightTransferEngine[DirectInitInfo, StagedUpdate]):
    """Loads updates, staged or sent, into a process's model, whose parameters are fused, sharded,
    or packed.

    The CPU build packs the weights of a linear layer into a form that only its kernel can read and
    drops the original, and `rollout.quantization` rounds them. So the fingerprints of such a layer
    are taken after it was loaded and before it is packed or rounded. All others are taken of the
    model's parameters in the end: CUDA's kernels read those, and vLLM loads into a copy of them.
    Experts are always taken before: what their kernels read depends on the kernel.
    """

    init_info_cls = DirectInitInfo
    update_info_cls = StagedUpdate
    model: Any
    direct: NCCLWeightTransferEngine | IpcReceiver | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sources: dict[str, list[Source]] = {}
        """The Hugging Face tensors that each parameter or buffer of vLLM is made of, in their order
        there, by its name."""
        self._before_packing: dict[str, Sums | None] = {}
        """What `_fingerprints_of` returned for a parameter before it was packed or rounded, by the
        name of the parameter."""
        self._experts: dict[str, Any] = {}
        """The modules that have a layer's experts, by their names."""
        self.unknown_layouts: dict[str, list[str]] = {}
        """After `fingerprints`, by the name of each parameter of vLLM of which it is not known what
        Hugging Face tensors it is made of, those of which it may be."""
        is_gpt_oss = isinstance(self.model, GptOssForCausalLM)
        self._gpt_oss = GptOssUpdates(self.model) if is_gpt_oss else None
        is_packed = self.device.type == "cpu"
        is_rounded = self.model_config.quantization is not None
        for name, module in self.model.named_modules():
            if isinstance(module, RoutedExperts):
                self._experts[name] = module
            is_changed = (is_packed or is_rounded) and isinstance(module, LinearBase)
            if is_changed or isinstance(module, RoutedExperts):
                method: Any = module.quant_method
                pack = method.process_weights_after_loading
                method.process_weights_after_loading = self._fingerprint_then(name, pack)

    def _fingerprint_then(
        self, module_name: str, pack: Callable[[Any], None]
    ) -> Callable[[Any], None]:
        """Returns a function that takes the fingerprints of a layer and then packs it."""

        def fingerprint_then_pack(layer: Any) -> None:
            loaded = dict(layer.named_parameters(prefix=module_name, recurse=False))
            found = {}
            for name, parameter in loaded.items():
                found[name] = self._fingerprints_of(name, parameter)
            is_experts = isinstance(layer, RoutedExperts)
            if is_experts and self.device.type == "cpu":
                # Only a layer without a kernel is packed.
                layer.quant_method.moe_kernel = None
            pack(layer)
            packed = layer.named_parameters(prefix=module_name, recurse=False)
            for name, parameter in packed:
                if is_experts or parameter is not loaded.get(name):
                    # New parameters, such as scales, are made of no Hugging Face one.
                    self._before_packing[name] = found.get(name, {})

        return fingerprint_then_pack

    def init_transfer_engine(self, init_info: DirectInitInfo) -> None:
        """Joins the trainer, which from then on sends the values of each update while it is
        loaded."""
        receiver = NCCLWeightTransferEngine if init_info.transport == "nccl" else IpcReceiver
        self.direct = receiver(self.config, self.vllm_config, self.device, self.model)
        self.direct.init_transfer_engine(init_info)

    def shutdown(self) -> None:
        """Leaves the trainer. Nothing else is open, since an update is only held while it is
        loaded."""
        if self.direct:
            self.direct.shutdown()

    def start_weight_update(self) -> None:
        """Gives the layers the tensors that they were built with, on which the model's
        `load_weights` works."""
        # Ends an update that failed in the middle. Otherwise its layers would count the values of
        # both updates, and be complete with a mixture. If there is none, this does nothing.
        finalize_layerwise_reload(self.model, self.model_config)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: StagedUpdate) -> None:
        """Overwrites the weights. All of them come in one call, since vLLM forgets an update that
        failed in it."""
        buckets = sorted(update_info.buckets, key=lambda bucket: bucket.index)
        names = []
        dtypes = []
        shapes = []
        for bucket in buckets:
            names += bucket.names
            dtypes += [bucket.dtype] * len(bucket.names)
            shapes += bucket.shapes
        self._sources = self._find_sources(names, shapes)
        if self.direct:
            announced = NCCLWeightTransferUpdateInfo(names, dtypes, shapes)
            self.direct.receive_weights(announced)
        else:
            self.model.load_weights(iterate_buckets(buckets))
        finalize_layerwise_reload(self.model, self.model_config)
        if self._gpt_oss:
            self._gpt_oss.finish()
        head = getattr(self.model, "lm_head", None)
        if head is not None and self.model_config.hf_text_config.tie_word_embeddings:
            # A tied head gets no weights of its own, so vLLM does not prepare it again; on CPU it
            # would go on computing with the packed copy of the weights before.
            head.quant_method.process_weights_after_loading(head)

    def finish_weight_update(self) -> None:
        """Does nothing, because nothing is left to do."""

    def _find_sources(self, hf_names: list[str], shapes: list[Any]) -> dict[str, list[Source]]:
        """Returns `_sources`, from the names and shapes of the Hugging Face tensors."""
        parameters = self.model.named_parameters(remove_duplicate=False)
        known = {name for name, _parameter in parameters}
        placed: dict[str, list[tuple[int, Source]]] = defaultdict(list)
        for hf_name, shape in zip(hf_names, shapes, strict=True):
            renamed = self._rename(hf_name)
            source = Source(hf_name, torch.Size(shape), self._is_transposed(renamed))
            of_experts = self._place_in_experts(renamed, source)
            if of_experts is None:
                name, position = self._place_of(renamed, known)
            else:
                position = 0
                name, source = of_experts
            placed[name].append((position, source))
        sources = {}
        for name, found in placed.items():
            in_order = sorted(found, key=operator.itemgetter(0))
            sources[name] = [source for _position, source in in_order]
        return sources

    def _rename(self, hf_name: str) -> str:
        """Returns a Hugging Face name as vLLM's model has it, before it fuses tensors."""
        renamed = hf_name
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        if mapper:
            renamed = mapper.get_rename_mapper().map_name(renamed)
        child_name, _, rest = renamed.partition(".")
        child = getattr(self.model, child_name, None)
        own = getattr(child, "hf_to_vllm_mapper", None)
        if own and own is not mapper:
            rest = own.get_rename_mapper().map_name(rest)
            renamed = f"{child_name}.{rest}"
        return renamed

    def _is_transposed(self, renamed: str) -> bool:
        """Returns whether vLLM's model transposes a matrix, as that of GPT-2 does."""
        child_name, _, _rest = renamed.partition(".")
        child = getattr(self.model, child_name, None)
        transpose = getattr(child, "_transpose_conv1d", None)
        if transpose is None:
            return False
        tried = torch.empty((2, 1), device="meta")
        ((_name, turned),) = transpose([(renamed, tried)])
        return turned.shape != tried.shape

    def _place_in_experts(self, renamed: str, source: Source) -> tuple[str, Source] | None:
        """Returns the vLLM parameter of a layer's experts in which a tensor is, and the tensor with
        what is known of it there; None for a tensor that is not of such experts."""
        before, found, rest = renamed.partition(".experts.")
        module_name = f"{before}.experts.routed_experts"
        module = self._experts.get(module_name)
        if not found or module is None:
            return None
        shards = {
            module.ckpt_gate_proj_name: "w1",
            module.ckpt_down_proj_name: "w2",
            module.ckpt_up_proj_name: "w3",
        }
        expert, _, part_and_leaf = rest.partition(".")
        if expert.isdecimal():
            part, _, leaf = part_and_leaf.partition(".")
            shard = shards.get(part, "")
            stem = "w2" if shard == "w2" else "w13"
            one = source._replace(expert=int(expert), shard=shard)
            return f"{module_name}.{stem}_{leaf}", one
        stacked = {"gate_up_proj": "w13_weight", module.ckpt_down_proj_name: "w2_weight"}
        if rest in stacked:
            turned = source._replace(is_transposed=module.is_fused_checkpoint_transposed)
            return f"{module_name}.{stacked[rest]}", turned
        # The model that has vLLM's own names for what is in files, gpt-oss, transposes it.
        return f"{module_name}.{rest}", source._replace(is_transposed=True)

    def _place_of(self, renamed: str, known: set[str]) -> tuple[str, int]:
        """Returns the vLLM parameter, one of `known` if it is fused, in which a tensor is, and the
        tensor's position in it."""
        # Such as {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
        fused = getattr(self.model, "packed_modules_mapping", {})
        for whole, parts in fused.items():
            for position, part in enumerate(parts):
                name = renamed.replace(f".{part}.", f".{whole}.")
                if name != renamed and name in known:
                    return name, position
        return renamed, 0

    def fingerprints(self) -> dict[str, int]:
        """Returns fingerprints by Hugging Face name of the weights that the replica's processes
        compute with together. What is in `unknown_layouts` has none.
        """
        tensors = {}
        for name, parameter in self.model.named_parameters():  # lists tied parameters once
            module_name, _, _leaf = name.rpartition(".")
            # What latent attention itself has is computed from its projections after loading.
            if not isinstance(self.model.get_submodule(module_name), MLAAttention):
                tensors[name] = parameter
        for name, buffer in self.model.named_buffers():
            # Other buffers of vLLM's, such as tables of positions, are its own.
            if name in self._sources:
                tensors[name] = buffer
        totals: dict[str, Tensor | int] = defaultdict(int)
        self.unknown_layouts = {}
        for name, tensor in tensors.items():
            sources = self._sources.get(name, [])
            if name in self._before_packing:
                sums = self._before_packing[name]
            else:
                sums = self._fingerprints_of(name, tensor)
            if sums is None:
                self.unknown_layouts[name] = [source.hf_name for source in sources]
                continue
            # A tensor that vLLM has no place for is not in the result. So the comparison finds it
            # missing, even if all its values are 0.
            for source in sources:
                totals.setdefault(source.hf_name, 0)
            for hf_name, part in sums.items():
                totals[hf_name] += part
        own = read_fingerprints(totals)
        group = get_tp_group()
        if group.world_size == 1:
            return own
        return sum_over_ranks(own, group.cpu_group)

    def _fingerprints_of(self, name: str, parameter: Tensor) -> Sums | None:
        """Returns the fingerprints of what this process answers for in a parameter; None if the
        parameter's sources do not add up to it."""
        module_name, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(module_name)
        sources = self._sources.get(name, [])
        pieces = cut_parameter(module, leaf, parameter, sources)
        if pieces is None:
            return None
        sums: Sums = {}
        for piece in pieces:
            part = fingerprint_sum(piece.values, piece.first_row, piece.first_column)
            if piece.hf_name in sums:
                part += sums[piece.hf_name]
            sums[piece.hf_name] = part
        return sums


class WorkerExtension:
    """What vLLM's worker is given by `worker_extension_cls`."""

    weight_transfer_engine: StagedTransfer
    model_runner: Any
    adapter: Adapter

    def weight_fingerprints(self) -> dict[str, int]:
        """Calls `StagedTransfer.fingerprints`."""
        return self.weight_transfer_engine.fingerprints()

    def unknown_layouts(self) -> dict[str, list[str]]:
        """Returns `StagedTransfer.unknown_layouts`."""
        return self.weight_transfer_engine.unknown_layouts

    def load_adapter(self, buckets: list[Any], adapter_id: int) -> None:
        """Calls `Adapter.load` with the weights of buckets, as `StagedUpdate` has them."""
        manager = self.model_runner.get_model().lora_manager
        update = StagedUpdate(buckets)
        self.adapter = Adapter(manager, adapter_id)
        self.adapter.load(iterate_buckets(update.buckets))

    def adapter_fingerprints(self) -> dict[str, int]:
        """Calls `Adapter.fingerprints`."""
        return self.adapter.fingerprints()


WeightTransferEngineFactory.register_engine("staged", StagedTransfer)

# An engine's own process is ended by the kernel when the process that started it ends (Linux).
if starter := multiprocessing.parent_process():
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != starter.pid:  # it has ended already
        os._exit(1)
