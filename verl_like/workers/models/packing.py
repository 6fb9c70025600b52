"""Rows of tokens: how they are packed for a forward pass, and what a pass returns of their response
tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

import torch
from torch.nn import functional as F

from verl_like.protocol import PAD_COLUMN, DataProto
from verl_like.protocol.padded import Padding, RowPlaces, places_of_samples
from verl_like.protocol.row_ops import RowTaker, is_jagged, jagged_parts
from verl_like.protocol.samples import sample_starts
from verl_like.workers.models.sequence_exchange import SequenceExchange
from verl_like.workers.pinned_memory import to_device

# Legend: B rows, R padded response length, N tokens, M scored tokens, K response tokens, scored or
# not.

SEQUENCE_COLUMNS = ("prompts", "responses", "response_mask")
"""What `pack` reads."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a batch, on the host: columns by token are jagged, others have an entry a
    row."""

    columns: Mapping[str, torch.Tensor]
    response_length: int
    """R, how wide a response is where it is padded."""
    known_response_length: int | None
    """R, where the batch says it; else R is the longest response's of these rows."""
    filler_rows: int = 1
    """Rows of a pass that has none of its own."""

    @classmethod
    def of(cls, data: DataProto, filler_rows: int = 1) -> Self:
        """The tensors of a batch. Padding rows lose their scored tokens, so that they count
        nowhere."""
        columns = data.tensors()
        if not is_jagged(columns["prompts"]):
            raise ValueError(
                "the batch has padded columns, but the library's workers take jagged ones: "
                "register the method that hands the batch on with jagged=True, or give "
                "without_padding(batch, pad_token_id)"
            )
        lengths_B = _offsets(columns["responses"]).diff()
        if PAD_COLUMN in columns:
            is_real = torch.repeat_interleave(~columns[PAD_COLUMN], lengths_B)
            mask, offsets = jagged_parts(columns["response_mask"])
            columns["response_mask"] = torch.nested.nested_tensor_from_jagged(
                mask * is_real, offsets=offsets
            )
        longest = int(lengths_B.max()) if len(lengths_B) else 0
        known = Padding.of(data).max_response_length if "padding" in data.meta_info else None
        return cls(columns, known or max(1, longest), known, filler_rows)

    def __len__(self) -> int:
        return len(_offsets(self.columns["prompts"])) - 1

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.columns[name]

    @property
    def sample_starts(self) -> torch.Tensor:
        """(number of samples + 1,) int64, the first row of each sample, and the number of rows."""
        return sample_starts(self.columns, len(self))

    @property
    def lengths_B(self) -> torch.Tensor:
        """(B,) int64, tokens of prompt and response."""
        return _offsets(self.columns["prompts"]).diff() + _offsets(self.columns["responses"]).diff()

    @property
    def num_scored_B(self) -> torch.Tensor:
        """(B,) int64, response tokens that are scored."""
        mask, offsets = jagged_parts(self.columns["response_mask"])
        before = F.pad(mask.cumsum(0), (1, 0))
        return before[offsets[1:]] - before[offsets[:-1]]

    def take(self, at: torch.Tensor) -> Self:
        """Copies of the rows `at`; without any, `filler_rows` of one token each, of which nothing
        is scored."""
        if not len(at):
            fillers = {
                name: _filler(name, column, self.filler_rows)
                for name, column in self.columns.items()
            }
            return replace(self, columns=fillers)
        take = RowTaker(at)
        return replace(
            self, columns={name: take.tensor(column) for name, column in self.columns.items()}
        )

    def response_places(self, starts: torch.Tensor | None = None) -> RowPlaces:
        """Where the response tokens lie in padded rows, or with the `starts` of samples in
        theirs."""
        return places_of_samples(_offsets(self.columns["responses"]), self.response_length, starts)


def _offsets(column: torch.Tensor) -> torch.Tensor:
    return jagged_parts(column)[1]


