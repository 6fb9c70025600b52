"""Corrections for the difference between the policy that sampled the responses and the policy that
is trained.

The rollout engine computes with other kernels and another precision than the trainer, and may have
older weights. With `r = exp(old_log_probs - rollout_log_probs)` by token, a correction makes
importance weights (`rollout_is_weights`, factors of the token losses) or removes tokens from
`response_mask`. The driver composes the files here; any loss takes the result. Loads no torch.
"""

import re
from typing import Literal

from pydantic import model_validator

from verl_like.config_model import ConfigModel

STATISTICS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)
"""The statistics that `rollout_rs` may name; see rejection.py."""

_NUMBER = r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?"


class RolloutCorrectionConfig(ConfigModel):
    """What is done about the difference between the policy that sampled and the policy that is
    trained."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Weight token losses by the ratio of the trainer's probability to the rollout's: of the token,
    or of the whole response; null means not at all."""
    rollout_is_threshold: float | str = 2.0
    """Largest weight, to which larger ones are truncated; or, as in '0.5_5.0', a band, outside of
    which weights become 0 (IcePop). In a YAML file put a band in quotes: without them 0.5_5 is the
    number 0.55."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    rollout_rs: str | None = None
    """Remove tokens or whole responses that drifted too far, by one or several of token_k1,
    token_k2, token_k3, and seq_sum_, seq_mean_ and seq_max_ with the same endings, separated by
    commas; docs/algorithms.md explains them."""
    rollout_rs_threshold: float | str | None = None
    """Bounds for rollout_rs, one for all or one each, separated by commas: for k1 a band of ratios
    such as '0.5_2.0', for k2 and k3 the largest value."""
    bypass_mode: bool = False
    """Take the rollout's log-probabilities for the trainer's before the update, which saves a
    forward pass; the loss's own ratio is then against the rollout."""

    @model_validator(mode="after")
    def parts_fit_together(self) -> "RolloutCorrectionConfig":
        if self.bypass_mode and (self.rollout_is or self.rollout_rs):
            needing = f"rollout_rs={self.rollout_rs}"
            if self.rollout_is:
                needing = f"rollout_is={self.rollout_is}"
            raise ValueError(
                "bypass_mode=true computes no log-probabilities of the trainer before the update, "
                f"but {needing} compares the rollout's with them: set bypass_mode=false; or leave "
                f"{needing} out and use a loss with a ratio, such as cispo, which is against the "
                "rollout under bypass_mode"
            )
        if self.rollout_is_batch_normalize and not self.rollout_is:
            raise ValueError(
                "rollout_is_batch_normalize=true has no effect without rollout_is; set it or "
                "remove both"
            )
        if self.rollout_rs_threshold is not None and not self.rollout_rs:
            raise ValueError(
                f"rollout_rs_threshold={self.rollout_rs_threshold} has no effect without "
                "rollout_rs; set it or remove both"
            )
        read_band(self.rollout_is_threshold, "rollout_is_threshold")
        if self.rollout_rs:
            rejection_bounds(self.rollout_rs, self.rollout_rs_threshold)
        return self


def read_band(threshold: float | str, key: str) -> tuple[float | None, float]:
    """Reads (lower, upper) from the value of `key`; lower is None where that is one number alone.

    Raises:
        ValueError: not a positive number, nor two with an underscore between them, the smaller
            first.
    """
    match = re.fullmatch(rf"(?:({_NUMBER})_)?({_NUMBER})", str(threshold))
    if match:
        lower = float(match[1]) if match[1] else None
        upper = float(match[2])
        if upper > 0 and (lower is None or 0 < lower <= upper):
            return lower, upper
    raise ValueError(
        f"{key}={threshold}: expected a positive number, or a band of two such as 0.5_2.0, the "
        "smaller first"
    )


def rejection_bounds(
    statistics: str, threshold: float | str | None
) -> dict[str, tuple[float | None, float]]:
    """Reads (lower, upper) of each statistic of `rollout_rs`; lower is None where it has one.

    Raises:
        ValueError: an unknown statistic, or bounds that do not fit it.
    """
    names: dict[str, None] = {}  # in place of a set, which has no order
    for part in statistics.split(","):
        name = part.strip()
        if name not in STATISTICS:
            raise ValueError(
                f"rollout_rs={statistics}: unknown statistic {name!r}; known are "
                f"{', '.join(STATISTICS)}"
            )
        names[name] = None
    if threshold is None:
        raise ValueError(f"rollout_rs={statistics} needs rollout_rs_threshold: set it, e.g. to 2.0")
    given = str(threshold).split(",")
    if len(given) not in (1, len(names)):
        raise ValueError(
            f"rollout_rs_threshold={threshold} has {len(given)} bounds for the {len(names)} "
            f"statistics of rollout_rs={statistics}; give one for all or one for each"
        )
    if len(given) == 1:
        given = given * len(names)
    found = {}
    for name, bound in zip(names, given, strict=True):
        lower, upper = read_band(bound.strip(), "rollout_rs_threshold")
        if name.endswith("k1"):
            if lower is None:
                lower = 1 / upper
            if lower > upper:
                raise ValueError(
                    f"rollout_rs_threshold={bound}: {name} keeps ratios up to it; give 1 or more, "
                    "or a band"
                )
        elif lower is not None:
            raise ValueError(
                f"rollout_rs_threshold={bound}: {name} has one bound, the largest value; give one "
                "number"
            )
        found[name] = lower, upper
    return found
