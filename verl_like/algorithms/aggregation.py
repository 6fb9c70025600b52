"""From a loss per token to one number, exact under any split of the mini-batch.

B rows, R padded response length.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from verl_like.algorithms.masked import masked_mean, masked_sum

Aggregate = Callable[[Tensor, Tensor], Tensor]
"""(loss_mat (B, R), loss_mask (B, R)) -> scalar: `agg_loss` with its mode and its counts already
bound."""

LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)


@dataclass(frozen=True)
class BatchCounts:
    """The counts of a mini-batch over all ranks and micro-batches, by which `agg_loss` divides.

    Each field is the argument of `agg_loss` that has its name.
    """

    batch_num_tokens: float | None = None
    global_batch_size: float | None = None
    loss_scale_factor: float | None = None
    dp_size: int = 1

    @property
    def arguments(self) -> dict[str, Any]:
        """The counts by name: `agg_loss(..., **counts.arguments)`."""
        return dict(vars(self))


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Returns this micro-batch's share of the mini-batch loss: the sum of the shares of all
    micro-batches and ranks *is* that loss.

    The counts are those of the whole mini-batch, over every rank and micro-batch, so its rows may
    be spread in any way (a row itself is never split). Left out, they are those of `loss_mask`, as
    for a mini-batch in one piece.

    | mode | mini-batch loss |
    |---|---|
    | token-mean | sum of all tokens / batch_num_tokens |
    | token-sum | sum of all tokens |
    | seq-mean-token-sum | sum of all tokens / global_batch_size |
    | seq-mean-token-sum-norm | sum of all tokens / global_batch_size / loss_scale_factor |
    | seq-mean-token-mean | sum over rows of the row's token mean / global_batch_size |

    Args:
        loss_mat: (B, R) float, loss per token.
        loss_mask: (B, R) bool or 0/1, the tokens that count.
        loss_agg_mode: one of LOSS_AGG_MODES.
        dp_size: factor of the result: the number of ranks where an engine averages gradients over
            them. This one adds them up, so it is 1.
        batch_num_tokens: tokens with mask 1 in the mini-batch.
        global_batch_size: rows with at least one such token in the mini-batch.
        loss_scale_factor: the constant of seq-mean-token-sum-norm, which no other mode reads: in a
            run `data.max_response_length`.
        scale: (B, R) float, factor of the loss of each token, such as an importance weight; None =
            1.

    Returns:
        Scalar. 0, with zero gradient, when the mini-batch has no token at all (every sample
        skipped).

    Raises:
        ValueError: unknown mode; no counts for several ranks; seq-mean-token-sum-norm without a
            loss_scale_factor; a count or loss_scale_factor that is not positive although the mask
            selects tokens.
    """
    _check_counts(loss_agg_mode, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    valid = loss_mask.bool()
    if scale is not None:
        loss_mat = loss_mat * scale
    if loss_agg_mode == "seq-mean-token-mean":
        row_means = masked_mean(loss_mat, valid, axis=-1)
        total = row_means.sum()
    else:
        total = masked_sum(loss_mat, valid)

    if loss_agg_mode == "token-sum":
        return total * dp_size
    if loss_agg_mode == "token-mean":
        denominator = batch_num_tokens
        if denominator is None:
            denominator = float(valid.sum())
    else:
        denominator = global_batch_size
        if denominator is None:
            denominator = float(valid.any(dim=-1).sum())
    if loss_agg_mode == "seq-mean-token-sum-norm":
        assert loss_scale_factor is not None
        denominator *= loss_scale_factor
    if denominator > 0:
        return total / denominator * dp_size
    if valid.any():
        raise ValueError(
            f"loss_agg_mode {loss_agg_mode!r} divides by {denominator} "
            f"(batch_num_tokens={batch_num_tokens}, global_batch_size={global_batch_size}, "
            f"loss_scale_factor={loss_scale_factor}) but the mask selects tokens: pass the counts "
            "of the whole mini-batch and a positive loss_scale_factor"
        )
    return total


def _check_counts(
    loss_agg_mode: str,
    dp_size: int,
    batch_num_tokens: float | None,
    global_batch_size: float | None,
    loss_scale_factor: float | None,
) -> None:
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ValueError(
            f"unknown loss_agg_mode {loss_agg_mode!r}: choose one of {', '.join(LOSS_AGG_MODES)}"
        )
    if dp_size > 1 and (batch_num_tokens is None or global_batch_size is None):
        raise ValueError(
            f"agg_loss got dp_size={dp_size}, batch_num_tokens={batch_num_tokens}, "
            "global_batch_size="
            f"{global_batch_size}: one rank cannot count the mini-batch of several; pass both "
            "counts"
        )
    if loss_agg_mode == "seq-mean-token-sum-norm" and loss_scale_factor is None:
        raise ValueError(
            "loss_agg_mode 'seq-mean-token-sum-norm' got no loss_scale_factor, by which it "
            "divides: pass data.max_response_length, which counts.arguments has"
        )
