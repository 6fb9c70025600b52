"""The keys of `kl_cov`."""

from typing import Annotated

from pydantic import Field

from verl_like.algorithms.policy_losses import PolicyLossOptions
from verl_like.config_model import NonNegativeFloat


class KlCovKeys(PolicyLossOptions):
    """Which tokens are held back, and how strongly."""

    kl_cov_ratio: Annotated[float, Field(gt=0, le=1)] = 0.0002
    """Share of the batch's response tokens that take the penalty."""
    ppo_kl_coef: NonNegativeFloat = 0.1
    """Weight of the penalty."""
