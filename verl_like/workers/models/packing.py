"""Rows of tokens on the host, and how they are packed for a forward pass."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from verl_like.protocol import PAD_COLUMN, DataProto
from verl_like.protocol.padded import Padding, RowPlaces, places_of_samples
from verl_like.protocol.row_ops import (
    RowTaker,
    is_jagged,
    jagged_from_offsets,
    jagged_parts,
    offsets_of,
    places_from,
    row_lengths,
)
from verl_like.protocol.samples import sample_starts
from verl_like.workers.models.routed_experts import OWN, ROUTED_EXPERTS, RoutingRecord
from verl_like.workers.models.router_load import RouterLoad
from verl_like.workers.models.sequence_exchange import SequenceExchange
from verl_like.workers.pinned_memory import to_device

# Legend: B rows, R padded response length, N tokens, M scored tokens, K response tokens, scored or
# not; T tokens of all rows, which are more than N if rows share prompts.

SEQUENCE_COLUMNS = ("prompts", "responses", "response_mask")
"""The columns that `pack` reads."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a batch, on the host.

    Columns with a value for each token are jagged. Others have one entry for each row.
    """

    columns: Mapping[str, Tensor]
    response_length: int
    """R, the width of a padded response."""
    known_response_length: int | None
    """R, if the batch says it. Otherwise R is the length of the longest response of these rows."""
    filler_rows: int = 1
    """The number of filler rows of a pass that has no rows."""
    record: RoutingRecord | None = None
    """Where a pass of these rows keeps what its routers select, or None."""
    load: RouterLoad | None = None
    """Where it keeps the load of the experts, or None."""
    shares_prompts: bool = False
    """Whether rows of a pass with the same prompt compute it once, see `share_prompts`."""

    @classmethod
    def of(cls, data: DataProto, filler_rows: int = 1, shares_prompts: bool = False) -> Self:
        """Makes Rows of a batch.

        Tokens of padding rows are not scored, so that they do not count. Raises ValueError for a
        batch with padded columns.
        """
        columns = data.tensors()
        if not is_jagged(columns["prompts"]):
            raise ValueError(
                "the batch has padded columns, but the library's workers take jagged ones: "
                "register the method that hands the batch on with jagged=True, or give "
                "without_padding(batch, pad_token_id)"
            )
        lengths_B = row_lengths(columns["responses"])
        if PAD_COLUMN in columns:
            is_real = torch.repeat_interleave(~columns[PAD_COLUMN], lengths_B)
            mask, offsets = jagged_parts(columns["response_mask"])
            columns["response_mask"] = jagged_from_offsets(mask * is_real, offsets)
        longest = max(lengths_B.tolist(), default=0)
        known = None
        if "padding" in data.meta_info:
            known = Padding.of(data).max_response_length
        response_length = known or max(1, longest)
        return cls(columns, response_length, known, filler_rows, shares_prompts=shares_prompts)

    def __len__(self) -> int:
        return self.columns["prompts"].size(0)

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    @property
    def sample_starts(self) -> Tensor:
        """The first row of each sample, then the number of rows, (number of samples + 1,) int64."""
        return sample_starts(self.columns, len(self))

    @property
    def lengths_B(self) -> Tensor:
        """The number of tokens of each row's prompt and response, (B,) int64."""
        prompt_lengths_B = row_lengths(self.columns["prompts"])
        response_lengths_B = row_lengths(self.columns["responses"])
        return prompt_lengths_B + response_lengths_B

    @property
    def num_scored_B(self) -> Tensor:
        """The number of scored response tokens of each row, (B,) int64."""
        return num_marked(self.columns["response_mask"])

    def take(self, at: Tensor) -> Self:
        """Returns copies of the rows `at`.

        If `at` is empty, it returns `filler_rows` rows of one token that is not scored, because a
        model cannot run over no tokens.
        """
        if len(at):
            return self.take_some(at)
        columns = {}
        for name, column in self.columns.items():
            columns[name] = _filler(name, column, self.filler_rows)
        return replace(self, columns=columns)

    def take_some(self, at: Tensor) -> Self:
        """Returns copies of the rows `at`, and no filler rows if there are none."""
        take = RowTaker(at)
        columns = {name: take.tensor(column) for name, column in self.columns.items()}
        return replace(self, columns=columns)

    def response_places(self, starts: Tensor | None = None) -> RowPlaces:
        """Returns where the response tokens lie in padded rows.

        With the `starts` of samples it returns where they lie in padded samples.
        """
        _values, offsets = jagged_parts(self.columns["responses"])
        return places_of_samples(offsets, self.response_length, starts)


def num_marked(mask: Tensor) -> Tensor:
    """Returns how many tokens a jagged mask marks in each row, (B,) int64."""
    marks, offsets = jagged_parts(mask)
    return sums_between(marks.long(), offsets)


