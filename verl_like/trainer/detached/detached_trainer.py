"""A trainer of detached training: experience in from the makers, weights out to them."""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch

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
)
from verl_like.trainer.detached.weight_turns import WeightTurns
from verl_like.trainer.loop.balancing import RowWork
from verl_like.trainer.loop.experience import Experience, Update
from verl_like.trainer.loop.training_loop import TrainingLoop
from verl_like.trainer.ppo import engine_check
from verl_like.trainer.ppo.inputs import load_ptx_dataset
from verl_like.trainer.ppo.learner import Learner
from verl_like.trainer.ppo.metrics import batch_metrics
from verl_like.trainer.ppo.workers import (
    build_resource_pools,
    build_role_worker_mapping,
    start_groups,
)
from verl_like.trainer.run.run_recorder import placement_rows
from verl_like.trainer.state.checkpoint import Checkpoint, partial_of_step
from verl_like.workers.config.joint_trainer import JointTrainer
from verl_like.workers.models.pretrained import load_hf_config, load_tokenizer
from verl_like.workers.planning.flops import ModelCost


@remote(concurrency_groups={"buffer": 32, "status": 1, "weights": 1, "turns": 32})
class DetachedPPOTrainer(Side, TrainingLoop):
    """The driver of one trainer, a named Ray actor, which pushes weights if it is the first of its
    model.

    Its loop is that of every trainer. Its experience comes out of the buffer, and makers validate.

    `experience_maker_holder_name_list` are the makers that get them; `env_info` says which of the
    trainers of the model this is, and where they meet. The other arguments are those of `Side`.
    """

    recorder: SideRecorder
    val_dataset: None = None

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
        room = self.config.data.train_batch_size * (config.trainer.max_staleness + 1)
        makers = () if self.index else experience_maker_holder_name_list
        # As long as the first step waits for experience.
        self.comparisons = Comparisons(self.name, makers, 2 * config.trainer.call_timeout_s)
        # As long as it takes to send them, and before that for a maker to be started again.
        self.turns = WeightTurns(self.name, 3 * config.trainer.call_timeout_s)
        self.buffer = ExperienceBuffer(self.ledger, self.index, limit=room)
        self.numbers: list[int] = []
        """The groups of the present step."""
        self.batches: list[DataProto] = []
        """Their rows, by the parts in which they were taken."""
        self.state_of_ledger: Mapping[str, Any] | None = None
        """Of the present step, see `state`."""

    def fit(
        self,
        total_steps: int | None = None,
        update_steps: int = 1,
        train_epochs: int | None = None,
        resumed: Checkpoint | None = None,
    ) -> int:
        """Trains for `total_steps`, with a push of the weights after every `update_steps` and after
        the last.

        The steps are by default `trainer.total_training_steps`, and `train_epochs`, the passes over
        one batch, `ppo_epochs`. `resumed` goes on after its step. Returns the version of the
        weights.
        """
        self.ends_after = self.total_steps = total_steps or self.config.num_steps_of_run
        self.update_steps = update_steps
        if train_epochs is not None:
            epochs = {
                f"{part}.ppo_epochs": train_epochs for part in ("actor_rollout_ref.actor", "critic")
            }
            self.config = self.config.updated(epochs)
        with self.recorder.timer("starting"):
            self.start()
            if resumed:
                self.recorder.notes += self.learner.restore(resumed.folder, resumed.step)
        self.trained = self.learner.trained
        self.global_step = self.learner.version
        self.push()
        return super().fit()

    @property
    def last_step(self) -> int:
        """The step after which the run ends, for which the ledger may bring it forward."""
        return self.ends_after

    def run_step(self) -> None:
        super().run_step()
        self.turns.end_step()  # now that no call of the workers is under way

    def take(self) -> Iterator[Experience]:
        """The groups of the present step out of the buffer; mini-batch by mini-batch where that is
        the same."""
        num_parts = self.config.plan.num_parts_of_step
        num_groups = self.config.data.train_batch_size // num_parts
        self.numbers = []
        self.batches = []
        for part in range(1, num_parts + 1):
            with self.recorder.timer("waiting for experience"):  # nothing trains meanwhile
                numbers, batch = self.wait_for_groups(num_groups, version=self.global_step - 1)
            self.numbers += numbers
            self.batches.append(batch.select())
            batch.meta_info["part_of_step"] = (part, num_parts)
            if self.config.algorithm.rollout_correction.bypass_mode:
                columns = batch.tensor_batch
                columns["old_log_probs"] = columns["rollout_log_probs"]
            with self.recorder.timer("update"):
                work = RowWork.of(batch, self.model_cost, balance=self.config.trainer.balance_batch)
                yield Experience(batch, work, {})
                self.update.finish()

    def wait_for_groups(self, num_groups: int, version: int) -> tuple[list[int], DataProto]:
        """Waits for what the step after `version` trains next, and then until the weights may
        change."""
        # Longer than a call of a maker may take, so that a maker whose call hangs is given up
        # first.
        deadline_s = 2 * self.config.trainer.call_timeout_s
        taken = self.buffer.take(num_groups, version, deadline_s, self.turns.raise_failure)
        self.begin_step(version)
        return taken

    def learn(self, experience: Experience) -> Update:
        self.update = self.learner.learn(experience)
        return self.update

    def metrics_of(self, experience: Experience) -> dict[str, Metric]:
        """Those of the whole step when its last part is there, and what makers measured of the
        groups until then."""
        part, num_parts = experience.batch.meta_info["part_of_step"]
        if part < num_parts:
            return {}
        data = self.config.data
        batch = concat_samples(self.batches) if num_parts > 1 else self.batches[0]
        metrics = batch_metrics(batch, data.max_prompt_length, data.max_response_length)
        made = [self.buffer.metrics.popleft() for _ in range(len(self.buffer.metrics))]
        return merge_metrics([metrics, *made])

    def account(self, learned: Mapping[str, Metric]) -> dict[str, Metric]:
        """Tells the ledger that the groups are trained; returns its counts."""
        # Without it, as in the warm-up of the critic, the actor did not learn from these samples.
        size = learned.get("actor/eff_sample_size", Metric.mean(1.0)).value
        counts = self.ledger.trained(self.numbers, self.global_step - 1, size)
        self.ends_after = min(self.total_steps, self.ledger.last_step())
        # The last trainer that has done the step knows what became of its prompts.
        is_saved = self.is_saved_by_number or self.global_step == self.last_step
        self.state_of_ledger = self.ledger.state() if counts and is_saved else None
        return {f"detached/{name}": Metric.max(count) for name, count in counts.items()}

    def hand_on(self) -> None:
        """Pushes the weights, if it is their turn. Then makers may compare themselves with the
        actor again."""
        if self.global_step % self.update_steps == 0 or self.global_step == self.total_steps:
            with self.recorder.timer("export_weights"):
                self.push()
        self.comparisons.in_step = False

    def validate(self) -> dict[str, float]:
        raise AssertionError("the first maker validates, with the versions that it has")

    def new_folder(self) -> Path:
        """The folder of the run's checkpoint, into which other trainers may have written their
        parts."""
        return partial_of_step(self.recorder.run_dir, self.global_step)

    def state(self) -> dict[str, Any]:
        """The ledger's when the step was done, from the last trainer that has done it; None from
        the others."""
        return {"ledger": self.state_of_ledger}

    def begin_step(self, version: int) -> None:
        """Before a step changes the weights, waits for makers whose engines are to be compared with
        them."""
        if self.comparisons.in_step:
            return
        if self.comparisons.awaited and self.pushed and self.pushed.version < version:
            self.push()  # out of turn, for they cannot be compared with others
        self.recorder.notes += self.comparisons.begin_step()
        self.turns.begin_step()  # makers load the weights before they are compared

    @ray.method(concurrency_group="weights")
    def score_greedy(
        self, maker: str, version: int, drawn: list[DataProto]
    ) -> list[torch.Tensor] | None:
        """The actor's log-probabilities of what a maker's replicas drew with the weights of a
        version.

        None if the actor has other weights by now.
        """
        actor = self.groups[Role.Actor]
        return self.comparisons.score(
            maker,
            has_weights=lambda: version == self.learner.version,
            compute=lambda: engine_check.log_probs_of(actor, drawn),
        )

    @ray.method(concurrency_group="turns")
    def hold_weights(self, maker: str) -> PushedWeights:
        """The newest weights for a maker, by its name in the ledger; they stay as they are until
        `send_weights`.

        Waits until no step runs and no other maker loads. With `rollout.weight_transport=nccl`.
        """
        self.turns.begin_loading(maker)
        with self.turns.loading(maker, ends=False):
            if self.pushed is None or self.pushed.version < self.learner.version:
                self.export()
            assert self.pushed is not None
            address, *_ = self.groups[Role.Actor].address_for(maker)
            return replace(self.pushed, address=address)

    @ray.method(concurrency_group="turns")
    def send_weights(self, maker: str, num_receivers: int) -> None:
        """Sends the weights to the maker that holds them, whose `num_receivers` processes load them
        meanwhile."""
        with self.turns.loading(maker):
            self.groups[Role.Actor].send_weights.remote(num_receivers, maker).get()

    def start(self) -> None:
        """Starts the workers and loads the models."""
        config = self.config
        # Of TRAINED there are no other classes
        synchronous = build_role_worker_mapping(config, own_classes={})
        built_in = {role: synchronous[role] for role in config.plan.trainer_roles}
        mapping = dict(self.model_fn(config)) if self.model_fn else built_in
        pools = self.pools or build_resource_pools(config, list(mapping))
        joint = None
        world_size = int(self.env_info["world_size"])
        if world_size > 1:
            address = str(self.env_info["master_addr"]), int(self.env_info["master_port"])
            joint = JointTrainer(self.index, world_size, *address)
        self.groups, placement = start_groups(config, mapping, pools, self.recorder.record, joint)
        ptx = load_ptx_dataset(config, load_tokenizer(config.actor_rollout_ref.model))
        self.learner = Learner(config, self.groups, ptx, (self.index, world_size))
        hf_config = load_hf_config(config.actor_rollout_ref.model, key="actor_rollout_ref.model")
        self.model_cost = ModelCost.of(hf_config)
        self.recorder.show_placement(placement_rows(placement))
        for future in [group.init_model.remote() for group in self.groups.values()]:
            future.get()
        self.require_same_inputs(config)

    @ray.method(concurrency_group="buffer")
    def extend(
        self, maker: str, tickets: Sequence[Ticket], batch: DataProto, metrics: dict[str, Metric]
    ) -> None:
        """Takes the experience of some tickets, n rows each."""
        self.buffer.extend(maker, tickets, batch, metrics)

    def push(self) -> None:
        """The first trainer exports the weights, of which each has whole copies, and gives all
        makers references."""
        if self.index:
            return
        self.export()
        for name in self.maker_names:
            # When it was started again, it asks for what was pushed last
            with contextlib.suppress(WorkerDied):
                side_named(name).update_experience_maker.remote(self.pushed)

    def export(self) -> None:
        """Has the weights exported, for whoever asks for the newest ones."""
        version = self.learner.version
        with self.pushing:
            futures = {
                role: group.export_weights.remote(version=version)
                for role, group in self.groups.items()
            }
            exports = {
                role: ForwardedFuture(tuple(future.parts), future.collect)
                for role, future in futures.items()
            }
            # What is pushed has been exported; it stays with the workers
            for future in futures.values():
                future.finish()
            self.pushed = PushedWeights(version, exports)
        self.learner.actor.report_finished_calls()

    @ray.method(concurrency_group="weights")
    def newest_weights(self) -> PushedWeights | None:
        """What was pushed last, for a maker that was started again or came too late; waits for a
        push that runs."""
        with self.pushing:
            return self.pushed
