"""Merges batches: the columns of two batches over the same rows, and the meta_info of many
parts."""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from tensordict import TensorDict

from verl_like.protocol.metric import merge_metrics
from verl_like.protocol.row_ops import columns_of, concat_columns, deep_equal, share_offsets

V = TypeVar("V")
# meta_info entries that every call writes anew, as dicts by name.
_PER_CALL = ("metrics", "timing")


def names(keys: Iterable[str]) -> str:
    """Writes key names for an error message."""
    return ", ".join(sorted(map(repr, keys)))


def pick_keys(
    caller: str, place: str, values: Mapping[str, V], keys: Sequence[str] | None
) -> dict[str, V]:
    """Returns the entries at `keys`; None means all. Raises ValueError, which names the keys, if
    some are missing or given twice."""
    if keys is None:
        return dict(values)
    wanted = list(keys)
    missing = [key for key in wanted if key not in values]
    if missing:
        raise ValueError(
            f"{caller}: {names(missing)} not in {place}, which has {names(values) or 'nothing'}."
        )
    if len(set(wanted)) != len(wanted):
        raise ValueError(f"{caller}: a key of {names(wanted)} is given twice.")
    return {name: values[name] for name in wanted}


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Returns a new TensorDict with the columns of both. Raises ValueError if they or the batch
    sizes differ."""
    size = tensor_dict1.batch_size
    other_size = tensor_dict2.batch_size
    if size != other_size:
        raise ValueError(f"union: the batch sizes differ, {tuple(size)} and {tuple(other_size)}.")
    columns = columns_of(tensor_dict1)
    other_columns = columns_of(tensor_dict2)
    united = union_columns("batch", columns, other_columns)
    # With a device, a TensorDict would move its columns there.
    device = tensor_dict1.device
    if device != tensor_dict2.device:
        device = None
    shared = share_offsets(united)
    return TensorDict(shared, size, device=device)


def union_numpy_dict(
    left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns a new dict with the arrays of both. Raises ValueError if they differ."""
    return union_columns("non_tensor_batch", left, right)


def union_meta_info(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a new dict with the entries of both, "metrics" and "timing" joined name by name.
    Raises ValueError if entries differ."""
    joined = {}
    for key in _PER_CALL:
        if key in left and key in right:
            joined[key] = union_columns(f"meta_info[{key!r}]", left[key], right[key])
    with_joined = {**left, **joined}
    others_with_joined = {**right, **joined}
    return union_columns("meta_info", with_joined, others_with_joined)


def union_columns(place: str, left: Mapping[str, V], right: Mapping[str, V]) -> dict[str, V]:
    """Returns a new dict with the entries of both. Raises ValueError if an entry that is in both
    differs. NaN equals NaN."""
    for key in left.keys() & right.keys():
        if not deep_equal(left[key], right[key]):
            raise ValueError(
                f"union: {place} key {key!r} is in both and differs: {_short(left[key])} and "
                f"{_short(right[key])}; pop or rename it on one side."
            )
    # Left's own columns stay the very same tensors: those that are in an object store already are
    # not put again.
    united = dict(left)
    for key, value in right.items():
        united.setdefault(key, value)
    return united


def merge_meta_info(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the meta_info of the parts of a concatenation, see `DataProto.concat`."""
    merged: dict[str, Any] = {}
    for index, part in enumerate(parts):
        for key, value in part.items():
            if key not in merged:
                merged[key] = value
            elif key not in _PER_CALL and not deep_equal(merged[key], value):
                raise ValueError(
                    f"concat: meta_info[{key!r}] is {_short(value)} in part {index} but "
                    f"{_short(merged[key])} before; make it equal in all parts or pop it first."
                )
    if "metrics" in merged:
        metrics = [part["metrics"] for part in parts if "metrics" in part]
        merged["metrics"] = merge_metrics(metrics)
    if "timing" in merged:
        timing: dict[str, list[Any]] = {}
        for part in parts:
            timing_of_part = part.get("timing", {})
            for name, seconds in timing_of_part.items():
                several = timing.setdefault(name, [])
                if isinstance(seconds, list):
                    several.extend(seconds)
                else:
                    several.append(seconds)
        merged["timing"] = timing
    return merged


def concat_parts(place: str, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenates every column of `parts` by rows. Raises ValueError unless all parts have the
    same, matching columns."""
    first = parts[0]
    for index, part in enumerate(parts):
        differing = part.keys() ^ first.keys()
        if differing:
            raise ValueError(
                f"concat: {names(differing)} in {place} not in all parts (compare the non-empty "
                f"parts 0 and {index}); select or pop the same columns in every part."
            )
    whole = {}
    for name in first:
        columns = [part[name] for part in parts]
        whole[name] = concat_columns(name, columns)
    return whole


def _short(value: Any) -> str:
    if not hasattr(value, "shape"):
        return reprlib.repr(value)
    kind = type(value).__name__
    shape = tuple(value.shape)
    return f"{kind} {value.dtype} {shape}"
