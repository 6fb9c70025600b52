"""Padding: what algorithms, and code written for verl, see of rows that have none."""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from verl_like.protocol.dataproto import DataProto
from verl_like.protocol.row_ops import is_jagged, jagged_from_lengths, jagged_parts, offsets_of
from verl_like.protocol.samples import SampleRows

# Legend: B rows, P padded prompt length, R padded response length, T = P + R, N tokens of all rows.

VERL_COLUMNS = ("input_ids", "attention_mask", "position_ids")
"""Columns of verl's layout that are made of `prompts` and `responses`."""


@dataclass(frozen=True)
class Padding:
    """How wide padded columns are, and the token that fills them; in meta_info as `padding`, a tuple of the three."""

    max_prompt_length: int
    max_response_length: int
    pad_token_id: int

    @classmethod
    def of(cls, data: DataProto) -> "Padding":
        """Raises ValueError if the batch does not say."""
        if "padding" not in data.meta_info:
            raise ValueError(
                "the batch has no meta_info['padding'], which says how wide padded columns are: set it to "
                "(data.max_prompt_length, data.max_response_length, the padding token)"
            )
        return cls(*data.meta_info["padding"])


class RowPlaces:
    """Where the N values of jagged rows lie in (B, width), on the left or on the right.

    Raises ValueError for a row that is longer than the width.
    """

    def __init__(self, offsets: torch.Tensor, width: int, *, at_end: bool = False) -> None:
        lengths = offsets.diff()
        longest = int(lengths.max()) if len(lengths) else 0
        if longest > width:
            raise ValueError(f"a row has {longest} tokens, but padded rows have {width}: raise the width")
        self.shape = (len(lengths), width)
        first = torch.arange(len(lengths)) * width
        if at_end:
            first = first + width - lengths
        self.of_values = torch.repeat_interleave(first - offsets[:-1], lengths) + torch.arange(int(offsets[-1]))

    def pad(self, values: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """(N, ...) -> (B, width, ...), with `fill` elsewhere."""
        padded = values.new_full((self.shape[0] * self.shape[1], *values.shape[1:]), fill)
        return padded.index_copy_(0, self.of_values, values.detach()).view(*self.shape, *values.shape[1:])

    def strip(self, padded: torch.Tensor) -> torch.Tensor:
        """(B, width, ...) -> (N, ...): the inverse of `pad`, without what lies elsewhere."""
        return padded.detach().flatten(0, 1).index_select(0, self.of_values)


def padded(data: DataProto, names: Collection[str] | None = None) -> DataProto:
    """A batch of prompts and responses with padded columns, in verl's layout.

    `prompts` are padded on the left to (B, P); `responses`, and all jagged columns whose rows are as long as theirs, on
    the right to (B, R). `input_ids`, `attention_mask` and `position_ids` (B, T) are made of both, of prompts alone
    before generation, where T = P. Positions go on counting behind a response, as in verl. Elsewhere columns are 0,
    those of tokens `pad_token_id`. Columns that are not jagged stay as they are.

    Args:
        data: jagged `prompts`, and `responses` or none yet; with the meta entry `padding`, see `Padding`.
        names: the columns that are wanted; None for all.
    """
    padding, tensors = Padding.of(data), data.tensors()
    wanted = {*tensors, *VERL_COLUMNS} if names is None else set(names)
    prompts, prompt_offsets = jagged_parts(tensors["prompts"])
    in_prompt = RowPlaces(prompt_offsets, padding.max_prompt_length, at_end=True)
    made = {"prompts": in_prompt.pad(prompts, padding.pad_token_id)}
    attended = [in_prompt.pad(torch.ones_like(prompts))]
    if "responses" in tensors:
        responses, response_offsets = jagged_parts(tensors["responses"])
        in_response = RowPlaces(response_offsets, padding.max_response_length)
        made["responses"] = in_response.pad(responses, padding.pad_token_id)
        attended.append(in_response.pad(torch.ones_like(responses)))
        for name in tensors.keys() & wanted - made.keys():
            if is_jagged(tensors[name]) and torch.equal(jagged_parts(tensors[name])[1], response_offsets):
                made[name] = in_response.pad(jagged_parts(tensors[name])[0])
    made["input_ids"] = torch.cat([made[name] for name in ("prompts", "responses") if name in made], dim=1)
    made["attention_mask"] = torch.cat(attended, dim=1)
    made["position_ids"] = _positions(attended[0], made["attention_mask"].size(1))
    columns = {name: column for name, column in {**tensors, **made}.items() if name in wanted}
    return DataProto.from_dict(columns, data.non_tensor_batch, data.meta_info)


def _positions(prompt_mask_BP: torch.Tensor, length: int) -> torch.Tensor:
    """(B, T) int64, 0 on the first token of the prompt and before it."""
    num_prompt_tokens_B = prompt_mask_BP.sum(-1, keepdim=True)
    return (torch.arange(length) - prompt_mask_BP.size(1) + num_prompt_tokens_B).clamp(min=0)


def view_of_samples(data: DataProto) -> DataProto:
    """What algorithms see of a batch: `padded(data)`, or where samples have several rows, a row for each sample.

    Such a row has the response columns of the sample's rows side by side (see `SampleRows`), an `attention_mask` of
    them alone, and of other columns the entry of the sample's first row. `strip` undoes it.
    """
    view = padded(data)
    samples = SampleRows.of(data)
    if samples.is_plain:
        return view
    width = Padding.of(data).max_response_length
    columns = view.tensors()
    columns["attention_mask"] = columns["attention_mask"][:, -width:]
    for name in ("prompts", "input_ids", "position_ids"):
        del columns[name]
    folded = {
        name: samples.fold(column) if _is_by_token(column, len(data), width) else column[samples.first_rows]
        for name, column in columns.items()
    }
    of_first_rows = {name: array[samples.first_rows.numpy()] for name, array in view.non_tensor_batch.items()}
    return DataProto.from_dict(folded, of_first_rows, view.meta_info)


def strip(view: DataProto, data: DataProto) -> DataProto:
    """What was done with `view_of_samples(data)` or `padded(data)`, without padding: the batch with the columns that
    were added or replaced.

    A column (B, R, ...) of the view is one by response token, unless the batch has one of this name that is not jagged.
    """
    tensors = data.tensors()
    arrays = dict(view.non_tensor_batch)
    offsets = jagged_parts(tensors["responses"])[1]
    in_response = RowPlaces(offsets, Padding.of(data).max_response_length)
    samples = SampleRows.of(data) if len(view) < len(data) else None
    for name, column in view.tensors().items():
        is_dense_before = name in tensors and not is_jagged(tensors[name])
        if name in (*VERL_COLUMNS, "prompts", "responses") or column.is_nested or (samples and is_dense_before):
            continue
        if samples:
            by_token = column.shape[:2] == (samples.num_samples, samples.most_rows * in_response.shape[1])
            column = samples.unfold(column) if by_token else column[samples.sample_of_row]
        if column.shape[:2] == in_response.shape and not is_dense_before:
            column = torch.nested.nested_tensor_from_jagged(in_response.strip(column), offsets=offsets)
        tensors[name] = column
    if samples:
        arrays = {name: array[samples.sample_of_row.numpy()] for name, array in arrays.items()}
        arrays |= data.non_tensor_batch
    return DataProto.from_dict(tensors, arrays, view.meta_info)


def _is_by_token(column: torch.Tensor, num_rows: int, width: int) -> bool:
    return not column.is_nested and column.shape[:2] == (num_rows, width)


def without_padding(data: DataProto, pad_token_id: int) -> DataProto:
    """The inverse of `padded`: a batch in verl's layout as jagged `prompts`, `responses` and columns by response token.

    Every dense column (B, R, ...) counts as one by response token. A response has the tokens that `attention_mask`
    says, and `response_mask` 1 on all of them where the batch has none. The meta entry `padding` is that of the batch.
    Raises ValueError for a batch without `input_ids` and `attention_mask`, and for padding between tokens.
    """
    tensors = data.tensors()
    missing = [name for name in ("input_ids", "attention_mask") if name not in tensors]
    if missing:
        raise ValueError(f"a batch in verl's layout has input_ids and attention_mask, this one lacks {missing}")
    input_ids, attended = tensors.pop("input_ids"), tensors.pop("attention_mask").bool()
    tensors.pop("position_ids", None)
    response_length = tensors["responses"].size(1) if "responses" in tensors else 0
    prompt_length = input_ids.size(1) - response_length
    grows = attended[:, :prompt_length].int().diff(dim=1) >= 0
    falls = attended[:, prompt_length:].int().diff(dim=1) <= 0
    if not (grows.all() and falls.all()):
        raise ValueError("verl's layout pads prompts on the left and responses on the right; here padding is between")
    prompt_offsets = offsets_of(attended[:, :prompt_length].sum(-1))
    in_prompt = RowPlaces(prompt_offsets, prompt_length, at_end=True)
    prompts = in_prompt.strip(input_ids[:, :prompt_length])
    jagged = {"prompts": torch.nested.nested_tensor_from_jagged(prompts, offsets=prompt_offsets)}
    if "responses" in tensors:
        lengths_B = attended[:, prompt_length:].sum(-1)
        in_response = RowPlaces(offsets_of(lengths_B), response_length)
        tensors.setdefault("response_mask", attended[:, prompt_length:].long())
        for name, column in tensors.items():
            is_by_token = not column.is_nested and column.shape[:2] == in_response.shape
            if is_by_token and name != "prompts":
                jagged[name] = jagged_from_lengths(in_response.strip(column), lengths_B)
    meta_info = data.meta_info | {"padding": (prompt_length, response_length, pad_token_id)}
    return DataProto.from_dict({**tensors, **jagged}, data.non_tensor_batch, meta_info)
