"""The routing of the tokens of a request, of what an engine computed in several passes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from verl_like.workers.models.routed_experts import OWN, RouterShape

# Legend: L layers with a router, k selected experts.


@dataclass(frozen=True)
class RoutedPiece:
    """The routing of consecutive tokens of a request, from one pass."""

    start: int
    """The position of the first token in its sequence."""
    ids: np.ndarray
    """(tokens, L, k), a view of the routing of the pass."""
    is_computed: bool = True
    """False for tokens of the prefix cache, with the routing of the request that computed them."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    def between(self, start: int, end: int) -> np.ndarray:
        """Returns the part of its routing from the token at `start` to that before `end`."""
        first = start - self.start
        last = end - self.start
        return self.ids[first:last]


@dataclass(eq=False)
class RoutedRequest:
    """What is recorded of one request."""

    num_prompt_tokens: int
    num_blocks: int = 0
    """The blocks of the cache that it has."""
    pieces: list[RoutedPiece] = field(default_factory=list)
    """In the order in which they were computed."""

    def record(self, num_tokens: int, shape: RouterShape) -> np.ndarray:
        """Returns the routing by which the tokens were computed before the next one was drawn,
        (num_tokens, L, k).

        Tokens may be computed again after that, when the request lost its cache, or for new
        weights. The last token has no record, because what would be drawn after it was never
        computed or is not used.
        """
        ids = without_record(num_tokens, shape)
        num_kept = 0
        for piece in self.pieces:
            start = max(piece.start, num_kept)
            end = min(piece.end, num_tokens - 1)
            if start < end:
                ids[start:end] = piece.between(start, end)
            # A pass that reaches the end of the prompt draws a token.
            if piece.is_computed and piece.end >= self.num_prompt_tokens:
                num_kept = max(num_kept, piece.end)
        return ids

    def last_computed(self, start: int, end: int, shape: RouterShape) -> np.ndarray:
        """Returns the routing by which the tokens from `start` to `end` - 1 were computed last, as
        they are in the cache."""
        ids = without_record(end - start, shape)
        for piece in self.pieces:
            first = max(start, piece.start)
            last = min(end, piece.end)
            if first < last:
                place = first - start
                own = piece.between(first, last)
                ids[place : place + len(own)] = own
        return ids

    def compact(self, shape: RouterShape) -> None:
        """Frees the passes whose views the pieces are. Afterwards there is only what is in the
        cache."""
        ends = [piece.end for piece in self.pieces]
        end = max(ends, default=0)
        ids = self.last_computed(0, end, shape)
        self.pieces = [RoutedPiece(0, ids)]


def record_of_returned(
    returned: np.ndarray | None, num_tokens: int, layers: Sequence[int], shape: RouterShape
) -> np.ndarray:
    """Returns the record of a response from what vLLM itself returns with it, (num_tokens, L, k).

    Args:
        returned: (num_tokens - 1, all layers, k), of each token but the last.
        num_tokens: the number of tokens of prompt and response.
        layers: the numbers of the layers that have a router.
        shape: that of the model's routers.

    Raises ValueError if `returned` has other tokens.
    """
    num_returned = None if returned is None else len(returned)
    if returned is None or num_returned != num_tokens - 1:
        raise ValueError(
            f"vLLM returned the routing of {num_returned} tokens for a response that has "
            f"{num_tokens} with its prompt, and {num_tokens - 1} were computed: this vLLM records "
            "in a way that router replay does not know; set "
            "actor_rollout_ref.actor.router_replay.mode=disabled"
        )
    ids = without_record(num_tokens, shape)
    ids[:-1] = returned[:, list(layers)]
    return ids


def record_of_bytes(content: bytes, num_tokens: int, shape: RouterShape) -> np.ndarray:
    """Returns a record, (num_tokens, L, k), that came from an engine's process as bytes."""
    ids = torch.frombuffer(bytearray(content), dtype=shape.dtype)
    return ids.view(num_tokens, shape.num_layers, shape.top_k).numpy()


def without_record(num_tokens: int, shape: RouterShape) -> np.ndarray:
    """Returns the routing of tokens that have no record, (num_tokens, L, k)."""
    size = (num_tokens, shape.num_layers, shape.top_k)
    return torch.full(size, OWN, dtype=shape.dtype).numpy()
