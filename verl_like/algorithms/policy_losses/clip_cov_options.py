"""The keys of `clip_cov`."""

from typing import Annotated

from pydantic import Field

from verl_like.algorithms.policy_losses import PolicyLossOptions


class ClipCovKeys(PolicyLossOptions):
    """Which tokens are left out."""

    clip_cov_ratio: Annotated[float, Field(gt=0, le=1)] = 0.0002
    """Share of the batch's response tokens that are left out, at most."""
    clip_cov_lb: float = 1.0
    """Only tokens with a covariance above it are left out."""
    clip_cov_ub: float = 5.0
    """Only tokens with a covariance below it are left out."""
