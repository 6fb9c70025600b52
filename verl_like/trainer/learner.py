"""The learner: experience in; metrics, new weights and their version out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_like.protocol import Future, Metric, merge_metrics
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer.experience_maker import Experience, Weights
from verl_like.trainer.roles import Role


@dataclass(frozen=True)
class Update:
    """The updates of one training step, which may still be running."""

    pending: Sequence[Future[Any]]
    balance: dict[str, Metric]
    """How evenly the ranks of the actor's update are loaded."""

    def get(self) -> dict[str, Metric]:
        """Waits for the updates; returns their metrics and `balance`."""
        return merge_metrics([self.balance, *(future.get().meta_info.get("metrics", {}) for future in self.pending)])


@dataclass(kw_only=True)
class Learner:
    """Trains the actor and the critic on experience from any maker, with which it shares no state.

    Each `learn` is one training step; `version` counts them and numbers the weights.
    """

    actor: WorkerGroup
    critic: WorkerGroup | None
    num_actor_mini_batch_rows: int
    """Rows of one optimizer step over all ranks."""
    num_critic_mini_batch_rows: int
    critic_warmup: int
    """First training steps that leave the actor as it is."""
    version: int = 0

    def learn(self, experience: Experience) -> Update:
        """Submits the updates on experience of one or more mini-batches; returns at once.

        Actor and critic train at the same time on separate pools, one after the other on a shared one. Experience that
        is given while an update runs is learned from afterwards, in order. Raises ValueError if the rows do not divide
        into mini-batches, or those by the ranks.
        """
        self.version += 1
        batch, work, pending = experience.batch, experience.work, []
        if self.critic:
            pending.append(work.submit(self.critic.update_critic, batch, self.num_critic_mini_batch_rows))
        if self.version > self.critic_warmup:
            pending.append(work.submit(self.actor.update_actor, batch, self.num_actor_mini_batch_rows))
        return Update(pending, work.metrics(self.actor.update_actor, self.num_actor_mini_batch_rows))

    def export_weights(self) -> Weights:
        """The actor's weights after all updates submitted so far; returns at once."""
        return Weights(self.actor.export_weights.remote(version=self.version), self.version)

    def save(self, folder: Path, *, with_checkpoint: bool) -> None:
        """Writes the models in Hugging Face format, and with a checkpoint the state that training needs to continue."""
        trained = {Role.Actor: self.actor} | ({Role.Critic: self.critic} if self.critic else {})
        for role, group in trained.items():
            group.save_hf(str(folder / role / "huggingface"))
            if with_checkpoint:
                group.save_checkpoint(str(folder / role / "checkpoint"))
