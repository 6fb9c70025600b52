"""The learner: it takes experience, and returns metrics, new weights and their version."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_like.data.conversations import ConversationDataset
from verl_like.data.sampler import EpochSampler
from verl_like.protocol import DataProto, Metric
from verl_like.protocol.samples import SampleRows
from verl_like.single_controller import Ordered
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.config.roles import Role
from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.loop.balancing import RowWork, data_parallel_size
from verl_like.trainer.loop.experience import Experience, Update
from verl_like.trainer.ppo.experience_maker import Weights
from verl_like.workers.models.packing import Rows


@dataclass
class Learner:
    """Trains the actor and the critic on experience from any maker, with which it shares no state.

    A call of `learn` is one training step, or the part of one that `part_of_step` in the batch's
    meta_info names. `version` counts the training steps and is the version of the weights.
    """

    config: PPOConfig
    groups: Mapping[str, WorkerGroup]
    """The worker groups by role: the actor's and, if there is a critic, the critic's. Others may be
    among them."""
    ptx_dataset: ConversationDataset | None = None
    """The rows of `data.ptx_files`, or None without them."""
    joint: tuple[int, int] = (0, 1)
    """(index, number): which of how many trainers this is, if several train one actor."""
    version: int = 0

    def __post_init__(self) -> None:
        assert bool(self.ptx_dataset) == bool(self.config.data.ptx_files), (
            "a learner needs the rows of data.ptx_files"
        )
        self.actor = self.groups[Role.Actor]
        self.critic = self.groups.get(Role.Critic)
        self.trained = {str(Role.Actor): self.actor}
        if self.critic is not None:
            self.trained[str(Role.Critic)] = self.critic
        # The samples of one optimizer step, over all ranks:
        policy = self.config.actor_rollout_ref
        n = policy.rollout.n
        self.num_actor_samples = policy.actor.ppo_mini_batch_size * n
        self.num_critic_samples = self.config.critic.ppo_mini_batch_size * n

    def learn(self, experience: Experience) -> Update:
        """Submits the updates on experience of one or more mini-batches and returns at once.

        Actor and critic train at the same time on separate pools, and one after the other on a
        shared one. Calls queue: experience that is given while an update runs is learned from after
        it. During the critic's warm-up, the first `trainer.critic_warmup` steps, the actor does not
        train.
        """
        batch = experience.batch
        work = experience.work
        part, num_parts = batch.meta_info.get("part_of_step", (1, 1))
        balance = work.metrics(self.actor.update_actor, self.num_actor_samples)
        metrics = balance | self.staleness(batch)
        pending = []
        if self.critic:
            size = self.num_critic_samples
            pending.append(work.submit(self.critic.update_critic, batch, size))
        if self.version >= self.config.trainer.critic_warmup:
            size = self.num_actor_samples
            ptx_rows = self.ptx_rows(batch, work)
            pending.append(work.submit(self.actor.update_actor, batch, size, *ptx_rows))
        if part == num_parts:
            self.version += 1
        return Update(pending, metrics)

    def ptx_rows(self, batch: DataProto, work: RowWork) -> list[Ordered]:
        """Returns the rows of `data.ptx_files` for the update of the actor on this batch, as one
        further argument of it. Without such files the list is empty.

        Each optimizer step gets a batch of `data.ptx_batch_size` rows. Its number in the sampler
        counts all optimizer steps of all trainers so far, so that the rows depend only on the seed
        and the training step, and trainers of one actor get different rows.
        """
        if not self.ptx_dataset:
            return []
        trainer = self.config.trainer
        index, num_trainers = self.joint
        size = self.config.data.ptx_batch_size
        part, num_parts = batch.meta_info.get("part_of_step", (1, 1))
        num_optimizer_steps = math.ceil(work.num_samples / self.num_actor_samples)
        num_steps_before = self.version - trainer.critic_warmup
        num_parts_of_steps = num_steps_before * num_parts
        num_parts_before = num_parts_of_steps + part - 1
        first = num_parts_before * num_optimizer_steps
        sampler = EpochSampler(len(self.ptx_dataset), size, trainer.seed)
        numbers = []
        for optimizer_step in range(first, first + num_optimizer_steps):
            number_of_batch = optimizer_step * num_trainers + index
            _epoch, rows = sampler.batch(number_of_batch)
            numbers.extend(rows)
        ptx_batch = self.ptx_dataset.collate(numbers)
        ptx_rows = Rows.of(ptx_batch)
        tokens_B = ptx_rows.lengths_B.numpy()
        # The tokens of a row stand for its work.
        starts = ptx_rows.sample_starts.numpy()
        ptx_work = RowWork(tokens_B, tokens_B, work.balance, starts)
        num_ranks = data_parallel_size(self.actor.update_actor)
        assert num_ranks is not None
        rows_of_update = ptx_work.divided(ptx_batch, num_ranks, size)
        return [rows_of_update]

    def staleness(self, batch: DataProto) -> dict[str, Metric]:
        """Returns metrics of how old the responses are. That is the number of training steps
        between the weights that generated the oldest token of a response and the weights that are
        trained on it.

        Adds the share of each age, and that of responses whose tokens are of several weights, if
        `trainer.max_staleness` allows any age. Raises ValueError if the responses do not say which
        weights generated them.
        """
        if not len(batch):
            return {}
        if "policy_version" not in batch.non_tensor_batch:
            raise ValueError(
                "the responses have no column policy_version, so how old they are is not known; a "
                "custom rollout worker has to write it, see docs/columns.md"
            )
        versions_of: dict[int, set[int]] = {}
        """The versions of the tokens of each sample. One that stands for an episode without a token
        has none."""
        sample_of_row = SampleRows.of(batch).sample_of_row
        spans_of_row = batch.non_tensor_batch["policy_version"]
        for sample, spans in zip(sample_of_row.tolist(), spans_of_row, strict=True):
            for version, _start, _end in spans:
                versions_of.setdefault(sample, set()).add(version)
        num_samples = len(versions_of)
        if not num_samples:
            return {}
        versions_S = np.array([min(versions) for versions in versions_of.values()])
        staleness_S = self.version - versions_S
        mean = staleness_S.mean()
        largest = staleness_S.max()
        max_staleness = self.config.trainer.max_staleness
        assert staleness_S.min() >= 0 and largest <= max_staleness, (staleness_S, max_staleness)
        metrics = {
            "training/staleness/mean": Metric.mean(mean, weight=num_samples),
            "training/staleness/max": Metric.max(largest),
        }
        if not max_staleness:
            return metrics
        for steps in range(max_staleness + 1):
            is_so_old_S = staleness_S == steps
            share = is_so_old_S.mean()
            name = f"training/staleness/share_{steps}"
            metrics[name] = Metric.mean(share, weight=num_samples)
        num_mixed = sum(len(versions) > 1 for versions in versions_of.values())
        metrics["training/staleness/mixed"] = Metric.mean_of(num_mixed, num_samples)
        return metrics

    def export_weights(self) -> Weights:
        """Returns the actor's weights after all updates that were submitted so far. It does not
        wait for them."""
        exports = self.actor.export_weights.remote(version=self.version)
        return Weights(exports, self.version)

    def restore(self, folder: Path, version: int) -> list[str]:
        """Loads the training state that `save_training` wrote into `folder`, on the same number of
        ranks or another. `version` is that of the saved weights, and is not checked. Returns notes
        for the user."""
        notes: list[str] = []
        for role, group in self.trained.items():
            path = str(folder / role / "checkpoint")
            notes_of_ranks = group.load_checkpoint(path)
            notes += notes_of_ranks[0]  # every rank returns the same
        self.version = version
        return notes
