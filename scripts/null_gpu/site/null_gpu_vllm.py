"""The CUDA kernels of vLLM that a Llama needs, on the memory of the null GPU: norms, activation,
positions, cache.

vLLM's own Triton kernels need no answer but those for adapters: TRITON_INTERPRET=1 runs them.
"""

import torch
from null_gpu_kernels import on_host, register

_library = torch.library.Library("_C", "IMPL")
_cache_library = torch.library.Library("_C_cache_ops", "IMPL")


def _normalized(values: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon), rounded, times the weight."""
    wide = values.float()
    rounded = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(values.dtype)
    return rounded if weight is None else rounded * on_host(weight)


def rms_norm(
    out: torch.Tensor, values: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    on_host(out).copy_(_normalized(on_host(values), weight, epsilon))


def fused_add_rms_norm(
    values: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    """`residual` takes the sum of both, and `values` the norm of it."""
    on_host(residual).add_(on_host(values))
    on_host(values).copy_(_normalized(on_host(residual), weight, epsilon))


def silu_and_mul(out: torch.Tensor, gate_and_up: torch.Tensor) -> None:
    gate, up = on_host(gate_and_up).float().chunk(2, -1)
    on_host(out).copy_(torch.nn.functional.silu(gate) * up)


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_and_sin: torch.Tensor,
    is_neox: bool,
    *unused: object,
) -> None:
    """Turns pairs of each head by the angle of its position: with neox the halves, else
    neighbours."""
    cos, sin = on_host(cos_and_sin)[on_host(positions).flatten()].float()[:, None].chunk(2, -1)
    width = 2 * cos.size(-1)
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = on_host(tensor).view(positions.numel(), -1, head_size)[..., :width]
        turned = heads.float()
        first, second = turned.chunk(2, -1) if is_neox else (turned[..., ::2], turned[..., 1::2])
        pair = (first * cos - second * sin, second * cos + first * sin)
        heads.copy_(torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2))


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    dtype: str,
    *scales: torch.Tensor,
) -> None:
    """Writes each token's key and value into its slot of (blocks, slots of a block, heads, values);
    -1 is padding."""
    if dtype != "auto":
        raise NotImplementedError(
            f"The null GPU answers caches in the dtype of the model, not {dtype}."
        )
    slot = on_host(slots)
    kept = (slot >= 0).nonzero().squeeze(1)
    place = (slot[kept] // key_cache.size(1), slot[kept] % key_cache.size(1))
    for cache, new in ((key_cache, key), (value_cache, value)):
        on_host(cache)[place] = on_host(new)[kept]


def vocab_parallel_embedding(
    out: torch.Tensor,
    tokens: torch.Tensor,
    weight: torch.Tensor,
    start: int,
    end: int,
    num_padding: int,
    added_start: int,
    added_end: int,
) -> None:
    """A rank's rows of an embedding, 0 for the tokens that others have; its added tokens follow its
    own and padding."""
    token = on_host(tokens)
    is_own = (token >= start) & (token < end)
    is_added = (token >= added_start) & (token < added_end)
    row = torch.where(is_own, token - start, token - added_start + (end - start) + num_padding)
    row = torch.where(is_own | is_added, row, 0)
    on_host(out).copy_(on_host(weight)[row.long()] * (is_own | is_added)[:, None])


def install() -> None:
    for kernel in (
        rms_norm,
        fused_add_rms_norm,
        silu_and_mul,
        rotary_embedding,
        vocab_parallel_embedding,
    ):
        register(kernel.__name__, kernel, _library)
    register("reshape_and_cache_flash", reshape_and_cache_flash, _cache_library)
