"""DataProto, the batch that travels between the driver and the workers."""

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union, cast, overload

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch.utils.data import DataLoader

from verl_like.protocol import wire
from verl_like.protocol.merge import (
    merge_meta_info,
    names,
    require_keys,
    union_meta_info,
    union_numpy_dict,
    union_tensor_dict,
)
from verl_like.protocol.row_ops import (
    ColumnData,
    concat_columns,
    copy_column,
    copy_containers,
    deep_equal,
    is_jagged,
    jagged_from_lengths,
    jagged_parts,
    num_rows,
    object_array,
    take_rows,
    view_rows,
)

RowIndex = Union[slice, Sequence[int], Sequence[bool], np.ndarray, torch.Tensor]


@dataclass(eq=False)
class DataProtoItem:
    """One row: `batch` holds its tensors (no batch dimension), `non_tensor_batch` its objects.

    `jagged_keys` and `array_templates` (no rows; dtype and row shape) let `collate_fn` rebuild the columns.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
    jagged_keys: frozenset[str] = frozenset()
    array_templates: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class DataProto:
    """A batch of rows: tensors in `batch` (one batch dimension), objects in `non_tensor_batch`, and `meta_info`, which
    is about the batch and not about a row.

    Tensors may be jagged (torch.nested, layout=torch.jagged, ragged in dim 1). Containers are never shared between two
    DataProtos; columns are values: replace them (`data.batch["x"] = ...`), never write into them. Operations on rows
    (indexing, chunk, repeat, concat, ...) copy the rows; `select` and `union` share the column tensors.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()
        self.batch = None if self.batch is None else self.batch.copy()
        self.non_tensor_batch = dict(self.non_tensor_batch)
        self.meta_info = copy_containers(self.meta_info)

    def check_consistency(self) -> None:
        """Raise ValueError unless every column has the same number of rows and a supported type."""
        if self.batch is not None:
            if not isinstance(self.batch, TensorDict):
                raise ValueError(
                    f"DataProto.batch is a {type(self.batch).__name__}, not a TensorDict; use DataProto.from_dict."
                )
            if len(self.batch.batch_size) != 1:
                raise ValueError(
                    f"DataProto.batch has batch_size {tuple(self.batch.batch_size)}; it must have one batch dimension."
                )
        if not isinstance(self.non_tensor_batch, dict) or not isinstance(self.meta_info, dict):
            raise ValueError("DataProto.non_tensor_batch and DataProto.meta_info must be dicts.")
        rows = len(self)
        first = "batch" if self.batch is not None else next(iter(self.non_tensor_batch), "")
        for name, tensor in self._tensors().items():
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(
                    f"DataProto.batch[{name!r}] is a {type(tensor).__name__}, not a tensor; put it in non_tensor_batch."
                )
            if is_jagged(tensor):
                jagged_parts(tensor)
        for name, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray) or array.ndim == 0:
                raise ValueError(
                    f"DataProto.non_tensor_batch[{name!r}] is a {type(array).__name__}, not an array with rows; "
                    "use DataProto.from_dict(non_tensors=...), which converts lists."
                )
            if array.shape[0] != rows:
                raise ValueError(
                    f"DataProto.non_tensor_batch[{name!r}] has {array.shape[0]} rows but {first!r} has {rows}; "
                    "every column must have the same number of rows."
                )

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return next((array.shape[0] for array in self.non_tensor_batch.values()), 0)

    def __repr__(self) -> str:
        return self.get_data_info()

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {} if self.batch is None else dict(self.batch.items())

    def _map_columns(self, operation: Callable[[Any], Any], rows: int) -> "DataProto":
        """The same columns and meta_info with `operation` done on every column."""
        self.check_consistency()  # the containers are open: a column of another length may have been put in
        batch = None
        if self.batch is not None:
            tensors = {name: operation(tensor) for name, tensor in self._tensors().items()}
            batch = TensorDict(tensors, batch_size=[rows], device=self.batch.device)
        return DataProto(
            batch, {name: operation(array) for name, array in self.non_tensor_batch.items()}, self.meta_info
        )

    # Construction ---------------------------------------------------------------------------------------------------

    @staticmethod
    def from_dict(
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, np.ndarray | Sequence[Any]] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> "DataProto":
        """Columns by name. A list or tuple of non-tensors becomes a 1-D object array, one element per row."""
        batch = None
        if tensors:
            for name, tensor in tensors.items():
                if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
                    raise ValueError(
                        f"from_dict: tensors[{name!r}] is a {type(tensor).__name__}, not a tensor with rows; "
                        "pass other values in non_tensors, one per row, or in meta_info."
                    )
            sizes = {name: num_rows(tensor) for name, tensor in tensors.items()}
            rows = next(iter(sizes.values()))
            if set(sizes.values()) != {rows}:
                raise ValueError(f"from_dict: the tensors differ in their number of rows: {sizes}.")
            batch = TensorDict(dict(tensors), batch_size=[rows])
        arrays = {}
        for name, value in (non_tensors or {}).items():
            if not isinstance(value, (np.ndarray, list, tuple)):
                raise ValueError(
                    f"from_dict: non_tensors[{name!r}] is a {type(value).__name__}; pass an array or a list with one element "
                    "per row."
                )
            arrays[name] = value if isinstance(value, np.ndarray) else object_array(value)
        return DataProto(batch, arrays, meta_info or {})

    @staticmethod
    def from_single_dict(data: Mapping[str, Any], meta_info: dict[str, Any] | None = None) -> "DataProto":
        """Tensors go to `batch`, NumPy arrays to `non_tensor_batch`; anything else raises ValueError."""
        tensors, arrays = {}, {}
        for name, value in data.items():
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            elif isinstance(value, np.ndarray):
                arrays[name] = value
            else:
                raise ValueError(
                    f"from_single_dict: {name!r} is a {type(value).__name__}, neither a tensor nor a NumPy array; "
                    "use from_dict(non_tensors=...) for lists."
                )
        return DataProto.from_dict(tensors, arrays, meta_info)

    @staticmethod
    def from_tensordict(tensor_dict: TensorDict, meta_info: dict[str, Any] | None = None) -> "DataProto":
        """Tensors stay; NonTensorStack entries become object arrays, NonTensorData entries meta_info.

        Raises ValueError if a meta key is also in `meta_info`.
        """
        tensors, arrays, meta = {}, {}, dict(meta_info or {})
        for name, value in tensor_dict.items():
            if isinstance(value, NonTensorStack):
                arrays[name] = object_array(value.tolist())
            elif isinstance(value, NonTensorData):
                if name in meta:
                    raise ValueError(f"from_tensordict: {name!r} is in the TensorDict and in meta_info; drop one.")
                meta[name] = value.data
            else:
                tensors[name] = value
        return DataProto(TensorDict(tensors, tensor_dict.batch_size, device=tensor_dict.device), arrays, meta)

    def to_tensordict(self) -> TensorDict:
        """Inverse of `from_tensordict`: a non-tensor column is stored by elements, so it comes back as an object array.

        Raises ValueError if one name is used twice among tensors, non-tensors and meta_info.
        """
        self.check_consistency()
        tensors = self._tensors()
        twice = (tensors.keys() & self.non_tensor_batch.keys()) | (
            self.meta_info.keys() & (tensors.keys() | self.non_tensor_batch.keys())
        )
        if twice:
            raise ValueError(
                f"to_tensordict: {names(twice)} are used both as a column and in meta_info or twice; rename."
            )
        device = None if self.batch is None else self.batch.device
        result = TensorDict(tensors, batch_size=[len(self)], device=device)
        for name, array in self.non_tensor_batch.items():
            result[name] = NonTensorStack(*array)
        for name, value in self.meta_info.items():
            result[name] = NonTensorData(copy_containers(value), batch_size=[len(self)])
        return result

    # Rows -----------------------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: int | np.integer) -> DataProtoItem: ...
    @overload
    def __getitem__(self, index: RowIndex) -> "DataProto": ...
    def __getitem__(self, index: Any) -> Any:
        """A row as DataProtoItem for an integer, else a DataProto of copied rows."""
        if isinstance(index, (int, np.integer)) and not isinstance(index, bool):
            return self._item(int(index))
        if isinstance(index, slice):
            return self.slice(index.start, index.stop, index.step)
        if isinstance(index, (list, tuple, np.ndarray, torch.Tensor)):
            return self.select_idxs(index)
        raise TypeError(
            f"DataProto is indexed by an int, a slice, a list, an array or a tensor, not {type(index).__name__}."
        )

    def _item(self, index: int) -> DataProtoItem:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a DataProto with {len(self)} rows")
        row = index % len(self)
        data = self.slice(row, row + 1)
        jagged = frozenset(name for name, tensor in data._tensors().items() if is_jagged(tensor))
        batch = None
        if data.batch is not None:
            tensors = {
                name: jagged_parts(value)[0] if name in jagged else value[0] for name, value in data.batch.items()
            }
            batch = TensorDict(tensors, batch_size=[], device=data.batch.device)
        arrays = data.non_tensor_batch
        objects = {name: array[0] for name, array in arrays.items()}
        return DataProtoItem(
            batch, objects, data.meta_info, jagged, {name: array[:0] for name, array in arrays.items()}
        )

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> "DataProto":
        """Copy of the rows start:end:step, with Python's rules for slices."""
        selected = range(*slice(start, end, step).indices(len(self)))
        if selected.step == 1:
            stop = max(selected.start, selected.stop)
            return self._map_columns(lambda column: copy_column(view_rows(column, selected.start, stop)), len(selected))
        return self.select_idxs(list(selected))

    def rows(self, start: int, stop: int) -> "DataProto":
        """Rows start..stop-1 as a VIEW of the same memory, for code that only moves rows; everyone else uses `slice`."""
        if self._tensors() or self.non_tensor_batch:
            if not 0 <= start <= stop <= len(self):
                raise ValueError(f"rows({start}, {stop}) is not a range of the {len(self)} rows.")
        return self._map_columns(lambda column: view_rows(column, start, stop), stop - start)

    def select_idxs(self, idxs: Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor) -> "DataProto":
        """Copy of the rows at `idxs`: integers (negative ones count from the end, repeats allowed) or a bool per row."""
        indices = self._row_indices(idxs)
        return self._map_columns(lambda column: take_rows(column, indices), len(indices))

    def _row_indices(self, idxs: Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor) -> torch.Tensor:
        """`idxs` as int64 on CPU, each in 0..len-1."""
        indices = torch.as_tensor(np.asarray(idxs) if isinstance(idxs, (list, tuple)) else idxs).cpu()
        if indices.ndim != 1:
            raise ValueError(f"select_idxs: the indices must be one-dimensional, got shape {tuple(indices.shape)}.")
        if indices.dtype == torch.bool:
            if len(indices) != len(self):
                raise ValueError(f"select_idxs: a mask of {len(indices)} values for {len(self)} rows.")
            return indices.nonzero().squeeze(1)
        if len(indices) == 0:
            return torch.zeros(0, dtype=torch.int64)
        if indices.is_floating_point() or indices.is_complex():
            raise ValueError(f"select_idxs: the indices must be integers or bools, got {indices.dtype}.")
        indices = indices.to(torch.int64)
        low, high = int(indices.min()), int(indices.max())
        if low < -len(self) or high >= len(self):
            raise IndexError(f"select_idxs: indices {low}..{high} are outside the {len(self)} rows.")
        return torch.where(indices < 0, indices + len(self), indices)

    def reorder(self, indices: torch.Tensor) -> None:
        """In place: row i becomes the old row indices[i]. Raises ValueError unless `indices` is a permutation."""
        order = self._row_indices(indices)
        if not torch.equal(order.sort().values, torch.arange(len(self))):
            raise ValueError(
                f"reorder: the {len(order)} indices are not a permutation of the {len(self)} rows; use select_idxs."
            )
        reordered = self.select_idxs(order)
        self.batch, self.non_tensor_batch = reordered.batch, reordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Every row `repeat_times` times: AABB if `interleave`, else ABAB."""
        if repeat_times < 0:
            raise ValueError(f"repeat: repeat_times must not be negative, got {repeat_times}.")
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor) -> "DataProto":
        """Row i repeat_times[i] times, copies side by side."""
        counts = torch.as_tensor(repeat_times, dtype=torch.int64).cpu()
        if counts.shape != (len(self),) or bool((counts < 0).any()):
            raise ValueError(
                f"sample_level_repeat: needs one count >= 0 for each of the {len(self)} rows, got {counts.tolist()}."
            )
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(counts))

    def chunk(self, chunks: int) -> list["DataProto"]:
        """Split into `chunks` equal parts. Without columns: `chunks` copies. Raises ValueError if it does not divide."""
        if chunks <= 0:
            raise ValueError(f"chunk: the number of chunks must be positive, got {chunks}.")
        if len(self) % chunks:
            raise ValueError(
                f"chunk: {len(self)} rows do not divide into {chunks} equal chunks; pad a copy with "
                f"pad_dataproto_to_divisor(data, {chunks}), or use split(split_size), whose last piece may be short."
            )
        size = len(self) // chunks
        return [self.slice(index * size, (index + 1) * size) for index in range(chunks)]

    def split(self, split_size: int) -> list["DataProto"]:
        """Pieces of `split_size` rows, the last one may be short; one empty piece if there are no rows."""
        if split_size <= 0:
            raise ValueError(f"split: split_size must be positive, got {split_size}.")
        return [self.slice(start, start + split_size) for start in range(0, max(len(self), 1), split_size)]

    @staticmethod
    def concat(data: Sequence["DataProto"]) -> "DataProto":
        """The rows of all parts, in order. A part without rows adds only its meta_info.

        meta_info is merged by key: "metrics" by `merge_metrics`, "timing" (seconds by name) into lists, anything else
        must be equal wherever it is present. Raises ValueError for an empty list, and for columns or meta_info that
        differ.
        """
        if not data:
            raise ValueError("concat got an empty list; there is no batch to return.")
        meta_info = merge_meta_info([part.meta_info for part in data])
        filled = [part for part in data if len(part)]
        if not filled:
            with_columns = [part for part in data if part._tensors() or part.non_tensor_batch]
            filled = (with_columns or list(data))[:1]
        first = filled[0]
        for index, part in enumerate(filled):
            part.check_consistency()
            differing = (part._tensors().keys() ^ first._tensors().keys()) | (
                part.non_tensor_batch.keys() ^ first.non_tensor_batch.keys()
            )
            if differing:
                raise ValueError(
                    f"concat: {names(differing)} are not in all parts (compare the non-empty parts 0 and {index}); "
                    "select or pop the same columns in every part."
                )
        arrays = {
            name: cast(np.ndarray, concat_columns(name, [part.non_tensor_batch[name] for part in filled]))
            for name in first.non_tensor_batch
        }
        if first.batch is None:
            return DataProto(None, arrays, meta_info)
        parts = [part._tensors() for part in filled]
        tensors = {name: concat_columns(name, [part[name] for part in parts]) for name in first._tensors()}
        batch = TensorDict(tensors, batch_size=[sum(map(len, filled))], device=first.batch.device)
        return DataProto(batch, arrays, meta_info)

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> "DataProto":
        """(B, L, ...) columns in `split_keys` become (B * n_split, L / n_split, ...), the other rows are repeated
        n_split times side by side. Raises ValueError for a missing key or an L that does not divide."""
        keys = list(split_keys or [])
        require_keys("unfold_column_chunks", "the columns", keys, self._tensors().keys() | self.non_tensor_batch.keys())
        if n_split <= 0:
            raise ValueError(f"unfold_column_chunks: n_split must be positive, got {n_split}.")
        result = self.repeat(n_split)
        for name in keys:
            if self.batch is not None and name in self._tensors():
                assert result.batch is not None
                result.batch[name] = _unfold_column(name, self.batch[name], n_split)
            else:
                result.non_tensor_batch[name] = cast(
                    np.ndarray, _unfold_column(name, self.non_tensor_batch[name], n_split)
                )
        return result

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator["DataProto"]:
        """Mini-batches of `mini_batch_size` rows, `epochs` times over, each with the meta_info.

        `dataloader_kwargs` go to torch's DataLoader, e.g. {"shuffle": True}, which needs a `seed`: the order is then
        another one in each epoch and depends on nothing but the seed. Raises ValueError (at the call, not at the first
        item) if the rows do not divide or if shuffle has no seed.
        """
        options = dict(dataloader_kwargs or {})
        if mini_batch_size <= 0 or len(self) % mini_batch_size:
            raise ValueError(
                f"make_iterator: {len(self)} rows do not divide into mini-batches of {mini_batch_size}; choose a "
                "mini-batch size that divides the rows of one rank."
            )
        if options.get("shuffle") and seed is None:
            raise ValueError("make_iterator: shuffle without a seed cannot be reproduced; pass seed=.")
        # Always its own generator: a DataLoader draws from torch's global one even when it does not shuffle.
        generator = torch.Generator().manual_seed(0 if seed is None else seed)
        loader = DataLoader(
            cast(Any, self), batch_size=mini_batch_size, collate_fn=_identity, generator=generator, **options
        )
        return (mini_batch for _ in range(epochs) for mini_batch in loader)

    def __getitems__(self, indices: list[int]) -> "DataProto":
        """Rows for torch's DataLoader in one call instead of one by one."""
        return self.select_idxs(indices)

    # Columns --------------------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> "DataProto":
        """New DataProto with these keys; None keeps all. Shares the columns unless `deepcopy`.

        Raises ValueError naming a key that does not exist.
        """
        self.check_consistency()
        tensors, arrays, meta = self._pick("select", batch_keys, non_tensor_batch_keys, meta_info_keys)
        batch = None
        if self.batch is not None:
            batch = TensorDict(tensors, batch_size=[len(self)], device=self.batch.device)
        if deepcopy:
            tensors_copied = None if batch is None else batch.clone()
            return DataProto(tensors_copied, copy.deepcopy(arrays), copy.deepcopy(meta))
        return DataProto(batch, arrays, meta)

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> "DataProto":
        """Remove these keys in place and return them as a DataProto; None removes nothing.

        Raises ValueError naming a key that does not exist, and then removes nothing.
        """
        tensors, arrays, meta = self._pick("pop", batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        result = DataProto.from_dict(tensors, arrays, meta)
        if tensors:
            assert self.batch is not None
            self.batch = self.batch.exclude(*tensors)
        self.non_tensor_batch = {name: array for name, array in self.non_tensor_batch.items() if name not in arrays}
        self.meta_info = {name: value for name, value in self.meta_info.items() if name not in meta}
        return result

    def _pick(
        self,
        caller: str,
        batch_keys: Sequence[str] | None,
        non_tensor_batch_keys: Sequence[str] | None,
        meta_info_keys: Sequence[str] | None,
    ) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray], dict[str, Any]]:
        picked = []
        for place, values, keys in (
            ("batch", self._tensors(), batch_keys),
            ("non_tensor_batch", self.non_tensor_batch, non_tensor_batch_keys),
            ("meta_info", self.meta_info, meta_info_keys),
        ):
            wanted = list(values) if keys is None else list(keys)
            require_keys(caller, place, wanted, values)
            picked.append({name: values[name] for name in wanted})
        tensors, arrays, meta = picked
        return tensors, arrays, meta

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> "DataProto":
        """Rename tensor columns in place (a swap works) and return self."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise ValueError(f"rename: {len(old)} old keys but {len(new)} new keys.")
        tensors = self._tensors()
        require_keys("rename", "batch", old, tensors)
        new_names = dict(zip(old, new, strict=True))
        renamed = {new_names.get(name, name): tensor for name, tensor in tensors.items()}
        if len(renamed) != len(tensors):
            raise ValueError(f"rename: {names(new)} would overwrite a column of {names(tensors)}; pop that one first.")
        if self.batch is not None:
            self.batch = TensorDict(renamed, batch_size=[len(self)], device=self.batch.device)
        return self

    def to(self, device: str | torch.device | int) -> "DataProto":
        """Move the tensors in place and return self; non-tensors stay."""
        if self.batch is not None:
            self.batch = self.batch.to(torch.device(device))
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """New DataProto with the columns and meta_info of both, sharing the tensors.

        What both have must be equal (NaN equals NaN); the meta_info entries "metrics" and "timing" are united name by
        name. Raises ValueError naming the key that differs, or when the numbers of rows differ.
        """
        self.check_consistency()
        other.check_consistency()
        has_rows = [data for data in (self, other) if data.batch is not None or data.non_tensor_batch]
        if len({len(data) for data in has_rows}) > 1:
            raise ValueError(
                f"union: {len(self)} rows and {len(other)} rows; drop padding rows or select the same rows first."
            )
        batch = self.batch
        if batch is None or other.batch is None:
            batch = other.batch if batch is None else batch
        else:
            batch = union_tensor_dict(batch, other.batch)
        arrays = union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        return DataProto(batch, arrays, union_meta_info(self.meta_info, other.meta_info))

    # Comparing and storing ------------------------------------------------------------------------------------------

    def equal(self, other: "DataProto") -> bool:
        """Same columns, dtypes, values (NaN equals NaN) and meta_info, whatever the device and the order of columns."""
        return (
            len(self) == len(other)
            and deep_equal(self._tensors(), other._tensors())
            and deep_equal(self.non_tensor_batch, other.non_tensor_batch)
            and deep_equal(self.meta_info, other.meta_info)
        )

    def column_versions(self) -> dict[str, int]:
        """torch's write counter of each tensor column: a column was written into in place if its counter has changed.

        -1 for inference-mode tensors, which have no counter.
        """
        return {name: -1 if tensor.is_inference() else tensor._version for name, tensor in self._tensors().items()}

    def get_data_info(self) -> str:
        """What the batch holds, for people: one line per column with shape, dtype and size."""
        lines = [f"DataProto: {len(self)} rows"]
        total = 0
        for name, tensor in self._tensors().items():
            size = (jagged_parts(tensor)[0] if is_jagged(tensor) else tensor).nbytes
            total += size
            lines.append(f"  {name}: {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, {size / 2**20:.2f} MiB")
        for name, array in self.non_tensor_batch.items():
            total += array.nbytes
            lines.append(f"  {name}: {array.shape} array of {array.dtype}")
        lines += [f"  meta_info[{name!r}]: {type(value).__name__}" for name, value in self.meta_info.items()]
        lines[0] += f", {total / 2**20:.2f} MiB"
        return "\n".join(lines)

    def __getstate__(self) -> dict[str, Any]:
        """Tensors as views in NumPy arrays, which pickle protocol 5 hands over out of band, without a copy."""
        self.check_consistency()
        return {
            "rows": None if self.batch is None else len(self),
            "tensors": {name: wire.to_wire(tensor) for name, tensor in self._tensors().items()},
            "non_tensor_batch": self.non_tensor_batch,
            "meta_info": wire.pack_meta(self.meta_info),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Tensors on the CPU, wherever they were. On shared memory they are read-only by agreement."""
        self.batch = None
        if state["rows"] is not None:
            tensors = {name: wire.from_wire(tensor) for name, tensor in state["tensors"].items()}
            self.batch = TensorDict(tensors, batch_size=[state["rows"]])
        self.non_tensor_batch = state["non_tensor_batch"]
        self.meta_info = wire.unpack_meta(state["meta_info"])

    def save_to_disk(self, path: str | os.PathLike[str]) -> None:
        """One safetensors file that holds everything; never pickle. Raises ValueError naming a value of an unknown
        type."""
        self.check_consistency()
        contents = {
            "rows": None if self.batch is None else len(self),
            "batch": self._tensors(),
            "non_tensor_batch": self.non_tensor_batch,
            "meta_info": self.meta_info,
        }
        wire.write_file(path, contents)

    @staticmethod
    def load_from_disk(path: str | os.PathLike[str]) -> "DataProto":
        """A batch written by `save_to_disk`, on the CPU."""
        contents = wire.read_file(path)
        batch = None if contents["rows"] is None else TensorDict(contents["batch"], batch_size=[contents["rows"]])
        return DataProto(batch, contents["non_tensor_batch"], contents["meta_info"])


def _unfold_column(name: str, column: ColumnData, n_split: int) -> ColumnData:
    if not isinstance(column, np.ndarray) and column.is_nested:
        values, offsets = jagged_parts(column)
        lengths = offsets.diff()
        if bool((lengths % n_split).any()):
            raise ValueError(
                f"unfold_column_chunks: {name!r} has rows of lengths {lengths.tolist()}; not all divide by {n_split}."
            )
        return jagged_from_lengths(values.clone(), (lengths // n_split).repeat_interleave(n_split))
    if column.ndim < 2 or column.shape[1] % n_split:
        raise ValueError(
            f"unfold_column_chunks: {name!r} has shape {tuple(column.shape)}; its second dimension must be there and "
            f"divide by {n_split}."
        )
    return copy_column(column).reshape((column.shape[0] * n_split, column.shape[1] // n_split, *column.shape[2:]))


def _identity(data: DataProto) -> DataProto:
    return data
