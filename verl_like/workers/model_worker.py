"""The base classes of workers with a model: they make its engine, checkpoints and exports."""

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from verl_like.plugins import Extensible
from verl_like.protocol import DataProto, Metric
from verl_like.single_controller.decorator import Dispatch, register
from verl_like.single_controller.worker import Worker
from verl_like.workers.config.engine import ForwardFsdpConfig, TrainedFsdpConfig
from verl_like.workers.config.models import ModelConfig, TrainedModelConfig
from verl_like.workers.config.roles import ActorConfig, CriticConfig
from verl_like.workers.config.supervised import TrainingConfig
from verl_like.workers.engine.base import FileDigests, TrainingEngine
from verl_like.workers.engine.fsdp import FsdpEngine
from verl_like.workers.engine.mesh import init_process_group
from verl_like.workers.engine.mini_batches import (
    MicroBatch,
    MicroLoss,
    MicroPass,
    UpdateSchedule,
    forward,
)
from verl_like.workers.engine.routed_loss import RoutedLoss
from verl_like.workers.engine.throughput import Stopwatch
from verl_like.workers.models.lora import with_scale
from verl_like.workers.models.packed_models import PackedModel
from verl_like.workers.models.packing import Rows
from verl_like.workers.models.pretrained import load_pretrained
from verl_like.workers.models.routed_experts import RouterShape
from verl_like.workers.models.router_replay import attach_load
from verl_like.workers.planning.partition import MicroBatching, num_groups, update_micro_batching
from verl_like.workers.weights.exports import WeightExport, collect_weights
from verl_like.workers.weights.ipc import IpcTransport
from verl_like.workers.weights.transport import WeightTransport


def metrics_alone(metrics: dict[str, Metric]) -> DataProto:
    """Returns a batch that has metrics and no rows, for methods that have no more to return."""
    return DataProto.from_dict(tensors={}, meta_info={"metrics": metrics})


def scores_of_tokens(engine: TrainingEngine, micro: MicroBatch, *inputs: Any) -> tuple[Tensor, ...]:
    """Runs a model, and returns what it says of the response tokens, (K,) each: a language model
    their log-probabilities at the temperature that is given. `inputs` are those of the model."""
    packed = engine.pack(micro.on_host)
    scores = engine.run(packed, *inputs)
    return tuple(packed.of_tokens(scored) for scored in scores)


