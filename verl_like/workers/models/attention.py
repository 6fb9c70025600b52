"""Causal attention over packed sequences: what lets a forward run without padding and without
mixing sequences."""

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from verl_like.workers.models.sequence_exchange import SequenceExchange

# Legend: N tokens of all packed sequences together, H query heads, G key/value heads, D head size,
# L one sequence.


def choose_attention(
    requested: str | None, device: str, dtype: torch.dtype, softcap: float | None = None
) -> str:
    """Name of the packed attention to load a model with. Raises ValueError for one that this
    device, dtype, model or environment does not have.

    Args:
        requested: `override_config.attn_implementation`: None (choose), sdpa, varlen (torch) or
            flash_attention_2.
        device: `cpu` or `cuda`.
        dtype: the dtype attention computes in; the varlen kernels need bfloat16 or float16.
        softcap: the bound of the attention logits of models that have one (Gemma 2), which torch's
            varlen has not.
    """
    require_flash_attention(requested, key="model")
    on_gpu = device == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if requested in ("flash_attention_2", "varlen") and not on_gpu:
        raise ValueError(
            f"attn_implementation={requested} computes in bfloat16 or float16 on a GPU, not in "
            f"{dtype} on {device}; leave override_config.attn_implementation out."
        )
    if requested == "varlen" and softcap is not None:
        raise ValueError(
            "attn_implementation=varlen cannot bound attention logits, which this model does at "
            f"{softcap}; install flash-attn and set attn_implementation=flash_attention_2, or "
            "leave it at null."
        )
    if requested is None:
        has_flash = importlib.util.find_spec("flash_attn") is not None
        fastest = "flash_attention_2" if has_flash else "varlen" if softcap is None else "sdpa"
        requested = fastest if on_gpu else "sdpa"
    return _PACKED_NAMES[requested]


def require_flash_attention(requested: str | None, key: str) -> None:
    """Raises ValueError if flash-attn is requested for the model of this key, but not installed."""
    if requested == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise ValueError(
            f"{key}.override_config.attn_implementation=flash_attention_2, but flash-attn is not "
            "installed: pip install --no-build-isolation -e '.[flash]', or leave "
            "attn_implementation out."
        )


@dataclass(frozen=True)
class Sequences:
    """How N tokens are sequences, and what each token of them attends to."""

    lengths: list[int]
    cu_seqlens: torch.Tensor
    """(S + 1,) int32, where each of the S sequences starts; the last entry is N."""
    scale: float | None = None
    """Factor of the attention logits; None means 1 / sqrt(D)."""
    window: int | None = None
    """The nearest tokens that a token attends to, itself among them; None means all before it."""
    softcap: float | None = None
    """Bound of the attention logits."""


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Sequences], torch.Tensor]
"""(query (1 H N D), key and value (1 G N D), sequences) -> (1 N H D)."""


_NOT_COMPUTED = "which packed attention does not compute"
_REFUSED = {
    "attention_mask": "has an attention mask of its own",
    "position_bias": "adds a bias to its attention logits",
    "s_aux": "has attention sinks",
    "indices": "attends to chosen tokens",
    "block_indices": "attends to chosen blocks of tokens",
}
"""What models hand to transformers' attention beside queries, keys and values, and what they do
with it."""


def packed_attention(kernel: Kernel) -> Callable[..., tuple[torch.Tensor, None]]:
    """What transformers calls in every layer: checks, the exchange of sequence parallelism, and
    `kernel`."""

    @torch.compiler.disable
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        cu_seqlens: torch.Tensor | None = None,
        sequence_lengths: torch.Tensor | None = None,
        sequence_parallel: SequenceExchange | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        **further: Any,
    ) -> tuple[torch.Tensor, None]:
        if dropout:
            raise ValueError(
                f"The model trains with attention dropout {dropout}, which makes the probability "
                "ratio of a policy to itself differ from 1; set "
                "model.override_config.attention_dropout=0."
            )
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            raise ValueError(f"{type(module).__name__} attends to later tokens, {_NOT_COMPUTED}.")
        further["attention_mask"] = attention_mask
        for name, what in _REFUSED.items():
            if further.get(name) is not None:
                raise ValueError(f"{type(module).__name__} {what}, {_NOT_COMPUTED}.")
        if cu_seqlens is None or sequence_lengths is None:
            raise ValueError(
                f"{type(module).__name__} is not told where sequences begin, since the layers of "
                "the model do not hand further arguments on to it; packed sequences would attend "
                "to each other."
            )
        value_size = value.size(-1)
        if value_size < query.size(-1):
            # Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). The exchange and some
            # kernels need one size.
            value = F.pad(value, (0, query.size(-1) - value_size))
        if sequence_parallel is not None:
            query, key, value = sequence_parallel.tokens_to_heads(query, key, value)
        sequences = Sequences(
            sequence_lengths.tolist(), cu_seqlens, scaling, sliding_window, softcap
        )
        output = kernel(query, key, value, sequences)
        if sequence_parallel is not None:
            output = sequence_parallel.heads_to_tokens(output)
        return output[..., :value_size], None

    return attend