def sums_between(values: Tensor, offsets: Tensor) -> Tensor:
    """Returns the sum of the integers from each offset to the next one, int64."""
    sums_before = offsets_of(values)
    return sums_before[offsets].diff()


def _filler(name: str, column: Tensor, num_rows: int) -> Tensor:
    """Makes a column of rows with a prompt of one token and an empty response, all zeros.

    The token has no recorded routing.
    """
    if not is_jagged(column):
        return column.new_zeros(num_rows, *column.shape[1:])
    length = 1 if name in ("prompts", ROUTED_EXPERTS) else 0
    values, _offsets = jagged_parts(column)
    num_values = num_rows * length
    fill = OWN if name == ROUTED_EXPERTS else 0
    filled = values.new_full((num_values, *values.shape[1:]), fill)
    offsets = torch.arange(num_rows + 1) * length
    return jagged_from_offsets(filled, offsets)


@dataclass(frozen=True)
class PackedBatch:
    """Rows without their padding, one after the other, and where their response tokens are."""

    input_ids: Tensor
    """(1, N) int64."""
    position_ids: Tensor
    """(1, N) int64."""
    cu_seqlens: Tensor
    """(S + 1,) int32, the start of each of the S sequences; the last entry is N, or T."""
    sequence_lengths: list[int]
    """The S lengths, on the host."""
    scored: Tensor
    """(M,) int64, the packed index of the token *before* each scored token, whose output predicts
    it."""
    labels: Tensor
    """(M,) int64, the scored tokens themselves."""
    places: Tensor
    """(M,) int64, the index of each scored token among the response tokens."""
    num_response_tokens: int
    """K."""
    routed_experts: Tensor | None = None
    """(N, L, k), the ids of the experts that the routers of the model's layers replay, see the
    column. None if they select themselves."""
    record: RoutingRecord | None = None
    """Where a pass keeps what the routers select themselves, or None."""
    load: RouterLoad | None = None
    """Where it keeps the load of the experts, or None."""
    counted: Tensor | None = None
    """How often each token counts in the load, (N,) int64, or None."""
    token_places: Tensor | None = None
    """(T,) int64, if rows share prompts: the packed index of each row's tokens, row by row."""
    query_lengths: list[int] | None = None
    """The number of the tokens of each sequence, its last ones, that no sequence before it has."""
    cu_queries: Tensor | None = None
    """(S + 1,) int32, where these tokens begin; the last entry is N."""
    exchange: SequenceExchange | None = None
    """The exchange of the ranks that share the batch. With it the batch has this rank's share of
    the tokens, and its m of the M scored tokens in `scored` and `labels`."""
    scored_before: int = 0
    """The number of scored tokens on the ranks before this one."""
    num_scored: int = 0
    """M, if ranks share the batch."""
    num_tokens: int = 0
    """The number of tokens of all sequences without filler, if ranks share the batch."""

    def on(self, device: str) -> "PackedBatch":
        """Returns the batch with its tensors on a device."""
        tensors = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                tensors[name] = value
        moved: dict[str, Any] = to_device(tensors, device)
        return replace(self, **moved)

    def unpack(self, scored_values: Tensor) -> NoReturn:
        """Raises ValueError. Earlier versions padded to rows, which a packed batch cannot do."""
        raise ValueError(
            "PackedBatch.unpack is gone: packed.of_tokens(values) has one number for each "
            "response token, and micro.of_rows of it pads these to (b, R), as unpack did"
        )

    def of_tokens(self, scored_values: Tensor) -> Tensor:
        """Expands values of the scored tokens, (M,), to all response tokens, (K,) float32.

        Tokens that are not scored get 0. It is differentiable. If ranks share the batch, it takes
        this rank's values, (m,), and gathers those of the others.
        """
        if self.exchange is not None:
            scored_values = self.exchange.gather(scored_values, self.scored_before, self.num_scored)
        values = scored_values.float()
        zeros = values.new_zeros(self.num_response_tokens)
        return zeros.index_copy(0, self.places, values)

    def of_sequences(self, values: Tensor) -> Tensor:
        """Returns integers of all tokens of prompts and responses, (tokens, ...), of those of the
        packed tokens.

        If ranks share the batch, it takes those of this rank's share of the tokens, and gathers
        those of the others.
        """
        if self.exchange is not None:
            size, rank = self.exchange.size, self.exchange.rank
            # Communication knows no int16.
            wide = self.exchange.gather(values.int(), rank * len(values), size * len(values))
            values = wide.to(values.dtype)
        if self.token_places is not None:
            values = values[self.token_places]
        if self.exchange is not None:
            values = values[: self.num_tokens]
        return values

    def shard(self, exchange: SequenceExchange) -> "PackedBatch":
        """Returns this rank's share of the tokens, with the scored tokens among them.

        `of_tokens` gathers their values. If the number of ranks does not divide the tokens, one
        more sequence fills the batch, in which nothing is scored.
        """
        num_tokens = self.input_ids.size(1)
        filler = -num_tokens % exchange.size
        share = (num_tokens + filler) // exchange.size
        start = exchange.rank * share
        end = start + share
        # Scored tokens ascend, so those of a share are consecutive.
        bounds = torch.tensor([start, end])
        first, last = torch.searchsorted(self.scored, bounds).tolist()
        input_ids = F.pad(self.input_ids, (0, filler))
        position_ids = F.pad(self.position_ids, (0, filler))
        routed_experts = self.routed_experts
        if routed_experts is not None:
            padded = F.pad(routed_experts, (0, 0, 0, 0, 0, filler), value=OWN)
            routed_experts = padded[start:end]
        counted = self.counted
        if counted is not None:
            counted = F.pad(counted, (0, filler))[start:end]
        filled = self
        if filler:
            filled = self._with_sequence_of(filler)
        return replace(
            filled,
            input_ids=input_ids[:, start:end],
            position_ids=position_ids[:, start:end],
            scored=self.scored[first:last] - start,
            labels=self.labels[first:last],
            routed_experts=routed_experts,
            counted=counted,
            exchange=exchange,
            scored_before=first,
            num_scored=len(self.scored),
            num_tokens=sum(self.sequence_lengths),
        )

    def _with_sequence_of(self, num_tokens: int) -> "PackedBatch":
        """Returns the batch with the bounds of one more sequence, behind the others."""
        cu_seqlens = _with_end(self.cu_seqlens, num_tokens)
        sequence_lengths = [*self.sequence_lengths, num_tokens]
        longer = replace(self, cu_seqlens=cu_seqlens, sequence_lengths=sequence_lengths)
        if self.token_places is None or self.query_lengths is None or self.cu_queries is None:
            return longer
        new_places = torch.arange(num_tokens) + self.input_ids.size(1)
        return replace(
            longer,
            token_places=torch.cat([self.token_places, new_places]),
            query_lengths=[*self.query_lengths, num_tokens],
            cu_queries=_with_end(self.cu_queries, num_tokens),
        )


