"""What the ranks that share a packed batch exchange in a pass: in attention tokens for heads, after
it scored values.

Each of the s ranks of a group runs the layers over its share of the tokens; attention needs all
tokens, so there each rank takes a share of the heads (DeepSpeed-Ulysses, Jacobs et al.,
arXiv:2309.14509). All ranks of a group hold the same rows and compute the same loss, and each
differentiates its own tokens: their gradients add up to that of the loss.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_to_all_single

# Legend: N tokens of all packed sequences, n = N / s of them on each of the s ranks of a group; H
# query heads, G key/value heads, D head size; M scored tokens of the group, m of this rank.


class SequenceExchange:
    """What the layers exchange within the group of s ranks, `mesh`, that shares each packed
    batch."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.group = mesh.get_group()

    def tokens_to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gives up tokens of other ranks' heads for all tokens of own heads, in one exchange.

        Query (1, H, n, D) -> (1, H / s, N, D); key and value (1, G, n, D) -> (1, lcm(G, s) / s, N,
        D): their heads are repeated where they do not divide by s.
        """
        repeats = math.lcm(key.size(1), self.size) // key.size(1)
        if repeats > 1:
            key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
        # (s, heads / s, n, D)
        by_rank = [tensor[0].unflatten(0, (self.size, -1)) for tensor in (query, key, value)]
        heads = [tensor.size(1) for tensor in by_rank]
        received = self._exchange(torch.cat(by_rank, dim=1))  # (ranks that sent, own heads, n, D)
        own = received.transpose(0, 1).flatten(1, 2).unsqueeze(0)
        own_query, own_key, own_value = own.split(heads, dim=1)
        return own_query, own_key, own_value

    def heads_to_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """The way back: (1, N, H / s, D), all tokens of own heads, to (1, n, H, D), own tokens of
        all heads."""
        received = self._exchange(output[0].unflatten(0, (self.size, -1)))  # (s, n, H / s, D)
        return received.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def gather(self, values_m: torch.Tensor, before: int, total: int) -> torch.Tensor:
        """(M,), M = `total`: the scored tokens' values on all ranks, of which `before` are on those
        before this one."""
        own = slice(before, before + len(values_m))
        gathered_M = values_m.new_zeros(total)
        gathered_M[own] = values_m.detach()
        dist.all_reduce(gathered_M, group=self.group)
        # With its graph: each rank differentiates its own share of the common loss
        gathered_M[own] = values_m
        return gathered_M

    def _exchange(self, by_rank: torch.Tensor) -> torch.Tensor:
        """Slice i of the first dimension goes to rank i of the group; slice i of the result came
        from it."""
        by_rank = by_rank.contiguous()
        return all_to_all_single(torch.empty_like(by_rank), by_rank, group=self.group)
