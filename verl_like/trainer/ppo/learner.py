"""The learner: experience in; metrics, new weights and their version out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_like.data.conversations import ConversationDataset
from verl_like.data.sampler import EpochSampler
from verl_like.protocol import DataProto, Metric
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

    Each `learn` is one training step, or the part of one that the batch's `part_of_step` says;
    `version` counts the steps and numbers the weights.
    """

    config: PPOConfig
    groups: Mapping[str, WorkerGroup]
    """Among them the actor's and, where there is one, the critic's."""
    ptx_dataset: ConversationDataset | None = None
    """The rows of `data.ptx_files`."""
    joint: tuple[int, int] = (0, 1)
    """Which of how many trainers of the actor this is."""
    version: int = 0

    def __post_init__(self) -> None:
        assert bool(self.ptx_dataset) == bool(self.config.data.ptx_files), (
            "a learner needs the rows of data.ptx_files"
        )
        self.actor, self.critic = self.groups[Role.Actor], self.groups.get(Role.Critic)
        self.trained = {
            str(role): self.groups[role]
            for role in (Role.Actor, Role.Critic)
            if role in self.groups
        }
        policy = self.config.actor_rollout_ref  # samples of one optimizer step over all ranks
        self.num_actor_samples = policy.actor.ppo_mini_batch_size * policy.rollout.n
        self.num_critic_samples = self.config.critic.ppo_mini_batch_size * policy.rollout.n

    def learn(self, experience: Experience) -> Update:
        """Submits the updates on experience of one or more mini-batches; returns at once.

        Actor and critic train at the same time on separate pools, one after the other on a shared
        one. Experience that is given while an update runs is learned from afterwards, in order.
        """
        batch = experience.batch
        work = experience.work
        pending = []
        part, num_parts = batch.meta_info.get("part_of_step", (1, 1))
        metrics = work.metrics(self.actor.update_actor, self.num_actor_samples) | self.staleness(
            batch
        )
        if self.critic:
            pending.append(work.submit(self.critic.update_critic, batch, self.num_critic_samples))
        if self.version >= self.config.trainer.critic_warmup:
            size = self.num_actor_samples
            ptx_rows = self.ptx_rows(batch, work)
            pending.append(work.submit(self.actor.update_actor, batch, size, *ptx_rows))
        self.version += part == num_parts
        return Update(pending, metrics)

    def ptx_rows(self, batch: DataProto, work: RowWork) -> list[Ordered]:
        """The rows of `data.ptx_files` for the optimizer steps on this batch, a function of seed
        and training step."""
        if not self.ptx_dataset:
            return []
        trainer = self.config.trainer
        (index, num_trainers) = self.joint
        size = self.config.data.ptx_batch_size
        part = batch.meta_info.get("part_of_step", (1, 1))
        num_steps = -(-work.num_samples // self.num_actor_samples)
        first = ((self.version - trainer.critic_warmup) * part[1] + part[0] - 1) * num_steps
        sampler = EpochSampler(len(self.ptx_dataset), size, trainer.seed)
        numbers = [step * num_trainers + index for step in range(first, first + num_steps)]
        rows = self.ptx_dataset.collate(
            [row for number in numbers for row in sampler.batch(number)[1]]
        )
        of_rows = Rows.of(rows)
        tokens_B = of_rows.lengths_B.numpy()
        num_ranks = data_parallel_size(self.actor.update_actor)
        assert num_ranks is not None
        of_ptx = RowWork(tokens_B, tokens_B, work.balance, of_rows.sample_starts.numpy())
        return [of_ptx.in_mini_batches(rows, num_ranks, size)]

    def staleness(self, batch: DataProto) -> dict[str, Metric]:
        """Training steps between the oldest token of each response and the weights that are trained
        on it."""
        if not len(batch):
            return {}
        if "policy_version" not in batch.non_tensor_batch:
            raise ValueError(
                "the responses have no column policy_version, so how old they are is not known; a "
                "custom rollout worker has to write it, see docs/columns.md"
            )
        spans_B = batch.non_tensor_batch["policy_version"]
        oldest = [min(version for version, _, _ in spans) for spans in spans_B]
        staleness_B = self.version - np.array(oldest)
        max_staleness = self.config.trainer.max_staleness
        assert staleness_B.min() >= 0 and staleness_B.max() <= max_staleness, (
            staleness_B,
            max_staleness,
        )
        return {
            "training/staleness/mean": Metric.mean(staleness_B.mean(), weight=len(batch)),
            "training/staleness/max": Metric.max(staleness_B.max()),
        } | {
            f"training/staleness/share_{steps}": Metric.mean(
                (staleness_B == steps).mean(), weight=len(batch)
            )
            for steps in range(max_staleness + 1)
            if max_staleness
        }

    def export_weights(self) -> Weights:
        """The actor's weights after all updates submitted so far; returns at once."""
        return Weights(self.actor.export_weights.remote(version=self.version), self.version)

    def restore(self, folder: Path, version: int) -> list[str]:
        """Reads what `save_training` wrote, on any number of ranks; the weights are then those of
        the version. Returns what the user should know."""
        notes: list[str] = []
        for role, group in self.trained.items():
            # Rank 0's, as all others'
            notes += group.load_checkpoint(str(folder / role / "checkpoint"))[0]
        self.version = version
        return notes
