"""A language model that learns from conversations: the likelihood of what assistants write."""

import torch

from verl_like.protocol import DataProto, Metric
from verl_like.single_controller.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl_like.workers.config.supervised import SupervisedModelConfig, TrainingConfig
from verl_like.workers.engine.mini_batches import (
    DeviceMetric,
    MicroMetrics,
    MiniBatch,
    Rows,
    UpdateSchedule,
    to_rows,
    update,
)
from verl_like.workers.model_worker import TrainedWorker
from verl_like.workers.models.packed_models import PolicyModel
from verl_like.workers.models.packing import SEQUENCE_COLUMNS
from verl_like.workers.planning.partition import MicroBatching, num_rows_per_rank

BY_SHARD = make_nd_compute_dataproto_dispatch_fn(mesh_name="model")


class SFTWorker(TrainedWorker):
    """One rank of a model that is fine-tuned on conversations.

    `batch_size` rows over all ranks are one optimizer step.
    """

    model_class = PolicyModel
    model_key = "model"

    def __init__(
        self, model: SupervisedModelConfig, training: TrainingConfig, batch_size: int, total_training_steps: int
    ) -> None:
        super().__init__()
        self.model_config, self.fsdp_config, self.training = model, model.fsdp_config, training
        self.batch_size, self.total_training_steps = batch_size, total_training_steps
        self.micro_batching = MicroBatching(
            training.micro_batch_size_per_gpu, training.max_token_len_per_gpu, training.use_dynamic_bsz
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model."""
        shards = self.register_mesh("model", self.training.ulysses_sequence_parallel_size)
        size = self.batch_size
        rows = num_rows_per_rank(size, size, shards, what=f"data.train_batch_size={size} rows")
        self.schedule = UpdateSchedule(rows, self.micro_batching, epochs=1)
        self.start_engine(self.training.ulysses_sequence_parallel_size, self.training)

    @register(dispatch_mode=BY_SHARD, blocking=False, reads=SEQUENCE_COLUMNS)
    def update_model(self, data: DataProto) -> DataProto:
        """One optimizer step on the batch; returns the metrics."""
        rows = to_rows(data, self.device)
        metrics = update(self.engine, rows, self.schedule, self.loss, prefix="sft", part=(1, 1))
        return DataProto.from_dict(tensors={}, meta_info={"metrics": metrics})

    @register(dispatch_mode=BY_SHARD, blocking=False, reads=SEQUENCE_COLUMNS, writes=["log_probs"])
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Log-probability of each learned token under the present model, (B, R) float32."""
        return self.infer(
            data, ["log_probs"], self.micro_batching, lambda micro: (self._log_probs(micro),), phase="sft_infer"
        )

    def loss(self, micro: Rows, mini_batch: MiniBatch) -> tuple[torch.Tensor, MicroMetrics]:
        """The share of some rows in -1/N sum log p(token | those before), over the N learned tokens of the batch."""
        log_probs_BR = self._log_probs(micro)
        loss = -log_probs_BR.sum() / mini_batch.num_tokens
        num_tokens = micro["response_mask"].sum()
        metrics = {"sft/num_tokens": DeviceMetric((num_tokens,), Metric.sum)}
        return loss, metrics

    def _log_probs(self, micro: Rows) -> torch.Tensor:
        """(b, R) float32, 0 where nothing is learned."""
        packed = self.engine.pack(micro)
        (log_probs,) = self.engine.run(packed, 1.0)
        return packed.unpack(log_probs)
