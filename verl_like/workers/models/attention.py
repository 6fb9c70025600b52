"""Causal attention over packed sequences, each of which attends to itself alone."""

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from verl_like.workers.models.sequence_exchange import SequenceExchange
from verl_like.workers.models.shared_prompts import rows_at

# Legend: N tokens of all packed sequences together, H query heads, G key/value heads, D head size,
# L one sequence, Q its queries; T tokens of all sequences, if some of them share tokens.


def choose_attention(
    requested: str | None, device: str, dtype: torch.dtype, softcap: float | None = None
) -> str:
    """Returns the name of the packed attention to load a model with.

    Raises ValueError for one that this device, dtype, model or environment does not support.

    Args:
        requested: `override_config.attn_implementation`: sdpa, varlen (of torch),
            flash_attention_2, or None for the fastest one.
        device: `cpu` or `cuda`.
        dtype: the dtype that attention computes in. Only sdpa supports float32.
        softcap: the bound of the model's attention logits (Gemma 2) or None. torch's varlen does
            not support it.
    """
    require_flash_attention(requested, key="model")
    is_half_on_gpu = device == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if requested in ("flash_attention_2", "varlen") and not is_half_on_gpu:
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
        requested = "sdpa"
        if is_half_on_gpu and importlib.util.find_spec("flash_attn") is not None:
            requested = "flash_attention_2"
        elif is_half_on_gpu and softcap is None:
            requested = "varlen"
    return _PACKED_NAMES[requested]


def settle_sinks(hf: PreTrainedModel, requested: str | None) -> None:
    """Has sdpa compute a model with attention sinks, since no other packed attention does.

    A sink is a learned logit of each query head, to which no value belongs (StreamingLLM,
    arXiv:2309.17453; gpt-oss). Models without sinks stay as they are. Raises ValueError if another
    attention is requested, see `choose_attention`.
    """
    with_sinks = [name for name, _parameter in hf.named_parameters() if "sink" in name]
    if not with_sinks:
        return
    if requested not in (None, "sdpa"):
        raise ValueError(
            f"attn_implementation={requested} does not compute attention sinks, which "
            f"{type(hf).__name__} has ({with_sinks[0]}); leave "
            "override_config.attn_implementation out."
        )
    if hf.config._attn_implementation in _PACKED_NAMES.values():
        hf.set_attn_implementation(_PACKED_NAMES["sdpa"])


def require_flash_attention(requested: str | None, key: str) -> None:
    """Raises ValueError if flash-attn is requested for the model of this key, but not installed."""
    if requested == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise ValueError(
            f"{key}.override_config.attn_implementation=flash_attention_2, but flash-attn is not "
            "installed: pip install --no-build-isolation -e '.[flash]', or leave "
            "attn_implementation out."
        )


@dataclass(frozen=True)
class Queries:
    """The queries of sequences that share the beginnings of others, see `shared_prompts`.

    Each sequence has queries for its last tokens alone, and keys for all of them.
    """

    lengths: list[int]
    """The number of queries of each of the S sequences."""
    cu_seqlens: Tensor
    """(S + 1,) int32, the first query of each sequence; the last entry is N."""


@dataclass(frozen=True)
class Sequences:
    """The sequences that packed tokens are, and how their tokens attend to each other."""

    lengths: list[int]
    cu_seqlens: Tensor
    """(S + 1,) int32, the start of each of the S sequences; the last entry is N, or T if they share
    tokens."""
    scale: float | None = None
    """The factor of the attention logits; None means 1 / sqrt(D)."""
    window: int | None = None
    """How many tokens a token attends to: itself and those before it. None means all before it."""
    softcap: float | None = None
    """The bound of the attention logits."""
    sinks: Tensor | None = None
    """The sink of each query head, (H,), one more attention logit, which has no value."""
    shared: Queries | None = None
    """The queries, if sequences share tokens. Otherwise each token has its own query."""

    @property
    def queries(self) -> Queries:
        """The queries of each sequence, the last of which belongs to its last token."""
        return self.shared or Queries(self.lengths, self.cu_seqlens)

    @property
    def window_size(self) -> tuple[int, int]:
        """How many tokens before it and after it a token attends to; -1 means all."""
        before = -1 if self.window is None else self.window - 1
        return before, 0


