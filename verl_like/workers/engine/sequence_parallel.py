"""Sequence parallelism: the ranks of a group share the tokens of one packed batch, and in attention the heads.

After DeepSpeed-Ulysses (Jacobs et al., arXiv:2309.14509). Every rank of a group holds the same rows and computes the
same loss, but runs the layers over its share of the tokens alone; the gradients of the ranks therefore add up to that
of the loss, as they do over data-parallel ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from transformers import PretrainedConfig

if TYPE_CHECKING:
    from verl_like.workers.models.packing import PackedBatch

# Legend: N tokens of all packed sequences, n = N / s of them on each of the s ranks of a group; H query heads, G
# key/value heads, D head size; M scored tokens of the group, m of this rank.


class SequenceParallel:
    """The group of ranks that share each packed batch: ranks 0 to s - 1, s to 2s - 1, and so on.

    Args:
        device: `cpu` or `cuda`.
        size: s, ranks in a group.
        hf_config: the model's configuration; its query heads divide by s.

    Raises:
        ValueError: the ranks, or the model's heads, do not divide by `size`.
    """

    def __init__(self, device: str, size: int, hf_config: PretrainedConfig) -> None:
        heads = hf_config.get_text_config().num_attention_heads
        if heads % size:
            raise ValueError(
                f"ulysses_sequence_parallel_size={size} does not divide the {heads} attention heads of the model, of "
                "which every rank takes a share; choose a divisor."
            )
        shape = (data_parallel_size(dist.get_world_size(), size), size)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("data", "sequence"))
        self.size = size
        self.rank = mesh.get_local_rank("sequence")
        self.group = mesh.get_group("sequence")

    def shard(self, packed: PackedBatch) -> PackedBatch:
        """This rank's share of a batch's tokens, with the scored tokens among them; `unpack` gathers their values.

        The batch is filled up to a multiple of s by one more sequence, of which nothing is scored.
        """
        num_tokens = packed.input_ids.size(1)
        filler = -num_tokens % self.size
        share = (num_tokens + filler) // self.size
        tokens = slice(self.rank * share, (self.rank + 1) * share)
        # Scored tokens ascend, so those of a share lie next to each other.
        bounds = torch.arange(self.rank, self.rank + 2, device=packed.scored.device) * share
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
            share=SequenceShare(self, first, len(packed.scored)),
        )

    def tokens_to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gives up tokens of other ranks' heads for all tokens of own heads, in one exchange.

        Args:
            query: (1, H, n, D).
            key: (1, G, n, D); heads are repeated where they do not divide by s.
            value: (1, G, n, D).

        Returns:
            Query (1, H / s, N, D), key and value (1, lcm(G, s) / s, N, D).
        """
        repeats = math.lcm(key.size(1), self.size) // key.size(1)
        if repeats > 1:
            key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        by_rank = [tensor[0].unflatten(0, (self.size, -1)) for tensor in (query, key, value)]  # (s, heads / s, n, D)
        heads = [tensor.size(1) for tensor in by_rank]
        received = _Exchange.apply(torch.cat(by_rank, dim=1), self.group)  # (ranks that sent, own heads, n, D)
        own = received.transpose(0, 1).flatten(1, 2).unsqueeze(0)
        own_query, own_key, own_value = own.split(heads, dim=1)
        return own_query, own_key, own_value

    def heads_to_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """The way back: (1, N, H / s, D), all tokens of own heads, to (1, n, H, D), own tokens of all heads."""
        received = _Exchange.apply(output[0].unflatten(0, (self.size, -1)), self.group)  # (s, n, H / s, D)
        return received.transpose(0, 1).flatten(1, 2).unsqueeze(0)


@dataclass(frozen=True)
class SequenceShare:
    """One rank's part of the scored tokens of a packed batch."""

    parallel: SequenceParallel
    before: int
    """Scored tokens on the ranks before this one."""
    total: int
    """M."""

    def gather(self, values_m: torch.Tensor) -> torch.Tensor:
        """(M,): the values of the scored tokens of all ranks; a rank's gradient is that of its own values."""
        return _GatherValues.apply(values_m, self.before, self.total, self.parallel.group)


def data_parallel_size(world_size: int, sequence_parallel_size: int) -> int:
    """Number of different shards of a batch on `world_size` ranks.

    Raises:
        ValueError: the ranks do not divide into groups.
    """
    if world_size % sequence_parallel_size:
        raise ValueError(
            f"ulysses_sequence_parallel_size={sequence_parallel_size} does not divide the {world_size} ranks of the "
            "pool; choose a divisor."
        )
    return world_size // sequence_parallel_size


class _Exchange(torch.autograd.Function):
    """Slice i of the first dimension goes to rank i of the group; slice i of the result came from it."""

    @staticmethod
    def forward(ctx: Any, by_rank: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        by_rank = by_rank.contiguous()
        received = torch.empty_like(by_rank)
        dist.all_to_all_single(received, by_rank, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Exchange.apply(gradient, ctx.group), None


class _GatherValues(torch.autograd.Function):
    """Puts the ranks' values one after the other; each rank differentiates its own share of the common loss."""

    @staticmethod
    def forward(ctx: Any, values_m: torch.Tensor, before: int, total: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.own = slice(before, before + len(values_m))
        gathered_M = values_m.new_zeros(total)
        gathered_M[ctx.own] = values_m
        dist.all_reduce(gathered_M, group=group)
        return gathered_M

    @staticmethod
    def backward(ctx: Any, gradient_M: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradient_M[ctx.own], None, None, None
