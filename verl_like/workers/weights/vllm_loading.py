"""vLLM's end of the weights: a transfer back end that reads staged updates, and fingerprints of
what was loaded.

vLLM imports this module in the process of its worker, where it registers the back end; nothing else
imports it.
"""

import ctypes
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tp_group
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCWeightTransferEngine,
    IPCWeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from verl_like.workers.weights.arrival import WeightSyncError
from verl_like.workers.weights.exports import WeightBucket, iterate_buckets
from verl_like.workers.weights.fingerprints import fingerprint_sum, read_fingerprints
from verl_like.workers.weights.ipc import receive_chunks
from verl_like.workers.weights.shared_memory import SharedPages
from verl_like.workers.weights.vllm_adapter import Adapter

_PR_SET_PDEATHSIG = 1


@dataclass
class StagedUpdate(WeightTransferUpdateInfo):
    """All buckets of an update that was staged and checked."""

    buckets: list[Any]

    def __post_init__(self) -> None:
        # A message between processes makes dictionaries of data classes.
        if isinstance(self.buckets[0], dict):
            self.buckets = [
                WeightBucket(**each | {"data": SharedPages(**each["data"])})
                for each in self.buckets
            ]


@dataclass(kw_only=True)
class DirectInitInfo(NCCLWeightTransferInitInfo):
    """Where the trainer waits, and by which `rollout.weight_transport` it sends."""

    transport: str


class IpcReceiver(IPCWeightTransferEngine):
    """vLLM's engine for CUDA IPC, which is told of each chunk of an update through the trainer's
    store."""

    def init_transfer_engine(self, init_info: Any) -> None:
        """Joins the trainer."""
        self.packed = init_info.packed
        rank = init_info.rank_offset + self.parallel_config.rank
        place = init_info.master_address, init_info.master_port, rank, init_info.world_size
        self._group = StatelessProcessGroup.create(*place)

    def receive_weights(self, update_info: Any) -> None:
        """Loads all chunks; what `update_info` announces is in them."""
        receive_chunks(self._group, self._load_chunk, self._packed_importer.close)

    def _load_chunk(self, chunk: dict[str, Any]) -> None:
        super().receive_weights(IPCWeightTransferUpdateInfo(**chunk))
        torch.cuda.synchronize()  # it was read, so the trainer may write the next one