def packed_sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences
) -> torch.Tensor:
    """Causal attention of each sequence to itself, one call for neighbours of the same length."""
    runs = [(length, len(list(same))) for length, same in groupby(sequences.lengths)]
    scale = sequences.scale
    window = sequences.window
    softcap = sequences.softcap
    outputs = []
    enable_gqa = query.size(1) != key.size(1)
    split = (
        tensor[0].split([length * count for length, count in runs], dim=1)
        for tensor in (query, key, value)
    )
    for (length, count), *run in zip(runs, *split, strict=True):
        # (sequences, heads, L, D)
        q, k, v = (tensor.unflatten(1, (count, length)).transpose(0, 1) for tensor in run)
        mask_LL = None
        if softcap is not None or (window is not None and length > window):
            distance_LL = torch.arange(length, device=q.device)[:, None] - torch.arange(
                length, device=q.device
            )
            mask_LL = (distance_LL >= 0) & (distance_LL < (window or length))
        if softcap is not None:
            assert mask_LL is not None
            output = _softcapped(q, k, v, mask_LL, scale, softcap)
        else:
            output = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask_LL,
                is_causal=mask_LL is None,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).unsqueeze(0)


def _softcapped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask_LL: torch.Tensor,
    scale: float | None,
    softcap: float,
) -> torch.Tensor:
    """Attention with the logits bounded by softcap * tanh(logits / softcap) (Gemma 2,
    arXiv:2408.00118)."""
    k, v = (tensor.repeat_interleave(q.size(1) // tensor.size(1), dim=1) for tensor in (k, v))
    logits_LL = q @ k.transpose(2, 3) * (q.size(-1) ** -0.5 if scale is None else scale)
    logits_LL = (softcap * torch.tanh(logits_LL / softcap)).masked_fill(~mask_LL, -torch.inf)
    return logits_LL.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


# torch 2.11's kernel takes grouped heads without a setting.
_VARLEN_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


def packed_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences
) -> torch.Tensor:
    """The same by torch's variable-length kernel, in one call."""
    assert sequences.softcap is None, (
        "choose_attention gives a model with bounded logits another kernel"
    )
    starts = sequences.cu_seqlens
    longest = max(sequences.lengths)
    window = sequences.window
    query_NHD, key_NHD, value_NHD = (
        tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)
    )
    output_NHD: Any = varlen_attn(
        *(query_NHD, key_NHD, value_NHD, starts, starts, longest, longest),
        scale=sequences.scale,
        window_size=(-1 if window is None else window - 1, 0),
        **_VARLEN_GROUPED,
    )
    return output_NHD.unsqueeze(0)


def packed_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences
) -> torch.Tensor:
    """The same by flash-attn's variable-length kernel, in one call."""
    from flash_attn import flash_attn_varlen_func

    starts = sequences.cu_seqlens
    longest = max(sequences.lengths)
    window = sequences.window
    output_NHD = flash_attn_varlen_func(
        *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
        *(starts, starts, longest, longest),
        softmax_scale=sequences.scale,
        causal=True,
        window_size=(-1 if window is None else window - 1, 0),
        softcap=sequences.softcap or 0.0,
    )
    return output_NHD.unsqueeze(0)


# transformers gives names containing "flash" a meaning of its own, and builds no mask for names it
# does not know.
_PACKED_NAMES = {
    "sdpa": "packed_sdpa",
    "varlen": "packed_varlen",
    "flash_attention_2": "packed_fa2",
}
AttentionInterface.register("packed_sdpa", packed_attention(packed_sdpa))
AttentionInterface.register("packed_varlen", packed_attention(packed_varlen))
AttentionInterface.register("packed_fa2", packed_attention(packed_flash))
