"""Rows without padding: how a batch is packed for a forward pass, and what a pass returns unpacked."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from verl_like.workers.models.sequence_exchange import SequenceExchange
from verl_like.workers.pinned_memory import to_device

# Legend: B rows, T = P + R padded sequence length, P prompt, R response, N tokens without padding, M scored tokens,
# S sequences.

SEQUENCE_COLUMNS = ("input_ids", "attention_mask", "position_ids", "response_mask")
"""What `pack` reads."""


@dataclass(frozen=True)
class PackedBatch:
    """Rows without their padding, one after the other, and where their response tokens are."""

    input_ids: torch.Tensor
    """(1, N) int64."""
    position_ids: torch.Tensor
    """(1, N) int64."""
    cu_seqlens: torch.Tensor
    """(S + 1,) int32, where each sequence starts; the last entry is N."""
    sequence_lengths: list[int]
    """The S lengths, on the host."""
    scored: torch.Tensor
    """(M,) int64: packed index of the token *before* each response token, whose output predicts it."""
    labels: torch.Tensor
    """(M,) int64, the response tokens themselves."""
    places: torch.Tensor
    """(M,) int64, where the scored tokens lie among the B * R of the padded rows."""
    padded_shape: torch.Size
    """(B, R)."""
    exchange: SequenceExchange | None = None
    """The ranks that share the batch; tokens and scored tokens are then this rank's alone, m of the M."""
    scored_before: int = 0
    """Scored tokens on the ranks before this one."""
    num_scored: int = 0
    """M, where ranks share the batch."""

    def on(self, device: str) -> "PackedBatch":
        """The batch with its tensors on a device."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        moved: dict[str, Any] = to_device(tensors, device)
        return replace(self, **moved)

    def unpack(self, scored_values: torch.Tensor) -> torch.Tensor:
        """(M,) -> (B, R) float32, zero elsewhere; differentiable; a share's values are gathered."""
        if self.exchange is not None:
            scored_values = self.exchange.gather(scored_values, self.scored_before, self.num_scored)
        padded = torch.zeros(self.padded_shape.numel(), dtype=torch.float32, device=scored_values.device)
        return padded.index_copy(0, self.places, scored_values.float()).view(self.padded_shape)

    def shard(self, exchange: SequenceExchange) -> "PackedBatch":
        """This rank's share of the tokens, with the scored tokens among them; `unpack` gathers their values.

        The batch is filled up to a multiple of s by one more sequence, of which nothing is scored.
        """
        num_tokens = self.input_ids.size(1)
        filler = -num_tokens % exchange.size
        share = (num_tokens + filler) // exchange.size
        tokens = slice(exchange.rank * share, (exchange.rank + 1) * share)
        # Scored tokens ascend, so those of a share lie next to each other.
        bounds = torch.arange(exchange.rank, exchange.rank + 2) * share
        first, last = torch.searchsorted(self.scored, bounds).tolist()
        cu_seqlens, sequence_lengths = self.cu_seqlens, self.sequence_lengths
        if filler:
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + filler])
            sequence_lengths = [*sequence_lengths, filler]
        return replace(
            self,
            input_ids=F.pad(self.input_ids, (0, filler))[:, tokens],
            position_ids=F.pad(self.position_ids, (0, filler))[:, tokens],
            cu_seqlens=cu_seqlens,
            sequence_lengths=sequence_lengths,
            scored=self.scored[first:last] - tokens.start,
            labels=self.labels[first:last],
            exchange=exchange,
            scored_before=first,
            num_scored=len(self.scored),
        )


def pack(rows: Mapping[str, torch.Tensor]) -> PackedBatch:
    """Removes the padding of rows: `input_ids`, `attention_mask`, `position_ids` (B, T), `response_mask` (B, R).

    Rows of the host are packed without a wait for the device. The last R of a row's T positions are the response.
    Raises ValueError for a row without any token, or a response token that has no attended token before it.
    """
    input_ids = rows["input_ids"]
    attended_BT, scored_BR = rows["attention_mask"].bool(), rows["response_mask"].bool()
    lengths = attended_BT.sum(-1)
    prompt_length = attended_BT.size(1) - scored_BR.size(1)
    predicts_BR = attended_BT[:, prompt_length - 1 : -1]
    if not bool((lengths > 0).all()) or not bool((predicts_BR & attended_BT[:, prompt_length:])[scored_BR].all()):
        raise ValueError(
            "attention_mask and response_mask do not fit: every row needs a token, and every response token must be "
            f"attended and follow an attended one; rows have {lengths.tolist()} tokens and "
            f"{scored_BR.sum(-1).tolist()} response tokens. Prompts are padded on the left, responses on the right."
        )
    packed_index_BT = (attended_BT.flatten().cumsum(0) - 1).view_as(attended_BT)
    return PackedBatch(
        input_ids=input_ids[attended_BT].unsqueeze(0),
        position_ids=rows["position_ids"][attended_BT].unsqueeze(0),
        cu_seqlens=F.pad(lengths.cumsum(0), (1, 0)).int(),
        sequence_lengths=lengths.tolist(),
        scored=packed_index_BT[:, prompt_length - 1 : -1][scored_BR],
        labels=input_ids[:, prompt_length:][scored_BR],
        places=scored_BR.flatten().nonzero().squeeze(1),
        padded_shape=scored_BR.shape,
    )
