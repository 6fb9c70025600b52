"""Sequence parallelism: the ranks of a group share the tokens of one packed batch.

After DeepSpeed-Ulysses (Jacobs et al., arXiv:2309.14509). Every rank of a group holds the same rows and computes the
same loss, but runs the layers over its share of the tokens alone; the gradients of the ranks therefore add up to that
of the loss, as they do over data-parallel ranks.
"""

from dataclasses import replace

import torch
from torch.nn import functional as F

from verl_like.workers.models.packing import PackedBatch
from verl_like.workers.models.sequence_exchange import SequenceExchange, SequenceShare


def shard(packed: PackedBatch, exchange: SequenceExchange) -> PackedBatch:
    """This rank's share of a batch's tokens, with the scored tokens among them; `unpack` gathers their values.

    The batch is filled up to a multiple of s by one more sequence, of which nothing is scored.
    """
    num_tokens = packed.input_ids.size(1)
    filler = -num_tokens % exchange.size
    share = (num_tokens + filler) // exchange.size
    tokens = slice(exchange.rank * share, (exchange.rank + 1) * share)
    # Scored tokens ascend, so those of a share lie next to each other.
    bounds = torch.arange(exchange.rank, exchange.rank + 2, device=packed.scored.device) * share
    first, last = torch.searchsorted(packed.scored, bounds).tolist()
    cu_seqlens, sequence_lengths = packed.cu_seqlens, packed.sequence_lengths
    if filler:
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + filler])
        sequence_lengths = [*sequence_lengths, filler]
    return replace(
        packed,
        input_ids=F.pad(packed.input_ids, (0, filler))[:, tokens],
        position_ids=F.pad(packed.position_ids, (0, filler))[:, tokens],
        cu_seqlens=cu_seqlens,
        sequence_lengths=sequence_lengths,
        scored=packed.scored[first:last] - tokens.start,
        labels=packed.labels[first:last],
        share=SequenceShare(exchange, first, len(packed.scored)),
    )
