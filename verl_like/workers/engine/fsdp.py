"""The training engine by FSDP2: a model sharded over ranks, its optimizer and its checkpoints."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedTokenizerBase

from verl_like.workers.config.engine import ForwardFsdpConfig, TrainedFsdpConfig
from verl_like.workers.config.models import ModelConfig, TrainedModelConfig
from verl_like.workers.config.roles import ActorConfig, CriticConfig
from verl_like.workers.config.supervised import TrainingConfig
from verl_like.workers.engine.activation_offload import ActivationOffload
from verl_like.workers.engine.base import FileDigests, TrainingEngine
from verl_like.workers.engine.host_memory import HostMemory, local_part
from verl_like.workers.engine.mesh import build_meshes
from verl_like.workers.engine.optimizer import build_optimizer, learning_rate
from verl_like.workers.engine.shard_writer import ShardWriter
from verl_like.workers.models.distributed_experts import distribute_experts, experts_of
from verl_like.workers.models.lora import (
    merged_weights,
    model_buffers,
    trained_parameters,
    without_adapter,
)
from verl_like.workers.models.packed_models import PackedModel, decoder_layers
from verl_like.workers.models.packing import PackedBatch, Rows, pack
from verl_like.workers.models.pretrained import (
    compile_layers,
    load_tokenizer,
    save_settings,
    save_weights,
)
from verl_like.workers.models.sequence_exchange import SequenceExchange
from verl_like.workers.models.shared_prompts import share_prompts
from verl_like.workers.planning.flops import ModelCost
from verl_like.workers.planning.partition import require_shares_of_heads
from verl_like.workers.weights.file_layout import FileLayout, file_layout
from verl_like.workers.weights.gathering import whole_tensors

MAX_SKIPPED_STEPS = 3
"""How many consecutive optimizer steps may be skipped, because their gradients are not finite,
before the run stops."""


class FsdpEngine(TrainingEngine):
    """One model, sharded over the ranks by FSDP2, and its optimizer if it is trained.

    Raises ValueError if ranks or attention heads cannot be divided as the settings say.

    Args:
        build_model: makes the model. It is called with True on rank 0, for a model with weights,
            and with False on other ranks, for a model on the meta device.
        config: how the layers compute.
        fsdp: sharding, dtypes and offload.
        device: `cpu` or `cuda`.
        training: the optimizer, its schedule and clipping; None for a model that only runs forward.
        total_training_steps: the number of training steps of the run, for a learning rate that
            depends on it.
        sequence_parallel_size: how many ranks share each packed batch.
        shares_device: whether a rollout engine in another process uses the memory of the device in
            turn.
    """

    def __init__(
        self,
        build_model: Callable[[bool], PackedModel],
        *,
        config: ModelConfig,
        fsdp: ForwardFsdpConfig | TrainedFsdpConfig,
        device: str,
        training: ActorConfig | CriticConfig | TrainingConfig | None,
        total_training_steps: int | None,
        sequence_parallel_size: int,
        shares_device: bool,
    ) -> None:
        self.device = device
        self.shares_device = shares_device
        self.config = config
        self.fsdp = fsdp
        self.training = training
        self.total_training_steps = total_training_steps
        self.dtype = fsdp.dtype
        self.sequence_parallel_size = sequence_parallel_size
        self.rank = dist.get_rank()
        self.meshes = build_meshes(
            device, fsdp.num_shards, sequence_parallel_size, fsdp.expert_parallel_size
        )
        self.mesh = self.meshes.parameters
        # If each rank has all parameters, nothing is gathered, and freeing layers would save
        # little.
        num_shards = self.mesh["shard"].size()
        is_sharded = num_shards > 1
        self.frees_layers = fsdp.strategy == "zero3" and is_sharded
        self.shards_gradients = fsdp.strategy in ("zero2", "zero3") and is_sharded
        self.model = build_model(self.rank == 0)
        if training is None:
            self.model.requires_grad_(False)
        hf = self.model.hf
        adapters = getattr(hf, "peft_config", {})
        self.adapter_settings = adapters.get("default")
        self.exchange = None
        if self.meshes.batch is not None:
            require_shares_of_heads(
                hf.config, sequence_parallel_size, key="ulysses_sequence_parallel_size"
            )
            self.exchange = SequenceExchange(self.meshes.batch["sequence"])
        has_head = hf.get_output_embeddings() is not None
        self.cost = ModelCost.of(hf.config, with_head=has_head)
        if isinstance(config, TrainedModelConfig):
            if training and config.enable_activation_offload and device == "cuda":
                self.model.saving = ActivationOffload()
            if config.use_torch_compile:
                compile_layers(hf)
            if training and config.enable_gradient_checkpointing:
                hf.gradient_checkpointing_enable({"use_reentrant": False})
        distributed = experts_of(hf) if self.meshes.experts else []
        self.distributed_experts = set(distributed)
        """The modules of experts that are distributed over ranks."""
        sharded_experts = [] if self._computes_from_its_experts else distributed
        self.units: list[Any] = [*sharded_experts, *decoder_layers(hf), self.model]
        """The units of sharding, which `fully_shard` makes FSDPModules."""
        self._shard(self.model)
        parameters = self.model.parameters()
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.ema_decay = training.ema_decay if isinstance(training, ActorConfig) else None
        self.optimizer = None
        self.offloads_optimizer = False
        if training:
            with_ema = self.ema_decay is not None
            self.optimizer = build_optimizer(self.parameters, training.optim, with_ema)
            if isinstance(fsdp, TrainedFsdpConfig):
                self.offloads_optimizer = fsdp.optimizer_offload
        self.training_steps = 0
        self.consecutive_skips = 0
        self.writer = ShardWriter(self.rank, self.mesh)
        self._offload()

    @property
    def _computes_from_its_experts(self) -> bool:
        """True if a rank computes with the stored parameters of its experts, without a copy.

        It is so if no other rank has these experts, and they are stored in float32, in which they
        are computed and their gradients are summed. FSDP2 then has nothing to gather, to cast or to
        reduce, but would copy weights and gradients all the same.
        """
        mesh = self.meshes.experts
        if mesh is None or mesh.size() > mesh["expert"].size():
            return False
        return self.fsdp.model_dtype == self.dtype == "float32"

    def _shard(self, model: PackedModel) -> None:
        """Shards the model, and distributes rank 0's weights and buffers to all ranks.

        Every decoder layer is a unit of sharding, and the rest of the model is another one. Experts
        that are distributed are units of their own, because fewer ranks share each of them, or in
        no unit if each rank computes from its own (`_computes_from_its_experts`).
        """
        weights = model.state_dict() if self.rank == 0 else {}
        buffers = dict(model.named_buffers())
        dtypes = [buffer.dtype for buffer in model.buffers()]
        computing_dtype = getattr(torch, self.dtype)
        precision = MixedPrecisionPolicy(param_dtype=computing_dtype, reduce_dtype=torch.float32)
        model.to("meta")
        model.hf.tie_weights()  # moving to another device unties
        meshes = self.meshes
        if meshes.experts is not None:
            distribute_experts(model.hf, meshes.experts["expert"])
        in_no_unit: set[nn.Parameter] = set()
        for module in self.distributed_experts.difference(self.units):
            in_no_unit.update(module.parameters())
        for unit in self.units:
            mesh = meshes.parameters
            if unit in self.distributed_experts:
                assert meshes.experts is not None
                mesh = meshes.experts["replica", "part"]
            # The outermost unit is not freed after the forward pass, because the backward pass
            # begins with it.
            reshard = self.frees_layers and unit is not model
            fully_shard(
                unit,
                mesh=mesh,
                mp_policy=precision,
                reshard_after_forward=reshard,
                ignored_params=in_no_unit,
            )
        model.to_empty(device=self.device)
        # Ranks may differ in the dtype of buffers: transformers keeps some of them in float32 if it
        # reads the model from a file, but not if it makes the model on the meta device.
        dtypes_of_first = [dtypes]
        dist.broadcast_object_list(dtypes_of_first, src=0)
        (dtypes,) = dtypes_of_first
        for buffer, dtype in zip(model.buffers(), dtypes, strict=True):
            buffer.data = buffer.data.to(dtype)
        # The loss divides by counts over all ranks, so gradients are summed. Without the second
        # call torch would sum by PREMUL_SUM, which gloo refuses.
        for unit in self.units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, weights, options=options)
        # The weights lack the buffers that no checkpoint has, such as the rotary frequencies.
        for name, buffer in model.named_buffers():
            if self.rank == 0:
                buffer.copy_(buffers[name])
            dist.broadcast(buffer, src=0)

    @contextmanager
    def on_device(self, *, train: bool = False) -> Iterator[None]:
        if self.fsdp.param_offload:
            self.model.to(self.device, non_blocking=True)
        self.model.train(train)
        with torch.set_grad_enabled(train):
            yield
        for unit in self.units:
            unit.reshard()
        self._offload()

    def _offload(self) -> None:
        """Moves parameters and optimizer state to the host if they are offloaded.

        It also returns torch's cached memory to the device if a rollout engine uses the device.
        """
        if self.fsdp.param_offload:
            self.model._apply(self._to_host)
        if self.offloads_optimizer:
            self._optimizer_to_host()
        if self.device != "cuda":
            return
        if self.fsdp.param_offload or self.offloads_optimizer:
            torch.cuda.current_stream().synchronize()  # now the copies may be read
        if self.shares_device:
            torch.cuda.empty_cache()

    def _to_host(self, tensor: Tensor) -> Tensor:
        """Copies a parameter to its place on the host. Buffers, which are small, stay."""
        places = self._parameter_places
        if id(tensor) in places:
            return places.to_host(id(tensor), tensor)
        return tensor

    @cached_property
    def _parameter_places(self) -> HostMemory:
        parameters = self.model.parameters()
        return HostMemory({id(parameter): parameter for parameter in parameters})

    @property
    def _optimizer_state(self) -> dict[Any, dict[str, Tensor]]:
        """The state of the optimizer by parameter; only a model that is trained has one."""
        assert self.optimizer is not None
        return self.optimizer.state

    @cached_property
    def _optimizer_places(self) -> HostMemory:
        values: dict[Hashable, Tensor] = {}
        for parameter, state in self._optimizer_state.items():
            for name, value in state.items():
                values[id(parameter), name] = value
        return HostMemory(values)

    def _optimizer_to_host(self) -> None:
        places = self._optimizer_places
        for parameter, state in self._optimizer_state.items():
            for name, value in state.items():
                key = (id(parameter), name)
                state[name] = places.to_host(key, value)

    def _optimizer_to_device(self) -> None:
        for state in self._optimizer_state.values():
            for name, value in state.items():
                state[name] = value.to(self.device, non_blocking=True)

    def without_adapter(self) -> AbstractContextManager[None]:
        return without_adapter(self.model.hf)

    def pack(self, rows: Rows) -> PackedBatch:
        packed = pack(rows)
        if rows.shares_prompts:
            packed = share_prompts(packed, rows)
        if self.exchange is not None:
            packed = packed.shard(self.exchange)
        return packed.on(self.device)

    def run(self, packed: PackedBatch, *inputs: Any) -> Any:
        return self.model(packed, *inputs)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Does what `TrainingEngine.backward` says.

        With zero2 and zero3 a rank has its shard of the gradients after each call, in float32.
        Otherwise every rank has whole gradients until the last call.
        """
        outermost = self.units[-1]
        outermost.set_requires_gradient_sync(is_last or self.shards_gradients)
        outermost.set_requires_all_reduce(is_last)
        outermost.set_reshard_after_backward(is_last or self.frees_layers)
        loss.backward()

    def step(self) -> float:
        assert self.optimizer is not None
        assert self.training is not None
        grad_norm = self._clip_gradients(self.training.grad_clip)
        if not math.isfinite(grad_norm):
            self.consecutive_skips += 1
            if self.consecutive_skips > MAX_SKIPPED_STEPS:
                raise FloatingPointError(
                    f"The gradient norm was not finite ({grad_norm}) in {self.consecutive_skips} "
                    f"optimizer steps in a row; {MAX_SKIPPED_STEPS} may be skipped. The weights "
                    "are those before these steps; look at the last steps' advantages, "
                    "log-probabilities and learning rate."
                )
        else:
            self.consecutive_skips = 0
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr
            if self.offloads_optimizer:
                self._optimizer_to_device()
            self.optimizer.step()
            if self.ema_decay is not None:
                self._average(1 - self.ema_decay)
            if self.offloads_optimizer:
                self._optimizer_to_host()
        self.optimizer.zero_grad()
        return grad_norm

    def _clip_gradients(self, grad_clip: float) -> float:
        """Scales the gradients to a norm of at most `grad_clip`, and returns the norm before that.

        The norm is that of the gradients over all ranks.
        """
        gradients = []
        for parameter in self.parameters:
            if parameter.grad is not None:
                gradients.append(local_part(parameter.grad))
        own_norm = torch.nn.utils.get_total_norm(gradients)
        # The norm of no gradients is float32, but that of other ranks may be bfloat16.
        squared = own_norm.float().square()
        group = self.mesh.get_group("shard")
        dist.all_reduce(squared, group=group)
        grad_norm = squared.sqrt().item()
        if gradients and grad_norm > grad_clip:
            torch._foreach_mul_(gradients, grad_clip / grad_norm)
        return grad_norm

    @torch.no_grad()
    def _average(self, weight: float) -> None:
        """Moves the average of the weights towards the weights, by the fraction `weight`."""
        averages = []
        weights = []
        for parameter in self.parameters:
            average = self._optimizer_state[parameter]["ema"]
            averages.append(local_part(average))
            weights.append(local_part(parameter))
        if self.fsdp.model_dtype != "float32":
            stored = weights
            weights = [torch.empty_like(each, dtype=torch.float32) for each in weights]
            torch._foreach_copy_(weights, stored)
        torch._foreach_lerp_(averages, weights, weight)

    @property
    def lr(self) -> float:
        assert self.training is not None
        return learning_rate(self.training_steps, self.training.optim, self.total_training_steps)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from trained_parameters(self.model.hf)
        yield from self.model.heads.named_parameters("heads")

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        yield from model_buffers(self.model.hf)

    @cached_property
    def file_layout(self) -> FileLayout:
        # An adapter is in its files as in memory.
        return {} if self.adapter_settings else file_layout(self.model.hf)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that is saved with the model. Loading a large one takes a second."""
        return load_tokenizer(cast(TrainedModelConfig, self.config))

    @cached_property
    def settings_files(self) -> dict[str, bytes]:
        """The contents of the files of configuration and tokenizer, by name.

        They are made once, because that takes long and holds Python's global lock.
        """
        contents = {}
        dtype = getattr(torch, self.dtype)
        with TemporaryDirectory() as folder:
            save_settings(self.model.hf, self.tokenizer, dtype, folder)
            if self.adapter_settings:
                self.adapter_settings.save_pretrained(folder)
            for file in Path(folder).rglob("*"):
                if file.is_file():
                    name = str(file.relative_to(folder))
                    contents[name] = file.read_bytes()
        return contents

    def save(self, path: str) -> None:
        def write_settings() -> None:
            if self.rank != 0:
                return
            for name, content in self.settings_files.items():
                file = Path(path, name)
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(content)

        # Offloaded tensors are copied from the host, because a rollout engine may use the device.
        state = self._state()
        self.writer.begin(state, Path(path), write_settings)

    def saved_files(self, *, wait: bool) -> FileDigests | None:
        return self.writer.result(wait)

    @torch.no_grad()
    def load(self, path: str, optimizer_only: bool = False) -> list[str]:
        files = Path(path).glob("*.safetensors")
        if not any(files):
            raise ValueError(f"There is no checkpoint at {path}: it has no safetensors file.")
        reader = HuggingFaceStorageReader(path)
        state = self._state()
        metadata = reader.read_metadata()
        saved = metadata.state_dict_metadata
        lacking = []
        for name, _ in self.named_buffers():
            key = f"model.{name}"
            if key not in saved:  # earlier versions did not save buffers
                lacking.append(name)
                del state[key]
        _check_saved(saved, state, path)
        loaded = state
        if optimizer_only:
            loaded = {name: state[name] for name in state if name.startswith("optimizer.")}
        dcp.load(loaded, storage_reader=reader)  # this writes into the tensors
        self.training_steps = int(state["training_steps"])
        self.consecutive_skips = int(state["skipped_steps"])
        if not lacking:
            return []
        return [
            f"{path} is of an earlier version and lacks the buffers {', '.join(lacking)}: they "
            f"are those of {self.config.path}."
        ]

    def save_hf(self, path: str) -> None:
        dtype = getattr(torch, self.dtype)
        settings = self.adapter_settings
        kept_dtype = None if settings else dtype  # an adapter is merged before the conversion
        kept = {}
        # All ranks gather one parameter after the other, and rank 0 keeps them. They are gathered
        # in host memory, because a rollout engine may use the device.
        for name, parameter in self.named_parameters():
            on_host = parameter.detach().to("cpu", kept_dtype)
            for gathered in whole_tensors([on_host], is_kept=self.rank == 0):
                kept[name] = gathered
        if self.rank != 0:
            return
        for name, buffer in self.named_buffers():
            kept[name] = buffer.to("cpu")
        hf = self.model.hf
        if settings:
            kept = merged_weights(hf, settings, kept, dtype)
        save_weights(hf, kept, Path(path))
        # The settings are saved last, because save_weights writes the dtype of `hf`.
        save_settings(hf, self.tokenizer, dtype, path)

    def _state(self) -> dict[str, Tensor]:
        """Returns the training state by name: tensors that `load` writes into, and two counts."""
        state = {"training_steps": torch.tensor(self.training_steps)}
        state["skipped_steps"] = torch.tensor(self.consecutive_skips)
        for name, parameter in self.named_parameters():
            state[f"model.{name}"] = parameter
            if self.optimizer:
                values = self._optimizer_state[parameter]
                for key, value in values.items():
                    state[f"optimizer.{name}.{key}"] = value
        return state | {f"model.{name}": buffer for name, buffer in self.named_buffers()}


def _check_saved(saved: Mapping[str, Any], state: Mapping[str, Tensor], path: str) -> None:
    """Raises ValueError if the checkpoint at `path` is of another state, or has a part of it.

    `saved` has torch's description of each tensor of the checkpoint.
    """
    for name in sorted({*saved, *state}):
        there = list(saved[name].size) if name in saved else None
        here = list(state[name].size()) if name in state else None
        if there != here:
            raise ValueError(
                f"{path} is a checkpoint of another model: {name} is {there} there, and {here} "
                "here; give the model of that run."
            )
        chunks = {(chunk.offsets, chunk.sizes) for chunk in saved[name].chunks}
        num_saved = sum(sizes.numel() for _, sizes in chunks)
        if num_saved < state[name].numel():
            raise ValueError(
                f"{path} has only a part of {name}: give a default_local_dir that all nodes see."
            )
