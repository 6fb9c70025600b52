"""Random batches for the protocol's property tests, and what a batch holds as plain Python rows."""

from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from verl_like.protocol import DataProto
from verl_like.protocol.row_ops import object_array


def jagged(rows: list[torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """The rows as one jagged tensor; `values` gives dtype and row shape, also when there are no
    rows."""
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in rows])], dtype=torch.int64)
    return torch.nested.nested_tensor_from_jagged(torch.cat([values[:0], *rows]), offsets=offsets)


def _float_column(rng: np.random.Generator, rows: int) -> torch.Tensor:
    column = torch.from_numpy(rng.normal(size=(rows, 3)).astype(np.float32))
    column[torch.rand(column.shape, generator=torch.Generator().manual_seed(rows)) < 0.2] = float(
        "nan"
    )
    return column


def _jagged_column(
    rng: np.random.Generator, rows: int, dtype: torch.dtype, row_shape: tuple[int, ...]
) -> torch.Tensor:
    pieces = [
        torch.from_numpy(rng.integers(-9, 9, size=(n, *row_shape))).to(dtype)
        for n in rng.integers(0, 4, size=rows)
    ]
    return jagged(pieces, torch.zeros((0, *row_shape), dtype=dtype))


def _objects(rng: np.random.Generator, rows: int) -> list[Any]:
    kinds = [
        lambda i: {"id": i, "text": f"row {i}"},
        lambda i: [i, i],
        lambda i: None,
        lambda i: float("nan"),
        str,
        lambda i: np.arange(i),
        lambda i: (i, {"nested": np.float32(i)}),
    ]
    return [kinds[rng.integers(len(kinds))](i) for i in range(rows)]


TENSORS = {
    "input_ids": lambda rng, rows: torch.from_numpy(rng.integers(0, 99, size=(rows, 4))),
    "values": _float_column,
    "counts": lambda rng, rows: torch.from_numpy(rng.integers(0, 9, size=rows)),
    "mask": lambda rng, rows: torch.from_numpy(rng.integers(0, 2, size=(rows, 2)).astype(bool)),
    "half": lambda rng, rows: torch.from_numpy(rng.normal(size=(rows, 2))).to(torch.bfloat16),
    "no_width": lambda rng, rows: torch.zeros(rows, 0),
    "strided": lambda rng, rows: torch.from_numpy(rng.normal(size=(3, rows))).t(),
    "expanded": lambda rng, rows: torch.tensor([[7.0, 8.0]]).expand(rows, 2),
    "jagged_ids": lambda rng, rows: _jagged_column(rng, rows, torch.int64, ()),
    "jagged_half": lambda rng, rows: _jagged_column(rng, rows, torch.bfloat16, (2,)),
}
ARRAYS = {
    "uid": lambda rng, rows: np.array([f"0-{i}" for i in range(rows)], dtype=object),
    "policy_version": lambda rng, rows: object_array(
        [((7, 0, i), (8, i, int(rng.integers(9)))) for i in range(rows)]
    ),
    "objects": lambda rng, rows: DataProto.from_dict(
        non_tensors={"x": _objects(rng, rows)}
    ).non_tensor_batch["x"],
    "numbers": lambda rng, rows: rng.integers(0, 9, size=(rows, 2)),
    "words": lambda rng, rows: np.array(["a" * (i % 3) for i in range(rows)], dtype="<U3"),
    "object_pairs": lambda rng, rows: np.full((rows, 2), "x", dtype=object),
}


@st.composite
def batches(
    draw: st.DrawFn, min_rows: int = 0, max_rows: int = 6, jagged_columns: bool = True
) -> DataProto:
    """A batch with at least one column, of every kind of column that there is."""
    rows = draw(st.integers(min_rows, max_rows))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    choices = [
        name for name in [*TENSORS, *ARRAYS] if jagged_columns or not name.startswith("jagged")
    ]
    chosen = draw(st.lists(st.sampled_from(choices), min_size=1, unique=True))
    tensors = {name: make(rng, rows) for name, make in TENSORS.items() if name in chosen}
    arrays = {name: make(rng, rows) for name, make in ARRAYS.items() if name in chosen}
    meta = {
        "temperature": 1.0,
        "nan": float("nan"),
        "bounds": np.array([0.2, np.nan]),
        "scale": torch.tensor([1.0, 2.0]),
    }
    return DataProto.from_dict(tensors, arrays, meta)


def plain_rows(data: DataProto) -> list[dict[str, str]]:
    """Each row as {column: text of dtype and values}, worked out by iterating, without the code
    under test."""
    rows: list[dict[str, str]] = [{} for _ in range(len(data))]
    for name, column in data.tensors().items():
        for row, value in zip(rows, column.unbind(), strict=True):
            row[name] = f"{value.dtype} {tuple(value.shape)} {value.tolist()}"
    for name, array in data.non_tensor_batch.items():
        for row, value in zip(rows, array, strict=True):
            row[name] = f"{array.dtype} {value!r}"
    return rows


def buffers(data: DataProto) -> list[np.ndarray]:
    """The memory of every column as arrays of bytes."""
    found = []
    for column in data.tensors().values():
        for tensor in (column.values(), column.offsets()) if column.is_nested else (column,):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found.append(torch.tensor([], dtype=torch.uint8).set_(storage).numpy())
    return found + [array for array in data.non_tensor_batch.values() if array.size]


def share_memory(left: DataProto, right: DataProto) -> bool:
    return any(np.may_share_memory(a, b) for a in buffers(left) for b in buffers(right))


@contextmanager
def unchanged(*batches: DataProto):
    """Fail if the block changes rows, meta_info keys or write counters of the batches, or replaces
    their columns."""
    before = [
        (plain_rows(data), sorted(data.meta_info), data.column_versions()) for data in batches
    ]
    yield
    assert [
        (plain_rows(data), sorted(data.meta_info), data.column_versions()) for data in batches
    ] == before
