"""The rows of a micro-batch as losses see them: on the device, and padded where they are read."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, MutableMapping
from functools import cached_property

import torch

from verl_like.protocol.row_ops import is_jagged, jagged_parts
from verl_like.protocol.samples import SampleRows
from verl_like.workers.models.packing import Rows
from verl_like.workers.pinned_memory import to_device

# Legend: b rows, R response length, K response tokens, s samples of at most W of these.

_IN_ROWS = "places in rows"
_IN_SAMPLES = "places in samples"
_FIRST_ROWS = "first rows of samples"


class ColumnViews(MutableMapping[str, torch.Tensor]):
    """Columns that are made when they are first read; others may be put in beside them or in their
    place."""

    def __init__(self, names: Iterable[str]) -> None:
        self._columns: dict[str, torch.Tensor | None] = dict.fromkeys(names)

    @abstractmethod
    def _make(self, name: str) -> torch.Tensor: ...

    def __getitem__(self, name: str) -> torch.Tensor:
        column = self._columns[name]
        if column is None:
            column = self._columns[name] = self._make(name)
        return column

    def __setitem__(self, name: str, column: torch.Tensor) -> None:
        self._columns[name] = column

    def __delitem__(self, name: str) -> None:
        del self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


class MicroBatch(ColumnViews):
    """The columns of some rows on the device, those by response token padded to (b, R) when they
    are first read.

    `on_host` has the rows on the host, where they are packed without a wait. Losses are of samples:
    `by_sample` has their columns, and `of_samples` brings what a model returns of rows into that
    form.

    What is read first, a column or a place, brings all to the device, in one copy.
    """

    def __init__(self, rows: Rows, device: str) -> None:
        super().__init__(name for name in rows.columns if name != "prompts")
        self.on_host = rows
        self.device = device
        self.samples = SampleRows(rows.sample_starts)
        self.in_rows = rows.response_places()
        self.in_samples = (
            self.in_rows if self.samples.is_plain else rows.response_places(self.samples.starts)
        )

    @cached_property
    def moved(self) -> dict[str, torch.Tensor]:
        """The columns as they are, (K, ...) by response token, and places."""
        columns = {
            name: column for name, column in self.on_host.columns.items() if name != "prompts"
        }
        values = {
            name: jagged_parts(each)[0] if is_jagged(each) else each
            for name, each in columns.items()
        }
        values[_IN_ROWS] = self.in_rows.of_values
        if not self.samples.is_plain:
            values |= {_IN_SAMPLES: self.in_samples.of_values, _FIRST_ROWS: self.samples.first_rows}
        return to_device(values, self.device)

    def _make(self, name: str) -> torch.Tensor:
        column = self.moved[name]
        return self._padded(column) if is_jagged(self.on_host[name]) else column

    def __setitem__(self, name: str, column: torch.Tensor) -> None:
        num_rows, _ = self.in_rows.shape
        if len(column) != num_rows:
            raise ValueError(
                f"micro[{name!r}] is given the shape {tuple(column.shape)}, and has {num_rows} "
                "rows: pad what a model returns of tokens by micro.of_rows"
            )
        super().__setitem__(name, column)

    def of_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """(K,), what a model returns of the response tokens, as it is; of padded (b, R, ...) the
        tokens, (K, ...).

        Raises ValueError for another shape.
        """
        num_tokens = len(self.in_rows.of_values)
        if values.shape[:2] == self.in_rows.shape:
            return values.flatten(0, 1).index_select(0, self.moved[_IN_ROWS])
        if values.shape != (num_tokens,):
            raise ValueError(
                f"values of response tokens have shape {tuple(values.shape)}: give one for each "
                f"of these, ({num_tokens},), as PackedBatch.of_tokens makes them, or padded to "
                f"{tuple(self.in_rows.shape)}"
            )
        return values

    def of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """(K,) -> (b, R)."""
        return self._padded(self.of_tokens(values))

    def of_samples(self, values: torch.Tensor) -> torch.Tensor:
        """(K,), or padded (b, R) -> (s, W), the tokens of a sample's rows one after the other."""
        return self._padded_by_sample(self.of_tokens(values))

    def by_sample(self) -> ColumnViews:
        """The columns with a row for each sample: (s, W) by response token, of others the entry of
        its first row."""
        return _OfSamples(self)

    def column_of_samples(self, name: str) -> torch.Tensor:
        """One of `by_sample`."""
        if self.samples.is_plain:
            return self[name]
        is_unread = self._columns[name] is None
        if is_unread and is_jagged(self.on_host[name]):
            return self._padded_by_sample(self.moved[name])
        column = self[name]
        is_by_token = column.shape[:2] == self.in_rows.shape
        return self.of_samples(column) if is_by_token else column[self.moved[_FIRST_ROWS]]

    def _padded(self, values: torch.Tensor) -> torch.Tensor:
        return _scatter(values, self.moved[_IN_ROWS], self.in_rows.shape)

    def _padded_by_sample(self, values: torch.Tensor) -> torch.Tensor:
        if self.samples.is_plain:
            return self._padded(values)
        return _scatter(values, self.moved[_IN_SAMPLES], self.in_samples.shape)


class _OfSamples(ColumnViews):
    """What `MicroBatch.by_sample` returns."""

    def __init__(self, micro: MicroBatch) -> None:
        super().__init__(micro)
        self.micro = micro

    def _make(self, name: str) -> torch.Tensor:
        return self.micro.column_of_samples(name)


def _scatter(values: torch.Tensor, places: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """(K, ...) values of tokens -> (*shape, ...) with 0 elsewhere, differentiable."""
    padded = values.new_zeros(shape[0] * shape[1], *values.shape[1:])
    return padded.index_copy(0, places, values).view(*shape, *values.shape[1:])
