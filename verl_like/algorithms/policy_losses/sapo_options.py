"""The options of `sapo`."""

from typing import ClassVar

from verl_like.algorithms.policy_losses import PolicyLossOptions
from verl_like.config_model import PositiveFloat


class SapoOptions(PolicyLossOptions):
    """The temperatures of the gate."""

    section: ClassVar[str] = "actor_rollout_ref.actor"

    tau_pos: PositiveFloat = 1.0
    """Temperature of the gate where the advantage is positive; the larger, the narrower."""
    tau_neg: PositiveFloat = 1.05
    """Temperature where it is not."""
