"""Padding: the form in which algorithms, and code written for verl, see rows that have none."""

import copy
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_like.protocol.dataproto import DataProto
from verl_like.protocol.row_ops import (
    is_jagged,
    jagged_from_offsets,
    jagged_parts,
    offsets_of,
    places_from,
)
from verl_like.protocol.samples import SampleRows

# Legend: B rows, P padded prompt length, R padded response length, T = P + R, N tokens of all rows.

VERL_COLUMNS = ("input_ids", "attention_mask", "position_ids")
"""Columns of verl's layout that are made of `prompts` and `responses`."""
_TOKEN_COLUMNS = (*VERL_COLUMNS, "prompts", "responses")


@dataclass(frozen=True)
class Padding:
    """How wide padded columns are, and the token that fills them. In meta_info it is `padding`, a
    tuple of the three."""

    max_prompt_length: int
    max_response_length: int
    pad_token_id: int

    @classmethod
    def of(cls, data: DataProto) -> "Padding":
        """Returns the padding of a batch. Raises ValueError if the batch does not say it."""
        if "padding" not in data.meta_info:
            raise ValueError(
                "the batch has no meta_info['padding'], which says how wide padded columns are: "
                "set it to (data.max_prompt_length, data.max_response_length, the padding token)"
            )
        return cls(*data.meta_info["padding"])


def has_jagged_prompts(data: DataProto) -> bool:
    """Returns True for a batch without padding."""
    prompts = data.tensors().get("prompts")
    return prompts is not None and is_jagged(prompts)


class RowPlaces:
    """The places of the N values of jagged rows in (B, width), on the left or on the right.

    Raises ValueError for a row that is longer than the width.
    """

    def __init__(self, offsets: Tensor, width: int, *, at_end: bool = False) -> None:
        lengths = offsets.diff()
        num_rows = len(lengths)
        longest = 0
        if num_rows:
            longest = int(lengths.max())
        if longest > width:
            raise ValueError(
                f"a row has {longest} tokens, but padded rows have {width}, as "
                "meta_info['padding'] says: raise data.max_prompt_length or "
                "data.max_response_length"
            )
        self.shape = (num_rows, width)
        starts = torch.arange(num_rows) * width
        if at_end:
            starts = starts + width - lengths
        self.of_values = places_from(starts, offsets)

    def pad(self, values: Tensor, fill: int = 0) -> Tensor:
        """Puts values (N, ...) at their places in (B, width, ...), with `fill` elsewhere."""
        num_rows, width = self.shape
        of_entry = values.shape[1:]
        padded = values.new_full((num_rows * width, *of_entry), fill)
        padded.index_copy_(0, self.of_values, values.detach())
        return padded.view(num_rows, width, *of_entry)

    def strip(self, padded: Tensor) -> Tensor:
        """Takes values (N, ...) from their places in (B, width, ...). It is the inverse of `pad`,
        and drops what lies elsewhere."""
        entries = padded.detach().flatten(0, 1)
        return entries.index_select(0, self.of_values)


