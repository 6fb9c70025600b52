"""The language-model head and its softmax in one: log-probabilities and the like without the full
logits."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

# Legend: M scored tokens, D hidden size, V vocabulary, C vocabulary entries of a chunk, S chunks, R
# rows of a block.

LOGITS_PER_CHUNK = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Largest number of logits that exist at a time, by device: 64 MiB in float32, 256 MiB in bfloat16.
On a GPU each chunk reads and writes the whole gradient of the hidden states, so few are faster."""

COLUMNS_PER_CHUNK = {"cpu": 1, "cuda": 64}
"""A chunk but the last has a multiple of so many, by device: a GPU is faster where rows begin at
whole 16 bytes."""

LOGITS_PER_BLOCK = 1 << 18
"""Logits that an elementwise pass on a CPU works on: few enough that the next pass finds them in
the cache."""


def linear_log_prob(
    hidden_MD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_M: torch.Tensor,
    *,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Log-probability of each label under softmax(logits / temperature), and more of that
    distribution.

    logits = x, or softcap * tanh(x / softcap) where there is a cap (Gemma 2, arXiv 2408.00118),
    with x = scale * hidden @ weight.T. A chunk of the vocabulary is computed at a time, for all
    tokens, and again in the backward pass; only the last chunk is kept. Products are in the dtype
    of the inputs, all else in float32.

    Args:
        hidden_MD: (M, D) outputs of the backbone.
        weight_VD: (V, D) of the head, same dtype.
        labels_M: (M,) int64, in [0, V).
        temperature: > 0, as is a `softcap`.

    Returns:
        (M,) float32 each: log-probabilities; entropies in nats and sums of squared probabilities
        where they are asked for. The first two can be differentiated once.
    """
    factor = scale / temperature if softcap is None else scale / softcap
    cap = None if softcap is None else softcap / temperature
    scores = _LinearLogProb.apply(
        hidden_MD, weight_VD, labels_M, factor, cap, with_entropy, with_sum_pi_squared
    )
    return tuple(score_M for score_M in scores if score_M is not None)


class _LinearLogProb(torch.autograd.Function):
    """With x = factor * hidden @ weight.T and z = x, or z = cap * tanh(x): lse = log(sum_v
    exp(z_v)).

    log p_y = z_y - lse, so d log p_y / d z_v = [v = y] - p_v.
    H = -sum_v p_v log p_v with log p_v = z_v - lse, so d H / d z_v = -p_v (z_v - lse + H).

    A chunk c has the share w_c = exp(lse_c - lse) of the probability, and H_c is the entropy of its
    own softmax: H = sum_c w_c (H_c - log w_c), which stays exact where lse is large and H small.
    Likewise sum_v p_v^2 = sum_c w_c^2 (sum of the squares of its own softmax).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: torch.Tensor,
        weight_VD: torch.Tensor,
        labels_M: torch.Tensor,
        factor: float,
        cap: float | None,
        with_entropy: bool,
        with_sum_pi_squared: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        chunks = _chunks(hidden_MD, weight_VD)
        buffer = hidden_MD.new_empty(len(hidden_MD) * chunks[0][1])
        lse_SM = hidden_MD.new_empty(len(chunks), len(hidden_MD), dtype=torch.float32)
        entropy_SM = torch.empty_like(lse_SM)
        norm_SM = torch.empty_like(lse_SM)
        label_logit_M = torch.zeros_like(lse_SM[0])
        for index, (start, end) in enumerate(chunks):
            x_MC = _product(hidden_MD, weight_VD[start:end], factor, buffer)
            lse_SM[index], entropy_SM[index], norm_SM[index] = _statistics(
                x_MC, cap, with_entropy, with_sum_pi_squared
            )
            column_M1, is_here_M1 = _find(labels_M, start, end)
            label_logit_M += (_logits(x_MC.gather(1, column_M1), cap) * is_here_M1).squeeze(1)
        lse_M = lse_SM.logsumexp(0)
        log_share_SM = lse_SM - lse_M
        entropy_M = (
            (log_share_SM.exp() * (entropy_SM - log_share_SM)).sum(0) if with_entropy else None
        )
        sum_squares_M = (
            (log_share_SM.exp() * norm_SM).square().sum(0) if with_sum_pi_squared else None
        )
        if sum_squares_M is not None:
            ctx.mark_non_differentiable(sum_squares_M)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_MD, weight_VD, labels_M, log_share_SM, lse_M, entropy_M)
        ctx.factor = factor
        ctx.cap = cap
        ctx.buffer = buffer
        return label_logit_M - lse_M, entropy_M, sum_squares_M

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_prob_M: torch.Tensor | None, grad_entropy_M: torch.Tensor | None, _: None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_MD, weight_VD, labels_M, log_share_SM, lse_M, entropy_M = ctx.saved_tensors
        chunks = _chunks(hidden_MD, weight_VD)
        # The buffer still holds the last chunk, unless this is a second backward pass through a
        # retained graph.
        buffer = ctx.buffer
        ctx.buffer = None
        computed = len(chunks) - 1 if buffer is not None else None
        if buffer is None:
            buffer = hidden_MD.new_empty(len(hidden_MD) * chunks[0][1])
        grad_log_prob_M = (
            torch.zeros_like(lse_M) if grad_log_prob_M is None else ctx.factor * grad_log_prob_M
        )
        grad_entropy_M = None if grad_entropy_M is None else ctx.factor * grad_entropy_M
        grad_hidden_MD = (
            torch.zeros_like(hidden_MD, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        )
        grad_weight_VD = torch.empty_like(weight_VD) if ctx.needs_input_grad[1] else None
        for index, (start, end) in reversed(list(enumerate(chunks))):
            x_MC = _view(buffer, len(hidden_MD), end - start)
            if index != computed:
                _product(hidden_MD, weight_VD[start:end], ctx.factor, buffer)
            _to_gradient(
                x_MC,
                ctx.cap,
                labels_M - start,
                lse_M,
                log_share_SM[index],
                grad_log_prob_M,
                entropy_M,
                grad_entropy_M,
            )
            if grad_weight_VD is not None:
                torch.mm(x_MC.t(), hidden_MD, out=grad_weight_VD[start:end])
            if grad_hidden_MD is not None and x_MC.dtype == torch.float32:
                grad_hidden_MD.addmm_(x_MC, weight_VD[start:end])
            elif grad_hidden_MD is not None:
                grad_hidden_MD += x_MC @ weight_VD[start:end]
        if grad_hidden_MD is not None:
            grad_hidden_MD = grad_hidden_MD.to(hidden_MD.dtype)
        return grad_hidden_MD, grad_weight_VD, None, None, None, None, None


def _statistics(
    x_MC: torch.Tensor, cap: float | None, with_entropy: bool, with_sum_pi_squared: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(M,) float32 each, of the softmax of z over a chunk alone: lse, entropy, and root of the sum
    of its squares.

    The last two are left without values where they are not asked for.
    """
    kernels = _kernels(x_MC)
    compute = _statistics_in_blocks if kernels is None else kernels.statistics
    return compute(x_MC, cap, with_entropy, with_sum_pi_squared)


def _to_gradient(
    x_MC: torch.Tensor,
    cap: float | None,
    column_M: torch.Tensor,
    lse_M: torch.Tensor,
    log_share_M: torch.Tensor,
    grad_log_prob_M: torch.Tensor,
    entropy_M: torch.Tensor | None,
    grad_entropy_M: torch.Tensor | None,
) -> None:
    """Overwrites a chunk of x by the gradient by hidden @ weight.T, which is factor times that by
    x.

    The two gradients that it starts from are multiplied by factor; lse and entropy are the whole
    vocabulary's. `column_M` has the label's column, which may be outside the chunk, log_share_M the
    log of the chunk's probability.
    """
    kernels = _kernels(x_MC)
    if kernels is not None:
        kernels.to_gradient(x_MC, cap, column_M, lse_M, grad_log_prob_M, entropy_M, grad_entropy_M)
        return
    share_M1 = log_share_M.exp().unsqueeze(1)
    offset_M1 = grad_log_prob_M.unsqueeze(1)
    entropy_terms = None
    if grad_entropy_M is not None:
        assert entropy_M is not None, "its gradient is asked for"
        entropy_terms = ((entropy_M - lse_M).unsqueeze(1), grad_entropy_M.unsqueeze(1) * -share_M1)
    column_M1, is_here_M1 = _find(column_M, 0, x_MC.size(1))
    _to_gradient_in_blocks(
        x_MC, cap, offset_M1 * -share_M1, entropy_terms, column_M1, offset_M1 * is_here_M1
    )


def _kernels(x_MC: torch.Tensor) -> ModuleType | None:
    """What computes a chunk on a GPU; it needs Triton, which a CPU does without."""
    if not x_MC.is_cuda:
        return None
    import verl_like.workers.models.head_kernels as head_kernels

    return head_kernels


def _statistics_in_blocks(
    x_MC: torch.Tensor, cap: float | None, with_entropy: bool, with_sum_pi_squared: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lse_M = x_MC.new_empty(len(x_MC), dtype=torch.float32)
    entropy_M = torch.empty_like(lse_M)
    norm_M = torch.empty_like(lse_M)
    for rows, x_RC, probs_RC in _blocks(x_MC):
        logits_RC = _logits(x_RC, cap)
        torch.softmax(logits_RC, -1, out=probs_RC)
        # The largest logit's probability is 1 / sum(exp(logits - largest)).
        largest_R1 = logits_RC.amax(-1, keepdim=True)
        log_prob_R1 = probs_RC.amax(-1, keepdim=True).log()
        lse_M[rows] = (largest_R1 - log_prob_R1).squeeze(1)
        if with_sum_pi_squared:
            norm_M[rows] = torch.linalg.vector_norm(probs_RC, dim=-1)
        if with_entropy:
            mean_R1 = probs_RC.mul_(logits_RC - largest_R1).sum(-1, keepdim=True)
            entropy_M[rows] = -(mean_R1 + log_prob_R1).squeeze(1)
    return lse_M, entropy_M, norm_M


def _to_gradient_in_blocks(
    x_MC: torch.Tensor,
    cap: float | None,
    offset_M1: torch.Tensor,
    entropy_terms: tuple[torch.Tensor, torch.Tensor] | None,
    column_M1: torch.Tensor,
    at_label_M1: torch.Tensor,
) -> None:
    """Overwrites a chunk of x by dz/dx (softmax(z) (offset + slope (z + centre)) + at_label in one
    column of each row).

    `entropy_terms` are (centre, slope).
    """
    for rows, x_RC, probs_RC in _blocks(x_MC):
        grad_RC = _logits(x_RC, cap)
        torch.softmax(grad_RC, -1, out=probs_RC)
        derivative_RC = None if cap is None else cap - grad_RC.square() / cap
        if entropy_terms is None:
            torch.mul(probs_RC, offset_M1[rows], out=grad_RC)
        else:
            centre_M1, slope_M1 = entropy_terms
            grad_RC.add_(centre_M1[rows]).mul_(slope_M1[rows]).add_(offset_M1[rows]).mul_(probs_RC)
        grad_RC.scatter_add_(1, column_M1[rows], at_label_M1[rows])
        if derivative_RC is not None:
            grad_RC.mul_(derivative_RC)
        if grad_RC is not x_RC:
            x_RC.copy_(grad_RC)


def _chunks(hidden_MD: torch.Tensor, weight_VD: torch.Tensor) -> list[tuple[int, int]]:
    """First and last-but-one vocabulary entry of each chunk; the first chunk is the largest."""
    device = hidden_MD.device.type
    size = max(LOGITS_PER_CHUNK[device] // max(len(hidden_MD), 1), COLUMNS_PER_CHUNK[device])
    size = min(len(weight_VD), size - size % COLUMNS_PER_CHUNK[device])
    return [(start, min(start + size, len(weight_VD))) for start in range(0, len(weight_VD), size)]


def _view(buffer: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    return buffer[: num_rows * num_columns].view(num_rows, num_columns)


def _product(
    hidden_MD: torch.Tensor, weight_CD: torch.Tensor, factor: float, buffer: torch.Tensor
) -> torch.Tensor:
    x_MC = _view(buffer, len(hidden_MD), len(weight_CD))
    return x_MC.addmm_(hidden_MD, weight_CD.t(), beta=0, alpha=factor)


def _blocks(x_MC: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Cuts a chunk into blocks of rows; yields the rows, the block, and a float32 block to work
    in."""
    size = max(1, LOGITS_PER_BLOCK // max(x_MC.size(1), 1))
    scratch = x_MC.new_empty(min(size, len(x_MC)), x_MC.size(1), dtype=torch.float32)
    for start in range(0, len(x_MC), size):
        rows = slice(start, min(start + size, len(x_MC)))
        yield rows, x_MC[rows], scratch[: rows.stop - start]


def _logits(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """float32; x itself if it is in float32 and has no cap."""
    return x.float() if cap is None else cap * x.float().tanh()


def _find(labels_M: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, 1) each: the label's column in a chunk, any column if it is not there, and whether it is
    there."""
    labels_M1 = labels_M.unsqueeze(1)
    return (labels_M1 - start).clamp(0, end - start - 1), (labels_M1 >= start) & (labels_M1 < end)
