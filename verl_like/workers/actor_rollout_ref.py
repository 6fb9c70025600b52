"""The policy in its three roles: `actor` is trained, `ref` is the frozen reference, `rollout` generates."""

from collections.abc import Generator
from functools import partial
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from verl_like.algorithms.kl import kl_penalty
from verl_like.algorithms.masked import zero_masked
from verl_like.algorithms.policy_losses import get_policy_loss_fn
from verl_like.algorithms.registry import call_by_name, read_options, required_inputs
from verl_like.protocol import DataProto, Metric
from verl_like.single_controller.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl_like.workers.config import ActorRolloutRefConfig, RefConfig, RolloutConfig
from verl_like.workers.engine.fsdp import TrainingEngine, init_process_group
from verl_like.workers.engine.mini_batches import (
    DeviceMetric,
    MicroBatching,
    MicroMetrics,
    MiniBatch,
    Rows,
    UpdateSchedule,
    forward,
    per_rank_rows,
    read_metrics,
    to_rows,
    update,
)
from verl_like.workers.engine.throughput import Stopwatch
from verl_like.workers.models.packed_models import PolicyModel
from verl_like.workers.models.packing import SEQUENCE_COLUMNS
from verl_like.workers.models.pretrained import load_pretrained
from verl_like.workers.rollout import FinishedSample, build_rollout_engine
from verl_like.workers.trained_worker import TrainedWorker
from verl_like.workers.weight_sync import WeightExport, collect_weights