def _with_end(starts: Tensor, length: int) -> Tensor:
    """Returns the starts of sequences and one more, which has a length."""
    return torch.cat([starts, starts[-1:] + length])


def pack(rows: Rows) -> PackedBatch:
    """Packs rows: each row's prompt and response are one sequence, behind that of the row before.

    Positions count from 0 in each sequence. Raises ValueError for a row without a prompt, because
    the output of the token before predicts a response token.
    """
    prompts, prompt_offsets = jagged_parts(rows["prompts"])
    responses, response_offsets = jagged_parts(rows["responses"])
    mask, _offsets = jagged_parts(rows["response_mask"])
    is_scored = mask.bool()
    prompt_lengths_B = prompt_offsets.diff()
    response_lengths_B = response_offsets.diff()
    if not (prompt_lengths_B > 0).all():
        raise ValueError(
            f"every row needs a prompt token, but the prompts have {prompt_lengths_B.tolist()}"
        )
    lengths_B = prompt_lengths_B + response_lengths_B
    cu_seqlens = offsets_of(lengths_B)
    starts_B = cu_seqlens[:-1]
    num_tokens = int(cu_seqlens[-1])
    place_of_prompts = places_from(starts_B, prompt_offsets)
    place_of_responses = places_from(starts_B + prompt_lengths_B, response_offsets)
    input_ids = prompts.new_empty(num_tokens)
    input_ids[place_of_prompts] = prompts
    input_ids[place_of_responses] = responses
    start_of_tokens = torch.repeat_interleave(starts_B, lengths_B)
    position_ids = torch.arange(num_tokens) - start_of_tokens
    routed_experts = None
    if ROUTED_EXPERTS in rows:
        # Its entries are those of prompt and response, row by row, as they are packed.
        routed_experts, routed_offsets = jagged_parts(rows[ROUTED_EXPERTS])
        assert torch.equal(routed_offsets, cu_seqlens), "check_routing has refused other lengths"
    counted = None
    if rows.load is not None:
        counts_B = (rows.num_scored_B > 0).long()
        counted = torch.repeat_interleave(counts_B, lengths_B)
    return PackedBatch(
        input_ids=input_ids.unsqueeze(0),
        position_ids=position_ids.unsqueeze(0),
        cu_seqlens=cu_seqlens.int(),
        sequence_lengths=lengths_B.tolist(),
        scored=place_of_responses[is_scored] - 1,
        labels=responses[is_scored],
        places=is_scored.nonzero().squeeze(1),
        num_response_tokens=len(responses),
        routed_experts=routed_experts,
        record=rows.record,
        load=rows.load,
        counted=counted,
    )