def _filler(name: str, column: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Rows of a prompt of one token and an empty response; zeros."""
    if not is_jagged(column):
        return column.new_zeros(num_rows, *column.shape[1:])
    length = 1 if name == "prompts" else 0
    values = jagged_parts(column)[0].new_zeros(
        num_rows * length, *jagged_parts(column)[0].shape[1:]
    )
    return torch.nested.nested_tensor_from_jagged(
        values, offsets=torch.arange(num_rows + 1) * length
    )


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
    """(M,) int64: packed index of the token *before* each response token, whose output predicts
    it."""
    labels: torch.Tensor
    """(M,) int64, the response tokens themselves."""
    places: torch.Tensor
    """(M,) int64, which of the response tokens are scored."""
    num_response_tokens: int
    """K."""
    exchange: SequenceExchange | None = None
    """The ranks that share the batch; tokens and scored tokens are then this rank's alone, m of the
    M."""
    scored_before: int = 0
    """Scored tokens on the ranks before this one."""
    num_scored: int = 0
    """M, where ranks share the batch."""

    def on(self, device: str) -> "PackedBatch":
        """The batch with its tensors on a device."""
        tensors = {
            name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        moved: dict[str, Any] = to_device(tensors, device)
        return replace(self, **moved)

    def unpack(self, scored_values: torch.Tensor) -> NoReturn:
        """Raises ValueError: it padded to rows, which a packed batch does not know any more."""
        raise ValueError(
            "PackedBatch.unpack is gone: packed.of_tokens(values) has one number for each "
            "response token, and micro.of_rows of it pads these to (b, R), as unpack did"
        )

    def of_tokens(self, scored_values: torch.Tensor) -> torch.Tensor:
        """(M,) -> (K,) float32, of each response token, zero of those that are not scored;
        differentiable; a share's values are gathered."""
        if self.exchange is not None:
            scored_values = self.exchange.gather(scored_values, self.scored_before, self.num_scored)
        values = torch.zeros(
            self.num_response_tokens, dtype=torch.float32, device=scored_values.device
        )
        return values.index_copy(0, self.places, scored_values.float())

    def shard(self, exchange: SequenceExchange) -> "PackedBatch":
        """This rank's share of the tokens, with the scored tokens among them; `of_tokens` gathers
        their values.

        The batch is filled up to a multiple of s by one more sequence, of which nothing is scored.
        """
        num_tokens = self.input_ids.size(1)
        filler = -num_tokens % exchange.size
        share = (num_tokens + filler) // exchange.size
        tokens = slice(exchange.rank * share, (exchange.rank + 1) * share)
        # Scored tokens ascend, so those of a share lie next to each other.
        bounds = torch.arange(exchange.rank, exchange.rank + 2) * share
        first, last = torch.searchsorted(self.scored, bounds).tolist()
        cu_seqlens = self.cu_seqlens
        sequence_lengths = self.sequence_lengths
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


def pack(rows: Rows) -> PackedBatch:
    """Each row's prompt and response as one sequence, behind those of the row before; positions
    count from 0 in each.

    Raises ValueError for a row without a prompt: each response token follows another one, whose
    output predicts it.
    """
    prompts, prompt_offsets = jagged_parts(rows["prompts"])
    responses, response_offsets = jagged_parts(rows["responses"])
    is_scored = jagged_parts(rows["response_mask"])[0].bool()
    prompt_lengths_B = prompt_offsets.diff()
    response_lengths_B = response_offsets.diff()
    if not bool((prompt_lengths_B > 0).all()):
        raise ValueError(
            f"every row needs a prompt token, but the prompts have {prompt_lengths_B.tolist()}"
        )
    lengths_B = prompt_lengths_B + response_lengths_B
    cu_seqlens = F.pad(lengths_B.cumsum(0), (1, 0))
    starts_B = cu_seqlens[:-1]
    num_tokens = int(cu_seqlens[-1])
    shift_of_prompts = torch.repeat_interleave(starts_B - prompt_offsets[:-1], prompt_lengths_B)
    shift_of_responses = torch.repeat_interleave(
        starts_B + prompt_lengths_B - response_offsets[:-1], response_lengths_B
    )
    place_of_prompts = shift_of_prompts + torch.arange(len(prompts))
    place_of_responses = shift_of_responses + torch.arange(len(responses))
    input_ids = prompts.new_empty(num_tokens)
    input_ids[place_of_prompts] = prompts
    input_ids[place_of_responses] = responses
    return PackedBatch(
        input_ids=input_ids.unsqueeze(0),
        position_ids=(
            torch.arange(num_tokens) - torch.repeat_interleave(starts_B, lengths_B)
        ).unsqueeze(0),
        cu_seqlens=cu_seqlens.int(),
        sequence_lengths=lengths_B.tolist(),
        scored=place_of_responses[is_scored] - 1,
        labels=responses[is_scored],
        places=is_scored.nonzero().squeeze(1),
        num_response_tokens=len(responses),
    )
