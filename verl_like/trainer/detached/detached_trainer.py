"""A trainer of detached training. It gets experience from makers and gives them weights."""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from torch import Tensor

from verl_like.protocol import DataProto, Metric, merge_metrics
from verl_like.protocol.samples import concat_samples
from verl_like.single_controller.failure import WorkerDied
from verl_like.single_controller.ray.resource_pool import ResourcePoolManager
from verl_like.single_controller.shard import ForwardedFuture
from verl_like.trainer.config.detached import DetachedConfig
from verl_like.trainer.config.roles import Role
from verl_like.trainer.detached.buffer import ExperienceBuffer
from verl_like.trainer.detached.comparisons import Comparisons
from verl_like.trainer.detached.ledger import Ticket
from verl_like.trainer.detached.side import (
    EnvInfo,
    ModelFn,
    PushedWeights,
    Side,
    SideRecorder,
    remote,
    side_named,
    take_all,
)
from verl_like.trainer.detached.weight_turns import WeightTurns
from verl_like.trainer.loop.experience import Experience, Update
from verl_like.trainer.loop.training_loop import TrainingLoop
from verl_like.trainer.ppo import engine_check
from verl_like.trainer.ppo.choice_of_replay import hf_config_of_policy
from verl_like.trainer.ppo.inputs import load_ptx_dataset
from verl_like.trainer.ppo.learner import Learner
from verl_like.trainer.ppo.metrics import batch_metrics
from verl_like.trainer.ppo.row_work import work_of_rows
from verl_like.trainer.ppo.workers import (
    build_resource_pools,
    build_role_worker_mapping,
    load_models,
    start_groups,
)
from verl_like.trainer.run.run_recorder import placement_rows
from verl_like.trainer.state.checkpoint import Checkpoint, partial_of_step
from verl_like.workers.config.joint_trainer import JointTrainer
from verl_like.workers.models.pretrained import load_tokenizer
from verl_like.workers.planning.flops import ModelCost


