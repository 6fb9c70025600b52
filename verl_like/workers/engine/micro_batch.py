"""The columns of a micro-batch as losses read them: on the device, and padded when first read."""

import math
from abc import abstractmethod
from collections import UserDict
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from torch import Tensor

from verl_like.protocol.row_ops import is_jagged, jagged_parts
from verl_like.protocol.samples import SampleRows
from verl_like.workers.models.packing import Rows
from verl_like.workers.models.routed_experts import ROUTED_EXPERTS
from verl_like.workers.pinned_memory import to_device

# Legend: b rows, R response length, K response tokens, s samples of at most W of these.

_OF_PACKED_ROWS = ("prompts", ROUTED_EXPERTS)
"""Columns that only the packed rows have."""
_IN_ROWS = "places in rows"
_IN_SAMPLES = "places in samples"
_FIRST_ROWS = "first rows of samples"


class ColumnViews(UserDict[str, Tensor]):
    """A mapping of columns, each of which is made when it is first read.

    Columns may be added or replaced.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.data: dict[str, Any] = dict.fromkeys(names)
        """The columns by name, None if nobody has read them yet."""

    @abstractmethod
    def _make(self, name: str) -> Tensor:
        """Makes a column that is read for the first time."""

    def __getitem__(self, name: str) -> Tensor:
        if self.data[name] is None:
            self.data[name] = self._make(name)
        return self.data[name]


class MicroBatch(ColumnViews):
    """The columns of some rows on the device.

    Columns with a value for each response token are padded to (b, R) when they are first read. The
    first read of any column copies all of them to the device, in one copy.

    Losses are computed by sample, which can be several rows: `by_sample` returns the columns of
    samples, and `of_samples` brings what a model returns into their form. `on_host` has the rows
    on the host, where they can be packed for the model without waiting for the device.
    """

    def __init__(self, rows: Rows, device: str) -> None:
        names = [name for name in rows.columns if name not in _OF_PACKED_ROWS]
        super().__init__(names)
        self.on_host = rows
        self.device = device
        self.samples = SampleRows(rows.sample_starts)
        self.in_rows = rows.response_places()
        self.in_samples = self.in_rows
        if not self.samples.is_plain:
            self.in_samples = rows.response_places(self.samples.starts)

    @cached_property
    def moved(self) -> dict[str, Tensor]:
        """The columns on the device without padding, (K, ...) if by response token, and the places
        of their values in padded rows and samples."""
        values = {}
        for name, column in self.on_host.columns.items():
            if name not in _OF_PACKED_ROWS:
                values[name] = jagged_parts(column)[0] if is_jagged(column) else column
        values[_IN_ROWS] = self.in_rows.of_values
        if not self.samples.is_plain:
            values[_IN_SAMPLES] = self.in_samples.of_values
            values[_FIRST_ROWS] = self.samples.first_rows
        return to_device(values, self.device)

    def _make(self, name: str) -> Tensor:
        column = self.moved[name]
        if is_jagged(self.on_host[name]):
            return self._padded(column)
        return column

    def __setitem__(self, name: str, column: Tensor) -> None:
        num_rows, _ = self.in_rows.shape
        if len(column) != num_rows:
            raise ValueError(
                f"micro[{name!r}] is given the shape {tuple(column.shape)}, and has {num_rows} "
                "rows: pad what a model returns of tokens by micro.of_rows"
            )
        super().__setitem__(name, column)

    def of_tokens(self, values: Tensor) -> Tensor:
        """Returns values of the response tokens without padding.

        Values (K,) are returned as they are, and padded ones (b, R, ...) become (K, ...). Raises
        ValueError for another shape.
        """
        if values.shape[:2] == self.in_rows.shape:
            entries = values.flatten(0, 1)
            return entries.index_select(0, self.moved[_IN_ROWS])
        num_tokens = len(self.in_rows.of_values)
        if values.shape != (num_tokens,):
            raise ValueError(
                f"values of response tokens have shape {tuple(values.shape)}: give one for each "
                f"of these, ({num_tokens},), as PackedBatch.of_tokens makes them, or padded to "
                f"{tuple(self.in_rows.shape)}"
            )
        return values

    def of_rows(self, values: Tensor) -> Tensor:
        """Pads values (K,) of the response tokens to (b, R), with 0."""
        return self._padded(self.of_tokens(values))

    def of_samples(self, values: Tensor) -> Tensor:
        """Pads values (K,) or (b, R) of the response tokens to (s, W), with 0.

        The tokens of a sample's rows follow each other.
        """
        return self._padded_by_sample(self.of_tokens(values))

    def by_sample(self) -> ColumnViews:
        """Returns the columns with a row for each sample.

        Columns by response token become (s, W). Others have the entry of the sample's first row.
        """
        return _OfSamples(self)

    def column_of_samples(self, name: str) -> Tensor:
        """Makes one column of `by_sample`."""
        if self.samples.is_plain:
            return self[name]
        is_unread = self.data[name] is None
        if is_unread and is_jagged(self.on_host[name]):
            return self._padded_by_sample(self.moved[name])
        column = self[name]
        is_by_token = column.shape[:2] == self.in_rows.shape
        if is_by_token:
            return self.of_samples(column)
        return column[self.moved[_FIRST_ROWS]]

    def _padded(self, values: Tensor) -> Tensor:
        places = self.moved[_IN_ROWS]
        return _scatter(values, places, self.in_rows.shape)

    def _padded_by_sample(self, values: Tensor) -> Tensor:
        if self.samples.is_plain:
            return self._padded(values)
        places = self.moved[_IN_SAMPLES]
        return _scatter(values, places, self.in_samples.shape)


class _OfSamples(ColumnViews):
    """The columns that `MicroBatch.by_sample` returns."""

    def __init__(self, micro: MicroBatch) -> None:
        super().__init__(micro)
        self.micro = micro

    def _make(self, name: str) -> Tensor:
        return self.micro.column_of_samples(name)


def _scatter(values: Tensor, places: Tensor, shape: tuple[int, int]) -> Tensor:
    """Puts values of tokens, (K, ...), at their places in a tensor (*shape, ...) that is 0
    elsewhere. It is differentiable."""
    shape_of_value = values.shape[1:]
    num_places = math.prod(shape)
    zeros = values.new_zeros(num_places, *shape_of_value)
    padded = zeros.index_copy(0, places, values)
    return padded.view(*shape, *shape_of_value)
