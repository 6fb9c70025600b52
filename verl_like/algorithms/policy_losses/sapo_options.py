"""The options of `sapo`."""

from typing import Annotated, ClassVar

from pydantic import Field

from verl_like.algorithms.policy_losses import PolicyLossOptions


class SapoOptions(PolicyLossOptions):
    """The temperatures of the gate."""

    section: ClassVar[str] = "actor_rollout_ref.actor"

    tau_pos: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the gate where the advantage is positive; the larger, the narrower."""
    tau_neg: Annotated[float, Field(gt=0)] = 1.05
    """Temperature where it is not."""
