"""Sums, means and whitening over the positions a mask selects, and a row's value on its last one.

Masks are bool or 0/1 of any dtype. A value at a masked-out position, NaN and infinity included,
never reaches a result or a gradient: positions are selected with `torch.where`, never by
multiplication.
"""

import torch
from torch import Tensor

_TOKENS_IN_CACHE = 1 << 19
"""How many tokens of a column are computed at once, so that its values stay in the cache."""
Axis = int | tuple[int, ...] | None
"""The axes of a sum or mean; None means all."""


def zero_masked(values: Tensor, mask: Tensor) -> Tensor:
    """Returns `values` with 0 at every position where `mask` is 0; `mask` broadcasts to `values`.

    A loss passes the tensor it differentiates through this before anything else: the gradient then
    stops at the mask. Blanking only the result is not enough, since a zero gradient times the
    derivative at NaN is still NaN.
    """
    return torch.where(mask.bool(), values, 0.0)


def masked_sum(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    """Returns the sum of the selected `values`, over `axis`."""
    selected = zero_masked(values, mask)
    return selected.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    """Returns the mean of the selected `values`, over `axis`. It is 0 where nothing is selected."""
    valid = mask.bool().expand_as(values)
    count = valid.sum(dim=axis).clamp(min=1)
    return masked_sum(values, valid, axis) / count


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Returns (values - mean) / sqrt(var + 1e-8) over the selected values, and 0 elsewhere.

    The variance is the unbiased one. A single selected value has no spread and whitens to 0, and an
    empty mask gives all zeros, so a batch in which every sample was skipped stays harmless.

    Args:
        shift_mean: False adds the mean back, so that only the scale changes.
    """
    valid = mask.bool().expand_as(values)
    count = int(valid.sum())
    # The passes are few and in place, because with long responses a new tensor costs more than the
    # arithmetic.
    deviation = zero_masked(values, valid)
    mean = deviation.sum() / max(count, 1)
    deviation = deviation.sub_(mean).masked_fill_(~valid, 0.0)
    row_norms = torch.linalg.vector_norm(deviation, dim=-1)
    sum_squares = row_norms.square().sum()
    variance = sum_squares / max(count - 1, 1)
    whitened = deviation
    if count >= 2:
        whitened = deviation * torch.rsqrt(variance + 1e-8)
    if shift_mean:
        return whitened
    return zero_masked(whitened + mean, valid)


def on_last_token(row_values: Tensor, mask: Tensor) -> Tensor:
    """Returns a (B, R) matrix of the (B,) values of rows: each stands on the last selected position
    of its row, with 0 elsewhere."""
    valid = mask.bool()
    num_so_far = valid.cumsum(-1)
    num_of_row = num_so_far[:, -1:]
    has_none_behind = num_so_far == num_of_row
    is_last = valid & has_none_behind
    values = row_values.unsqueeze(-1)
    return zero_masked(values, is_last)


def few_rows(matrix: Tensor) -> list[slice]:
    """Divides the rows of a matrix (B, R) into slices. Each has so few rows that what is computed
    for them stays in the cache."""
    num_rows, length = matrix.shape
    num_in_cache = _TOKENS_IN_CACHE // max(1, length)
    at_once = max(1, num_in_cache)
    starts = range(0, num_rows, at_once)
    return [slice(start, start + at_once) for start in starts]
