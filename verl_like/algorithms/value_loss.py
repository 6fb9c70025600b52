"""The critic's loss: clipped squared error against the returns.

B rows, R padded response length.
"""

import torch
from torch import Tensor

from verl_like.algorithms.aggregation import Aggregate
from verl_like.algorithms.masked import masked_sum, zero_masked


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    *,
    aggregate: Aggregate,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns half the larger of the squared errors of the prediction and of the prediction clipped
    around the old value.

    A token's loss is max((v - R)^2, (clip(v, v_old - cliprange, v_old + cliprange) - R)^2) / 2, as
    in the PPO reference implementation.

    Args:
        vpreds: (B, R) float, the critic's present predictions; the gradient flows here.
        returns: (B, R) float, the regression targets.
        values: (B, R) float, the predictions that the returns were computed with.
        response_mask: (B, R) bool or 0/1, the tokens that count.
        cliprange_value: how far a prediction may move from `values` before its gradient stops.
        aggregate: `agg_loss` with its mode and its counts bound.

    Returns:
        The scalar loss, and {"critic/vf_clipfrac": number of selected tokens whose loss was raised
        by clipping}, a scalar on the device.
    """
    vpreds = zero_masked(vpreds, response_mask)
    clipped_vpreds = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    unclipped = (vpreds - returns) ** 2
    clipped = (clipped_vpreds - returns) ** 2
    loss = 0.5 * aggregate(torch.maximum(unclipped, clipped), response_mask)
    with torch.no_grad():
        num_clipped = masked_sum((clipped > unclipped).float(), response_mask)
    return loss, {"critic/vf_clipfrac": num_clipped}