class PaddedColumns(MutableMapping[str, Tensor]):
    """The columns of a batch in verl's layout, each padded when it is first read.

    Args:
        data: jagged `prompts`, and `responses` or none yet; with the meta entry `padding`, see
            `Padding`.
        by_sample: with a row for each sample, see `view_of_samples`.
    """

    def __init__(self, data: DataProto, *, by_sample: bool = False) -> None:
        self.padding = Padding.of(data)
        self.columns = data.tensors()
        self.samples: SampleRows | None = None
        """Set if a sample has several rows, which are then one row of the view."""
        num_rows = len(data)
        starts = None
        if by_sample:
            samples = SampleRows.of(data)
            if not samples.is_plain:
                self.samples = samples
                num_rows = samples.num_samples
                starts = samples.starts
        self.batch_size = torch.Size([num_rows])
        self.device: torch.device | None = None
        self.response_offsets: Tensor
        """Those of `responses`, where there are any."""
        self.response_places: RowPlaces | None = None
        if "responses" in self.columns:
            width = self.padding.max_response_length
            _, self.response_offsets = jagged_parts(self.columns["responses"])
            self.response_places = places_of_samples(self.response_offsets, width, starts)
        self.names = set(self.columns)
        """Columns of the batch."""
        if self.samples:
            self.names.add("attention_mask")
            self.names.discard("prompts")
        else:
            self.names.update(VERL_COLUMNS)
        self.read: dict[str, Tensor] = {}
        """Columns that somebody has read, in this view or in one with the same batch."""
        self.written: dict[str, Tensor] = {}
        """Columns that were put in."""
        self.removed: set[str] = set()

    def copy(self) -> "PaddedColumns":
        """Returns another view of the batch. What is put into it or removed from it stays out of
        this one."""
        other = copy.copy(self)
        other.written = dict(self.written)
        other.removed = {*self.removed}
        return other

    def __getitem__(self, name: str) -> Tensor:
        if name in self.written:
            return self.written[name]
        if name not in self:
            raise KeyError(name)
        if name not in self.read:
            self.read[name] = self._make(name)
        return self.read[name]

    def __setitem__(self, name: str, column: Tensor) -> None:
        if name in _TOKEN_COLUMNS:
            raise ValueError(
                f"{name} was put into a padded view, which cannot change tokens: make another batch"
            )
        self.written[name] = column

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self.written.pop(name, None)
        self.removed.add(name)

    def exclude(self, *names: str) -> "PaddedColumns":
        """Removes columns, as `DataProto.pop` does, and returns itself."""
        for name in names:
            del self[name]
        return self

    def __contains__(self, name: object) -> bool:
        if name in self.written:
            return True
        return name in self.names and name not in self.removed

    def __iter__(self) -> Iterator[str]:
        left = self.names - self.removed
        seen = self.read.keys() | self.written.keys()
        unread = sorted(left - seen)
        read = [name for name in self.read if name in left]
        in_order = dict.fromkeys([*unread, *read, *self.written])
        return iter(in_order)

    def __len__(self) -> int:
        """Returns the number of rows, as a TensorDict does."""
        return self.batch_size[0]

    def _make(self, name: str) -> Tensor:
        if name in VERL_COLUMNS:
            return self._made_of_both(name)
        column = self.columns[name]
        if not is_jagged(column):
            if self.samples:
                return column[self.samples.first_rows]
            return column
        values, offsets = jagged_parts(column)
        pad_token = self.padding.pad_token_id
        if name == "prompts":
            in_prompt = self._prompt_places(offsets)
            return in_prompt.pad(values, pad_token)
        if self.response_places is not None and torch.equal(offsets, self.response_offsets):
            fill = pad_token if name == "responses" else 0
            return self.response_places.pad(values, fill)
        assert not self.samples, f"{name} has no entry a response token"
        return column  # of another kind

    def _prompt_places(self, offsets: Tensor) -> RowPlaces:
        return RowPlaces(offsets, self.padding.max_prompt_length, at_end=True)

    def _made_of_both(self, name: str) -> Tensor:
        prompts, prompt_offsets = jagged_parts(self.columns["prompts"])
        in_prompt = self._prompt_places(prompt_offsets)
        if name == "input_ids":
            prompts_BP = in_prompt.pad(prompts, self.padding.pad_token_id)
            if self.response_places is None:
                return prompts_BP
            responses_BR = self["responses"]
            return torch.cat([prompts_BP, responses_BR], dim=1)
        if name == "position_ids":
            prompt_length = self.padding.max_prompt_length
            length = prompt_length
            if self.response_places is not None:
                length += self.padding.max_response_length
            num_padding_B = prompt_length - prompt_offsets.diff()
            positions_BT = torch.arange(length) - num_padding_B.unsqueeze(1)
            return positions_BT.clamp(min=0)  # 0 in the padding, too
        ones = torch.ones_like(prompts)
        is_prompt_BP = in_prompt.pad(ones)
        if self.response_places is None:
            return is_prompt_BP
        responses, _ = jagged_parts(self.columns["responses"])
        response_ones = torch.ones_like(responses)
        is_response_BR = self.response_places.pad(response_ones)
        if self.samples:
            return is_response_BR
        return torch.cat([is_prompt_BP, is_response_BR], dim=1)


def places_of_samples(offsets: Tensor, width: int, starts: Tensor | None) -> RowPlaces:
    """Returns the places of the values of response columns in (B, width), or with the `starts` of
    samples of several rows in (S, W).

    The tokens of a sample's rows then follow each other, and W is `width`, or more where a sample
    has more tokens.
    """
    if starts is None:
        return RowPlaces(offsets, width)
    of_samples = offsets[starts]
    if len(of_samples) > 1:
        longest = int(of_samples.diff().max())
        width = max(width, longest)
    return RowPlaces(of_samples, width)


