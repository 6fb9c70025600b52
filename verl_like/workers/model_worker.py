"""What the workers around a model have in common: the engine that runs it, checkpoints and
export."""

import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from verl_like.protocol import DataProto
from verl_like.single_controller.decorator import Dispatch, register
from verl_like.single_controller.worker import Worker
from verl_like.workers.config.engine import ForwardFsdpConfig, TrainedFsdpConfig
from verl_like.workers.config.models import ModelConfig, TrainedModelConfig
from verl_like.workers.config.roles import ActorConfig, CriticConfig
from verl_like.workers.config.supervised import TrainingConfig
from verl_like.workers.engine.base import TrainingEngine
from verl_like.workers.engine.fsdp import FsdpEngine
from verl_like.workers.engine.mesh import init_process_group
from verl_like.workers.engine.mini_batches import MicroBatch, UpdateSchedule, forward
from verl_like.workers.engine.throughput import Stopwatch
from verl_like.workers.models.lora import with_scale
from verl_like.workers.models.packed_models import PackedModel
from verl_like.workers.models.packing import Rows
from verl_like.workers.models.pretrained import load_pretrained
from verl_like.workers.planning.partition import MicroBatching, num_groups
from verl_like.workers.weights.exports import WeightExport, collect_weights
from verl_like.workers.weights.ipc import IpcTransport
from verl_like.workers.weights.transport import WeightTransport


class ModelWorker(Worker):
    """One rank of a model that an engine runs; `init_model` of a subclass starts the engine.

    `shares_device` says whether a rollout engine takes memory of the device in turn.
    """

    model_class: ClassVar[type[PackedModel]]
    model_key: str
    """The configuration key of `model_config`, for messages."""
    model_config: ModelConfig
    fsdp_config: ForwardFsdpConfig | TrainedFsdpConfig
    """How the model is sharded and stored."""
    new_head_seed: int | None = None
    """Seed of the model's head where its folder has none; None means that it must have one."""
    total_training_steps: int | None = None
    """Training steps of the run, for a learning rate that depends on them."""
    engine: TrainingEngine

    def __init__(self, shares_device: bool = False) -> None:
        super().__init__()
        self.shares_device = shares_device

    def build_model(self, with_weights: bool) -> PackedModel:
        """The model before it is sharded; without weights it is made on the meta device."""
        return self.model_class(
            load_pretrained(
                self.model_class.auto_class,
                self.model_config,
                self.fsdp_config,
                key=self.model_key,
                device=self.device,
                weights=with_weights,
                new_head_seed=self.new_head_seed,
            )
        )

    def register_mesh(self, mesh_name: str, sequence_parallel_size: int) -> None:
        """Names the shard of a batch that this rank works on.

        `sequence_parallel_size` neighbouring ranks share one, and the first of them gives the
        result. Raises ValueError if it does not divide the ranks.
        """
        num_groups(
            sequence_parallel_size,
            self.world_size,
            "ranks of the pool",
            key="ulysses_sequence_parallel_size",
        )
        shard, rank_in_shard = divmod(self.rank, sequence_parallel_size)
        self._register_dispatch_collect_info(mesh_name, shard, rank_in_shard == 0)

    def start_engine(
        self,
        sequence_parallel_size: int = 1,
        training: ActorConfig | CriticConfig | TrainingConfig | None = None,
    ) -> None:
        """Joins the ranks of the group and makes `engine`, which trains where there are settings
        for it."""
        if self.device == "cuda" and not isinstance(
            getattr(self, "weight_transport", None), IpcTransport
        ):
            # Segments that grow have less between tensors. Memory that another process opens is
            # left as it is.
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        init_process_group(self.device, self.rank, self.world_size)
        self.engine = FsdpEngine(
            self.build_model,
            config=self.model_config,
            fsdp=self.fsdp_config,
            device=self.device,
            training=training,
            total_training_steps=self.total_training_steps,
            sequence_parallel_size=sequence_parallel_size,
            shares_device=self.shares_device,
        )

    def infer(
        self,
        data: DataProto,
        columns: Sequence[str],
        micro_batching: MicroBatching,
        compute: Callable[[MicroBatch], tuple[torch.Tensor, ...]],
        phase: str,
    ) -> DataProto:
        """Runs the model over all rows without gradients; `compute` maps a micro-batch of b rows to
        the values of `columns`, one for each of the K response tokens, (K,), or padded (b, R)."""
        rows = Rows.of(data)
        stopwatch = Stopwatch(self.engine, rows, phase, passes=1)
        values = forward(self.engine, rows, micro_batching, compute)
        tensors = dict(zip(columns, values, strict=True))
        return DataProto.from_dict(tensors=tensors, meta_info={"metrics": stopwatch.metrics()})


class TrainedWorker(ModelWorker):
    """One rank of a model that is trained, saved and exported."""

    model_config: TrainedModelConfig
    export_dtype: str
    """Name of the torch dtype of exported weights."""
    weight_transport: WeightTransport
    schedule: UpdateSchedule
    """How the rows of an update become optimizer steps."""

    def start_training_engine(
        self, mesh_name: str, settings: ActorConfig | CriticConfig, *, samples_per_prompt: int
    ) -> None:
        """Makes the engine and the schedule of its updates. Raises ValueError if ranks or attention
        heads do not divide as the settings ask."""
        self.register_mesh(mesh_name, settings.ulysses_sequence_parallel_size)
        self.schedule = UpdateSchedule(
            num_mini_batch_samples=settings.ppo_mini_batch_size * samples_per_prompt,
            micro_batching=MicroBatching(
                settings.ppo_micro_batch_size_per_gpu,
                settings.ppo_max_token_len_per_gpu,
                settings.use_dynamic_bsz,
            ),
            epochs=settings.ppo_epochs,
        )
        self.start_engine(settings.ulysses_sequence_parallel_size, settings)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, wait: bool = True) -> None:
        """Writes parameters, buffers, optimizer state and step count to the folder `path`, which
        all ranks see, and the model's configuration and tokenizer.

        Without `wait` it returns when the state is copied, and `save_result` says when the copy is
        written: before the next save.
        """
        self.engine.save(path)
        if wait:
            self.engine.saved_files(wait=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_result(self, wait: bool) -> dict[str, dict[str, Any]] | None:
        """The files of the last `save_checkpoint` that this rank wrote, by name: bytes and sha256.

        None while they are being written, unless `wait`. Raises OSError, naming the file that
        cannot be written.
        """
        return self.engine.saved_files(wait=wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str, optimizer_only: bool = False) -> list[str]:
        """Reads what `save_checkpoint` wrote, on any number of ranks, or the optimizer's state
        alone; ValueError if nothing is at `path`. Returns what the user should know."""
        with self.engine.on_device():  # the optimizer's state is loaded to where the parameters are
            return self.engine.load(path, optimizer_only)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_hf(self, path: str) -> None:
        """Writes the model as a Hugging Face folder, in the dtype the layers compute in; rank 0
        writes."""
        self.engine.save_hf(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def export_weights(self, version: int) -> WeightExport:
        """This rank's part of the weights for rollout engines and copies as version `version`:
        parameters in `export_dtype`, and the model's buffers."""
        with self.engine.on_device():
            export = collect_weights(
                with_scale(self.engine.named_parameters(), self.model_config),
                self.engine.named_buffers(),
                dtype=getattr(torch, self.export_dtype),
                rank=self.rank,
                world_size=self.world_size,
                version=version,
                allocate=self.weight_transport.allocate,
            )
        return self.weight_transport.publish(export)
