"""Attention over sequences of several lengths, on the CPU: what flash kernels compute, with all
scores in memory.

Shapes: H heads of queries, G heads of keys and values, D values a head; in a sequence Q queries and
K keys. Scores, weights and sums are float32.
"""

from collections.abc import Iterator
from itertools import pairwise

import null_gpu_kernels
import torch


def weights_HQK(
    query_QHD: torch.Tensor,
    key_KGD: torch.Tensor,
    scale: float | None,
    causal: bool,
    left: int = -1,
) -> torch.Tensor:
    """The softmax of the scores. The last query stands at the last key; it sees `left` before its
    own, -1 for all."""
    query_HQD = query_QHD.float().transpose(0, 1)
    key_HKD = spread(key_KGD, query_QHD.size(1))
    scores_HQK = query_HQD @ key_HKD.transpose(1, 2) * (scale or query_QHD.size(2) ** -0.5)
    num_queries, num_keys = scores_HQK.shape[1:]
    behind_QK = torch.arange(num_queries)[:, None] + num_keys - num_queries - torch.arange(num_keys)
    hidden_QK = (behind_QK < 0) & torch.tensor(causal) | (behind_QK > left) & torch.tensor(
        left >= 0
    )
    return scores_HQK.masked_fill(hidden_QK, -torch.inf).softmax(-1)


def spread(values_KGD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The heads of keys or values as (H, K, D), each repeated for the queries that share it."""
    return values_KGD.float().transpose(0, 1).repeat_interleave(num_heads // values_KGD.size(1), 0)


def _gather(values_HKD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The sum over queries that share a head: (H, K, D) to (K, G, D)."""
    return values_HKD.unflatten(0, (num_heads, -1)).sum(1).transpose(0, 1)


def _sequences(
    starts_query: torch.Tensor, starts_key: torch.Tensor
) -> Iterator[tuple[slice, slice]]:
    bounds = [null_gpu_kernels.on_host(starts).tolist() for starts in (starts_query, starts_key)]
    for query, key in zip(*map(pairwise, bounds), strict=True):
        yield slice(*query), slice(*key)


def forward(
    query,
    key,
    value,
    starts_query,
    starts_key,
    max_query,
    max_key,
    dropout,
    causal,
    debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
    block_table=None,
    num_splits=None,
):
    """aten::_flash_attention_forward over packed sequences."""
    if (
        starts_query is None
        or dropout
        or seqused_k is not None
        or alibi_slopes is not None
        or block_table is not None
    ):
        raise NotImplementedError(
            "The null GPU answers flash attention over packed sequences alone, without dropout."
        )
    out = torch.empty_like(query)
    q, k, v, o = (null_gpu_kernels.on_host(tensor) for tensor in (query, key, value, out))
    causal, left = _window(causal, window_size_left, window_size_right)
    for queries, keys in _sequences(starts_query, starts_key):
        weights = weights_HQK(q[queries], k[keys], scale, causal, left)
        o[queries] = (weights @ spread(v[keys], q.size(1))).transpose(0, 1).to(o.dtype)
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
    # The backward here does not read them
    log_sums = torch.zeros(query.size(1), query.size(0), device=query.device)
    return out, log_sums, unused, unused.clone(), query.new_zeros(0)


def backward(
    grad,
    query,
    key,
    value,
    out,
    log_sums,
    starts_query,
    starts_key,
    max_query,
    max_key,
    dropout,
    causal,
    state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    """aten::_flash_attention_backward. With P the weights: dV = P' dO, dS = P * (dO V' - rowsum(P *
    dO V'))."""
    grads = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    dq, dk, dv, do, q, k, v = (
        null_gpu_kernels.on_host(tensor) for tensor in (*grads, grad, query, key, value)
    )
    causal, left = _window(causal, window_size_left, window_size_right)
    num_heads = q.size(1)
    num_shared = k.size(1)
    for queries, keys in _sequences(starts_query, starts_key):
        weights = weights_HQK(q[queries], k[keys], scale, causal, left)
        grad_out = do[queries].float().transpose(0, 1)
        grad_weights = grad_out @ spread(v[keys], num_heads).transpose(1, 2)
        grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True))
        grad_scores *= scale or q.size(2) ** -0.5
        dq[queries] = (grad_scores @ spread(k[keys], num_heads)).transpose(0, 1).to(dq.dtype)
        dk[keys] = _gather(
            grad_scores.transpose(1, 2) @ q[queries].float().transpose(0, 1), num_shared
        ).to(dk.dtype)
        dv[keys] = _gather(weights.transpose(1, 2) @ grad_out, num_shared).to(dv.dtype)
    return tuple(grads)


def _window(causal: bool, left: int | None, right: int | None) -> tuple[bool, int]:
    return causal or right == 0, -1 if left is None else left
