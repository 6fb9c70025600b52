"""A batch as NumPy arrays, out of band in pickle protocol 5, and as a file, without pickle."""

import functools
import json
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from torch import Tensor

from verl_like.protocol.metric import Metric
from verl_like.protocol.row_ops import jagged_from_offsets, jagged_parts, object_array

_FILE_STRUCTURE = "verl_like.DataProto/2"
# NumPy has no such types: they travel as integers of the same width.
_VIEWED_AS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


@dataclass(frozen=True)
class WireTensor:
    """A tensor as NumPy arrays that share its memory; `offsets` is set for a jagged tensor."""

    array: np.ndarray
    dtype: str  # name of the torch dtype, e.g. "bfloat16"
    offsets: np.ndarray | None = None


def to_wire(tensor: Tensor) -> WireTensor:
    """Returns a view of a CPU tensor. A GPU tensor is copied to the CPU, and a non-contiguous one
    is made contiguous."""
    tensor = tensor.detach()
    offsets = None
    if tensor.is_nested:
        tensor, offset_tensor = jagged_parts(tensor)
        offsets = offset_tensor.cpu().numpy()
    # Complex conjugate and negation are lazy views that NumPy does not know.
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    tensor = tensor.contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    viewed_as = _VIEWED_AS.get(tensor.dtype, tensor.dtype)
    array = tensor.view(viewed_as).numpy()
    return WireTensor(array, dtype, offsets)


def from_wire(wire: WireTensor) -> Tensor:
    """Returns a CPU tensor on the memory of the arrays. Nobody may write into it if the memory came
    from another process."""
    # from_dlpack, unlike from_numpy, takes a read-only array; writes are found by
    # DataProto.column_versions().
    dtype = getattr(torch, wire.dtype)
    tensor = torch.from_dlpack(wire.array).view(dtype)
    if wire.offsets is None:
        return tensor
    offsets = torch.from_dlpack(wire.offsets)
    return jagged_from_offsets(tensor, offsets)


def write_file(path: str | os.PathLike[str], contents: dict[str, Any]) -> None:
    """Writes nested containers of numbers, text, arrays, tensors and metrics as one safetensors
    file. It writes all or nothing.

    Each array is an entry of the file, and one more entry holds everything else as JSON. Raises
    ValueError with the place and type of a value that is none of these.
    """
    arrays: dict[str, np.ndarray] = {}
    encoded = _encode(contents, "", arrays)
    structure = json.dumps(encoded)
    arrays[_FILE_STRUCTURE] = np.frombuffer(structure.encode(), dtype=np.uint8)
    partial = f"{path}.partial"
    safetensors.numpy.save_file(arrays, partial)
    os.replace(partial, path)


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the contents that were given to `write_file`. Raises ValueError if the file was not
    written by it."""
    with safetensors.safe_open(path, framework="numpy") as file:
        if _FILE_STRUCTURE not in file.keys():  # noqa: SIM118  it is no dict
            raise ValueError(
                f"{path} was not written by save_to_disk: it has no entry {_FILE_STRUCTURE!r}."
            )
    arrays = safetensors.numpy.load_file(path)
    structure = arrays[_FILE_STRUCTURE].tobytes()
    decode = functools.partial(_decode, arrays)
    return json.loads(structure, object_hook=decode)


def _encode(value: Any, place: str, arrays: dict[str, np.ndarray]) -> Any:
    """Returns the JSON form of `value`, which is {kind: content} for what JSON does not know.
    Arrays of numbers are added to `arrays`."""

    def encode_all(items: Any) -> list[Any]:
        return [_encode(item, f"{place}[{index}]", arrays) for index, item in enumerate(items)]

    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.str_):
        return str(value)
    if type(value) is list:
        return encode_all(value)
    if type(value) is tuple:
        return {"tuple": encode_all(value)}
    if type(value) is dict:
        pairs = []
        for key, item in value.items():
            encoded_key = _encode(key, f"{place} key", arrays)
            encoded_item = _encode(item, f"{place}[{key!r}]", arrays)
            pairs.append((encoded_key, encoded_item))
        return {"dict": pairs}
    if isinstance(value, Metric):
        return {"metric": [value.value, value.reduction, value.weight]}
    if isinstance(value, Tensor):
        wire = to_wire(value)
        parts = (wire.array, wire.dtype, wire.offsets)
        return {"tensor": encode_all(parts)}
    if isinstance(value, np.generic):
        array = np.asarray(value)
        return {"scalar": _encode(array, place, arrays)}
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        dtype = value.dtype
        kind = f"array of {dtype}"
        is_of_numbers = dtype.kind in "biuf"
        if is_of_numbers and dtype.isnative and dtype.itemsize <= 8:
            name = str(len(arrays))
            contiguous = np.ascontiguousarray(value)
            arrays[name] = contiguous.reshape(value.shape)
            return {"array": name}
        if dtype.kind in "OU":
            items = encode_all(value.ravel().tolist())
            return {"objects": [items, list(value.shape), dtype.str]}
    raise ValueError(
        f"save_to_disk: {place} is a {kind}, which a file without pickle cannot hold; turn it "
        "into numbers, text, lists, dicts, arrays or tensors, or pop it first."
    )


def _decode(arrays: dict[str, np.ndarray], encoded: dict[str, Any]) -> Any:
    """Returns the value that `{kind: content}` stands for. The content is decoded already."""
    [(kind, content)] = encoded.items()
    match kind:
        case "array":
            return arrays[content]
        case "tuple":
            return tuple(content)
        case "dict":
            return dict(content)
        case "metric":
            return Metric(*content)
        case "tensor":
            return from_wire(WireTensor(*content))
        case "scalar":
            return content[()]
        case "objects":
            items, shape, dtype = content
            array = object_array(items).astype(dtype)
            return array.reshape(shape)
    raise ValueError(f"A saved batch holds a value of unknown kind {kind!r}.")