class StagedTransfer(WeightTransferEngine[DirectInitInfo, StagedUpdate]):
    """Loads updates, staged or sent, into a process's model, whose parameters are fused, sharded,
    or packed.

    The CPU build packs the weights of a linear layer into a form that only its kernel can read and
    drops the original, and `rollout.quantization` rounds them. So these fingerprints are taken
    after the layer was loaded and before that. Otherwise CUDA's kernels read the parameters
    themselves, and vLLM loads into a copy of them: there only what lies in the parameters in the
    end counts.
    """

    init_info_cls = DirectInitInfo
    update_info_cls = StagedUpdate
    model: Any
    direct: NCCLWeightTransferEngine | IpcReceiver | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sources: dict[str, list[tuple[str, torch.Size]]] = {}
        self._before_packing: dict[str, dict[str, torch.Tensor] | None] = {}
        is_changed = self.device.type == "cpu" or self.model_config.quantization is not None
        for name, module in self.model.named_modules():
            if is_changed and isinstance(module, LinearBase):
                method: Any = module.quant_method
                method.process_weights_after_loading = self._fingerprint_then(
                    name, method.process_weights_after_loading
                )

    def _fingerprint_then(
        self, module_name: str, pack: Callable[[Any], None]
    ) -> Callable[[Any], None]:
        def fingerprint_then_pack(layer: Any) -> None:
            loaded = dict(layer.named_parameters(prefix=module_name, recurse=False))
            found = {
                name: self._fingerprints_of(name, parameter) for name, parameter in loaded.items()
            }
            pack(layer)
            for name, parameter in layer.named_parameters(prefix=module_name, recurse=False):
                if parameter is not loaded.get(name):
                    self._before_packing[name] = found.get(name, {})  # scales are vLLM's own

        return fingerprint_then_pack

    def init_transfer_engine(self, init_info: DirectInitInfo) -> None:
        """Joins the trainer, which from then on sends the values of each update while it is
        loaded."""
        receiver = NCCLWeightTransferEngine if init_info.transport == "nccl" else IpcReceiver
        self.direct = receiver(self.config, self.vllm_config, self.device, self.model)
        self.direct.init_transfer_engine(init_info)

    def shutdown(self) -> None:
        """Leaves the trainer. An update is only held while it is loaded."""
        if self.direct:
            self.direct.shutdown()

    def start_weight_update(self) -> None:
        """Gives the layers the tensors that they were built with, on which the model's
        `load_weights` works."""
        # Ends what an update that failed in the middle has left open, whose layers would count the
        # values of both updates, and be complete with a mixture. Otherwise it does nothing.
        finalize_layerwise_reload(self.model, self.model_config)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: StagedUpdate) -> None:
        """Overwrites the weights. All of them come in one call, since vLLM forgets an update that
        failed in it."""
        buckets = sorted(update_info.buckets, key=lambda bucket: bucket.index)
        shapes = dict(
            pair for bucket in buckets for pair in zip(bucket.names, bucket.shapes, strict=True)
        )
        self._sources = self._find_sources(
            {name: torch.Size(shape) for name, shape in shapes.items()}
        )
        if self.direct:
            dtypes = [bucket.dtype for bucket in buckets for _ in bucket.names]
            self.direct.receive_weights(
                NCCLWeightTransferUpdateInfo([*shapes], dtypes, [*shapes.values()])
            )
        else:
            self.model.load_weights(iterate_buckets(buckets))
        finalize_layerwise_reload(self.model, self.model_config)
        head = getattr(self.model, "lm_head", None)
        if head is not None and self.model_config.hf_text_config.tie_word_embeddings:
            # A tied head gets no weights of its own, so vLLM does not prepare it again; on CPU it
            # would go on computing with the packed copy of the weights before.
            head.quant_method.process_weights_after_loading(head)

    def finish_weight_update(self) -> None:
        """Nothing is left to do."""

    def _find_sources(
        self, shapes: dict[str, torch.Size]
    ) -> dict[str, list[tuple[str, torch.Size]]]:
        """By the name of a vLLM parameter or buffer the Hugging Face ones that it is made of, in
        their order there."""
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        rename = mapper.get_rename_mapper().map_name if mapper else str
        # Such as {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
        fused = getattr(self.model, "packed_modules_mapping", {})
        known = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        places: dict[str, list[tuple[int, str, torch.Size]]] = {}
        for hf_name, shape in shapes.items():
            renamed = rename(hf_name)
            target = renamed, 0
            for whole, parts in fused.items():
                for place, part in enumerate(parts):
                    name = renamed.replace(f".{part}.", f".{whole}.")
                    if f".{part}." in renamed and name in known:
                        target = name, place
            places.setdefault(target[0], []).append((target[1], hf_name, shape))
        return {
            name: [source[1:] for source in sorted(sources)] for name, sources in places.items()
        }

    def fingerprints(self) -> dict[str, int]:
        """Fingerprints by Hugging Face name of the weights that the replica's processes compute
        with together.

        Raises WeightSyncError if it is not known which Hugging Face parameters a parameter is made
        of.
        """
        # Other buffers of vLLM's, such as tables of positions, are its own.
        buffers = [each for each in self.model.named_buffers() if each[0] in self._sources]
        tensors = [*self.model.named_parameters(), *buffers]  # lists tied parameters once
        # What vLLM has no place for is left out, and so it is missed, whatever its values are.
        sources = [self._sources.get(name, []) for name, _ in tensors]
        totals: dict[str, torch.Tensor | int] = {
            hf_name: 0 for of_tensor in sources for hf_name, _ in of_tensor
        }
        for name, parameter in tensors:
            is_packed = name in self._before_packing
            found = (
                self._before_packing[name] if is_packed else self._fingerprints_of(name, parameter)
            )
            if found is None:
                raise WeightSyncError(
                    f"What was loaded into vLLM's parameter {name} ({type(self.model).__name__}) "
                    "cannot be checked: it is not made of "
                    f"{[hf_name for hf_name, _ in self._sources.get(name, [])]} alone, which is "
                    "what the trainer has for it, or not in a way that is known here. Set "
                    "rollout.name=hf."
                )
            for hf_name, part in found.items():
                totals[hf_name] = totals.get(hf_name, 0) + part
        group = get_tp_group()
        names = sorted(totals)
        own = read_fingerprints(totals)
        signed = torch.tensor(
            [(own[name] + 2**63) % 2**64 - 2**63 for name in names], dtype=torch.int64
        )
        if group.world_size > 1:
            dist.all_reduce(signed, group=group.cpu_group)  # wraps around modulo 2**64
        return {name: value % 2**64 for name, value in zip(names, signed.tolist(), strict=True)}

    def _fingerprints_of(
        self, name: str, parameter: torch.Tensor
    ) -> dict[str, torch.Tensor] | None:
        module_name, _, leaf = name.rpartition(".")
        pieces = _cut(
            self.model.get_submodule(module_name), leaf, parameter, self._sources.get(name, [])
        )
        if pieces is None:
            return None
        found: dict[str, torch.Tensor] = {}
        for hf_name, row, column, values in pieces:
            piece = fingerprint_sum(values, row, column)
            found[hf_name] = found[hf_name] + piece if hf_name in found else piece
        return found