Kernel = Callable[[Tensor, Tensor, Tensor, Sequences], Tensor]
"""A function of the query (1, H, N, D), key and value (1, G, N, D) and sequences, which returns the
output (1, N, H, D). If sequences share tokens, key and value have T tokens."""


_NOT_COMPUTED = "which packed attention does not compute"
_REFUSED = {
    "attention_mask": "has an attention mask of its own",
    "position_bias": "adds a bias to its attention logits",
    "indices": "attends to chosen tokens",
    "block_indices": "attends to chosen blocks of tokens",
}
"""Arguments of transformers' attention that packed attention does not support, and what a model
that gives them does."""


def packed_attention(kernel: Kernel) -> Callable[..., tuple[Tensor, None]]:
    """Returns the attention function that transformers calls in every layer.

    It refuses what packed attention does not compute, does the exchanges of sequence parallelism,
    and calls `kernel`.
    """

    @torch.compiler.disable
    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        cu_seqlens: Tensor | None = None,
        sequence_lengths: Tensor | None = None,
        key_places: Tensor | None = None,
        query_lengths: Tensor | None = None,
        cu_queries: Tensor | None = None,
        sequence_parallel: SequenceExchange | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        **further: Any,
    ) -> tuple[Tensor, None]:
        if dropout:
            raise ValueError(
                f"The model trains with attention dropout {dropout}, which makes the probability "
                "ratio of a policy to itself differ from 1; set "
                "model.override_config.attention_dropout=0."
            )
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        if not is_causal:
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
            # Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) has smaller values. But
            # the exchange and some kernels need the same size.
            num_zeros = query.size(-1) - value_size
            value = F.pad(value, (0, num_zeros))
        if sequence_parallel is not None:
            query, key, value = sequence_parallel.tokens_to_heads(query, key, value)
            if s_aux is not None:
                s_aux = sequence_parallel.own_heads(s_aux)
        queries = None
        if key_places is not None and query_lengths is not None and cu_queries is not None:
            queries = Queries(query_lengths.tolist(), cu_queries)
            key = _at_places(key, key_places)
            value = _at_places(value, key_places)
        lengths = sequence_lengths.tolist()
        if sum(lengths) != key.size(2):
            raise ValueError(
                f"{type(module).__name__} is not told which tokens sequences share, since the "
                "layers of the model hand only some further arguments on to it; set "
                "use_prefix_grouper=false."
            )
        sequences = Sequences(lengths, cu_seqlens, scaling, sliding_window, softcap, s_aux, queries)
        output = kernel(query, key, value, sequences)
        if sequence_parallel is not None:
            output = sequence_parallel.heads_to_tokens(output)
        return output[..., :value_size], None

    return attend


def _at_places(packed: Tensor, places: Tensor) -> Tensor:
    """Returns the heads of the tokens at some places, (1, G, T, D), of those of all tokens,
    (1, G, N, D)."""
    by_token = rows_at(packed[0].transpose(0, 1), places)
    return by_token.transpose(0, 1).unsqueeze(0)


