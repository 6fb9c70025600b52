"""Models that learn from examples: a language model from conversations, a reward model and DPO's
policy from pairs, and ILQL's model from scored conversations."""

from dataclasses import replace
from typing import ClassVar

import torch

from verl_like.algorithms.ilql import ilql_losses
from verl_like.algorithms.masked import zero_masked
from verl_like.algorithms.preferences import DPO_LOSSES, pairwise_loss, preference_metrics
from verl_like.protocol import DataProto, Metric, merge_metrics
from verl_like.single_controller.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl_like.workers.config.engine import ForwardFsdpConfig
from verl_like.workers.config.supervised import (
    DPOTrainingConfig,
    ILQLTrainingConfig,
    SupervisedModelConfig,
    TrainingConfig,
)
from verl_like.workers.engine.base import TrainingEngine
from verl_like.workers.engine.mini_batches import (
    DeviceMetric,
    MicroBatch,
    MicroMetrics,
    MiniBatch,
    UpdateSchedule,
    forward,
    read_metrics,
    update,
)
from verl_like.workers.model_worker import TrainedWorker
from verl_like.workers.models.ilql import ILQLModel
from verl_like.workers.models.packed_models import PackedModel, PolicyModel, RewardModel
from verl_like.workers.models.packing import SEQUENCE_COLUMNS, Rows
from verl_like.workers.planning.partition import MicroBatching

BY_SHARD = make_nd_compute_dataproto_dispatch_fn(mesh_name="model")
COLUMNS_READ = (*SEQUENCE_COLUMNS, "sample_id?", "mini_batch?", "margin?", "score?")