@remote(concurrency_groups={"buffer": 32, "status": 1, "weights": 1, "turns": 32})
class DetachedPPOTrainer(Side, TrainingLoop):
    """The driver of one trainer, as a named Ray actor.

    Its loop is that of every trainer, and takes experience out of the buffer. It does not validate,
    because the makers do that. If several trainers train one model, the first of them pushes the
    weights to the makers.

    Args:
        experience_maker_holder_name_list: the names of the makers, which get the weights.
        env_info: says which of the model's trainers this is, and where the trainers meet.

    The other arguments are those of `Side`.
    """

    recorder: SideRecorder
    val_dataset: None = None
    last_step = 0
    """The step after which the run ends. It can become an earlier one than planned, because the
    ledger ends the run after SIGTERM."""

    def __init__(
        self,
        config: DetachedConfig,
        experience_maker_holder_name_list: Sequence[str],
        model_fn: ModelFn | None = None,
        env_info: EnvInfo | None = None,
        pools: ResourcePoolManager | None = None,
        fingerprints: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(config, model_fn, env_info, pools, fingerprints)
        self.config = config.of_trainer(self.name)
        self.maker_names = experience_maker_holder_name_list
        self.pushing = threading.Lock()
        timeout_s = config.trainer.call_timeout_s
        makers = experience_maker_holder_name_list if self.index == 0 else ()
        # The first step waits just as long for experience.
        self.comparisons = Comparisons(self.name, makers, 2 * timeout_s)
        # In this time a maker can be started again and then load the weights.
        self.turns = WeightTurns(self.name, 3 * timeout_s)
        num_steps = config.trainer.max_staleness + 1
        limit = num_steps * self.config.data.train_batch_size
        self.buffer = ExperienceBuffer(self.ledger, self.index, limit)
        self.numbers: list[int] = []
        """The numbers of the groups of the present step."""
        self.batches: list[DataProto] = []
        """The rows of these groups, a batch for each part of the step."""
        self.state_of_ledger: Mapping[str, Any] | None = None
        """The ledger's state after the present step, see `state`."""

    def fit(
        self,
        total_steps: int | None = None,
        update_steps: int = 1,
        train_epochs: int | None = None,
        resumed: Checkpoint | None = None,
    ) -> int:
        """Trains and returns the version of the weights at the end.

        Args:
            total_steps: the number of steps, by default `trainer.total_training_steps`.
            update_steps: after so many steps each, and after the last step, the weights are pushed.
            train_epochs: the number of passes over each batch, by default `ppo_epochs` of the
                configuration.
            resumed: the checkpoint after whose step training continues.
        """
        self.total_steps = total_steps or self.config.num_steps_of_run
        self.last_step = self.total_steps
        self.update_steps = update_steps
        if train_epochs is not None:
            epochs = {
                "actor_rollout_ref.actor.ppo_epochs": train_epochs,
                "critic.ppo_epochs": train_epochs,
            }
            self.config = self.config.updated(epochs)
        with self.recorder.timer("starting"):
            self.start()
            if resumed:
                notes = self.learner.restore(resumed.folder, resumed.step)
                self.recorder.notes += notes
        self.trained = self.learner.trained
        self.global_step = self.learner.version
        self.push()
        return super().fit()

    def run_step(self) -> None:
        """Does one step. Then makers may load weights, because no call of the workers is running
        any more."""
        super().run_step()
        self.turns.end_step()

    def take(self) -> Iterator[Experience]:
        """Yields the groups of the present step from the buffer.

        They come mini-batch by mini-batch if training computes the same that way. Then the first
        mini-batch is trained before the last one has arrived.
        """
        config = self.config
        num_parts = config.plan.num_parts_of_step
        num_groups = config.data.train_batch_size // num_parts
        version = self.global_step - 1
        # This is longer than a call of a maker may take, so that a maker whose call hangs is given
        # up before the trainer is.
        deadline_s = 2 * config.trainer.call_timeout_s
        raise_failure = self.turns.raise_failure
        self.numbers = []
        self.batches = []
        for part in range(1, num_parts + 1):
            with self.recorder.timer("waiting for experience"):
                numbers, batch = self.buffer.take(num_groups, version, deadline_s, raise_failure)
                self.wait_for_makers(version)
            self.numbers += numbers
            self.batches.append(batch.select())
            batch.meta_info["part_of_step"] = (part, num_parts)
            columns = batch.tensor_batch
            if config.algorithm.rollout_correction.bypass_mode:
                columns["old_log_probs"] = columns["rollout_log_probs"]
            with self.recorder.timer("update"):
                work = work_of_rows(batch, self.model_cost, config)
                yield Experience(batch, work, {})
                self.update.finish()

    def learn(self, experience: Experience) -> Update:
        self.update = self.learner.learn(experience)
        return self.update

    def metrics_of(self, experience: Experience) -> dict[str, Metric]:
        """Computes the metrics of the whole step when its last part has come, and adds those that
        makers have sent until now."""
        part, num_parts = experience.batch.meta_info["part_of_step"]
        if part < num_parts:
            return {}
        data = self.config.data
        batch = self.batches[0]
        if num_parts > 1:
            batch = concat_samples(self.batches)
        metrics = batch_metrics(batch, data.max_prompt_length, data.max_response_length)
        metrics_of_makers = take_all(self.buffer.metrics)
        return merge_metrics([metrics, *metrics_of_makers])

    def account(self, learned: Mapping[str, Metric]) -> dict[str, Metric]:
        """Tells the ledger that the groups of this step are trained. Returns the ledger's counts of
        prompts, or nothing if other trainers still have to do the step."""
        # The metric is missing if the actor did not learn, as in the critic's warm-up.
        size = learned.get("actor/eff_sample_size", Metric.mean(1.0))
        counts = self.ledger.trained(self.numbers, self.global_step - 1, size.value)
        self.last_step = min(self.total_steps, self.ledger.last_step())
        # Only the last trainer that does the step gets counts, and saves the ledger's state.
        is_saved = self.is_saved_by_number or self.global_step == self.last_step
        self.state_of_ledger = None
        if counts and is_saved:
            self.state_of_ledger = self.ledger.state()
        return {f"detached/{name}": Metric.max(count) for name, count in counts.items()}

    def hand_on(self) -> None:
        """Pushes the weights if this is due, and lets makers compare their engines with the actor
        again."""
        is_last = self.global_step == self.total_steps
        is_due = self.global_step % self.update_steps == 0
        if is_due or is_last:
            with self.recorder.timer("export_weights"):
                self.push()
        self.comparisons.in_step = False

    def validate(self) -> dict[str, float]:
        raise AssertionError("the first maker validates, with the versions that it has")

    def new_folder(self) -> Path:
        """The folder of this step's checkpoint. It is not emptied, because other trainers may have
        written into it already."""
        return partial_of_step(self.recorder.run_dir, self.global_step)

    def state(self) -> dict[str, Any]:
        """The ledger's state after the step. Only the last trainer that does the step has it, and
        it is None for the others."""
        return {"ledger": self.state_of_ledger}

    def wait_for_makers(self, version: int) -> None:
        """Waits until the step after `version` may change the weights.

        First it waits for makers that have to compare their engines: this trainer's actor computes
        for them (`score_greedy`), and needs the weights that they have. Then it waits for makers
        that load weights or have asked for them (`hold_weights`). For the second and later parts of
        a step it does nothing.
        """
        if self.comparisons.in_step:
            return
        if self.comparisons.awaited and self.pushed and self.pushed.version < version:
            # No push is due, but makers need the actor's weights for the comparison.
            self.push()
        # In this order: a maker may have to load weights before it can compare, and after
        # `turns.begin_step` it could not.
        notes = self.comparisons.begin_step()
        self.recorder.notes += notes
        self.turns.begin_step()

    @ray.method(concurrency_group="weights")
    def score_greedy(self, maker: str, version: int, drawn: list[DataProto]) -> list[Tensor] | None:
        """The actor's log-probabilities of the tokens `drawn`, which a maker's replicas generated
        with the weights of `version`. Returns None if the actor is in a step, or has other weights
        by now."""
        actor = self.groups[Role.Actor]
        return self.comparisons.score(
            maker,
            has_weights=lambda: version == self.learner.version,
            compute=lambda: engine_check.log_probs_of(actor, drawn),
        )

    @ray.method(concurrency_group="turns")
    def hold_weights(self, maker: str) -> PushedWeights:
        """Returns the newest weights, which do not change until `send_weights` has sent them. This
        is used with `rollout.weight_transport=nccl`.

        It waits until no step runs and no other maker loads weights. `maker` is the name of the
        maker in the ledger.
        """
        self.turns.begin_loading(maker)
        with self.turns.loading(maker, ends=False):  # `send_weights` ends the turn
            version = self.learner.version
            if self.pushed is None or self.pushed.version < version:
                self.export()
            assert self.pushed is not None
            actor = self.groups[Role.Actor]
            addresses = actor.address_for(maker)
            return replace(self.pushed, address=addresses[0])

    @ray.method(concurrency_group="turns")
    def send_weights(self, maker: str, num_receivers: int) -> None:
        """Sends the weights to the maker that has asked for them by `hold_weights`. Its
        `num_receivers` rollout processes load them during this call."""
        with self.turns.loading(maker):
            sent = self.groups[Role.Actor].send_weights.remote(num_receivers, maker)
            sent.get()

    def start(self) -> None:
        """Starts the workers and loads the models.

        `fit` calls it and the constructor does not, so that the actor answers meanwhile. The inputs
        are compared last, because files may change while they are read.
        """
        config = self.config
        if self.model_fn:
            mapping = dict(self.model_fn(config))
        else:
            # A user cannot replace the workers of trained roles.
            built_in = build_role_worker_mapping(config, own_classes={})
            mapping = {role: built_in[role] for role in config.plan.trainer_roles}
        pools = self.pools or build_resource_pools(config, list(mapping))
        joint = None
        world_size = int(self.env_info["world_size"])
        if world_size > 1:
            host = str(self.env_info["master_addr"])
            port = int(self.env_info["master_port"])
            joint = JointTrainer(self.index, world_size, host, port)
        self.groups, placement = start_groups(config, mapping, pools, self.recorder.record, joint)
        model = config.actor_rollout_ref.model
        tokenizer = load_tokenizer(model)
        ptx = load_ptx_dataset(config, tokenizer)
        self.learner = Learner(config, self.groups, ptx, (self.index, world_size))
        self.model_cost = ModelCost.of(hf_config_of_policy(config))
        self.recorder.show_placement(placement_rows(placement))
        load_models(self.groups, config.trainer.device)
        self.require_same_inputs()

    @ray.method(concurrency_group="buffer")
    def extend(
        self, maker: str, tickets: Sequence[Ticket], batch: DataProto, metrics: dict[str, Metric]
    ) -> None:
        """Puts the experience of some tickets, with n samples for each, into the buffer. A maker
        calls this."""
        self.buffer.extend(maker, tickets, batch, metrics)

    def push(self) -> None:
        """Exports the weights and tells all makers where they are. Only the first trainer does so,
        because every trainer has all the weights."""
        if self.index:
            return
        self.export()
        for name in self.maker_names:
            # A maker that has died asks for the newest weights when it is started again.
            with contextlib.suppress(WorkerDied):
                side_named(name).update_experience_maker.remote(self.pushed)

    def export(self) -> None:
        """Has the workers export their weights, and waits until they have done so. The weights stay
        with the workers, and `pushed` refers to them."""
        version = self.learner.version
        with self.pushing:
            futures = {
                role: group.export_weights.remote(version=version)
                for role, group in self.groups.items()
            }
            for future in futures.values():
                future.finish()
            exports = {
                role: ForwardedFuture(tuple(future.parts), future.collect)
                for role, future in futures.items()
            }
            self.pushed = PushedWeights(version, exports)
        self.learner.actor.report_finished_calls()

    @ray.method(concurrency_group="weights")
    def newest_weights(self) -> PushedWeights | None:
        """The weights that were exported last, or None before the first export. A maker asks for
        them when it starts, or when the weights that it reads are overwritten. An export that is
        running is awaited."""
        with self.pushing:
            return self.pushed
