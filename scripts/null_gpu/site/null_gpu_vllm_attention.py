"""vLLM's flash attention over a paged cache, versions 2 and 3, on the memory of the null GPU."""

from itertools import pairwise

import torch
from null_gpu_attention import spread, weights_HQK
from null_gpu_kernels import on_host, register

_libraries = {name: torch.library.Library(name, "IMPL") for name in ("_vllm_fa2_C", "_vllm_fa3_C")}


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor | None,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    blocks: torch.Tensor,
    scale: float | None,
    causal: bool,
    left: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and, unread by vLLM without cascades, zeros for the sums.

    query: (tokens of all sequences, heads, values). *_cache: (blocks, slots of a block, heads,
    values). starts: where each sequence's queries begin, and their end. lengths: keys of each
    sequence. blocks: of each sequence, in order.
    """
    out = torch.empty_like(query) if out is None else out
    q, k, v, o = map(on_host, (query, key_cache, value_cache, out))
    bounds = on_host(starts).tolist()
    num_keys = on_host(lengths).tolist()
    tables = on_host(blocks)
    for row, (first, last) in enumerate(pairwise(bounds)):
        if last == first or not num_keys[row]:
            continue
        used = tables[row, : -(-num_keys[row] // k.size(1))].long()
        keys, values = (cache[used].flatten(0, 1)[: num_keys[row]] for cache in (k, v))
        weights = weights_HQK(q[first:last], keys, scale, causal, left)
        o[first:last] = (weights @ spread(values, q.size(1))).transpose(0, 1).to(o.dtype)
    return out, torch.zeros(q.size(1), q.size(0), device=query.device)


def _refuse(**given: object) -> None:
    asked = {name: value for name, value in given.items() if value is not None and value != 0}
    if asked:
        raise NotImplementedError(f"The null GPU does not answer this of vLLM's attention: {asked}")


def version_2(
    q,
    k,
    v,
    out,
    starts_q,
    starts_k,
    used_k,
    left_padding,
    blocks,
    alibi,
    max_q,
    max_k,
    dropout,
    scale,
    zero,
    causal,
    left,
    right,
    softcap,
    *unused,
):
    _refuse(left_padding=left_padding, alibi=alibi, dropout=dropout, softcap=softcap)
    return _attend(q, k, v, out, starts_q, used_k, blocks, scale, causal or right == 0, left)


def version_3(
    q,
    k,
    v,
    new_k,
    new_v,
    q_v,
    out,
    starts_q,
    starts_k,
    starts_new,
    used_q,
    used_k,
    max_q,
    max_k,
    blocks,
    batch_index,
    left_padding,
    cos,
    sin,
    rotary_lengths,
    q_scale,
    k_scale,
    v_scale,
    scale,
    causal,
    left,
    right,
    chunk_or_softcap,
    *unused,
):
    _refuse(new_k=new_k, q_v=q_v, left_padding=left_padding, cos=cos, softcap=chunk_or_softcap)
    out, sums = _attend(q, k, v, out, starts_q, used_k, blocks, scale, causal or right == 0, left)
    return out, sums, sums.new_zeros(0), sums.new_zeros(0)


def no_schedule(*unused: object) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device="cuda")


def install() -> None:
    register("varlen_fwd", version_2, _libraries["_vllm_fa2_C"])
    register("fwd", version_3, _libraries["_vllm_fa3_C"])
    register("get_scheduler_metadata", no_schedule, _libraries["_vllm_fa3_C"])