class PaddedView(DataProto):
    """The view that `view_of_samples` returns: a batch whose columns are `PaddedColumns`."""

    def __init__(self, data: DataProto) -> None:
        columns: Any = PaddedColumns(data, by_sample=True)
        self.batch = columns
        self.non_tensor_batch = dict(data.non_tensor_batch)
        self.meta_info = dict(data.meta_info)
        if columns.samples:
            first_rows = columns.samples.first_rows.numpy()
            for name, array in data.non_tensor_batch.items():
                self.non_tensor_batch[name] = array[first_rows]

    def check_consistency(self) -> None:
        """Checks nothing: the columns of a view are checked by `strip`."""


def padded(data: DataProto, names: Collection[str] | None = None) -> DataProto:
    """Returns a batch of prompts and responses with padded columns, in verl's layout.

    `prompts` are padded on the left to (B, P); `responses`, and all jagged columns whose rows are
    as long as theirs, on the right to (B, R). `input_ids`, `attention_mask` and `position_ids` (B,
    T) are made of both, of prompts alone before generation, where T = P. Positions go on counting
    behind a response, as in verl. Padding is `pad_token_id` in `prompts`, `responses` and
    `input_ids`, and 0 elsewhere. Other columns stay as they are, also jagged ones whose rows are
    not as long as responses.

    Args:
        data: jagged `prompts`, and `responses` or none yet; with the meta entry `padding`, see
            `Padding`.
        names: the columns that are wanted; None for all. Arrays and meta_info are always kept.
    """
    columns = PaddedColumns(data)
    tensors = {}
    for name in columns:
        if names is None or name in names:
            tensors[name] = columns[name]
    return DataProto.from_dict(tensors, data.non_tensor_batch, data.meta_info)


def view_of_samples(data: DataProto) -> PaddedView:
    """Returns the view that algorithms have of a batch: that of `padded(data)`, or a row for each
    sample if samples have several rows.

    Such a row has the response tokens of the sample's rows one after the other (see
    `places_of_samples`), an `attention_mask` of them alone, and of other columns the entry of the
    sample's first row. Columns are padded when they are read.
    """
    return PaddedView(data)


def view_with(view: DataProto, columns: Mapping[str, Tensor]) -> DataProto:
    """Returns another view, with columns beside those of `view` or in place of them. `view` stays
    as it is."""
    # copy.copy asks for the state of the view, for which all columns are padded.
    other = type(view).__new__(type(view))
    other.batch = view.tensor_batch.copy()
    other.non_tensor_batch = dict(view.non_tensor_batch)
    other.meta_info = dict(view.meta_info)
    for name, column in columns.items():
        other.batch[name] = column
    return other


def strip(view: DataProto, data: DataProto) -> DataProto:
    """Returns `data` with what was changed in `view`, without padding.

    `view` is a PaddedView of `data`, or a batch in the layout of `padded(data)`. Columns that were
    put into it join those of `data` or replace them. Columns removed from a PaddedView are left
    out. A batch in the layout of `padded` may have some columns only, so a column that it lacks
    stays in the result. All its columns count as put in, but for `prompts`, `responses` and those
    that are made of both.

    A column that was put in becomes:

    1. if it is jagged, itself;
    2. if it is the very tensor that was read from the view, under any name, the column of `data`
       that was padded for it, so that both names share one column;
    3. if its first dimensions are those of padded responses, (B, R) or (S, W), a jagged column with
       the row lengths of `responses`, unless `data` has a dense column of this name;
    4. otherwise itself, or in a view of samples its sample's entry for each row.

    One tensor that was put in under several names becomes one column, as its first name decides.
    Arrays and meta_info are those of the view. Where samples have several rows, the view's arrays
    are repeated for each row, and those of `data` win.
    """
    tensors = data.tensors()
    arrays = dict(view.non_tensor_batch)
    _, offsets = jagged_parts(tensors["responses"])
    samples: SampleRows | None = None
    stripped_of_id: dict[int, Tensor] = {}  # by the id of the padded column
    padded_columns: Any = view.batch
    if isinstance(padded_columns, PaddedColumns):
        assert padded_columns.response_places is not None, "there are responses"
        response_places = padded_columns.response_places
        samples = padded_columns.samples
        written = padded_columns.written
        for name, column in padded_columns.read.items():
            if name in tensors:
                stripped_of_id[id(column)] = tensors[name]
        for name in padded_columns.removed:
            tensors.pop(name, None)
    else:
        width = Padding.of(data).max_response_length
        response_places = RowPlaces(offsets, width)
        written = {}
        for name, column in view.tensors().items():
            if name not in _TOKEN_COLUMNS:
                written[name] = column
    for name, column in written.items():
        key = id(column)
        if key not in stripped_of_id:
            is_dense_in_data = name in tensors and not is_jagged(tensors[name])
            stripped = _stripped(column, is_dense_in_data, response_places, offsets, samples)
            stripped_of_id[key] = stripped
        tensors[name] = stripped_of_id[key]
    if samples:
        sample_of_row = samples.sample_of_row.numpy()
        for name, array in arrays.items():
            arrays[name] = array[sample_of_row]
        arrays |= data.non_tensor_batch
    return DataProto.from_dict(tensors, arrays, view.meta_info)


