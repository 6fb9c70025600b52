"""Sums over the later tokens of a row, in blocks: what a recurrence from the last token to the
first gives, fast."""

import torch

_BLOCK = 64


def gae_in_blocks(
    rewards: torch.Tensor, values: torch.Tensor, valid: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE's advantages before whitening, and its returns, (B, R) float each; `valid` (B, R) is
    bool."""
    num_rows, length = values.shape
    # Each row's valid tokens move to the left, W positions wide: a multiple of the block, at least
    # R + 1. Position R takes what is not valid and is then cleared, so that zeros follow the last
    # token and lie where masked tokens read.
    width = (length // _BLOCK + 1) * _BLOCK
    position = torch.where(valid, valid.cumsum(-1) - 1, length)

    def left_aligned(columns: torch.Tensor) -> torch.Tensor:
        aligned = columns.new_zeros(num_rows, width).scatter_(1, position, columns)
        aligned[:, length] = 0.0
        return aligned

    values_BW = left_aligned(values)
    delta_BW = left_aligned(rewards).sub_(values_BW)
    delta_BW[:, :-1].add_(values_BW[:, 1:], alpha=gamma)
    advantages_BW = discounted_sums(delta_BW, gamma * lam)
    returns_BW = values_BW.add_(advantages_BW)
    return advantages_BW.gather(1, position), returns_BW.gather(1, position)


def discounted_sums(terms: torch.Tensor, discount: float) -> torch.Tensor:
    """S_t = sum over j >= t of discount^(j - t) terms_j along each row of terms (B, W); W divides
    into blocks of 64.

    Within a block that is a product with the triangular matrix of the powers; from block to block
    only the first sum is carried: S_t += discount^(distance to the next block) S_(first of the next
    block). The powers are at most the ones the sum itself contains, so nothing overflows that the
    recurrence S_t = terms_t + discount S_(t+1) would not.
    """
    steps = torch.arange(_BLOCK + 1, dtype=torch.float64, device=terms.device)
    powers = (discount**steps).to(terms.dtype)  # 0^0 = 1
    distance = (steps[:-1].unsqueeze(1) - steps[:-1]).long()
    sums = terms.view(len(terms), -1, _BLOCK) @ powers[distance.clamp(min=0)].tril()
    for block in reversed(range(sums.size(1) - 1)):
        sums[:, block].addr_(sums[:, block + 1, 0], powers[1:].flip(0))
    return sums.view_as(terms)
