"""The critic of PPO, which predicts the return from each response token and learns from returns."""

from typing import ClassVar

from torch import Tensor

from verl_like.algorithms.value_loss import compute_value_loss
from verl_like.protocol import DataProto
from verl_like.single_controller.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl_like.workers.config.roles import CriticConfig
from verl_like.workers.engine.mini_batches import (
    DeviceMetric,
    MicroBatch,
    MicroMetrics,
    MiniBatch,
    update,
)
from verl_like.workers.model_worker import ModelWorker, TrainedWorker, metrics_alone
from verl_like.workers.models.packed_models import ValueModel
from verl_like.workers.models.packing import SEQUENCE_COLUMNS, Rows
from verl_like.workers.planning.partition import MicroBatching
from verl_like.workers.weights import WEIGHT_TRANSPORTS

BY_SHARD = make_nd_compute_dataproto_dispatch_fn(mesh_name="critic")


class ValueWorker(ModelWorker):
    """One rank of the critic that computes values: a `CriticWorker` or a copy of it.

    `seed` is the run's, and initialises a new value head. `weight_transport` is the rollout's.
    """

    model_class = ValueModel
    model_key = "critic.model"
    replaced_methods: ClassVar = {"_predict": "override values_of_tokens, which returns (K,)"}

    def __init__(
        self,
        config: CriticConfig,
        seed: int,
        shares_device: bool = False,
        weight_transport: str = "object_store",
    ) -> None:
        super().__init__(shares_device)
        self.config = config
        self.new_head_seed = seed
        self.model_config = config.model
        self.fsdp_config = config.model.fsdp_config
        self.weight_transport = WEIGHT_TRANSPORTS[weight_transport]()

    @register(
        dispatch_mode=BY_SHARD,
        blocking=False,
        reads=SEQUENCE_COLUMNS,
        writes=["values"],
        jagged=True,
    )
    def compute_values(self, data: DataProto) -> DataProto:
        """Returns the estimated return from each response token, jagged float32.

        The model predicts it at the token before.
        """
        micro_batching = MicroBatching(
            self.config.forward_micro_batch_size_per_gpu,
            self.config.forward_max_token_len_per_gpu,
            self.config.use_dynamic_bsz,
        )

        def values(micro: MicroBatch) -> tuple[Tensor]:
            return (self.values_of_tokens(micro),)

        return self.infer(data, ["values"], micro_batching, values, phase="values")

    def values_of_tokens(self, micro: MicroBatch) -> Tensor:
        """Runs the model, and returns the value of each response token, (K,)."""
        packed = self.engine.pack(micro.on_host)
        scored = self.engine.run(packed)
        return packed.of_tokens(scored)

    def _predict(self, micro: MicroBatch) -> Tensor:
        """Returns `values_of_tokens` padded to (b, R), for objectives of subclasses that use this
        form."""
        values = self.values_of_tokens(micro)
        return micro.of_rows(values)


class CriticWorker(ValueWorker, TrainedWorker):
    """One rank of the critic.

    Subclasses change the model in `build_model` and the objective in `value_loss`. `rollout_n` is
    the number of responses to each prompt of a mini-batch.
    """

    def __init__(
        self,
        config: CriticConfig,
        seed: int,
        rollout_n: int = 1,
        total_training_steps: int | None = None,
        shares_device: bool = False,
        weight_transport: str = "object_store",
    ) -> None:
        super().__init__(config, seed, shares_device, weight_transport)
        self.rollout_n = rollout_n
        self.total_training_steps = total_training_steps
        self.export_dtype = config.model.fsdp_config.dtype

    def init_model(self) -> None:
        """Loads the model; a value head that the checkpoint lacks is initialised from the seed."""
        self.start_training_engine("critic", self.config, samples_per_prompt=self.rollout_n)

    @register(
        dispatch_mode=BY_SHARD,
        blocking=False,
        reads=[*SEQUENCE_COLUMNS, "values", "returns", "sample_id?", "mini_batch?"],
        jagged=True,
    )
    def update_critic(self, data: DataProto) -> DataProto:
        """Trains the critic on the batch, in `ppo_epochs` passes over its mini-batches.

        Returns the metrics.
        """
        metrics = update(
            self.engine,
            Rows.of(data),
            self.schedule,
            self.value_loss,
            prefix="critic",
            part=data.meta_info.get("part_of_step", (1, 1)),
        )
        return metrics_alone(metrics)

    def value_loss(self, micro: MicroBatch, mini_batch: MiniBatch) -> tuple[Tensor, MicroMetrics]:
        """Computes what a micro-batch adds to the clipped squared error of its mini-batch.

        Arguments and result are those of `ActorWorker.policy_loss`.
        """
        columns = micro.by_sample()
        mask_BR = columns["response_mask"]
        num_tokens = mask_BR.sum()
        vpreds_BR = micro.of_samples(self.values_of_tokens(micro))
        loss, token_sums = compute_value_loss(
            vpreds=vpreds_BR,
            returns=columns["returns"],
            values=columns["values"],
            response_mask=mask_BR,
            cliprange_value=self.config.cliprange_value,
            aggregate=mini_batch.aggregate(self.config.loss_agg_mode),
        )
        metrics: MicroMetrics = {}
        for name, total in token_sums.items():
            metrics[name] = DeviceMetric.token_mean(total, num_tokens)
        metrics["critic/vf_loss"] = DeviceMetric.loss(loss, mini_batch)
        metrics["critic/vpred_mean"] = DeviceMetric.token_mean(vpreds_BR.sum(), num_tokens)
        return loss, metrics
