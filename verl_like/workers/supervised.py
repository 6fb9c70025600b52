"""The roles that learn from examples.

A language model learns from conversations, a reward model and DPO's policy from pairs of them, and
ILQL's model from scored conversations.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from verl_like.algorithms.ilql import ilql_losses
from verl_like.algorithms.masked import zero_masked
from verl_like.algorithms.preferences import DPO_LOSSES, pairwise_loss, preference_metrics
from verl_like.protocol import DataProto, Metric, merge_metrics
from verl_like.single_controller.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl_like.workers.config.engine import ForwardFsdpConfig
from verl_like.workers.config.supervised import (
    DPOTrainingConfig,
    ILQLTrainingConfig,
    SFTTrainingConfig,
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
from verl_like.workers.model_worker import TrainedWorker, metrics_alone, scores_of_tokens
from verl_like.workers.models.ilql import ILQLModel
from verl_like.workers.models.packed_models import PackedModel, PolicyModel, RewardModel
from verl_like.workers.models.packing import SEQUENCE_COLUMNS, Rows
from verl_like.workers.models.router_replay import own_aux_loss_coef
from verl_like.workers.planning.partition import MicroBatching

BY_SHARD = make_nd_compute_dataproto_dispatch_fn(mesh_name="model")
COLUMNS_READ = (*SEQUENCE_COLUMNS, "sample_id?", "mini_batch?", "margin?", "score?")

Losses = tuple[Tensor, dict[str, Tensor]]
"""The loss of each learned token, (b, R) with 0 elsewhere, or of each sample, (s,), and metrics of
the same shapes by name."""


class SupervisedWorker(TrainedWorker):
    """One rank of a model that learns from examples. A subclass defines its loss in `losses`, and
    may extend other methods: ILQL moves its target heads in `update_model`.

    An optimizer step has `batch_size` samples over all ranks. A sample is a conversation or a pair.
    `seed` is the run's, and initialises a new head.
    """

    model_key = "model"
    prefix: ClassVar[str]
    """The prefix of the names of metrics."""
    rows_of_sample: ClassVar[int] = 1
    """The number of conversations in an example, 2 for a pair."""
    router_aux_loss_coef = 0.0
    """The weight of the loss that balances the experts, see `RoutedLoss`."""

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

    def init_model(self) -> None:
        """Loads the model."""
        sequence_parallel_size = self.training.ulysses_sequence_parallel_size
        self.register_mesh("model", sequence_parallel_size)
        self.schedule = UpdateSchedule(self.batch_size, self.micro_batching, epochs=1)
        self.start_engine(sequence_parallel_size, self.training)

    @register(dispatch_mode=BY_SHARD, blocking=False, reads=COLUMNS_READ, jagged=True)
    def update_model(self, data: DataProto) -> DataProto:
        """Trains on the samples of one optimizer step, and returns the metrics. A batch of more
        than `batch_size` samples would take several steps."""
        rows = self.rows_of(data)
        routed = self.routed_loss(self.loss, rows, self.prefix, self.router_aux_loss_coef)
        metrics = update(
            self.engine, rows, self.schedule, routed or self.loss, prefix=self.prefix, part=(1, 1)
        )
        if routed:
            metrics |= routed.metrics()
        return metrics_alone(metrics)

    @register(dispatch_mode=BY_SHARD, blocking=False, reads=COLUMNS_READ, jagged=True)
    def evaluate(self, data: DataProto) -> DataProto:
        """Returns the metrics of the batch under the present model.

        They are `loss` and the metrics of an update, without their prefix.
        """
        parts: list[MicroMetrics] = []

        def measure(micro: MicroBatch) -> tuple[()]:
            losses, values = self.losses(micro)
            parts.append(_means(values | {"loss": losses}, micro))
            return ()

        rows = self.rows_of(data)
        forward(self.engine, rows, self.micro_batching, measure, by_token=False)
        metrics = merge_metrics(read_metrics(parts))
        return metrics_alone(metrics)

    def rows_of(self, data: DataProto) -> Rows:
        """Returns the rows of a batch. A subclass may add columns that its loss needs."""
        return Rows.of(data, self.rows_of_sample)

    def loss(self, micro: MicroBatch, mini_batch: MiniBatch) -> tuple[Tensor, MicroMetrics]:
        """Computes what a micro-batch adds to the mean of `losses` over its mini-batch.

        The mean is over the learned tokens, or over the samples if `losses` has one number for
        each. Returns it with the metrics.
        """
        losses, values = self.losses(micro)
        mask_bR = micro["response_mask"]
        by_token = tuple(mask_bR.shape)
        by_sample = (len(micro.samples.first_rows),)
        if losses.shape not in (by_token, by_sample):
            raise ValueError(
                f"{type(self).__name__}.losses returned the shape {tuple(losses.shape)}: give one "
                f"for each token, {by_token}, to which micro.of_rows pads what "
                f"PackedBatch.of_tokens makes, or one for each sample, {by_sample}"
            )
        if losses.ndim == 2:
            count = mini_batch.num_tokens
        else:
            count = mini_batch.num_sequences
            # A pair without a learned token is padding, and does not count.
            mask = _mask(losses, micro)
            has_tokens = mask.bool().any(-1)
            losses = zero_masked(losses, has_tokens)
        means = _means(values, micro)
        metrics = {f"{self.prefix}/{name}": metric for name, metric in means.items()}
        num_tokens = mask_bR.sum()
        metrics[f"{self.prefix}/num_tokens"] = DeviceMetric((num_tokens,), Metric.sum)
        return losses.sum() / count, metrics

    def losses(self, micro: MicroBatch) -> Losses:
        """Returns the loss of each learned token, (b, R) with 0 elsewhere, or of each sample, (s,).

        Metrics of the same shapes are returned beside it, by name.
        """
        raise NotImplementedError


class SFTWorker(SupervisedWorker):
    """One rank of a language model that is fine-tuned on conversations."""

    model_class = PolicyModel
    prefix = "sft"
    training: SFTTrainingConfig

    def build_model(self, with_weights: bool) -> PackedModel:
        """Makes the model before it is sharded, whose load of experts is recorded and balanced.

        The driver has refused a coefficient above 0 for a model that cannot be balanced.
        """
        model = super().build_model(with_weights)
        self.watch_routers(model)
        coefficient = self.training.router_aux_loss_coef
        if coefficient is None:
            coefficient = 0.0
            if self.watched and not self.model_config.lora_rank:
                coefficient = own_aux_loss_coef(model.hf.config)
        self.router_aux_loss_coef = coefficient
        return model

    def losses(self, micro: MicroBatch) -> Losses:
        """Returns -log p(token | tokens before it) of each learned token, (b, R)."""
        return -_log_probs(self.engine, micro), {}


class RMWorker(SupervisedWorker):
    """One rank of a reward model that is trained on pairs of conversations.

    `PreferenceDataset` collates the pairs: the rows of a pair are consecutive, the chosen first.
    """

    model_class = RewardModel
    prefix = "rm"
    rows_of_sample = 2

    def losses(self, micro: MicroBatch) -> Losses:
        """Returns -log sigmoid(r_c - r_r - margin) of each pair, (s,).

        The rewards r_c and r_r of the chosen and the rejected conversation are read at their last
        tokens.
        """
        packed = self.engine.pack(micro.on_host)
        rewards = self.engine.run(packed)
        chosen, rejected = _of_pairs(rewards)
        margin, _of_rejected = _of_pairs(micro["margin"])
        losses = pairwise_loss(chosen - rejected - margin)
        return losses, preference_metrics(chosen, rejected)


class DPOWorker(SupervisedWorker):
    """One rank of a policy that is trained on pairs, and of its reference.

    The reference is the model as it was at the start.
    """

    model_class = PolicyModel
    prefix = "dpo"
    rows_of_sample = 2
    training: DPOTrainingConfig

    def init_model(self) -> None:
        """Loads the model, and the reference in the dtype that the layers compute in.

        A model with an adapter is its own reference: without the adapter.
        """
        if self.model_config.lora_rank:
            super().init_model()
            self.reference = self.engine
            return
        # `start_engine` reads `fsdp_config`, and the reference has no optimizer.
        trained = self.fsdp_config
        self.fsdp_config = ForwardFsdpConfig(
            dtype=trained.dtype, param_offload=trained.param_offload
        )
        self.start_engine(self.training.ulysses_sequence_parallel_size)
        self.reference = self.engine
        self.fsdp_config = trained
        super().init_model()

    def rows_of(self, data: DataProto) -> Rows:
        """Returns the rows of a batch with the column `reference_log_probs`, (B,).

        It has the log-probability of each answer under the reference.
        """
        rows = super().rows_of(data)

        def score(micro: MicroBatch) -> tuple[Tensor]:
            return (_answer_log_probs(self.reference, micro),)

        with self.reference.without_adapter():
            (log_probs_B,) = forward(
                self.reference, rows, self.micro_batching, score, by_token=False
            )
        return replace(rows, columns={**rows.columns, "reference_log_probs": log_probs_B})

    def losses(self, micro: MicroBatch) -> Losses:
        """Returns the loss `training.loss_type` of each pair, (s,).

        The reward of an answer, a metric, is beta log(pi / reference).
        """
        log_ratios = _answer_log_probs(self.engine, micro) - micro["reference_log_probs"]
        chosen, rejected = _of_pairs(log_ratios)
        beta = self.training.beta
        loss = DPO_LOSSES[self.training.loss_type]
        losses = loss(chosen - rejected, beta, self.training.label_smoothing)
        return losses, preference_metrics(beta * chosen, beta * rejected)


class ILQLWorker(SupervisedWorker):
    """One rank of a language model with Q and V heads, which learn from scored conversations."""

    model_class = ILQLModel
    prefix = "ilql"
    training: ILQLTrainingConfig

    def build_model(self, with_weights: bool) -> PackedModel:
        """Makes the model. Heads that its folder lacks are initialised from `seed`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.new_head_seed or 0)
            return super().build_model(with_weights)

    def update_model(self, data: DataProto) -> DataProto:
        """Does an optimizer step, then moves the target heads towards the trained heads.

        They move by the fraction `training.polyak` of the difference.
        """
        result = super().update_model(data)
        parameters = dict(self.engine.named_parameters())
        with torch.no_grad():
            for name, target in parameters.items():
                if name.startswith("heads.target_"):
                    trained = parameters[name.replace("target_", "")]
                    target.add_(trained - target, alpha=self.training.polyak)
        return result

    def losses(self, micro: MicroBatch) -> Losses:
        """Returns the sum of `ilql_losses` of each learned token, (b, R).

        The configuration has the weights of the terms. The terms are metrics.
        """
        settings = self.training
        scores = scores_of_tokens(self.engine, micro)
        columns = [micro.of_rows(scored) for scored in scores]
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
        metrics["target_q"] = columns[-2]
        metrics["value"] = columns[-1]
        return losses, metrics


