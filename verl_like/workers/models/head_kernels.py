"""Triton kernels of `linear_log_prob`: one for the statistics of a chunk of logits, one for its
gradient.

Only torch's builds for CUDA have Triton, so this module is imported only for tensors on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Legend: M scored tokens, C vocabulary entries of a chunk, T vocabulary entries of a tile.
# z: the logits divided by the temperature. x = factor * hidden @ weight.T.
# Without a cap: z = x and factor = scale / temperature.
# With a cap: z = cap * tanh(x), cap = softcap / temperature and factor = scale / softcap.

TILE = 4096
"""The number of columns that a program loads at a time."""

NUM_WARPS = 8
"""The number of warps of a program, of 32 threads each. A thread has 16 columns of a tile, which
are two loads of 16 bytes in bfloat16."""


def statistics(
    x_MC: Tensor, cap: float | None, with_entropy: bool, with_norm: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns lse, entropy and norm of softmax(z) over this chunk's columns alone, (M,) float32
    each.

    The norm is the root of the sum of the squared probabilities. Entropy and norm are uninitialised
    memory if they are not asked for.

    Args:
        x_MC: factor * hidden @ weight.T, as `linear_log_prob` computes it. With a cap the division
            by softcap is in it already.
        cap: softcap / temperature, or None for a model without a cap.
        with_entropy: whether the entropy is asked for.
        with_norm: whether the norm is asked for.
    """
    lse_M = x_MC.new_empty(len(x_MC), dtype=torch.float32)
    entropy_M = torch.empty_like(lse_M)
    norm_M = torch.empty_like(lse_M)
    with torch.cuda.device_of(x_MC):
        _statistics_kernel[(len(x_MC),)](
            x_MC,
            lse_M,
            entropy_M,
            norm_M,
            x_MC.size(1),
            1.0 if cap is None else cap,
            HAS_CAP=cap is not None,
            WITH_ENTROPY=with_entropy,
            WITH_NORM=with_norm,
            TILE=TILE,
            num_warps=NUM_WARPS,
        )
    return lse_M, entropy_M, norm_M


def to_gradient(
    x_MC: Tensor,
    cap: float | None,
    column_M: Tensor,
    lse_M: Tensor,
    grad_log_prob_M: Tensor,
    entropy_M: Tensor | None,
    grad_entropy_M: Tensor | None,
) -> None:
    """Overwrites a chunk of x by its gradient, on a GPU.

    With log p = z - lse, and at_label = 1 in the label's column and 0 in others, this is
        dz/dx * (at_label * grad_log_prob - p * slope)
        slope = grad_log_prob + grad_entropy * (log p + entropy)
    `column_M` is the label's column, which may be outside of the chunk. If the two gradients are
    given times factor, the result is the gradient with respect to hidden @ weight.T.
    """
    has_entropy = grad_entropy_M is not None
    with torch.cuda.device_of(x_MC):
        _gradient_kernel[(len(x_MC), triton.cdiv(x_MC.size(1), TILE))](
            x_MC,
            column_M,
            lse_M,
            grad_log_prob_M,
            entropy_M if has_entropy else lse_M,  # any pointer, which is not read
            grad_entropy_M if has_entropy else lse_M,
            x_MC.size(1),
            1.0 if cap is None else cap,
            HAS_CAP=cap is not None,
            HAS_ENTROPY=has_entropy,
            TILE=TILE,
            num_warps=NUM_WARPS,
        )


@triton.jit
def _logits(x: tl.tensor, cap: tl.tensor, HAS_CAP: tl.constexpr) -> tl.tensor:
    """Returns z in float32: x, or cap * tanh(x). exp is computed only of numbers <= 0, so that it
    does not overflow."""
    z = x.to(tl.float32)
    if HAS_CAP:
        power = tl.exp(-2.0 * tl.abs(z))
        size = cap * (1.0 - power) / (1.0 + power)
        z = tl.where(z < 0.0, -size, size)
    return z


@triton.jit
def _statistics_kernel(
    x_MC: tl.tensor,
    lse_M: tl.tensor,
    entropy_M: tl.tensor,
    norm_M: tl.tensor,
    C: tl.tensor,
    cap: tl.tensor,
    HAS_CAP: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WITH_NORM: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Computes the statistics of one row in each program.

    With d = z - the largest z of the columns so far, it sums exp(d), exp(d) d and exp(2 d).
    """
    row = tl.program_id(0).to(tl.int64)
    x_C = x_MC + row * C
    largest = _logits(tl.load(x_C), cap, HAS_CAP)
    sum_exp = 0.0
    sum_exp_d = 0.0
    sum_squares = 0.0
    for start in range(0, C, TILE):
        column_T = start + tl.arange(0, TILE)
        is_here_T = column_T < C
        x_T = tl.load(x_C + column_T, mask=is_here_T, other=0.0)
        z_T = _logits(x_T, cap, HAS_CAP)
        z_T = tl.where(is_here_T, z_T, float("-inf"))
        before = largest
        largest = tl.maximum(before, tl.max(z_T, 0))
        d_T = z_T - largest
        exp_T = tl.exp(d_T)
        # From the columns summed so far the largest z before was subtracted, so sums are rescaled.
        shift = before - largest
        rescale = tl.exp(shift)
        if WITH_ENTROPY:
            exp_d_T = tl.where(is_here_T, exp_T * d_T, 0.0)
            sum_exp_d = rescale * (sum_exp_d + sum_exp * shift) + tl.sum(exp_d_T, 0)
        if WITH_NORM:
            sum_squares = rescale * rescale * sum_squares + tl.sum(exp_T * exp_T, 0)
        sum_exp = rescale * sum_exp + tl.sum(exp_T, 0)
    log_sum = tl.log(sum_exp)
    tl.store(lse_M + row, largest + log_sum)
    if WITH_ENTROPY:
        tl.store(entropy_M + row, log_sum - sum_exp_d / sum_exp)
    if WITH_NORM:
        tl.store(norm_M + row, tl.sqrt(sum_squares) / sum_exp)


@triton.jit
def _gradient_kernel(
    x_MC: tl.tensor,
    column_M: tl.tensor,
    lse_M: tl.tensor,
    grad_log_prob_M: tl.tensor,
    entropy_M: tl.tensor,
    grad_entropy_M: tl.tensor,
    C: tl.tensor,
    cap: tl.tensor,
    HAS_CAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Computes the gradient of one tile of a row in each program."""
    row = tl.program_id(0).to(tl.int64)
    column_T = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_here_T = column_T < C
    place_T = x_MC + row * C + column_T
    x_T = tl.load(place_T, mask=is_here_T, other=0.0)
    z_T = _logits(x_T, cap, HAS_CAP)
    log_prob_T = z_T - tl.load(lse_M + row)
    grad_log_prob = tl.load(grad_log_prob_M + row)
    slope = grad_log_prob  # of all columns, until the entropy's part is added
    if HAS_ENTROPY:
        grad_entropy = tl.load(grad_entropy_M + row)
        entropy = tl.load(entropy_M + row)
        slope += grad_entropy * (log_prob_T + entropy)
    label_column = tl.load(column_M + row)
    at_label_T = tl.where(column_T == label_column, grad_log_prob, 0.0)
    grad_T = at_label_T - tl.exp(log_prob_T) * slope
    if HAS_CAP:
        # This is cap - z^2 / cap, in a form that keeps precision if z is close to the cap.
        inverse = 1.0 / cap
        grad_T *= (cap - z_T) * (cap + z_T) * inverse
    tl.store(place_T, grad_T.to(x_MC.dtype.element_ty), mask=is_here_T)
