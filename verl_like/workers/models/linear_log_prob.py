"""The language-model head and its softmax in one function, which never has all logits at a time."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Legend: M scored tokens, D hidden size, V vocabulary, C vocabulary entries of a chunk, S chunks, R
# rows of a block.
# z: the logits divided by the temperature. x = factor * hidden @ weight.T.
# Without a cap: z = x and factor = scale / temperature.
# With a cap: z = cap * tanh(x), cap = softcap / temperature and factor = scale / softcap.

LOGITS_PER_CHUNK = {"cpu": 1 << 24, "cuda": 1 << 27}
"""The largest number of logits that exist at a time, by device: 64 MiB in float32 on a CPU, 256 MiB
in bfloat16 on a GPU. On a GPU each chunk reads and writes the whole gradient of the hidden states,
so few chunks are faster."""

COLUMNS_PER_CHUNK = {"cpu": 1, "cuda": 64}
"""All chunks but the last have a multiple of this number of columns, by device. A GPU is faster if
rows begin at multiples of 16 bytes."""

LOGITS_PER_BLOCK = 1 << 18
"""How many logits an elementwise pass on a CPU works on: so few that they are still in the cache
for the next pass."""


def linear_log_prob(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    labels_M: Tensor,
    *,
    temperature: float = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
) -> tuple[Tensor, ...]:
    """Computes the log-probability of each label under softmax(logits / temperature).

    logits = raw, or softcap * tanh(raw / softcap) if there is a cap (Gemma 2, arXiv 2408.00118),
    with raw = scale * hidden @ weight.T. The logits of one chunk of the vocabulary are computed at
    a time, for all tokens, and again in the backward pass; only the last chunk is kept. Products
    are in the dtype of the inputs, all else in float32.

    Args:
        hidden_MD: (M, D) outputs of the backbone.
        weight_VD: (V, D) of the head, same dtype.
        labels_M: (M,) int64, in [0, V).
        temperature: > 0.
        scale: the model's factor of its logits.
        softcap: the bound of the logits, > 0, or None.
        with_entropy: whether to return entropies, too.
        with_sum_pi_squared: whether to return sums of squared probabilities, too.

    Returns:
        The log-probabilities, then what was asked for: entropies in nats, and sums of squared
        probabilities, (M,) float32 each. The former two can be differentiated once.
    """
    if softcap is None:
        factor = scale / temperature
        cap = None
    else:
        factor = scale / softcap
        cap = softcap / temperature
    scores = _LinearLogProb.apply(
        hidden_MD, weight_VD, labels_M, factor, cap, with_entropy, with_sum_pi_squared
    )
    return tuple(score_M for score_M in scores if score_M is not None)


class _LinearLogProb(torch.autograd.Function):
    """The computation of `linear_log_prob` and its derivative.

    With x = factor * hidden @ weight.T and z = x, or z = cap * tanh(x), let lse = log(sum_v
    exp(z_v)).

    log p_y = z_y - lse, so d log p_y / d z_v = [v = y] - p_v.
    H = -sum_v p_v log p_v with log p_v = z_v - lse, so d H / d z_v = -p_v (z_v - lse + H).

    A chunk c of the vocabulary has the share w_c = exp(lse_c - lse) of the probability. With the
    entropy H_c of its own softmax, H = sum_c w_c (H_c - log w_c), which stays exact if lse is large
    and H is small. Likewise sum_v p_v^2 = sum_c w_c^2 (the sum of the squares of its own softmax).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        labels_M: Tensor,
        factor: float,
        cap: float | None,
        with_entropy: bool,
        with_sum_pi_squared: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        chunks = _chunks(hidden_MD, weight_VD)
        num_tokens = len(hidden_MD)
        buffer = _buffer(hidden_MD, chunks)
        lse_SM = hidden_MD.new_empty(len(chunks), num_tokens, dtype=torch.float32)
        entropy_SM = torch.empty_like(lse_SM)
        norm_SM = torch.empty_like(lse_SM)
        label_logit_M = torch.zeros_like(lse_SM[0])
        for index, (start, end) in enumerate(chunks):
            x_MC = _product(hidden_MD, weight_VD[start:end], factor, buffer)
            statistics = _statistics(x_MC, cap, with_entropy, with_sum_pi_squared)
            lse_SM[index], entropy_SM[index], norm_SM[index] = statistics
            column_M1, is_here_M1 = _in_chunk(labels_M - start, end - start)
            x_M1 = x_MC.gather(1, column_M1)
            logit_M1 = _logits(x_M1, cap) * is_here_M1
            label_logit_M += logit_M1.squeeze(1)
        lse_M = lse_SM.logsumexp(0)
        log_share_SM = lse_SM - lse_M
        share_SM = log_share_SM.exp()
        entropy_M = None
        if with_entropy:
            parts_SM = share_SM * (entropy_SM - log_share_SM)
            entropy_M = parts_SM.sum(0)
        sum_squares_M = None
        if with_sum_pi_squared:
            weighted_SM = share_SM * norm_SM
            sum_squares_M = weighted_SM.square().sum(0)
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
        ctx: Any, grad_log_prob_M: Tensor | None, grad_entropy_M: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_VD, labels_M, log_share_SM, lse_M, entropy_M = ctx.saved_tensors
        chunks = _chunks(hidden_MD, weight_VD)
        # The buffer still has the last chunk, unless this is a second backward pass through a
        # retained graph.
        buffer = ctx.buffer
        ctx.buffer = None
        has_last_chunk = buffer is not None
        if buffer is None:
            buffer = _buffer(hidden_MD, chunks)
        if grad_log_prob_M is None:
            grad_log_prob_M = torch.zeros_like(lse_M)
        else:
            grad_log_prob_M = ctx.factor * grad_log_prob_M
        if grad_entropy_M is not None:
            grad_entropy_M = ctx.factor * grad_entropy_M
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        grad_hidden_MD = None
        if needs_hidden:
            grad_hidden_MD = torch.zeros_like(hidden_MD, dtype=torch.float32)
        grad_weight_VD = torch.empty_like(weight_VD) if needs_weight else None
        # From the last chunk, which is still in the buffer.
        for index in reversed(range(len(chunks))):
            start, end = chunks[index]
            weight_CD = weight_VD[start:end]
            if has_last_chunk:
                x_MC = _view(buffer, len(hidden_MD), end - start)
                has_last_chunk = False
            else:
                x_MC = _product(hidden_MD, weight_CD, ctx.factor, buffer)
            _to_gradient(
                x_MC,
                ctx.cap,
                labels_M - start,  # may be outside of the chunk
                lse_M,
                log_share_SM[index],
                grad_log_prob_M,
                entropy_M,
                grad_entropy_M,
            )
            if grad_weight_VD is not None:
                torch.mm(x_MC.t(), hidden_MD, out=grad_weight_VD[start:end])
            if grad_hidden_MD is not None and x_MC.dtype == torch.float32:
                grad_hidden_MD.addmm_(x_MC, weight_CD)
            elif grad_hidden_MD is not None:
                grad_hidden_MD += x_MC @ weight_CD
        if grad_hidden_MD is not None:
            grad_hidden_MD = grad_hidden_MD.to(hidden_MD.dtype)
        return grad_hidden_MD, grad_weight_VD, None, None, None, None, None