class ModelWorker(Extensible, Worker):
    """One rank of a model that an engine runs. `init_model` of a subclass starts the engine.

    `shares_device` is True if a rollout engine uses the memory of the device in turn.
    """

    model_class: ClassVar[type[PackedModel]]
    model_key: str
    """The configuration key of `model_config`, for messages."""
    model_config: ModelConfig
    fsdp_config: ForwardFsdpConfig | TrainedFsdpConfig
    """How the model is sharded and stored."""
    new_head_seed: int | None = None
    """The seed of a new head, if the model's folder has none. None: the folder must have one."""
    total_training_steps: int | None = None
    """The number of training steps of the run, for a learning rate that depends on it."""
    shares_prompts = False
    """Whether rows of a pass with the same prompt compute it once."""
    engine: TrainingEngine

    def __init__(self, shares_device: bool = False) -> None:
        super().__init__()
        self.shares_device = shares_device

    def build_model(self, with_weights: bool) -> PackedModel:
        """Makes the model before it is sharded. Without weights it is on the meta device."""
        hf = load_pretrained(
            self.model_class.auto_class,
            self.model_config,
            self.fsdp_config,
            key=self.model_key,
            device=self.device,
            weights=with_weights,
            new_head_seed=self.new_head_seed,
        )
        return self.model_class(hf)

    def register_mesh(self, mesh_name: str, sequence_parallel_size: int) -> None:
        """Registers which shard of a batch this rank works on.

        `sequence_parallel_size` consecutive ranks work on the same shard, and the first of them
        returns the result. Raises ValueError if it does not divide the number of ranks.
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
        """Joins the ranks of the group and makes `engine`.

        The engine trains the model if there are settings `training`.
        """
        transport = getattr(self, "weight_transport", None)
        if self.device == "cuda" and not isinstance(transport, IpcTransport):
            # Segments that can grow waste less memory between tensors. They are not used by a
            # transport whose memory another process opens.
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

    def rows_of(self, data: DataProto) -> Rows:
        """Returns the rows of a batch, as this role computes them."""
        return Rows.of(data, shares_prompts=self.shares_prompts)

    def infer(
        self,
        data: DataProto,
        columns: Sequence[str],
        micro_batching: MicroBatching,
        compute: MicroPass,
        phase: str,
    ) -> DataProto:
        """Runs the model over all rows without gradients, and returns the `columns`, jagged.

        `compute` maps a micro-batch of b rows to the values of the columns: one for each of the K
        response tokens, (K,), or padded (b, R). `phase` names the pass in metrics.
        """
        rows = self.rows_of(data)
        stopwatch = Stopwatch(self.engine, rows, phase, passes=1)

        def measured(micro: MicroBatch) -> tuple[Tensor, ...]:
            stopwatch.leave_out_shared(micro.on_host)
            return compute(micro)

        values = forward(self.engine, rows, micro_batching, measured)
        tensors = dict(zip(columns, values, strict=True))
        metrics = stopwatch.metrics()
        return DataProto.from_dict(tensors=tensors, meta_info={"metrics": metrics})


class TrainedWorker(ModelWorker):
    """One rank of a model that is trained, saved and exported."""

    model_config: TrainedModelConfig
    export_dtype: str
    """The name of the torch dtype of exported weights."""
    weight_transport: WeightTransport
    schedule: UpdateSchedule
    """How the rows of an update are divided into optimizer steps."""
    watched: RouterShape | None = None
    """The shape of the routers, if an update records the load of the experts."""

    def watch_routers(self, model: PackedModel) -> None:
        """Makes a model record the load of its experts, if it has some whose routers are known.

        Compiled layers do not record it.
        """
        if model.routers is None and not self.model_config.use_torch_compile:
            model.routers = attach_load(model.hf)
        self.watched = model.routers

    def routed_loss(
        self, loss: MicroLoss, rows: Rows, prefix: str, coefficient: float
    ) -> RoutedLoss | None:
        """Returns the loss of an update of `rows` that records the load, see `RoutedLoss`.

        Returns None for a model whose load is not recorded. Raises ValueError if such a model has
        a coefficient.
        """
        if self.watched is None:
            if coefficient:
                raise ValueError(
                    f"router_aux_loss_coef={coefficient} balances the experts of a model whose "
                    "routers are known and not compiled, and this is none; set it to 0"
                )
            return None
        return RoutedLoss(
            loss, rows, self.engine, self.watched, prefix=prefix, coefficient=coefficient
        )

    def start_training_engine(
        self, mesh_name: str, settings: ActorConfig | CriticConfig, *, samples_per_prompt: int
    ) -> None:
        """Makes the engine and the schedule of its updates.

        Raises ValueError if ranks or attention heads cannot be divided as the settings say.
        """
        self.register_mesh(mesh_name, settings.ulysses_sequence_parallel_size)
        self.schedule = UpdateSchedule(
            num_mini_batch_samples=settings.ppo_mini_batch_size * samples_per_prompt,
            micro_batching=update_micro_batching(settings),
            epochs=settings.ppo_epochs,
        )
        self.start_engine(settings.ulysses_sequence_parallel_size, settings)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, wait: bool = True) -> None:
        """Writes the training state and the model's configuration and tokenizer to a folder.

        The training state is parameters, buffers, optimizer state and step count. All ranks must
        see the folder `path`. Without `wait` this returns when the state is copied; `save_result`,
        which must be called before the next save, says when the copy is written.
        """
        self.engine.save(path)
        if wait:
            self.engine.saved_files(wait=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_result(self, wait: bool) -> FileDigests | None:
        """Returns the files that this rank wrote in the last `save_checkpoint`.

        By the name of each file there are its bytes and sha256. While files are being written, this
        waits for them if `wait` is True, and otherwise returns None. Raises OSError, which names
        the file, if a file cannot be written.
        """
        return self.engine.saved_files(wait=wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str, optimizer_only: bool = False) -> list[str]:
        """Loads what `save_checkpoint` wrote, also on another number of ranks.

        With `optimizer_only` it loads the optimizer's state alone. Returns messages for the user.
        Raises ValueError if there is no checkpoint at `path`.
        """
        with self.engine.on_device():  # optimizer state is loaded to where the parameters are
            return self.engine.load(path, optimizer_only)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_hf(self, path: str) -> None:
        """Writes the model as a Hugging Face folder, in the dtype that its layers compute in.

        Rank 0 writes it.
        """
        self.engine.save_hf(path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def export_weights(self, version: int) -> WeightExport:
        """Exports this rank's part of the weights, as version `version`.

        Rollout engines and copies load it. It has parameters in `export_dtype` and the model's
        buffers.
        """
        with self.engine.on_device():
            parameters = self.engine.named_parameters()
            export = collect_weights(
                with_scale(parameters, self.model_config),
                self.engine.named_buffers(),
                layout=self.engine.file_layout,
                dtype=getattr(torch, self.export_dtype),
                rank=self.rank,
                world_size=self.world_size,
                version=version,
                allocate=self.weight_transport.allocate,
            )
        return self.weight_transport.publish(export)
