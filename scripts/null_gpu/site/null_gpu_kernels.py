"""Real numbers on the null GPU: aten's CUDA kernels are answered by the CPU's, on the same memory.

The memory of a null GPU is host memory. So a CUDA tensor is also a CPU tensor, `on_host`, and a
kernel's answer is the CPU kernel of the same name. What has no answer is launched as ever, and the
null GPU refuses the launch by name.
"""

import ctypes
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import null_gpu_attention
import torch

# Kernels that make, resize or describe tensors and compute nothing: they run as they are.
_AS_THEY_ARE = {
    "empty.memory_format",
    "empty_strided",
    "resize_",
    "set_",
    "set_.source_Storage",
    "is_set_to",
    "record_stream",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "_local_scalar_dense",
    "_cudnn_init_dropout_state",
}
# CUDA takes tensors of the CPU here: indices, and lists that are copied.
_ANY_DEVICE = {
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
    "_foreach_copy_",
}
_PHILOX_STEP = 4  # a generator's offset is a multiple of it

_library = torch.library.Library("aten", "IMPL")
_runtime = ctypes.CDLL("libcuda.so.1")  # the null GPU, which has the runtime's functions as well


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor on the memory of a CUDA tensor; a CPU tensor itself."""
    if not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or storage.data_ptr() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    host = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    view = torch.empty(0, dtype=tensor.dtype).set_(
        host, tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    view = torch._conj(view) if tensor.is_conj() else view
    return torch._neg_view(view) if tensor.is_neg() else view


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A new CUDA tensor with the values and strides of a CPU tensor."""
    tensor = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
    on_host(tensor).copy_(host)
    return tensor


def register(
    name: str, kernel: Callable[..., Any], library: torch.library.Library = _library
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is overridden
        library.impl(name, kernel, "CUDA", allow_override=True)


class _Call:
    """One call of a kernel: its CUDA tensors on the host, and back."""

    def __init__(self, name: str, arguments: tuple, keywords: dict) -> None:
        # By id of the CUDA tensor: it, and on the host
        self.hosts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.device = keywords.get("device")
        any_device = name.partition(".")[0] in _ANY_DEVICE
        for tensor in _tensors([arguments, list(keywords.values())]):
            if tensor.is_cuda:
                self.hosts[id(tensor)] = (tensor, on_host(tensor))
                self.device = tensor.device
        devices = {
            t.device
            for t in _tensors([arguments, list(keywords.values())])
            if t.is_cuda or (t.dim() and self.hosts)
        }
        if len(devices) > 1 and not any_device:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{' and '.join(sorted(map(str, devices)))}! (null GPU, {name})"
            )

    def to_host(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.hosts[id(value)][1] if value.is_cuda else value
        if isinstance(value, list | tuple):
            return type(value)(self.to_host(item) for item in value)
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return _host_generator(value) if isinstance(value, torch.Generator) else value

    def to_device(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            own = next((tensor for tensor, host in self.hosts.values() if host is value), None)
            return to_device(value, self.device or torch.device("cuda")) if own is None else own
        return (
            type(value)(self.to_device(item) for item in value)
            if isinstance(value, list | tuple)
            else value
        )

    def resize_outputs(self) -> None:
        """An `out` that the CPU kernel has resized, and with that moved, takes the values."""
        for tensor, host in self.hosts.values():
            if host.size() != tensor.size():
                tensor.resize_(host.size())
                on_host(tensor).copy_(host)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _host_generator(generator: torch.Generator | None) -> torch.Generator:
    """A CPU generator that follows from the CUDA generator's seed and offset, which moves on as
    after a kernel."""
    generator = (
        torch.cuda.default_generators[torch.cuda.current_device()]
        if generator is None
        else generator
    )
    if generator.device.type != "cuda":
        return generator
    seed = hash((generator.initial_seed(), generator.get_offset())) % 2**63
    generator.set_offset(generator.get_offset() + _PHILOX_STEP)
    return torch.Generator().manual_seed(seed)


def _answer(name: str, operator: torch._ops.OpOverload) -> Callable[..., Any]:
    arguments_of_schema = operator._schema.arguments
    random = any(argument.name == "generator" for argument in arguments_of_schema)
    # A number where the schema has a tensor: Python gives its own to the CPU kernel only as a
    # tensor.
    tensor_places = [
        str(argument.type) in ("Tensor", "Optional[Tensor]") for argument in arguments_of_schema
    ]

    def kernel(*arguments: Any, **keywords: Any) -> Any:
        call = _Call(name, arguments, keywords)
        host_arguments = [
            torch.tensor(value)
            if place and isinstance(value, bool | int | float)
            else call.to_host(value)
            for value, place in zip(arguments, tensor_places, strict=False)
        ]
        host_keywords = {key: call.to_host(value) for key, value in keywords.items()}
        if (
            random
            and len(host_arguments) < len(arguments_of_schema)
            and host_keywords.get("generator") is None
        ):
            host_keywords["generator"] = _host_generator(None)
        with torch._C._AutoDispatchBelowAutograd():
            result = operator(*host_arguments, **host_keywords)
            call.resize_outputs()
            return call.to_device(result)

    return kernel


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """aten::copy_. Between host and device it is the runtime's own copy, which counts, where torch
    would use that."""
    with torch._C._AutoDispatchBelowAutograd():
        same = (
            target.dtype == source.dtype and target.size() == source.size() and target.numel() > 0
        )
        if (
            target.is_cuda != source.is_cuda
            and same
            and target.is_contiguous()
            and source.is_contiguous()
        ):
            pointers = ctypes.c_void_p(target.data_ptr()), ctypes.c_void_p(source.data_ptr())
            _runtime.cudaMemcpyAsync(
                *pointers, ctypes.c_size_t(target.numel() * target.element_size()), 4, None
            )
            if not non_blocking:
                _runtime.cudaStreamSynchronize(None)
        else:
            on_host(target).copy_(on_host(source))
    return target


def _histc(values: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """aten::histc, which the CPU has for numbers with a fraction alone."""
    counts = torch.histc(on_host(values).double(), bins, min, max)
    result = torch.empty(bins, dtype=values.dtype, device=values.device)
    on_host(result).copy_(counts)
    return result


def install() -> None:
    """Answers all kernels of aten that the CPU has as well."""
    for full_name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        namespace, _, name = full_name.partition("::")
        if namespace != "aten" or name in _AS_THEY_ARE or name.startswith("_fft"):
            continue
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(full_name, "CPU"):
            continue
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        returns = operator._schema.returns
        if any(value.alias_info is not None and not value.alias_info.is_write for value in returns):
            continue  # a view
        register(name, _answer(name, operator))
    register("copy_", _copy)
    register("histc", _histc)
    for fused in (
        torch.backends.cuda.enable_flash_sdp,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ):
        fused(False)  # dense attention is then made of other kernels
    torch.backends.cuda.enable_cudnn_sdp(False)
    register("_flash_attention_forward", null_gpu_attention.forward)
    register("_flash_attention_backward", null_gpu_attention.backward)