def _means(values: dict[str, Tensor], micro: MicroBatch) -> MicroMetrics:
    """Returns the means of values of tokens or of samples as metrics."""
    return {
        name: DeviceMetric.of(name, value, _mask(value, micro)) for name, value in values.items()
    }


def _mask(values: Tensor | float, micro: MicroBatch) -> Tensor:
    """Returns the mask of the learned tokens, with a row for each thing that has a value.

    For values of tokens, and for one number, a row is a conversation: (b, R). For values of
    samples, (s,), it is a sample, whose conversations stand side by side: (s, b / s * R).
    """
    mask_bR = micro["response_mask"]
    if isinstance(values, Tensor) and values.ndim == 1:
        return mask_bR.reshape(len(values), -1)
    return mask_bR


def _of_pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the values, (s,) each, of the chosen and of the rejected rows of s pairs."""
    pairs = values.view(-1, 2)
    chosen, rejected = pairs.unbind(1)
    return chosen, rejected


def _log_probs(engine: TrainingEngine, micro: MicroBatch) -> Tensor:
    """Returns log-probabilities of the learned tokens at temperature 1, (b, R) float32, 0
    elsewhere."""
    (log_probs,) = scores_of_tokens(engine, micro, 1.0)
    return micro.of_rows(log_probs)


def _answer_log_probs(engine: TrainingEngine, micro: MicroBatch) -> Tensor:
    """Returns the log-probability of each row's answer, (b,) float32."""
    return _log_probs(engine, micro).sum(-1)