class ActorRolloutRefWorker(TrainedWorker):
    """One rank of the policy. Subclasses change the model in `build_model` and the objective in `policy_loss`.

    Args:
        config: settings of the policy in all its roles.
        role: `actor`, `ref` or `rollout`; a worker plays one role and has no model for the methods of the others.
        seed: the run's seed, for sampling.
        total_training_steps: steps that train the actor, for a learning rate that depends on them.
    """

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        role: Literal["actor", "ref", "rollout"],
        seed: int,
        total_training_steps: int | None = None,
        shares_device: bool = False,
    ) -> None:
        super().__init__()
        if role not in ("actor", "ref", "rollout"):
            raise ValueError(f"ActorRolloutRefWorker plays the role actor, ref or rollout, not {role!r}.")
        self.config = config
        self.role = role
        self.seed = seed
        self.total_training_steps = total_training_steps
        self.shares_device = shares_device
        self.model_config = config.model
        self.policy_loss_fn = get_policy_loss_fn(config.actor.policy_loss.loss_mode)
        self.loss_inputs = required_inputs(self.policy_loss_fn)
        self.loss_options = read_options(self.policy_loss_fn, actor_rollout_ref=config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model, or starts the inference engine."""
        if self.role == "rollout":
            self.rollout = build_rollout_engine(
                self.config.rollout,
                self.config.model,
                rank=self.rank,
                world_size=self.world_size,
                seed=self.seed,
                device=self.device,
            )
            self._register_dispatch_collect_info("rollout", self.rollout.dp_rank, self.rollout.is_collect)
            return
        init_process_group(self.device, self.rank, self.world_size)
        actor = self.config.actor
        data_parallel_size = self.register_mesh(self.role, actor.ulysses_sequence_parallel_size)
        if self.role == "ref":
            self.engine = TrainingEngine(
                self.build_model,
                fsdp=self.config.ref.fsdp_config,
                device=self.device,
                torch_compile=self.config.model.use_torch_compile,
                sequence_parallel_size=actor.ulysses_sequence_parallel_size,
                shares_device=self.shares_device,
            )
            return
        self.schedule = UpdateSchedule(
            mini_batch_rows=per_rank_rows(
                actor.ppo_mini_batch_size,
                self.config.rollout.n,
                data_parallel_size,
                "actor_rollout_ref.actor.ppo_mini_batch_size",
            ),
            micro_batching=MicroBatching(
                actor.ppo_micro_batch_size_per_gpu, actor.ppo_max_token_len_per_gpu, actor.use_dynamic_bsz
            ),
            epochs=actor.ppo_epochs,
        )
        self.engine = TrainingEngine(
            self.build_model,
            fsdp=actor.fsdp_config,
            device=self.device,
            optim=actor.optim,
            grad_clip=actor.grad_clip,
            total_training_steps=self.total_training_steps,
            gradient_checkpointing=self.config.model.enable_gradient_checkpointing,
            activation_offload=self.config.model.enable_activation_offload,
            torch_compile=self.config.model.use_torch_compile,
            sequence_parallel_size=actor.ulysses_sequence_parallel_size,
            shares_device=self.shares_device,
        )

    def build_model(self, with_weights: bool) -> PolicyModel:
        """The policy before it is sharded; without weights it is made on the meta device."""
        fsdp = self.config.actor.fsdp_config if self.role == "actor" else self.config.ref.fsdp_config
        return PolicyModel(
            load_pretrained(
                AutoModelForCausalLM,
                self.config.model,
                fsdp,
                key="actor_rollout_ref.model",
                device=self.device,
                weights=with_weights,
            )
        )

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"),
        blocking=False,
        reads=SEQUENCE_COLUMNS,
        writes=["old_log_probs", "entropys"],
    )
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Log-probability and entropy of each response token under the present policy, (B, R) float32."""
        rows = to_rows(data, self.device)
        stopwatch = Stopwatch(self.engine, rows, "actor_infer", passes=1)
        log_probs_BR, entropys_BR = forward(
            self.engine,
            rows,
            log_prob_micro_batching(self.config.rollout),
            lambda micro: self._score(micro, with_entropy=True),
        )
        num_tokens = rows["response_mask"].sum().cpu()
        (metrics,) = read_metrics([{"actor/entropy": DeviceMetric.token_mean(entropys_BR.sum(), num_tokens)}])
        return DataProto.from_dict(
            tensors={"old_log_probs": log_probs_BR, "entropys": entropys_BR},
            meta_info={"metrics": metrics | stopwatch.metrics()},
        )

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"),
        blocking=False,
        reads=SEQUENCE_COLUMNS,
        writes=["ref_log_prob"],
    )
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Log-probability of each response token under the reference policy, (B, R) float32."""
        rows = to_rows(data, self.device)
        stopwatch = Stopwatch(self.engine, rows, "ref", passes=1)
        (log_probs_BR,) = forward(
            self.engine,
            rows,
            log_prob_micro_batching(self.config.ref),
            lambda micro: self._score(micro, with_entropy=False),
        )
        return DataProto.from_dict(tensors={"ref_log_prob": log_probs_BR}, meta_info={"metrics": stopwatch.metrics()})

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"),
        blocking=False,
        reads=[*SEQUENCE_COLUMNS, "old_log_probs?", "rollout_log_probs?", "advantages", "ref_log_prob?"],
    )
    def update_actor(self, data: DataProto) -> DataProto:
        """Trains the policy on the batch, in `ppo_epochs` passes of mini-batches; returns the metrics.

        A batch that is one optimizer step needs no `old_log_probs`: the policy is still the one that they belong to.

        Raises:
            ValueError: several optimizer steps without `old_log_probs`.
        """
        rows = to_rows(data, self.device)
        num_rows, schedule = len(rows["input_ids"]), self.schedule
        if "old_log_probs" not in rows and (schedule.epochs > 1 or num_rows > schedule.mini_batch_rows):
            raise ValueError(
                f"update_actor got no old_log_probs for {num_rows} rows, which are {schedule.epochs} epoch(s) in steps "
                f"of {schedule.mini_batch_rows}: from the second step on the policy is another one; call "
                "compute_log_prob before and add what it returns to the batch."
            )
        stopwatch = Stopwatch(self.engine, rows, "actor", passes=3 * self.schedule.epochs)
        metrics = update(self.engine, rows, self.schedule, self.policy_loss, prefix="actor")
        return DataProto.from_dict(tensors={}, meta_info={"metrics": metrics | stopwatch.metrics()})

    def policy_loss(self, micro: Rows, mini_batch: MiniBatch) -> tuple[torch.Tensor, MicroMetrics]:
        """The share of some rows in their mini-batch's loss: clipped surrogate - entropy bonus + KL loss.

        Args:
            micro: the columns that `update_actor` reads, b rows.
            mini_batch: counts of the whole mini-batch over all ranks, by which the loss divides.

        Returns:
            The loss, and metrics that merge exactly over micro-batches and ranks.
        """
        actor, mask_BR = self.config.actor, micro["response_mask"]
        aggregate = mini_batch.aggregate(actor.loss_agg_mode)
        old_log_prob_BR = micro.get("old_log_probs")
        with_entropy = actor.entropy_coeff != 0 or old_log_prob_BR is None or "entropy" in self.loss_inputs
        log_prob_BR, *entropy_BR = self._score(micro, with_entropy=with_entropy)
        if old_log_prob_BR is None:
            old_log_prob_BR = log_prob_BR.detach()
        inputs: dict[str, Any] = {**micro, "old_log_prob": old_log_prob_BR, "log_prob": log_prob_BR}
        inputs |= {"entropy": entropy_BR[0]} if with_entropy else {}
        inputs |= {"loss_agg_mode": actor.loss_agg_mode, "options": self.loss_options}
        inputs["config"] = actor.model_copy(update={"global_batch_info": mini_batch.global_batch_info})
        loss, values = call_by_name(self.policy_loss_fn, inputs)
        token_mean = partial(DeviceMetric.token_mean, num_tokens=mask_BR.sum())
        metrics = {name: DeviceMetric.of(name, value, mask_BR) for name, value in values.items()}
        metrics["actor/pg_loss"] = DeviceMetric.sum(loss, mini_batch.share)
        if "old_log_probs" not in micro:  # what `compute_log_prob` and the driver would have told
            metrics["actor/entropy"] = token_mean(entropy_BR[0].sum())
        if "old_log_probs" not in micro and "rollout_log_probs" in micro:
            difference_BR = zero_masked(micro["rollout_log_probs"].exp() - old_log_prob_BR.exp(), mask_BR).abs()
            metrics["training/rollout_probs_diff_mean"] = token_mean(difference_BR.sum())
            metrics["training/rollout_probs_diff_max"] = DeviceMetric.max(difference_BR.max())
        if actor.entropy_coeff != 0:
            entropy_loss = aggregate(entropy_BR[0], mask_BR)
            loss = loss - actor.entropy_coeff * entropy_loss
            metrics["actor/entropy_loss"] = DeviceMetric.sum(entropy_loss, mini_batch.share)
        if actor.use_kl_loss:
            kl_loss = aggregate(kl_penalty(log_prob_BR, micro["ref_log_prob"], actor.kl_loss_type), mask_BR)
            loss = loss + actor.kl_loss_coef * kl_loss
            metrics["actor/kl_loss"] = DeviceMetric.sum(kl_loss, mini_batch.share)
            metrics["actor/kl_coef"] = DeviceMetric((), lambda: Metric.mean(actor.kl_loss_coef))
        return loss, metrics

    def _score(self, micro: Rows, *, with_entropy: bool) -> tuple[torch.Tensor, ...]:
        """Log-probabilities of the response tokens and, if asked for, entropies: (b, R) each."""
        packed = self.engine.pack(micro)
        log_probs, entropies = self.engine.model(packed, self.config.rollout.temperature, with_entropy)
        return tuple(packed.unpack(scores) for scores in (log_probs, entropies) if scores is not None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def export_weights(self, version: int) -> WeightExport:
        """This rank's part of the weights for the rollout engines, in their dtype, as version `version`."""
        with self.engine.on_device():
            return collect_weights(
                self.engine.named_parameters(),
                dtype=getattr(torch, self.config.rollout.dtype),
                rank=self.rank,
                world_size=self.world_size,
                version=version,
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_weights(self, exported: list[WeightExport], version: int) -> dict[str, Any]:
        """Takes what all ranks of the actor exported into the inference engine; samples then carry `version`."""
        return self.rollout.load_weights(exported, version)

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"),
        blocking=False,
        reads=["input_ids", "attention_mask", "position_ids", "uid"],
        writes=["prompts", "responses", *SEQUENCE_COLUMNS, "rollout_log_probs", "policy_version"],
    )
    def generate_sequences(self, prompts: DataProto) -> Generator[list[FinishedSample], None, DataProto]:
        """n responses to each of the (B, P) prompts, the responses to one prompt next to each other: (B * n) rows.

        Yields lists of those that are finished while others are still generated.
        """
        return (yield from self.rollout.stream_sequences(prompts))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Frees the device for training where `rollout.free_cache_engine` says so; `load_weights` wakes the engine."""
        self.rollout.sleep()


def log_prob_micro_batching(part: RolloutConfig | RefConfig) -> MicroBatching:
    """The micro-batches in which log-probabilities are computed."""
    return MicroBatching(
        part.log_prob_micro_batch_size_per_gpu, part.log_prob_max_token_len_per_gpu, part.log_prob_use_dynamic_bsz
    )