class WorkerExtension:
    """What vLLM's worker is given by `worker_extension_cls`."""

    weight_transfer_engine: StagedTransfer
    model_runner: Any
    adapter: Adapter

    def weight_fingerprints(self) -> dict[str, int]:
        """See `StagedTransfer.fingerprints`."""
        return self.weight_transfer_engine.fingerprints()

    def load_adapter(self, buckets: list[Any], adapter_id: int) -> None:
        """See `Adapter.load` and `StagedUpdate`."""
        self.adapter = Adapter(self.model_runner.get_model().lora_manager, adapter_id)
        self.adapter.load(iterate_buckets(StagedUpdate(buckets).buckets))

    def adapter_fingerprints(self) -> dict[str, int]:
        """See `Adapter.fingerprints`."""
        return self.adapter.fingerprints()


WeightTransferEngineFactory.register_engine("staged", StagedTransfer)

# Of an engine's own process, which the kernel ends with it (Linux)
if starter := multiprocessing.parent_process():
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != starter.pid:  # it has ended already
        os._exit(1)


def _cut(
    module: Any, leaf: str, parameter: torch.Tensor, sources: Sequence[tuple[str, torch.Size]]
) -> list[tuple[str, int, int, torch.Tensor]] | None:
    """The pieces of `sources` in a vLLM parameter: (Hugging Face name, first row, first column,
    values).

    Only those that this process answers for: of the copies in a replica one counts. None if the
    sources do not add up to the parameter.
    """
    rank = get_tensor_model_parallel_rank()
    # Shards of whole outputs
    by_rows = isinstance(module, ColumnParallelLinear | VocabParallelEmbedding)
    by_columns = isinstance(module, RowParallelLinear) and leaf == "weight"
    size = module.tp_size if by_rows or by_columns else 1
    num_rows = math.prod(parameter.shape[:1])
    num_columns = math.prod(parameter.shape[1:])
    if any(
        math.prod(shape[1:]) != num_columns * (size if by_columns else 1) for _, shape in sources
    ):
        return None
    copies = (
        [1, *[module.num_kv_head_replicas] * 2]
        if isinstance(module, QKVParallelLinear)
        else repeat(1)
    )
    outputs = [
        rows // c for rows, c in zip(getattr(module, "output_sizes", []), copies, strict=False)
    ]
    # Name, first row, rows
    parts = [(hf_name, 0, math.prod(shape[:1])) for hf_name, shape in sources]
    if isinstance(module, VocabParallelEmbedding):
        parts = [(hf_name, 0, num_rows * size) for hf_name, _, _ in parts]  # padded with zeros
    # Fused in Hugging Face's model too, such as Phi-3
    elif len(parts) == 1 and sum(outputs) == parts[0][2]:
        parts = [
            (parts[0][0], end - rows, rows)
            for rows, end in zip(outputs, accumulate(outputs), strict=True)
        ]
    matrix = parameter.reshape(num_rows, num_columns)
    end = 0
    pieces = []
    for (hf_name, first, rows), c in zip(parts, copies, strict=False):
        start = end
        end = end + rows * c // (size if by_rows else 1)
        if rank % c == 0:
            row = first + rank // c * (end - start) if by_rows else first
            pieces.append(
                (hf_name, row, rank * num_columns if by_columns else 0, matrix[start:end])
            )
    if end != num_rows:
        return None
    return pieces if size > 1 or rank == 0 else []
