"""Rows of a pass with the same prompt compute it once.

The samples of a prompt begin with the same tokens, of which the layers compute the same. So a pass
computes the prompt in the first of these rows, and in each of the others only the tokens after it,
which attend to the first row's. Logits, losses and gradients are those of whole rows, up to
rounding. (verl calls it prefix grouper.)
"""

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl_like.protocol.row_ops import jagged_parts, offsets_of, row_lengths
from verl_like.workers.models.packing import PackedBatch, Rows
from verl_like.workers.models.routed_experts import ROUTED_EXPERTS

# Legend: B rows, T tokens of all rows, N tokens that a pass computes, M scored tokens.


def first_rows_of_prompts(prompts: Tensor) -> Tensor:
    """Returns the first row that has the same prompt, for each row of a jagged column, (B,)
    int64."""
    values, offsets = jagged_parts(prompts)
    tokens = values.numpy()
    first_of_prompt: dict[bytes, int] = {}
    first_rows = []
    for row, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        prompt = tokens[start:end].tobytes()
        first_row = first_of_prompt.setdefault(prompt, row)
        first_rows.append(first_row)
    return torch.tensor(first_rows, dtype=torch.int64)


def lengths_of_shared_prompts(rows: Rows, first_rows_B: Tensor) -> Tensor:
    """Returns the number of tokens of each row's prompt, or 0 for the first row that has it, (B,)
    int64."""
    is_first_B = first_rows_B == torch.arange(len(rows))
    return row_lengths(rows["prompts"]).masked_fill(is_first_B, 0)


def num_shared_tokens(rows: Rows, first_rows_B: Tensor) -> Tensor:
    """Returns how many tokens each row has in common with the first row of its prompt, (B,) int64.

    They are those of the prompt, up to the first one whose routing is replayed and differs. First
    rows have 0, because they compute their tokens.
    """
    shared_B = lengths_of_shared_prompts(rows, first_rows_B)
    if ROUTED_EXPERTS not in rows:
        return shared_B
    ids, offsets = jagged_parts(rows[ROUTED_EXPERTS])
    (others,) = torch.where(shared_B > 0)
    for row in others.tolist():
        length = int(shared_B[row])
        start = int(offsets[row])
        start_of_first = int(offsets[first_rows_B[row]])
        own_ids = ids[start : start + length]
        ids_of_first = ids[start_of_first : start_of_first + length]
        differs = (own_ids != ids_of_first).flatten(1).any(1)
        if differs.any():
            shared_B[row] = int(differs.nonzero()[0])
    return shared_B


def share_prompts(packed: PackedBatch, rows: Rows) -> PackedBatch:
    """Removes the tokens of prompts from a packed batch that earlier rows of it have.

    Args:
        packed: what `pack` returns of the rows, with T tokens.
        rows: the rows, of which some may have the same prompt.
    """
    first_rows_B = first_rows_of_prompts(rows["prompts"])
    shared_B = num_shared_tokens(rows, first_rows_B)
    if not shared_B.any():
        return packed
    lengths_B = rows.lengths_B
    starts_B = offsets_of(lengths_B)[:-1]
    row_of_token = torch.repeat_interleave(lengths_B)
    position_T = packed.position_ids[0]
    is_computed_T = position_T >= shared_B[row_of_token]
    first_row_T = torch.where(is_computed_T, row_of_token, first_rows_B[row_of_token])
    # Where the token that is computed in place of each token is among all, then among these.
    place_among_all_T = starts_B[first_row_T] + position_T
    place_T = (is_computed_T.long().cumsum(0) - 1)[place_among_all_T]
    scored = place_T[packed.scored]
    # Scored tokens ascend, which ranks that share a batch rely on.
    order_M = scored.argsort(stable=True)
    routed_experts = packed.routed_experts
    if routed_experts is not None:
        routed_experts = routed_experts[is_computed_T]
    counted = packed.counted
    if counted is not None:
        num_computed = int(is_computed_T.sum())
        counted = counted.new_zeros(num_computed).index_add(0, place_T, counted)
    query_lengths_B = lengths_B - shared_B
    return replace(
        packed,
        input_ids=packed.input_ids[:, is_computed_T],
        position_ids=packed.position_ids[:, is_computed_T],
        scored=scored[order_M],
        labels=packed.labels[order_M],
        places=packed.places[order_M],
        routed_experts=routed_experts,
        counted=counted,
        token_places=place_T,
        query_lengths=query_lengths_B.tolist(),
        cu_queries=offsets_of(query_lengths_B).int(),
    )


def rows_at(values: Tensor, places: Tensor) -> Tensor:
    """Returns the entries (T, ...) at some places (T,) of values (N, ...).

    The gradient of an entry that is taken several times is summed in float32, and in the same order
    each time.
    """
    return _RowsAt.apply(values, places)


class _RowsAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = values.shape
        return values.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        total = gradient.new_zeros(ctx.shape, dtype=torch.float32)
        parts = gradient.float()
        # Each of the two is in a fixed order on one kind of device alone.
        if gradient.device.type == "cpu":
            total.index_add_(0, places, parts)
        else:
            total.index_put_((places,), parts, accumulate=True)
        return total.to(gradient.dtype), None