def _statistics(
    x_MC: Tensor, cap: float | None, with_entropy: bool, with_norm: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns lse, entropy and norm of softmax(z) over a chunk's columns alone, (M,) float32 each.

    The norm is the root of the sum of the squared probabilities. Entropy and norm are uninitialised
    memory if they are not asked for.
    """
    kernels = _kernels(x_MC)
    compute = _statistics_in_blocks if kernels is None else kernels.statistics
    return compute(x_MC, cap, with_entropy, with_norm)


def _to_gradient(
    x_MC: Tensor,
    cap: float | None,
    column_M: Tensor,
    lse_M: Tensor,
    log_share_M: Tensor,
    grad_log_prob_M: Tensor,
    entropy_M: Tensor | None,
    grad_entropy_M: Tensor | None,
) -> None:
    """Overwrites a chunk of x by the gradient with respect to hidden @ weight.T.

    That is factor times the gradient with respect to x.

    Args:
        x_MC: the chunk.
        cap: the bound of z, or None.
        column_M: the label's column in the chunk, which may be outside of it.
        lse_M: lse of the whole vocabulary.
        log_share_M: the log of the chunk's share of the probability.
        grad_log_prob_M: the gradient of the log-probability, times factor.
        entropy_M: the entropy of the whole vocabulary.
        grad_entropy_M: the gradient of the entropy, times factor, or None.
    """
    kernels = _kernels(x_MC)
    if kernels is not None:
        kernels.to_gradient(x_MC, cap, column_M, lse_M, grad_log_prob_M, entropy_M, grad_entropy_M)
        return
    share_M1 = log_share_M.exp().unsqueeze(1)
    grad_log_prob_M1 = grad_log_prob_M.unsqueeze(1)
    entropy_terms = None
    if grad_entropy_M is not None:
        assert entropy_M is not None, "its gradient is asked for"
        centre_M1 = (entropy_M - lse_M).unsqueeze(1)
        slope_M1 = grad_entropy_M.unsqueeze(1) * -share_M1
        entropy_terms = (centre_M1, slope_M1)
    column_M1, is_here_M1 = _in_chunk(column_M, x_MC.size(1))
    offset_M1 = grad_log_prob_M1 * -share_M1
    at_label_M1 = grad_log_prob_M1 * is_here_M1
    _to_gradient_in_blocks(x_MC, cap, offset_M1, entropy_terms, column_M1, at_label_M1)


def _kernels(x_MC: Tensor) -> ModuleType | None:
    """Returns the module that computes a chunk on a GPU, or None on a CPU.

    The module needs Triton, which torch's builds for CPU lack.
    """
    if not x_MC.is_cuda:
        return None
    import verl_like.workers.models.head_kernels as head_kernels

    return head_kernels


def _statistics_in_blocks(
    x_MC: Tensor, cap: float | None, with_entropy: bool, with_norm: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes what `_statistics` returns, on a CPU."""
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
        if with_norm:
            norm_M[rows] = torch.linalg.vector_norm(probs_RC, dim=-1)
        if with_entropy:
            weighted_RC = probs_RC.mul_(logits_RC - largest_R1)
            mean_R1 = weighted_RC.sum(-1, keepdim=True)
            entropy_M[rows] = -(mean_R1 + log_prob_R1).squeeze(1)
    return lse_M, entropy_M, norm_M


def _to_gradient_in_blocks(
    x_MC: Tensor,
    cap: float | None,
    offset_M1: Tensor,
    entropy_terms: tuple[Tensor, Tensor] | None,
    column_M1: Tensor,
    at_label_M1: Tensor,
) -> None:
    """Overwrites a chunk of x by dz/dx (softmax(z) (offset + slope (z + centre)) + at_label).

    `at_label` is added in one column of each row. `entropy_terms` are (centre, slope), or None if
    slope is 0.
    """
    for rows, x_RC, probs_RC in _blocks(x_MC):
        grad_RC = _logits(x_RC, cap)
        torch.softmax(grad_RC, -1, out=probs_RC)
        derivative_RC = None if cap is None else cap - grad_RC.square() / cap
        if entropy_terms is None:
            torch.mul(probs_RC, offset_M1[rows], out=grad_RC)
        else:
            centre_M1, slope_M1 = entropy_terms
            grad_RC.add_(centre_M1[rows]).mul_(slope_M1[rows])
            grad_RC.add_(offset_M1[rows]).mul_(probs_RC)
        grad_RC.scatter_add_(1, column_M1[rows], at_label_M1[rows])
        if derivative_RC is not None:
            grad_RC.mul_(derivative_RC)
        if grad_RC is not x_RC:
            x_RC.copy_(grad_RC)


def _chunks(hidden_MD: Tensor, weight_VD: Tensor) -> list[tuple[int, int]]:
    """Divides the vocabulary into chunks, and returns the start and the end of each.

    The first chunk is the largest.
    """
    device = hidden_MD.device.type
    vocab_size = len(weight_VD)
    num_tokens = max(len(hidden_MD), 1)
    step = COLUMNS_PER_CHUNK[device]
    num_columns = LOGITS_PER_CHUNK[device] // num_tokens
    size = max(num_columns - num_columns % step, step)
    size = min(size, vocab_size)
    chunks = []
    for start in range(0, vocab_size, size):
        end = min(start + size, vocab_size)
        chunks.append((start, end))
    return chunks


def _buffer(hidden_MD: Tensor, chunks: list[tuple[int, int]]) -> Tensor:
    """Allocates memory for x of any chunk."""
    _start, largest_chunk = chunks[0]
    return hidden_MD.new_empty(len(hidden_MD) * largest_chunk)


def _view(buffer: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Returns the first values of a buffer as a matrix."""
    return buffer[: num_rows * num_columns].view(num_rows, num_columns)


def _product(hidden_MD: Tensor, weight_CD: Tensor, factor: float, buffer: Tensor) -> Tensor:
    """Writes x of a chunk into the buffer, and returns it."""
    x_MC = _view(buffer, len(hidden_MD), len(weight_CD))
    return x_MC.addmm_(hidden_MD, weight_CD.t(), beta=0, alpha=factor)


def _blocks(x_MC: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Divides a chunk into blocks of rows.

    Yields the rows of each block, the block, and a float32 block of its shape to work in, whose
    memory is the same for all blocks.
    """
    num_rows, num_columns = x_MC.shape
    rows_per_block = max(1, LOGITS_PER_BLOCK // max(num_columns, 1))
    largest_block = min(rows_per_block, num_rows)
    scratch_RC = x_MC.new_empty(largest_block, num_columns, dtype=torch.float32)
    for start in range(0, num_rows, rows_per_block):
        rows = slice(start, start + rows_per_block)
        x_RC = x_MC[rows]
        yield rows, x_RC, scratch_RC[: len(x_RC)]


def _logits(x: Tensor, cap: float | None) -> Tensor:
    """Returns z in float32. It is x itself if x is in float32 and there is no cap."""
    x = x.float()
    return x if cap is None else cap * x.tanh()


def _in_chunk(column_M: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Returns the column of each label in a chunk, and whether it is in the chunk, (M, 1) each.

    The column of a label outside of the chunk becomes any column of it.
    """
    column_M1 = column_M.unsqueeze(1)
    is_here_M1 = (column_M1 >= 0) & (column_M1 < num_columns)
    return column_M1.clamp(0, num_columns - 1), is_here_M1
