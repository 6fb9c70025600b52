"""The options of `dro`."""

from pydantic import model_validator

from verl_like.algorithms.policy_losses import PolicyLossOptions
from verl_like.config_model import PositiveFloat


class DroOptions(PolicyLossOptions):
    """The weight of the penalty."""

    dro_beta: PositiveFloat | None = None
    """Weight of the quadratic penalty; it has no default value and must be set."""

    @model_validator(mode="after")
    def beta_is_set(self) -> "DroOptions":
        if self.dro_beta is None:
            raise ValueError(
                "loss_mode=dro needs dro_beta, the weight of its penalty; set it to a positive "
                "number"
            )
        return self
