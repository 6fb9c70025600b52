"""Samples: one or more rows of a batch that are one response, such as the turns of an agent."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from verl_like.protocol.dataproto import DataProto
from verl_like.protocol.row_ops import offsets_of

# Legend: B rows, S samples.

SAMPLE_COLUMN = "sample_id"


def sample_starts(columns: Mapping[str, Tensor], num_rows: int) -> Tensor:
    """Returns the first row of each sample of some columns, and the number of rows: (S + 1,) int64.

    A sample is one row, or several that follow each other with the same `sample_id`.
    """
    if SAMPLE_COLUMN not in columns:
        return torch.arange(num_rows + 1)
    _, num_rows_S = torch.unique_consecutive(columns[SAMPLE_COLUMN], return_counts=True)
    return offsets_of(num_rows_S)


class SampleRows:
    """The division of rows into samples."""

    def __init__(self, starts: Tensor) -> None:
        """Args: starts: (S + 1,) int64, the first row of each sample, and the number of rows."""
        num_rows_S = starts.diff()
        self.starts = starts
        self.first_rows = starts[:-1]
        self.num_samples = len(num_rows_S)
        self.sample_of_row = torch.repeat_interleave(num_rows_S)

    @classmethod
    def of(cls, data: DataProto) -> "SampleRows":
        """Returns the samples of a batch: rows that follow each other with the same `sample_id`.

        Without that column each row is a sample.
        """
        starts = sample_starts(data.tensors(), len(data))
        return cls(starts)

    @property
    def is_plain(self) -> bool:
        """True if each sample is one row."""
        return self.num_samples == len(self.sample_of_row)


def count_samples(data: DataProto) -> int:
    """Returns the number of samples of a batch."""
    return SampleRows.of(data).num_samples


def select_samples(data: DataProto, start: int, stop: int) -> DataProto:
    """Returns the rows of the samples start to stop - 1, as a view of the same memory."""
    starts = sample_starts(data.tensors(), len(data))
    bounds = starts[start : stop + 1]
    return data.rows(int(bounds[0]), int(bounds[-1]))


def concat_samples(parts: Sequence[DataProto]) -> DataProto:
    """Does `DataProto.concat`, and numbers `sample_id` through, because the same number in two
    parts means two samples."""
    whole = DataProto.concat(parts)
    if SAMPLE_COLUMN not in whole.tensors() or not len(whole):
        return whole
    num_rows_of_parts = [SampleRows.of(part).starts.diff() for part in parts]
    num_rows_S = torch.cat(num_rows_of_parts)
    whole.tensor_batch[SAMPLE_COLUMN] = torch.repeat_interleave(num_rows_S)
    return whole
