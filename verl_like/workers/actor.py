"""The trained policy: it computes log-probabilities, updates itself, and exports its weights."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from verl_like.algorithms.kl import kl_penalty
from verl_like.algorithms.masked import zero_masked
from verl_like.algorithms.policy_losses import (
    ConfigBesideCounts,
    PolicyLossInputs,
    declared_columns,
    get_policy_loss_fn,
)
from verl_like.algorithms.registry import call_by_name, read_options, required_inputs
from verl_like.protocol import DataProto, Metric
from verl_like.protocol.row_ops import jagged_from_offsets, jagged_parts
from verl_like.single_controller.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl_like.workers.actor_rollout_ref import ActorRolloutRefWorker
from verl_like.workers.config.roles import ActorRolloutRefConfig
from verl_like.workers.engine.mini_batches import (
    DeviceMetric,
    MicroBatch,
    MicroMetrics,
    MicroPass,
    MiniBatch,
    forward,
    update,
)
from verl_like.workers.model_worker import TrainedWorker, metrics_alone, scores_of_tokens
from verl_like.workers.models.packed_models import PackedModel
from verl_like.workers.models.packing import SEQUENCE_COLUMNS, Rows
from verl_like.workers.models.routed_experts import (
    ROUTED_EXPERTS,
    UNREPLAYED,
    RouterShape,
    RoutingRecord,
    routing_difference,
)
from verl_like.workers.models.router_replay import freeze_routers
from verl_like.workers.planning.partition import log_prob_micro_batching
from verl_like.workers.weights import WEIGHT_TRANSPORTS
from verl_like.workers.weights.direct import DirectTransport
from verl_like.workers.weights.exports import in_order

_ROWS_APART = 16
"""Every so many rows one is computed without router replay, to see what it does."""
BY_SHARD = make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")


class ScoringWorker(ActorRolloutRefWorker):
    """One rank of the policy that computes old log-probabilities: an `ActorWorker` or a copy of it.

    `with_sum_pi_squared` says whether `compute_log_prob` writes the column `sum_pi_squared`.
    """

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        shares_device: bool = False,
        with_sum_pi_squared: bool = False,
    ) -> None:
        super().__init__(config, shares_device)
        self.with_sum_pi_squared = with_sum_pi_squared
        self.fsdp_config = config.actor.fsdp_config
        self.replay_mode = config.actor.router_replay.chosen
        self.weight_transport = WEIGHT_TRANSPORTS[config.rollout.weight_transport]()

    @register(
        dispatch_mode=BY_SHARD,
        blocking=False,
        reads=[*SEQUENCE_COLUMNS, "routed_experts?"],
        writes=[
            "old_log_probs",
            "entropys",
            "sum_pi_squared?",
            "routed_experts?",
            "unreplayed_log_probs?",
        ],
        jagged=True,
    )
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Returns the log-probability and entropy of each response token under the present policy.

        The columns are jagged float32. With `with_sum_pi_squared` there is a third one. With the
        mode R2 of `router_replay` there is `routed_experts`, which the update replays. With R3 that
        column is read, and replayed here, too, and for some rows `unreplayed_log_probs` has what
        the model computes without it.
        """
        columns = ["old_log_probs", "entropys"]
        if self.with_sum_pi_squared:
            columns.append("sum_pi_squared")
        compute: MicroPass = partial(
            self.score_tokens, with_entropy=True, with_sum_pi_squared=self.with_sum_pi_squared
        )
        rows = Rows.of(data)
        if self.replay_mode == "R3":
            self.require_routing(rows)
        if self.replay_mode != "disabled":
            columns.append(ROUTED_EXPERTS)
            compute = partial(self.with_routing, compute)
        passes = log_prob_micro_batching(self.config.rollout)
        output = self.infer(data, columns, passes, compute, phase="actor_infer")
        entropies, _offsets = jagged_parts(output.tensor_batch["entropys"])
        total = entropies.sum(dtype=torch.float64).item()
        num_tokens = rows.num_scored_B.sum().item()
        metrics = output.meta_info["metrics"]
        metrics["actor/entropy"] = Metric.mean_of(total, num_tokens)
        if self.replay_mode == "R3":
            own = output.pop(batch_keys=[ROUTED_EXPERTS]).tensor_batch[ROUTED_EXPERTS]
            metrics |= routing_difference(own, rows[ROUTED_EXPERTS])
            output.tensor_batch[UNREPLAYED] = self.unreplayed_log_probs(rows)
        return output

    def unreplayed_log_probs(self, rows: Rows) -> Tensor:
        """Returns log-probabilities of the response tokens without router replay, a column.

        Only rows that are `_ROWS_APART` apart are computed. Those of the others are NaN.
        """
        columns = {name: rows[name] for name in SEQUENCE_COLUMNS}
        own_routing = replace(rows, columns=columns)
        at = torch.arange(0, len(rows), _ROWS_APART)
        passes = log_prob_micro_batching(self.config.rollout)
        compute = partial(self.score_tokens, with_entropy=False)
        (computed,) = forward(self.engine, own_routing.take_some(at), passes, compute)
        _values, offsets = jagged_parts(rows["responses"])
        log_probs = torch.full((int(offsets[-1]),), torch.nan)
        for number, row in enumerate(at.tolist()):
            log_probs[offsets[row] : offsets[row + 1]] = computed[number]
        return jagged_from_offsets(log_probs, offsets)

    def with_routing(self, compute: MicroPass, micro: MicroBatch) -> tuple[Tensor, ...]:
        """Returns what `compute` does, and the experts that the routers selected for each token,
        (N, L, k)."""
        record = RoutingRecord()
        micro.on_host = replace(micro.on_host, record=record)
        values = compute(micro)
        assert record.selected is not None, "the pass has filled it"
        return (*values, record.selected)

    @register(
        dispatch_mode=BY_SHARD,
        blocking=False,
        reads=[*SEQUENCE_COLUMNS, "routed_experts?"],
        writes=["old_log_probs", "routed_experts?"],
        jagged=True,
    )
    def score_greedy(self, data: DataProto, with_experts: bool = False) -> DataProto:
        """Returns the log-probability of each response token at temperature 1, jagged float32.

        Routing is replayed if the batch has it. `with_experts` adds a column of the experts that
        the routers select themselves for each token.

        The check of the rollout engine compares them with those of `RolloutWorker.draw_greedily`.
        """

        def log_probs(micro: MicroBatch) -> tuple[Tensor, ...]:
            return scores_of_tokens(self.engine, micro, 1.0)

        rows = Rows.of(data)
        passes = log_prob_micro_batching(self.config.rollout)
        columns = ["old_log_probs"]
        compute: MicroPass = log_probs
        if with_experts:
            columns.append(ROUTED_EXPERTS)
            compute = partial(self.with_routing, log_probs)
        values = forward(self.engine, rows, passes, compute)
        tensors = dict(zip(columns, values, strict=True))
        return DataProto.from_dict(tensors=tensors)

    @register(
        dispatch_mode=BY_SHARD,
        blocking=False,
        reads=[*SEQUENCE_COLUMNS, "routed_experts?"],
        writes=["ref_log_prob"],
        jagged=True,
    )
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Does what `ReferenceWorker.compute_ref_log_prob` does, for a model with an adapter.

        Without its adapter the model is the reference policy.
        """
        if self.config.ref.router_replay.mode == "R3":
            self.require_routing(Rows.of(data))
        else:
            names = [name for name in data.tensors() if name != ROUTED_EXPERTS]
            data = data.select(batch_keys=names)
        with self.engine.without_adapter():
            return self.infer_log_probs(data, "ref_log_prob", phase="ref")


class ActorWorker(ScoringWorker, TrainedWorker):
    """One rank of the trained policy.

    Subclasses change the model in `build_model` and the objective in `policy_loss`.
    `total_training_steps` is the number of training steps that train the actor.
    """

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        total_training_steps: int | None = None,
        shares_device: bool = False,
        with_sum_pi_squared: bool = False,
    ) -> None:
        super().__init__(config, shares_device, with_sum_pi_squared)
        self.total_training_steps = total_training_steps
        self.export_dtype = config.rollout.dtype
        self.policy_loss_fn = get_policy_loss_fn(config.actor.policy_loss.loss_mode)
        self.loss_inputs = required_inputs(self.policy_loss_fn)
        self.loss_columns = declared_columns(self.policy_loss_fn)
        self.loss_options = read_options(self.policy_loss_fn, actor_rollout_ref=config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def router_shape(self) -> RouterShape | None:
        """Returns the shape of the model's routers if a pass can record what they select."""
        return self.watched

    def build_model(self, with_weights: bool) -> PackedModel:
        """Makes the model before it is sharded, whose load of experts an update can record."""
        model = super().build_model(with_weights)
        self.watch_routers(model)
        if self.config.actor.freeze_router:
            freeze_routers(model.hf)
        return model

    def init_model(self) -> None:
        """Loads the model."""
        n = self.config.rollout.n
        self.start_training_engine("actor", self.config.actor, samples_per_prompt=n)

    @register(
        dispatch_mode=BY_SHARD,
        blocking=False,
        reads=[
            *SEQUENCE_COLUMNS,
            "sample_id?",
            "old_log_probs?",
            "rollout_log_probs?",
            "advantages",
            "ref_log_prob?",
            # Some policy losses read the next three.
            "teacher_log_prob?",
            "rollout_is_weights?",
            "selected_tokens?",
            "routed_experts?",
            "mini_batch?",
        ],
        jagged=True,
    )
    def update_actor(self, data: DataProto, ptx: DataProto | None = None) -> DataProto:
        """Trains the policy on the batch, in `ppo_epochs` passes over its mini-batches.

        Returns the metrics. If `ptx` is given, each mini-batch adds `ptx_loss` of an equal part of
        its rows, or of the rows with its number in the column `mini_batch`.

        If the batch is one optimizer step, it needs no `old_log_probs`, because the present policy
        still has the same log-probabilities. Raises ValueError for several steps without them, and
        for rows without the routing that `router_replay` demands.
        """
        rows = self.rows_of(data)
        self.require_routing(rows)

        def check_steps(num_steps: int) -> None:
            if "old_log_probs" not in rows and num_steps > 1:
                raise ValueError(
                    f"update_actor got no old_log_probs for {num_steps} optimizer steps "
                    f"({self.schedule.epochs} epoch(s) in mini-batches of "
                    f"{self.schedule.num_mini_batch_samples} responses): from the second step on "
                    "the policy is another one; call compute_log_prob before and add what it "
                    "returns to the batch."
                )

        beside = None
        if ptx is not None:
            beside = (Rows.of(ptx), self.ptx_loss)
        coefficient = self.config.actor.router_aux_loss_coef
        routed = self.routed_loss(self.policy_loss, rows, "actor", coefficient)
        metrics = update(
            self.engine,
            rows,
            self.schedule,
            routed or self.policy_loss,
            prefix="actor",
            part=data.meta_info.get("part_of_step", (1, 1)),
            beside=beside,
            check_steps=check_steps,
        )
        if routed:
            metrics |= routed.metrics()
        return metrics_alone(metrics)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self, num_receivers: int, receivers: str = "") -> None:
        """Sends the weights of the last export to the processes that load them.

        This needs `rollout.sends_directly`. If several rollout groups load the weights, one after
        the other, `receivers` is the name of the group.
        """
        transport = self.weight_transport
        assert isinstance(transport, DirectTransport)
        engine = self.engine
        dtype = getattr(torch, self.export_dtype)
        with transport.joined(self.rank, num_receivers, receivers), engine.on_device():
            # A variable that refers to the weights would keep them on the device.
            transport.send(
                in_order(
                    engine.named_parameters(), dtype, engine.named_buffers(), engine.file_layout
                ),
                self.rank,
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def address_for(self, receivers: str) -> tuple[str, int] | None:
        """Returns where rank 0 waits for a rollout group to join, and None on other ranks.

        This needs `rollout.sends_directly`; `receivers` is the name of the group.
        """
        assert isinstance(self.weight_transport, DirectTransport)
        return self.weight_transport.address(self.rank, receivers)

    def policy_loss(self, micro: MicroBatch, mini_batch: MiniBatch) -> tuple[Tensor, MicroMetrics]:
        """Computes what a micro-batch adds to the loss of its mini-batch.

        The loss is the configured policy loss - entropy bonus + KL loss. Returns it, and metrics
        that merge exactly over micro-batches and ranks.

        Args:
            micro: the columns that `update_actor` reads, b rows.
            mini_batch: the counts of the whole mini-batch over all ranks, by which the loss is
                divided.
        """
        actor = self.config.actor
        columns = micro.by_sample()
        mask_BR = columns["response_mask"]
        aggregate = mini_batch.aggregate(actor.loss_agg_mode)
        old_log_prob_BR = columns.get("old_log_probs")
        with_entropy = (
            actor.entropy_coeff != 0 or old_log_prob_BR is None or "entropy" in self.loss_inputs
        )
        scores = self.score_tokens(micro, with_entropy=with_entropy)
        log_prob_BR = micro.of_samples(scores[0])
        entropy_BR = micro.of_samples(scores[1]) if with_entropy else None
        if old_log_prob_BR is None:
            old_log_prob_BR = log_prob_BR.detach()
        # A column is padded when it is read, so no other is.
        loss_columns = {name: columns[name] for name in self.loss_columns if name in columns}
        inputs = PolicyLossInputs(
            old_log_prob=old_log_prob_BR,
            log_prob=log_prob_BR,
            response_mask=mask_BR,
            loss_agg_mode=actor.loss_agg_mode,
            counts=mini_batch.counts,
            entropy=entropy_BR,
            config=ConfigBesideCounts(actor, mini_batch.global_batch_info),
            options=self.loss_options,
            **loss_columns,
        )
        loss, values = call_by_name(self.policy_loss_fn, vars(inputs))
        metrics = {name: DeviceMetric.of(name, value, mask_BR) for name, value in values.items()}
        metrics["actor/pg_loss"] = DeviceMetric.loss(loss, mini_batch)
        num_tokens = mask_BR.sum()
        rollout_log_prob_BR = columns.get("rollout_log_probs")
        if rollout_log_prob_BR is not None:
            log_ratio_BR = zero_masked(log_prob_BR.detach() - rollout_log_prob_BR, mask_BR)
            metrics |= _ratio_metrics(log_ratio_BR, mask_BR, num_tokens)
        # With `old_log_probs`, `compute_log_prob` has reported the entropy, and the driver reports
        # the differences to the rollout.
        if "old_log_probs" not in columns:
            assert entropy_BR is not None
            metrics["actor/entropy"] = DeviceMetric.token_mean(entropy_BR.sum(), num_tokens)
            if rollout_log_prob_BR is not None:
                probs_diff_BR = rollout_log_prob_BR.exp() - old_log_prob_BR.exp()
                difference_BR = zero_masked(probs_diff_BR, mask_BR).abs()
                mean = DeviceMetric.token_mean(difference_BR.sum(), num_tokens)
                metrics["training/rollout_probs_diff_mean"] = mean
                metrics["training/rollout_probs_diff_max"] = DeviceMetric.max(difference_BR.max())
        if actor.entropy_coeff != 0:
            assert entropy_BR is not None
            entropy_loss = aggregate(entropy_BR, mask_BR)
            loss = loss - actor.entropy_coeff * entropy_loss
            metrics["actor/entropy_loss"] = DeviceMetric.loss(entropy_loss, mini_batch)
        if actor.use_kl_loss:
            kl_BR = kl_penalty(log_prob_BR, columns["ref_log_prob"], actor.kl_loss_type)
            kl_loss = aggregate(kl_BR, mask_BR)
            loss = loss + actor.kl_loss_coef * kl_loss
            metrics["actor/kl_loss"] = DeviceMetric.loss(kl_loss, mini_batch)
            coefficient = Metric.mean(actor.kl_loss_coef)
            metrics["actor/kl_coef"] = DeviceMetric((), lambda: coefficient)
        return loss, metrics

    def ptx_loss(self, micro: MicroBatch, mini_batch: MiniBatch) -> tuple[Tensor, MicroMetrics]:
        """Computes what a micro-batch of the rows `ptx` adds to their loss (PPO-ptx, Ouyang et al.
        2022, arXiv:2203.02155, eq. 2).

        The loss is -ptx_coef / N sum log p(token | tokens before it), over the N learned tokens of
        such rows in the mini-batch.
        """
        # At temperature 1, whatever the rollout has.
        (log_probs,) = scores_of_tokens(self.engine, micro, 1.0)
        log_prob_BR = micro.of_rows(log_probs)
        loss = -log_prob_BR.sum() / max(mini_batch.num_tokens, 1)
        metrics = {"actor/ptx_loss": DeviceMetric.loss(loss, mini_batch)}
        return self.config.actor.ptx_coef * loss, metrics


def _ratio_metrics(log_ratio_BR: Tensor, mask_BR: Tensor, num_tokens: Tensor) -> MicroMetrics:
    """Returns metrics of the ratio of the policy's probabilities to the rollout's.

    `log_ratio_BR` is its logarithm, and 0 where the mask is 0. `num_tokens` is the mask's sum.
    """
    ratio_BR = log_ratio_BR.clamp(-20.0, 20.0).exp()
    ratio_BR = zero_masked(ratio_BR, mask_BR)
    square_sum = ratio_BR.square().sum()
    return {
        "actor/rollout_kl": DeviceMetric.token_mean(-log_ratio_BR.sum(), num_tokens),
        # The driver computes the effective sample size from the next two metrics, because they
        # merge exactly and it does not.
        "actor/rollout_ratio": DeviceMetric.token_mean(ratio_BR.sum(), num_tokens),
        "actor/rollout_ratio_square": DeviceMetric.token_mean(square_sum, num_tokens),
    }
