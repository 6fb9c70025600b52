"""Causal attention over packed sequences: what lets a forward run without padding and without mixing sequences."""

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

# Legend: N tokens of all packed sequences together, H query heads, G key/value heads, D head size, L longest sequence.


def choose_attention(requested: str | None, device: str, dtype: torch.dtype) -> str:
    """Name of the packed attention to load a model with.

    Args:
        requested: the configured `attn_implementation`: None (choose), `sdpa`, `varlen` (torch) or `flash_attention_2`.
        device: `cpu` or `cuda`.
        dtype: the dtype attention computes in; the varlen kernels need bfloat16 or float16.

    Raises:
        ValueError: unknown name, or one that this device, dtype or environment does not have.
    """
    if requested not in (None, *_PACKED_NAMES):
        raise ValueError(f"attn_implementation={requested!r} is unknown; use null or one of {sorted(_PACKED_NAMES)}.")
    has_flash = importlib.util.find_spec("flash_attn") is not None
    can_varlen = device == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if requested == "flash_attention_2" and not has_flash:
        raise ValueError(
            "attn_implementation=flash_attention_2 needs the package flash-attn, which is not installed: "
            'pip install -e ".[gpu]", or set attn_implementation=null.'
        )
    if requested in ("flash_attention_2", "varlen") and not can_varlen:
        raise ValueError(
            f"attn_implementation={requested} computes in bfloat16 or float16 on a GPU, not in {dtype} on {device}; "
            "set attn_implementation=null."
        )
    if requested is None:
        requested = "sdpa" if not can_varlen else "flash_attention_2" if has_flash else "varlen"
    return _PACKED_NAMES[requested]


def packed_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sequence_lengths: list[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of each sequence to itself, one call per sequence: query (1 H N D), key and value (1 G N D)."""
    _refuse_dropout(dropout)
    outputs = []
    heads = {"scale": scaling, "enable_gqa": query.size(1) != key.size(1)}
    for q, k, v in zip(*(tensor.split(sequence_lengths, dim=2) for tensor in (query, key, value)), strict=True):
        length = q.size(2)
        if sliding_window is None or length <= sliding_window:
            outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, **heads))
        else:
            distance_LL = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
            window_LL = (distance_LL >= 0) & (distance_LL < sliding_window)
            outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=window_LL, **heads))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def packed_varlen(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seqlens: torch.Tensor,
    sequence_lengths: list[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The same by torch's variable-length kernel, in one call: query (1 H N D), key and value (1 G N D)."""
    _refuse_dropout(dropout)
    longest = max(sequence_lengths)
    output_NHD = varlen_attn(
        *(tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)),
        *(cu_seqlens, cu_seqlens, longest, longest),
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.size(1) != key.size(1),
    )
    return output_NHD.unsqueeze(0), None


def packed_flash(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seqlens: torch.Tensor,
    sequence_lengths: list[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The same by flash-attn's variable-length kernel, in one call: query (1 H N D), key and value (1 G N D)."""
    from flash_attn import flash_attn_varlen_func

    _refuse_dropout(dropout)
    longest = max(sequence_lengths)
    output_NHD = flash_attn_varlen_func(
        *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
        *(cu_seqlens, cu_seqlens, longest, longest),
        softmax_scale=scaling,
        causal=True,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
    )
    return output_NHD.unsqueeze(0), None


def _refuse_dropout(dropout: float) -> None:
    if dropout:
        raise ValueError(
            f"The model trains with attention dropout {dropout}, which makes the probability ratio of a policy to "
            "itself differ from 1; set model.override_config.attention_dropout=0."
        )


# transformers gives names containing "flash" a meaning of its own, and builds no mask for names it does not know.
_PACKED_NAMES = {"sdpa": "packed_sdpa", "varlen": "packed_varlen", "flash_attention_2": "packed_fa2"}
AttentionInterface.register("packed_sdpa", packed_sdpa)
AttentionInterface.register("packed_varlen", packed_varlen)
AttentionInterface.register("packed_fa2", packed_flash)
