"""How a batch travels (tensors as NumPy arrays, out of band in pickle protocol 5) and is stored (without pickle)."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from safetensors import safe_open
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl_like.protocol.merge import names
from verl_like.protocol.metric import Metric
from verl_like.protocol.row_ops import jagged_parts, map_leaves, object_array

_FILE_FORMAT = "verl_like.DataProto/1"
_JSON_KEY = "json"
# NumPy has no such types: they travel as integers of the same width.
_VIEWED_AS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
_FILE_DTYPES = {np.dtype(name) for name in ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64",
                                            "int64", "float16", "float32", "float64")}  # fmt: skip


@dataclass(frozen=True)
class WireTensor:
    """A tensor as NumPy arrays that share its memory; `offsets` is set for a jagged tensor."""

    array: np.ndarray
    dtype: str  # name of the torch dtype, e.g. "bfloat16"
    offsets: np.ndarray | None = None


def to_wire(tensor: torch.Tensor) -> WireTensor:
    """View of a CPU tensor (a GPU tensor is copied to the CPU, a non-contiguous one is made contiguous)."""
    tensor = tensor.detach()
    offsets = None
    if tensor.is_nested:
        tensor, offset_tensor = jagged_parts(tensor)
        offsets = offset_tensor.cpu().numpy()
    # resolve_*: complex conjugate and negation are lazy views that NumPy does not know.
    tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    array = tensor.view(_VIEWED_AS.get(tensor.dtype, tensor.dtype)).numpy()
    return WireTensor(array, str(tensor.dtype).removeprefix("torch."), offsets)


def from_wire(wire: WireTensor) -> torch.Tensor:
    """CPU tensor on the memory of the arrays. Memory that came from another process is read-only by agreement."""
    # from_dlpack, unlike from_numpy, takes a read-only array; writes are found by DataProto.column_versions().
    tensor = torch.from_dlpack(wire.array).view(getattr(torch, wire.dtype))
    if wire.offsets is None:
        return tensor
    return torch.nested.nested_tensor_from_jagged(tensor, offsets=torch.from_dlpack(wire.offsets))


def split_tensordict(
    tensor_dict: TensorDict, meta_info: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray], dict[str, Any]]:
    """(tensors, object arrays from NonTensorStack, meta_info with the NonTensorData entries added)."""
    tensors: dict[str, Any] = {}
    arrays, meta = {}, dict(meta_info)
    for name, value in tensor_dict.items():
        if isinstance(value, NonTensorStack):
            arrays[name] = object_array(value.tolist())
        elif isinstance(value, NonTensorData):
            if name in meta:
                raise ValueError(f"from_tensordict: {name!r} is in the TensorDict and in meta_info; drop one.")
            meta[name] = value.data
        else:
            tensors[name] = value
    return tensors, arrays, meta


def join_tensordict(batch: TensorDict, arrays: Mapping[str, np.ndarray], meta_info: Mapping[str, Any]) -> TensorDict:
    """New TensorDict that also holds the arrays, by element, and the meta_info. ValueError if a name is used twice."""
    used = [*map(str, batch.keys()), *arrays, *meta_info]
    twice = {name for name in used if used.count(name) > 1}
    if twice:
        raise ValueError(f"to_tensordict: {names(twice)} used more than once among columns and meta_info; rename one.")
    result = batch.copy()
    for name, array in arrays.items():
        result[name] = NonTensorStack(*array)
    for name, value in meta_info.items():
        result[name] = NonTensorData(map_leaves(lambda leaf: leaf, value), batch_size=batch.batch_size)
    return result


def write_file(path: str | os.PathLike[str], contents: dict[str, Any]) -> None:
    """Write nested containers of numbers, text, arrays, tensors and metrics as one safetensors file, all or nothing.

    Arrays are safetensors entries; the structure around them is JSON, stored as an entry of bytes because a
    safetensors header is limited in size. Raises ValueError naming the place and type of a value that has no safe form.
    """
    arrays: dict[str, np.ndarray] = {}
    structure = json.dumps(_encode(contents, "", arrays)).encode()
    arrays[_JSON_KEY] = np.frombuffer(structure, dtype=np.uint8)
    partial = Path(f"{path}.partial")
    safetensors.numpy.save_file(arrays, partial, metadata={"format": _FILE_FORMAT})
    os.replace(partial, path)


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents given to `write_file`. Raises ValueError if the file was not written by it."""
    with safe_open(path, framework="numpy") as file:
        found = (file.metadata() or {}).get("format")
    if found != _FILE_FORMAT:
        raise ValueError(f"{path} has format {found!r}, not {_FILE_FORMAT!r}: it was not written by save_to_disk.")
    arrays = safetensors.numpy.load_file(path)
    return _decode(json.loads(arrays[_JSON_KEY].tobytes()), arrays)