def _stripped(
    column: Tensor,
    is_dense_in_data: bool,
    response_places: RowPlaces,
    offsets: Tensor,
    samples: SampleRows | None,
) -> Tensor:
    """Returns what a column becomes that was put into a view, and that was not read from it.

    `offsets` are those of the rows' responses. `samples` is None if each row of the view is one row
    of the batch.
    """
    if column.is_nested:
        return column
    has_shape_of_responses = column.shape[:2] == response_places.shape
    if has_shape_of_responses and not is_dense_in_data:
        values = response_places.strip(column)
        return jagged_from_offsets(values, offsets)
    if samples:
        return column[samples.sample_of_row]
    return column


def without_padding(data: DataProto, pad_token_id: int) -> DataProto:
    """Returns a batch in verl's layout as jagged `prompts`, `responses` and columns by response
    token. It is the inverse of `padded`.

    Every dense column (B, R, ...) counts as one by response token. A response has the tokens that
    `attention_mask` says, and `response_mask` 1 on all of them where the batch has none. The meta
    entry `padding` is that of the batch. Raises ValueError for a batch without `input_ids` and
    `attention_mask`, and for padding between tokens.
    """
    tensors = data.tensors()
    missing = [name for name in ("input_ids", "attention_mask") if name not in tensors]
    if missing:
        raise ValueError(
            f"a batch in verl's layout has input_ids and attention_mask, this one lacks {missing}"
        )
    input_ids = tensors.pop("input_ids")
    attended = tensors.pop("attention_mask").bool()
    tensors.pop("position_ids", None)
    response_length = 0
    if "responses" in tensors:
        response_length = tensors["responses"].size(1)
    prompt_length = input_ids.size(1) - response_length
    is_prompt_BP = attended[:, :prompt_length]
    is_response_BR = attended[:, prompt_length:]
    grows = is_prompt_BP.int().diff(dim=1) >= 0
    falls = is_response_BR.int().diff(dim=1) <= 0
    if not (grows.all() and falls.all()):
        raise ValueError(
            "verl's layout pads prompts on the left and responses on the right; here padding is "
            "between"
        )
    prompt_lengths = is_prompt_BP.sum(-1)
    prompt_offsets = offsets_of(prompt_lengths)
    in_prompt = RowPlaces(prompt_offsets, prompt_length, at_end=True)
    prompts_BP = input_ids[:, :prompt_length]
    prompts = in_prompt.strip(prompts_BP)
    jagged = {"prompts": jagged_from_offsets(prompts, prompt_offsets)}
    if "responses" in tensors:
        response_lengths = is_response_BR.sum(-1)
        offsets = offsets_of(response_lengths)
        in_response = RowPlaces(offsets, response_length)
        tensors.setdefault("response_mask", is_response_BR.long())
        for name, column in tensors.items():
            is_by_token = not column.is_nested and column.shape[:2] == in_response.shape
            if is_by_token and name != "prompts":
                values = in_response.strip(column)
                jagged[name] = jagged_from_offsets(values, offsets)
    padding = (prompt_length, response_length, pad_token_id)
    meta_info = data.meta_info | {"padding": padding}
    return DataProto.from_dict(tensors | jagged, data.non_tensor_batch, meta_info)
