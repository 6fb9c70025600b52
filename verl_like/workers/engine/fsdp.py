"""Trains a model that is sharded over all ranks (FSDP2): gradient steps, full parameters, checkpoints."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from verl_like.workers.config import ForwardFsdpConfig, OptimConfig, TrainedFsdpConfig
from verl_like.workers.engine.activation_offload import ActivationOffload
from verl_like.workers.engine.optimizer import build_optimizer, learning_rate
from verl_like.workers.engine.sequence_parallel import SequenceParallel
from verl_like.workers.models.packed_models import PackedModel
from verl_like.workers.models.packing import PackedBatch, pack
from verl_like.workers.models.pretrained import compile_layers, decoder_layers, replace_folder
from verl_like.workers.planning.flops import ModelCost

COLLECTIVE_DEADLINE = timedelta(minutes=30)
"""Longest wait of a rank for its peers: they may still be reading a large model."""

MAX_SKIPPED_STEPS = 3
"""Consecutive optimizer steps that may be skipped for a gradient that is not finite before the run stops."""


def init_process_group(device: str, rank: int, world_size: int) -> None:
    """Joins the ranks of this worker group; once a process, so that roles of one process share the group."""
    if dist.is_initialized():
        return
    if device == "cuda":
        torch.cuda.set_device(0)
    alone = {"store": dist.HashStore()} if world_size == 1 else {}
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=COLLECTIVE_DEADLINE, **alone)


def build_mesh(device: str, fsdp_size: int) -> DeviceMesh:
    """Mesh (replicas, shards): one copy of the parameters is sharded over `fsdp_size` ranks, -1 for all.

    A single copy has a mesh of two dimensions too: FSDP2 then adds up the micro-batches of a step in float32, also for
    parameters that are stored in bfloat16.

    Raises:
        ValueError: `fsdp_size` does not divide the number of ranks.
    """
    world_size = dist.get_world_size()
    shards = world_size if fsdp_size == -1 else fsdp_size
    if world_size % shards:
        raise ValueError(
            f"fsdp_config.fsdp_size={fsdp_size} does not divide the {world_size} ranks of the pool; "
            "use -1 or a divisor."
        )
    return init_device_mesh(device, (world_size // shards, shards), mesh_dim_names=("replica", "shard"))


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    grad_norm: float
    """Norm of the mini-batch's whole gradient before clipping."""
    skipped: bool
    """True when the norm was not finite, so that the parameters stayed as they were."""


