"""Sums over the later tokens of a row. Discounted ones are computed in blocks, which is faster than
a recurrence from the last token to the first and gives the same."""

import torch
from torch import Tensor

_BLOCK = 64
"""How many tokens are summed at once, by a product with a matrix."""


def sums_from_here(terms: Tensor) -> Tensor:
    """Returns the sum of each term and of those after it in its row, of terms (B, R)."""
    from_the_end = terms.flip(-1).cumsum(-1)
    return from_the_end.flip(-1)


def gae_in_blocks(
    rewards: Tensor, values: Tensor, valid: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Returns GAE's advantages before whitening, and its returns, (B, R) float each.

    `rewards`, `values` and the bool mask `valid` are (B, R).
    """
    num_rows, length = values.shape
    # Each row's valid tokens move to the left of W positions. W is a multiple of the block and at
    # least R + 1. Position R takes what is not valid and is then cleared: zeros follow the last
    # token, and masked tokens read a zero.
    num_blocks = length // _BLOCK + 1
    width = num_blocks * _BLOCK
    num_before = valid.cumsum(-1) - 1
    position = torch.where(valid, num_before, length)

    def left_aligned(columns: Tensor) -> Tensor:
        aligned = columns.new_zeros(num_rows, width)
        aligned.scatter_(1, position, columns)
        aligned[:, length] = 0.0
        return aligned

    values_BW = left_aligned(values)
    next_values = values_BW[:, 1:]
    delta_BW = left_aligned(rewards).sub_(values_BW)
    delta_BW[:, :-1].add_(next_values, alpha=gamma)
    advantages_BW = discounted_sums(delta_BW, gamma * lam)
    returns_BW = values_BW.add_(advantages_BW)
    advantages = advantages_BW.gather(1, position)
    returns = returns_BW.gather(1, position)
    return advantages, returns


def discounted_sums(terms: Tensor, discount: float) -> Tensor:
    """Returns S_t = sum over j >= t of discount^(j - t) terms_j along each row of terms (B, W),
    where W is a multiple of 64.

    Within a block of 64 that is a product with the triangular matrix of the powers. From a block to
    the one before it only the first sum is carried: S_t += discount^(distance to the next block)
    S_(first of the next block). The powers are at most those in the sum itself, so nothing
    overflows that the recurrence S_t = terms_t + discount S_(t+1) would not.
    """
    exponents = torch.arange(_BLOCK + 1, device=terms.device)
    exact_powers = discount ** exponents.double()  # 0^0 = 1
    powers = exact_powers.to(terms.dtype)
    positions = exponents[:-1]
    distances = positions.unsqueeze(1) - positions
    power_of_pair = powers[distances.clamp(min=0)]
    discounts = power_of_pair.tril()
    blocks = terms.view(len(terms), -1, _BLOCK)
    sums = blocks @ discounts
    to_next_block = powers[1:].flip(0)
    last_block = sums.size(1) - 1
    for block in reversed(range(last_block)):
        next_block = block + 1
        carried = sums[:, next_block, 0]
        sums[:, block].addr_(carried, to_next_block)
    return sums.view_as(terms)
