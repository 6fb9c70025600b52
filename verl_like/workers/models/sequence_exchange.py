"""Sequence parallelism: what the ranks that share a packed batch exchange in a pass.

Each of the s ranks of a group runs the layers over its share of the tokens. Attention needs all
tokens, so there each rank takes a share of the heads instead (DeepSpeed-Ulysses, Jacobs et al.,
arXiv:2309.14509). After the pass the ranks exchange the values of scored tokens. All ranks of a
group have the same rows and compute the same loss, and each differentiates its own tokens, so their
gradients add up to that of the loss.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_to_all_single

# Legend: N tokens of all packed sequences, n = N / s of them on each of the s ranks of a group; H
# query heads, G key/value heads, D head size; M scored tokens of the group, m of this rank.


class SequenceExchange:
    """The exchanges within the group of s ranks, `mesh`, that shares each packed batch."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.group = mesh.get_group()

    def tokens_to_heads(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Exchanges own tokens of all heads for all tokens of own heads, in one communication.

        The query (1, H, n, D) becomes (1, H / s, N, D). Key and value (1, G, n, D) become
        (1, lcm(G, s) / s, N, D), because their heads are repeated if s does not divide G.
        """
        num_heads = key.size(1)
        num_repeats = math.lcm(num_heads, self.size) // num_heads
        if num_repeats > 1:
            key = key.repeat_interleave(num_repeats, dim=1)
            value = value.repeat_interleave(num_repeats, dim=1)
        by_rank = [self._split(heads) for heads in (query, key, value)]  # (s, heads / s, n, D)
        num_own_heads = [heads.size(1) for heads in by_rank]
        to_send = torch.cat(by_rank, dim=1)
        received = self._exchange(to_send)  # (ranks that sent, own heads, n, D)
        own_heads = _join(received)
        own_query, own_key, own_value = own_heads.split(num_own_heads, dim=1)
        return own_query, own_key, own_value

    def own_heads(self, values_H: Tensor) -> Tensor:
        """Returns the values of own heads of those of all query heads, (H / s,), a view."""
        return values_H.chunk(self.size)[self.rank]

    def heads_to_tokens(self, output: Tensor) -> Tensor:
        """Exchanges all tokens of own heads for own tokens of all heads, the reverse.

        (1, N, H / s, D) becomes (1, n, H, D).
        """
        by_rank = self._split(output)
        received = self._exchange(by_rank)  # (s, n, H / s, D)
        return _join(received)

    def gather(self, values_m: Tensor, before: int, total: int) -> Tensor:
        """Returns the values of the scored tokens of all ranks, (M, ...), with M = `total`.

        `before` of them are on the ranks before this one.
        """
        end = before + len(values_m)
        gathered_M = values_m.new_zeros(total, *values_m.shape[1:])
        gathered_M[before:end] = values_m.detach()
        dist.all_reduce(gathered_M, group=self.group)
        # Own values have their graph, so that each rank differentiates its share of the loss.
        gathered_M[before:end] = values_m
        return gathered_M

    def total(self, values: Tensor) -> Tensor:
        """Returns the sum of values of all ranks, of which own values have their graph."""
        own = values.detach()
        total = own.clone()
        dist.all_reduce(total, group=self.group)
        return total + (values - own)

    def _split(self, values: Tensor) -> Tensor:
        """Divides dimension 1 among the ranks: (1, X, Y, D) becomes (s, X / s, Y, D)."""
        return values[0].unflatten(0, (self.size, -1))

    def _exchange(self, by_rank: Tensor) -> Tensor:
        """Sends slice i of the first dimension to rank i of the group, and returns as slice i what
        that rank has sent."""
        by_rank = by_rank.contiguous()
        received = torch.empty_like(by_rank)
        return all_to_all_single(received, by_rank, group=self.group)


def _join(by_rank: Tensor) -> Tensor:
    """Puts the parts of all ranks one after the other: (s, X, Y, D) becomes (1, X, s Y, D)."""
    joined = by_rank.transpose(0, 1).flatten(1, 2)
    return joined.unsqueeze(0)