def packed_sdpa(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Computes attention by torch's `scaled_dot_product_attention`.

    Consecutive sequences of the same length are computed in one call.
    """
    window = sequences.window
    is_by_hand = sequences.softcap is not None or sequences.sinks is not None
    outputs = []
    enable_gqa = query.size(1) != key.size(1)
    query_shapes = []
    key_shapes = []
    both_lengths = zip(sequences.queries.lengths, sequences.lengths, strict=True)
    for (num_queries, length), same in groupby(both_lengths):
        count = len(list(same))
        query_shapes.append((count, num_queries))
        key_shapes.append((count, length))
    queries = _by_length(query, query_shapes)
    keys = _by_length(key, key_shapes)
    values = _by_length(value, key_shapes)
    for q, k, v in zip(queries, keys, values, strict=True):
        num_queries = q.size(2)
        length = k.size(2)
        mask_QL = None
        has_window = window is not None and length > window
        if has_window or is_by_hand or num_queries < length:
            reach = window or length
            places_L = torch.arange(length, device=q.device)
            places_Q = places_L[length - num_queries :]
            distance_QL = places_Q[:, None] - places_L
            mask_QL = (distance_QL >= 0) & (distance_QL < reach)
        if is_by_hand:
            assert mask_QL is not None
            output = _by_hand(q, k, v, mask_QL, sequences)
        else:
            output = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask_QL,
                is_causal=mask_QL is None,
                scale=sequences.scale,
                enable_gqa=enable_gqa,
            )
        output_NHD = output.transpose(1, 2).flatten(0, 1)
        outputs.append(output_NHD)
    return torch.cat(outputs).unsqueeze(0)


def _by_length(packed: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    """Divides packed heads (1, H, N, D) into views (sequences, H, L, D), whose sequences and L are
    in `shapes`."""
    num_tokens = [count * length for count, length in shapes]
    parts = packed[0].split(num_tokens, dim=1)
    pairs = zip(parts, shapes, strict=True)
    return [part.unflatten(1, shape).transpose(0, 1) for part, shape in pairs]


def _by_hand(q: Tensor, k: Tensor, v: Tensor, mask_QL: Tensor, sequences: Sequences) -> Tensor:
    """Computes attention with bounded logits or with sinks, which torch's function does not know.

    Bounded logits are softcap * tanh(logits / softcap) (Gemma 2, arXiv:2408.00118). A sink is one
    more logit in the softmax of each query, whose weight is dropped afterwards (gpt-oss).
    """
    num_repeats = q.size(1) // k.size(1)
    k = k.repeat_interleave(num_repeats, dim=1)
    v = v.repeat_interleave(num_repeats, dim=1)
    scale = sequences.scale
    if scale is None:
        scale = q.size(-1) ** -0.5
    logits_QL = q @ k.transpose(2, 3) * scale
    softcap = sequences.softcap
    if softcap is not None:
        logits_QL = softcap * torch.tanh(logits_QL / softcap)
    logits = logits_QL.masked_fill(~mask_QL, -torch.inf)
    if sequences.sinks is not None:
        sinks_Q1 = sequences.sinks[:, None, None].expand(*logits_QL.shape[:3], 1)
        logits = torch.cat((logits, sinks_Q1.to(logits.dtype)), dim=-1)
    weights = logits.softmax(-1, dtype=torch.float32)
    weights_QL = weights[..., : mask_QL.size(1)]
    return weights_QL.to(v.dtype) @ v


_VARLEN_GROUPED: dict[str, Any] = {}
"""The setting that torch's kernel needs for grouped heads. That of torch 2.11 needs none."""
if "enable_gqa" in inspect.signature(varlen_attn).parameters:
    _VARLEN_GROUPED["enable_gqa"] = True


def packed_varlen(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Computes attention by torch's kernel for sequences of different lengths, in one call."""
    assert sequences.softcap is None, (
        "choose_attention gives a model with bounded logits another kernel"
    )
    assert sequences.sinks is None, "settle_sinks gives a model with sinks another kernel"
    queries = sequences.queries
    output_NHD: Any = varlen_attn(
        _by_token(query).contiguous(),
        _by_token(key).contiguous(),
        _by_token(value).contiguous(),
        queries.cu_seqlens,
        sequences.cu_seqlens,
        max(queries.lengths),
        max(sequences.lengths),
        scale=sequences.scale,
        window_size=sequences.window_size,
        **_VARLEN_GROUPED,
    )
    return output_NHD.unsqueeze(0)


def _by_token(packed: Tensor) -> Tensor:
    """Returns packed heads (1, H, N, D) as (N, H, D), a view."""
    return packed[0].transpose(0, 1)


def packed_flash(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
    """Computes attention by flash-attn's kernel for sequences of different lengths, in one call."""
    from flash_attn import flash_attn_varlen_func

    assert sequences.sinks is None, "settle_sinks gives a model with sinks another kernel"
    queries = sequences.queries
    output_NHD = flash_attn_varlen_func(
        _by_token(query),
        _by_token(key),
        _by_token(value),
        queries.cu_seqlens,
        sequences.cu_seqlens,
        max(queries.lengths),
        max(sequences.lengths),
        softmax_scale=sequences.scale,
        causal=True,
        window_size=sequences.window_size,
        softcap=sequences.softcap or 0.0,
    )
    return output_NHD.unsqueeze(0)


# transformers makes no mask for these names, because it does not know them. None contains "flash"
# or "sdpa", which have a meaning for transformers.
_PACKED_NAMES = {
    "sdpa": "packed_torch",
    "varlen": "packed_varlen",
    "flash_attention_2": "packed_fa2",
}
AttentionInterface.register("packed_torch", packed_attention(packed_sdpa))
AttentionInterface.register("packed_varlen", packed_attention(packed_varlen))
AttentionInterface.register("packed_fa2", packed_attention(packed_flash))
