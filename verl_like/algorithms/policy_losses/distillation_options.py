"""The options of `distillation`."""

from verl_like.algorithms.policy_losses import PolicyLossOptions
from verl_like.config_model import NonNegativeFloat, PositiveFloat


class DistillationOptions(PolicyLossOptions):
    """The teacher, and what the policy learns from beside it."""

    teacher_path: str | None = None
    """Folder or hub name of the teacher; null where a custom role is the teacher."""
    use_task_rewards: bool = True
    """Learn from the advantages too; otherwise from the teacher alone."""
    distillation_loss_coef: NonNegativeFloat = 1.0
    """Weight of the teacher's part."""
    loss_max_clamp: PositiveFloat | None = 10.0
    """Bound of the teacher's advantage of a token, in nats; null means none."""
