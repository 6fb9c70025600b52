"""Samples: one or more rows of a batch that are one response, such as the turns of an agent."""

from collections.abc import Mapping, Sequence

import torch

from verl_like.protocol.dataproto import DataProto
from verl_like.protocol.row_ops import offsets_of

# Legend: B rows, S samples, m rows of the largest sample, R padded response length.

SAMPLE_COLUMN = "sample_id"


def sample_starts(columns: Mapping[str, torch.Tensor], num_rows: int) -> torch.Tensor:
    """(S + 1,) int64, the first row of each sample of some columns, and the number of rows.

    A sample is one row, or several that follow each other with the same `sample_id`.
    """
    if SAMPLE_COLUMN not in columns:
        return torch.arange(num_rows + 1)
    _, num_rows_S = torch.unique_consecutive(columns[SAMPLE_COLUMN], return_counts=True)
    return offsets_of(num_rows_S)


class SampleRows:
    """Which rows are one sample, whose response columns algorithms see side by side: (B, R) <-> (S, m R).

    S samples have at most m rows each. What a sample lacks of m rows is 0. Where each sample is one row, the two are
    the same.
    """

    def __init__(self, starts: torch.Tensor) -> None:
        """Args: starts: (S + 1,) int64, the first row of each sample, and the number of rows."""
        num_rows_S = starts.diff()
        self.starts, self.num_samples = starts, len(num_rows_S)
        self.most_rows = int(num_rows_S.max()) if self.num_samples else 1
        self.first_rows = starts[:-1]
        self.sample_of_row = torch.arange(self.num_samples).repeat_interleave(num_rows_S)
        number_in_sample = torch.arange(len(self.sample_of_row)) - self.first_rows[self.sample_of_row]
        self.places = self.sample_of_row * self.most_rows + number_in_sample
        """(B,) int64, where each row lies among the S * m."""

    @classmethod
    def of(cls, data: DataProto) -> "SampleRows":
        """Those of a batch: rows that follow each other with the same `sample_id`; without that column each row."""
        return cls(sample_starts(data.tensors(), len(data)))

    @property
    def is_plain(self) -> bool:
        """Each sample is one row."""
        return self.most_rows == 1

    def fold(self, column_BR: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        """(B, R, ...) -> (S, m R, ...), differentiable; `places` are those of this object on the column's device."""
        if self.is_plain:
            return column_BR
        places = self.places if places is None else places
        rows = column_BR.new_zeros(self.num_samples * self.most_rows, *column_BR.shape[1:])
        return rows.index_copy(0, places, column_BR).view(self.num_samples, -1, *column_BR.shape[2:])

    def unfold(self, column: torch.Tensor) -> torch.Tensor:
        """The inverse of `fold`."""
        if self.is_plain:
            return column
        rows = column.reshape(self.num_samples * self.most_rows, -1, *column.shape[2:])
        return rows.index_select(0, self.places)


def count_samples(data: DataProto) -> int:
    """How many samples a batch has."""
    return len(data) if SAMPLE_COLUMN not in data.tensors() else SampleRows.of(data).num_samples


def select_samples(data: DataProto, start: int, stop: int) -> DataProto:
    """The rows of the samples start..stop-1, a view of the same memory."""
    starts = SampleRows.of(data).starts
    return data.rows(int(starts[start]), int(starts[min(stop, len(starts) - 1)]))


def concat_samples(parts: Sequence[DataProto]) -> DataProto:
    """`DataProto.concat`, with `sample_id` numbered through: the same number in two parts is two samples."""
    whole = DataProto.concat(parts)
    if SAMPLE_COLUMN in whole.tensors():
        of_parts = [SampleRows.of(part) for part in parts if len(part)]
        before = 0
        numbers = []
        for samples in of_parts:
            numbers.append(samples.sample_of_row + before)
            before += samples.num_samples
        assert whole.batch is not None
        whole.batch[SAMPLE_COLUMN] = torch.cat(numbers) if numbers else whole.batch[SAMPLE_COLUMN]
    return whole