class SupervisedWorker(TrainedWorker):
    """One rank of a model that learns from examples; a subclass has its loss in `losses`.

    `batch_size` rows over all ranks are one optimizer step. `seed`, the run's, is for a new head.
    """

    model_key = "model"
    prefix: ClassVar[str]
    """Of the names of metrics."""
    rows_of_sample: ClassVar[int] = 1
    """Conversations of an example: two of a pair."""

    def __init__(
        self,
        model: SupervisedModelConfig,
        training: TrainingConfig,
        batch_size: int,
        total_training_steps: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.model_config = model
        self.fsdp_config = model.fsdp_config
        self.training = training
        self.batch_size = batch_size
        self.total_training_steps = total_training_steps
        self.new_head_seed = seed
        self.micro_batching = MicroBatching(
            training.micro_batch_size_per_gpu,
            training.max_token_len_per_gpu,
            training.use_dynamic_bsz,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model."""
        self.register_mesh("model", self.training.ulysses_sequence_parallel_size)
        self.schedule = UpdateSchedule(self.batch_size, self.micro_batching, epochs=1)
        self.start_engine(self.training.ulysses_sequence_parallel_size, self.training)

    @register(dispatch_mode=BY_SHARD, blocking=False, reads=COLUMNS_READ, jagged=True)
    def update_model(self, data: DataProto) -> DataProto:
        """One optimizer step on the batch; returns the metrics."""
        metrics = update(
            self.engine,
            self.rows_of(data),
            self.schedule,
            self.loss,
            prefix=self.prefix,
            part=(1, 1),
        )
        return DataProto.from_dict(tensors={}, meta_info={"metrics": metrics})

    @register(dispatch_mode=BY_SHARD, blocking=False, reads=COLUMNS_READ, jagged=True)
    def evaluate(self, data: DataProto) -> DataProto:
        """The metrics of the batch under the present model: `loss`, and those of an update without
        their prefix."""
        parts: list[MicroMetrics] = []

        def measure(micro: MicroBatch) -> tuple[()]:
            losses, values = self.losses(micro)
            parts.append(_means(values | {"loss": losses}, micro))
            return ()

        forward(self.engine, self.rows_of(data), self.micro_batching, measure, by_token=False)
        return DataProto.from_dict(
            tensors={}, meta_info={"metrics": merge_metrics(read_metrics(parts))}
        )

    def rows_of(self, data: DataProto) -> Rows:
        """The batch, with what the loss needs besides."""
        return Rows.of(data, self.rows_of_sample)

    def loss(self, micro: MicroBatch, mini_batch: MiniBatch) -> tuple[torch.Tensor, MicroMetrics]:
        """The share of some rows in the mean of `losses` over the learned tokens, or the rows, of
        the whole batch."""
        losses, values = self.losses(micro)
        by_token = micro["response_mask"].shape
        by_sample = (len(micro.samples.first_rows),)
        if losses.shape not in (by_token, by_sample):
            raise ValueError(
                f"{type(self).__name__}.losses returned the shape {tuple(losses.shape)}: give one "
                f"for each token, {tuple(by_token)}, to which micro.of_rows pads what "
                f"PackedBatch.of_tokens makes, or one for each sample, {by_sample}"
            )
        count = mini_batch.num_tokens if losses.ndim == 2 else mini_batch.num_sequences
        if losses.ndim == 1:  # a pair without a learned token fills up a pass
            losses = zero_masked(losses, _mask(losses, micro).bool().any(-1))
        metrics = {
            f"{self.prefix}/{name}": metric for name, metric in _means(values, micro).items()
        }
        metrics[f"{self.prefix}/num_tokens"] = DeviceMetric(
            (micro["response_mask"].sum(),), Metric.sum
        )
        return losses.sum() / count, metrics

    def losses(self, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of each learned token, (b, R) and 0 elsewhere, or of each row, (b,); and metrics
        of that shape."""
        raise NotImplementedError


class SFTWorker(SupervisedWorker):
    """One rank of a language model that is fine-tuned on conversations."""

    model_class = PolicyModel
    prefix = "sft"

    def losses(self, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """-log p(token | those before) of each learned token, (b, R)."""
        return -_log_probs(self.engine, micro), {}


class RMWorker(SupervisedWorker):
    """One rank of a reward model, which is trained on pairs of conversations as `PreferenceDataset`
    collates them."""

    model_class = RewardModel
    prefix = "rm"
    rows_of_sample = 2

    def losses(self, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """-log sigmoid(r_c - r_r - margin) of each pair, (b,); a reward is read at a conversation's
        last token."""
        chosen, rejected = self.engine.run(self.engine.pack(micro.on_host)).view(-1, 2).unbind(1)
        margin = micro["margin"].view(-1, 2)[:, 0]
        return pairwise_loss(chosen - rejected - margin), preference_metrics(chosen, rejected)


class DPOWorker(SupervisedWorker):
    """One rank of a policy that is trained on pairs, and of its reference: the model as it was at
    the start."""

    model_class = PolicyModel
    prefix = "dpo"
    rows_of_sample = 2
    training: DPOTrainingConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model, and unless it has an adapter the reference, in the data type in which
        layers compute."""
        if self.model_config.lora_rank:
            super().init_model()
            self.reference = self.engine
            return
        trained = self.fsdp_config
        self.fsdp_config = ForwardFsdpConfig(
            dtype=trained.dtype, param_offload=trained.param_offload
        )
        self.start_engine(self.training.ulysses_sequence_parallel_size)
        self.reference = self.engine
        self.fsdp_config = trained
        super().init_model()

    def rows_of(self, data: DataProto) -> Rows:
        """With `reference_log_probs` (B,) of each answer."""
        rows = super().rows_of(data)
        with self.reference.without_adapter():
            (log_probs_B,) = forward(
                self.reference,
                rows,
                self.micro_batching,
                lambda micro: (_answer_log_probs(self.reference, micro),),
                by_token=False,
            )
        return replace(rows, columns={**rows.columns, "reference_log_probs": log_probs_B})

    def losses(self, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss `training.loss_type` of each pair, (b,). The reward of an answer is beta log(pi
        / reference)."""
        log_ratios = _answer_log_probs(self.engine, micro) - micro["reference_log_probs"]
        chosen_B, rejected_B = log_ratios.view(-1, 2).unbind(1)
        beta = self.training.beta
        loss = DPO_LOSSES[self.training.loss_type]
        losses_B = loss(chosen_B - rejected_B, beta, self.training.label_smoothing)
        return losses_B, preference_metrics(beta * chosen_B, beta * rejected_B)


class ILQLWorker(SupervisedWorker):
    """One rank of a language model with Q and V heads, which learn from scored conversations."""

    model_class = ILQLModel
    prefix = "ilql"
    training: ILQLTrainingConfig

    def build_model(self, with_weights: bool) -> PackedModel:
        """With heads that `seed` decides where the model's folder has none."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.new_head_seed or 0)
            return super().build_model(with_weights)

    @register(dispatch_mode=BY_SHARD, blocking=False, reads=COLUMNS_READ, jagged=True)
    def update_model(self, data: DataProto) -> DataProto:
        """An optimizer step, after which the target heads move towards the others by
        `training.polyak` of the way."""
        result = super().update_model(data)
        parameters = dict(self.engine.named_parameters())
        with torch.no_grad():
            for name, target in parameters.items():
                if name.startswith("heads.target_"):
                    target.add_(
                        parameters[name.replace("target_", "")] - target, alpha=self.training.polyak
                    )
        return result

    def losses(self, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Of each learned token, (b, R), the sum of `ilql_losses` with the weights of the
        configuration."""
        settings = self.training
        packed = self.engine.pack(micro.on_host)
        columns = [micro.of_rows(packed.of_tokens(scored)) for scored in self.engine.run(packed)]
        terms = ilql_losses(
            *columns,
            scores=micro["score"],
            mask=micro["response_mask"],
            gamma=settings.gamma,
            expectile=settings.expectile,
            awac_beta=settings.awac_beta,
        )
        losses = (
            terms["td"]
            + terms["value"]
            + settings.cql_coef * terms["cql"]
            + settings.lm_coef * terms["lm"]
        )
        metrics = {f"{name}_loss": term for name, term in terms.items()}
        return losses, metrics | dict(zip(("target_q", "value"), columns[-2:], strict=True))


def _means(values: dict[str, torch.Tensor], micro: MicroBatch) -> MicroMetrics:
    return {
        name: DeviceMetric.of(name, value, _mask(value, micro)) for name, value in values.items()
    }


def _mask(values: torch.Tensor | float, micro: MicroBatch) -> torch.Tensor:
    """The learned tokens of each row, (b, R), or for a value of each pair those of both its
    conversations."""
    mask_bR = micro["response_mask"]
    if isinstance(values, torch.Tensor) and values.ndim == 1:
        return mask_bR.reshape(len(values), -1)
    return mask_bR


def _log_probs(engine: TrainingEngine, micro: MicroBatch) -> torch.Tensor:
    """(b, R) float32, 0 where nothing is learned."""
    packed = engine.pack(micro.on_host)
    return micro.of_rows(packed.of_tokens(engine.run(packed, 1.0)[0]))


def _answer_log_probs(engine: TrainingEngine, micro: MicroBatch) -> torch.Tensor:
    """Log-probability of each answer, (b,) float32."""
    return _log_probs(engine, micro).sum(-1)