def _encode(value: Any, place: str, arrays: dict[str, np.ndarray]) -> Any:
    """JSON form of `value`; a dict with the key "type" marks what JSON does not know, arrays are put aside by name."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, np.str_):
        return str(value)
    if type(value) is float:
        return value if math.isfinite(value) else {"type": "float", "value": repr(value)}
    if type(value) in (list, tuple):
        items = [_encode(item, f"{place}[{index}]", arrays) for index, item in enumerate(value)]
        return items if type(value) is list else {"type": "tuple", "items": items}
    if type(value) is dict:
        pairs = [[_encode(key, f"{place} key", arrays), _encode(item, f"{place}[{key!r}]", arrays)]
                 for key, item in value.items()]  # fmt: skip
        return {"type": "dict", "items": pairs}
    if isinstance(value, Metric):
        return {"type": "metric", "value": repr(value.value), "reduction": value.reduction, "weight": value.weight}
    if isinstance(value, torch.Tensor):
        wire = to_wire(value)
        offsets = None if wire.offsets is None else _encode(wire.offsets, place, arrays)
        return {"type": "tensor", "array": _encode(wire.array, place, arrays), "dtype": wire.dtype, "offsets": offsets}
    if isinstance(value, np.generic) and value.dtype in _FILE_DTYPES:
        return {"type": "scalar", "array": _encode(np.asarray(value), place, arrays)}
    if isinstance(value, np.ndarray) and value.dtype in _FILE_DTYPES:
        name = f"array-{len(arrays)}"
        arrays[name] = np.ascontiguousarray(value).reshape(value.shape)
        return {"type": "array", "name": name}
    if isinstance(value, np.ndarray) and value.dtype.kind in "OU":
        items = [_encode(item, f"{place}[{index}]", arrays) for index, item in enumerate(value.ravel().tolist())]
        return {"type": "objects", "items": items, "shape": list(value.shape), "dtype": value.dtype.str}
    kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise ValueError(f"save_to_disk: {place.lstrip()} is a {kind}, which a file without pickle cannot hold; "
                     "turn it into numbers, text, lists, dicts, arrays or tensors, or pop it first.")  # fmt: skip


def _decode(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    match value["type"]:
        case "float":
            return float(value["value"])
        case "tuple":
            return tuple(_decode(item, arrays) for item in value["items"])
        case "dict":
            return {_decode(key, arrays): _decode(item, arrays) for key, item in value["items"]}
        case "metric":
            return Metric(float(value["value"]), value["reduction"], value["weight"])
        case "tensor":
            return from_wire(
                WireTensor(_decode(value["array"], arrays), value["dtype"], _decode(value["offsets"], arrays))
            )
        case "scalar":
            return _decode(value["array"], arrays)[()]
        case "array":
            return arrays[value["name"]]
        case "objects":
            array = np.empty(len(value["items"]), dtype=np.dtype(value["dtype"]))
            for index, item in enumerate(value["items"]):
                array[index] = _decode(item, arrays)
            return array.reshape(value["shape"])
    raise ValueError(f"A saved batch holds a value of unknown type {value['type']!r}.")
