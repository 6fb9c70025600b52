"""The options of `distillation`."""

from typing import Annotated

from pydantic import Field

from verl_like.algorithms.policy_losses import PolicyLossOptions


class DistillationOptions(PolicyLossOptions):
    """The teacher, and what the policy learns from beside it."""

    teacher_path: str | None = None
    """Folder or hub name of the teacher; null where a custom role is the teacher."""
    use_task_rewards: bool = True
    """Learn from the advantages too; otherwise from the teacher alone."""
    distillation_loss_coef: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the teacher's part."""
    loss_max_clamp: Annotated[float, Field(gt=0)] | None = 10.0
    """Bound of the teacher's advantage of a token, in nats; null means none."""