class TrainingEngine:
    """One model, sharded over all ranks, and its optimizer if it is trained.

    Every rank calls every method, with the same number of micro-batches: the methods communicate. Gradients of the
    ranks are added, not averaged, so a loss divides by counts over all ranks.

    Args:
        build_model: makes the model; called with True (with weights) on rank 0, False (on the meta device) elsewhere.
        fsdp: sharding, dtypes and offload.
        device: `cpu` or `cuda`.
        optim: optimizer and schedule; None for a model that is only run forward.
        grad_clip: largest gradient norm.
        total_training_steps: training steps of the run, for a learning rate that depends on them.
        gradient_checkpointing: recompute each decoder layer in the backward pass.
        activation_offload: keep what the backward pass needs in host memory; on a CPU it is there anyway.
        torch_compile: compile the decoder layers.
        sequence_parallel_size: ranks that share each packed batch.
        shares_device: whether an inference engine in another process takes memory of the device in turn.

    Raises:
        ValueError: ranks or attention heads do not divide as the settings ask.
    """

    def __init__(
        self,
        build_model: Callable[[bool], PackedModel],
        *,
        fsdp: ForwardFsdpConfig | TrainedFsdpConfig,
        device: str,
        optim: OptimConfig | None = None,
        grad_clip: float = 1.0,
        total_training_steps: int | None = None,
        gradient_checkpointing: bool = False,
        activation_offload: bool = False,
        torch_compile: bool = False,
        sequence_parallel_size: int = 1,
        shares_device: bool = False,
    ) -> None:
        self.device = device
        self.shares_device = shares_device
        self.fsdp = fsdp
        self.optim = optim
        self.grad_clip = grad_clip
        self.total_training_steps = total_training_steps
        self.mesh = build_mesh(device, fsdp.fsdp_size)
        # A rank that holds all parameters gathers nothing: freeing its layers would save it little.
        self.reshard = fsdp.reshard_after_forward and self.mesh["shard"].size() > 1
        self.model = build_model(dist.get_rank() == 0)
        self.model.requires_grad_(optim is not None)
        self.sequence_parallel = None
        if sequence_parallel_size > 1:
            self.sequence_parallel = SequenceParallel(device, sequence_parallel_size, self.model.hf.config)
        self.cost = ModelCost.of(self.model.hf.config)
        if activation_offload and device == "cuda":
            self.model.saving = ActivationOffload()
        if torch_compile:
            compile_layers(self.model.hf)
        if gradient_checkpointing:
            self.model.hf.gradient_checkpointing_enable({"use_reentrant": False})
        self.units = [*decoder_layers(self.model.hf), self.model]
        self._shard(self.model)
        self.parameters = list(self.model.parameters())
        self.optimizer = build_optimizer(self.parameters, optim) if optim else None
        self.training_steps = 0
        self.consecutive_skips = 0
        self._offload()

    def _shard(self, model: PackedModel) -> None:
        """Makes every decoder layer, and all the rest together, a unit of sharding; rank 0's weights go to all."""
        weights = model.state_dict() if dist.get_rank() == 0 else {}
        buffers = dict(model.named_buffers()) if dist.get_rank() == 0 else {}
        precision = MixedPrecisionPolicy(param_dtype=getattr(torch, self.fsdp.dtype), reduce_dtype=torch.float32)
        model.to("meta")
        model.hf.tie_weights()  # moving to another device unties
        for unit in self.units:
            # The backward pass starts with the outermost unit: freeing that after the forward pass would gain nothing.
            reshard = self.reshard and unit is not model
            fully_shard(unit, mesh=self.mesh, mp_policy=precision, reshard_after_forward=reshard)
        model.to_empty(device=self.device)
        for unit in self.units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        set_model_state_dict(
            model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)
        )
        # Buffers that no checkpoint holds, such as the rotary frequencies.
        for name, buffer in model.named_buffers():
            if buffers:
                buffer.copy_(buffers[name])
            dist.broadcast(buffer, src=0)

    @contextmanager
    def on_device(self, *, train: bool = False) -> Iterator[None]:
        """Within it, offloaded parameters are on the device."""
        if self.fsdp.param_offload:
            self.model.to(self.device)
        self.model.train(train)
        with torch.set_grad_enabled(train):
            yield
        for unit in self.units:
            unit.reshard()
        self._offload()

    def _offload(self) -> None:
        if self.fsdp.param_offload:
            self.model.to("cpu")
        self._move_optimizer("cpu")
        if self.device == "cuda" and self.shares_device:
            torch.cuda.empty_cache()  # what torch keeps for itself, the engine cannot use

    def _move_optimizer(self, device: str) -> None:
        if self.optimizer is None or not (isinstance(self.fsdp, TrainedFsdpConfig) and self.fsdp.optimizer_offload):
            return
        for state in self.optimizer.state.values():
            for name, value in state.items():
                state[name] = value.to(device)

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that hold the same rows."""
        return 1 if self.sequence_parallel is None else self.sequence_parallel.size

    def pack(self, rows: Mapping[str, torch.Tensor]) -> PackedBatch:
        """`models.pack`; under sequence parallelism this rank's share of it."""
        packed = pack(rows)
        return packed if self.sequence_parallel is None else self.sequence_parallel.shard(packed)

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Adds the loss's gradient; the sum over all ranks is complete after the call with `is_last`, before `step`.

        Where layers are freed after their pass, their gradients are too: each call leaves a rank its shard, in float32.
        Otherwise the whole model fits on every rank, and its gradients stay there until the last call.
        """
        self.model.set_requires_gradient_sync(is_last or self.reshard)
        self.model.set_requires_all_reduce(is_last)
        self.model.set_reshard_after_backward(is_last or self.reshard)
        loss.backward()

    def step(self) -> StepResult:
        """One optimizer step on the gradients added since the last one.

        Raises:
            FloatingPointError: the gradient norm was not finite, for more than `MAX_SKIPPED_STEPS` steps in a row.
        """
        assert self.optimizer is not None and self.optim is not None
        grad_norm = self._clip_gradients()
        skipped = not math.isfinite(grad_norm)
        if skipped:
            self.consecutive_skips += 1
            if self.consecutive_skips > MAX_SKIPPED_STEPS:
                raise FloatingPointError(
                    f"The gradient norm was not finite ({grad_norm}) in {self.consecutive_skips} optimizer steps in a "
                    f"row; {MAX_SKIPPED_STEPS} may be skipped. The weights are those before these steps; look at the "
                    "last steps' advantages, log-probabilities and learning rate."
                )
        else:
            self.consecutive_skips = 0
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr
            self._move_optimizer(self.device)
            self.optimizer.step()
            self._move_optimizer("cpu")
        self.optimizer.zero_grad()
        return StepResult(grad_norm, skipped)

    def _clip_gradients(self) -> float:
        """Scales the gradients to at most `grad_clip`; returns their norm over all ranks."""
        gradients = [parameter.grad.to_local() for parameter in self.parameters if parameter.grad is not None]
        squared = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(squared, group=self.mesh.get_group("shard"))
        grad_norm = squared.sqrt().item()
        if grad_norm > self.grad_clip:
            for gradient in gradients:
                gradient.mul_(self.grad_clip / grad_norm)
        return grad_norm

    @property
    def lr(self) -> float:
        """Learning rate of the present training step."""
        assert self.optim is not None
        return learning_rate(self.training_steps, self.optim, self.total_training_steps)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """(name in the Hugging Face model, sharded parameter); tied parameters once."""
        for name, parameter in self.model.named_parameters():
            yield name.removeprefix("hf."), parameter

    def save(self, path: str) -> None:
        """Writes parameters, optimizer and step count; the folder appears at `path` complete or not at all.

        What is offloaded is written from where it is, so that an inference engine keeps its share of the device.
        """
        partial = Path(f"{path}.partial")
        dcp.save(self._state(), checkpoint_id=partial)
        if dist.get_rank() == 0:
            replace_folder(partial, Path(path))
        dist.barrier()

    def load(self, path: str) -> None:
        """Reads what `save` wrote, on any number of ranks.

        Raises:
            ValueError: there is no checkpoint at `path`.
        """
        if not Path(path, ".metadata").is_file():
            raise ValueError(f"There is no checkpoint at {path} ({Path(path, '.metadata')} does not exist).")
        state = self._state()
        dcp.load(state, checkpoint_id=path)
        optimizers = [self.optimizer] if self.optimizer else []
        set_state_dict(
            self.model, optimizers, model_state_dict=state["model"], optim_state_dict=state.get("optimizer", {})
        )
        self.training_steps = int(state["training_steps"])

    def _state(self) -> dict:
        optimizers = [self.optimizer] if self.optimizer else []
        model_state, optimizer_state = get_state_dict(self.model, optimizers)
        state = {"model": model_state, "training_steps": torch.tensor(self.training_steps)}
        return state | ({"optimizer": optimizer_state} if optimizers else {})
