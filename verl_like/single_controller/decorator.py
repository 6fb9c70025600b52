"""`@register`: how a worker's method is called from the driver."""

import enum
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from verl_like.protocol import COLUMNS, DataProto
from verl_like.protocol.padded import VERL_COLUMNS, has_jagged_prompts
from verl_like.single_controller.dispatch import Dispatch, DispatchMode
from verl_like.single_controller.dispatch import (  # here as well, as in verl
    make_nd_compute_dataproto_dispatch_fn as make_nd_compute_dataproto_dispatch_fn,
)

_SPEC_ATTRIBUTE = "_verl_like_method_spec"
_Method = TypeVar("_Method", bound=Callable[..., Any])


class Execute(enum.Enum):
    """Which ranks run the method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class MethodSpec:
    """What `@register` says about a method. A name in `reads` or `writes` that ends in "?" is
    optional."""

    name: str
    function: Callable[..., Any]
    """What was registered. An override without `@register` of its own is another function."""
    dispatch_mode: DispatchMode
    blocking: bool
    reads: tuple[str, ...] | None
    writes: tuple[str, ...] | None
    streams: bool
    """True if the method is a generator: what it yields reaches the caller while it runs."""
    jagged: bool
    """True if the method takes and returns jagged columns. Otherwise they are padded, in verl's
    layout."""
    is_recorded: bool
    """True if finished calls are reported for the timeline."""

    @property
    def read_columns(self) -> tuple[str, ...] | None:
        if self.reads is None:
            return None
        return tuple(name.rstrip("?") for name in self.reads)

    @property
    def sent_columns(self) -> tuple[str, ...] | None:
        """The columns that travel to the worker: those that are read, and those of which padded
        ones are made."""
        if self.read_columns is None or self.jagged:
            return self.read_columns
        return (*self.read_columns, "prompts", "responses")


def register(
    dispatch_mode: DispatchMode | dict[str, Any] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    reads: Sequence[str] | None = None,
    writes: Sequence[str] | None = None,
    jagged: bool = False,
    is_recorded: bool = True,
) -> Callable[[_Method], _Method]:
    """Makes a worker's method callable on its group. It works for `def` and `async def`.

    A method that yields is a stream: `future.stream()` gives the driver what the ranks yield, as it
    comes, and `future.get()` what they return at their end. A combination that cannot work raises
    ValueError when the class is defined.

    Args:
        dispatch_mode: how arguments are split and results collected; or a dict with `dispatch_fn`
            and `collect_fn`, called as `register_dispatch_mode` says.
        execute_mode: which ranks run it.
        blocking: whether `group.method(...)` waits. `group.method.remote(...)` returns a future
            either way.
        reads: the only columns that the batch arguments carry to the worker; checked on the driver
            before the call.
        writes: the columns that the returned DataProto must have.
        jagged: the method takes batches without padding, with jagged `prompts`, `responses` and
            columns by response token, and returns such columns. Otherwise it gets and returns
            padded ones in verl's layout, with `input_ids`, `attention_mask` and `position_ids`
            (docs/columns.md).
        is_recorded: whether its calls stand in the timeline of the run.
    """
    mode = dispatch_mode
    if isinstance(mode, dict) and "dispatch_fn" in mode and "collect_fn" in mode:
        mode = DispatchMode(**{"name": "custom", **mode})
    if not isinstance(mode, DispatchMode):
        raise ValueError(
            "dispatch_mode is a Dispatch.<NAME> or a dict with dispatch_fn and collect_fn, got "
            f"{mode!r}"
        )
    if not isinstance(execute_mode, Execute):
        raise ValueError(f"execute_mode is Execute.ALL or Execute.RANK_ZERO, got {execute_mode!r}")
    if execute_mode is Execute.RANK_ZERO:
        whole_argument_modes = (Dispatch.RANK_ZERO, Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL)
        if mode not in whole_argument_modes:
            raise ValueError(
                f"{mode.name} splits its arguments over all ranks, so it cannot run with "
                "Execute.RANK_ZERO: use Dispatch.RANK_ZERO, or Execute.ALL"
            )
        mode = Dispatch.RANK_ZERO

    def decorate(method: _Method) -> _Method:
        if inspect.isasyncgenfunction(method):
            raise ValueError(
                f"{method.__qualname__} is an async generator, which returns no value: use def and "
                "yield"
            )
        spec = MethodSpec(
            name=method.__name__,
            function=method,
            dispatch_mode=mode,
            blocking=blocking,
            reads=_as_names("reads", method, reads),
            writes=_as_names("writes", method, writes),
            streams=inspect.isgeneratorfunction(method),
            jagged=jagged,
            is_recorded=is_recorded,
        )
        setattr(method, _SPEC_ATTRIBUTE, spec)
        return method

    return decorate


def registered_methods(cls: type) -> dict[str, MethodSpec]:
    """Returns the registered methods of a worker class. An override without its own `@register`
    keeps the inherited one."""
    specs: dict[str, MethodSpec] = {}
    for base in reversed(cls.__mro__):
        for name, attribute in vars(base).items():
            if hasattr(attribute, _SPEC_ATTRIBUTE):
                specs[name] = getattr(attribute, _SPEC_ATTRIBUTE)
    return specs


def check_reads(role: str, spec: MethodSpec, batches: Sequence[DataProto]) -> None:
    """Raises ValueError if a column that the method must read is in none of its batches."""
    if not batches or not spec.reads:
        return
    present: set[str] = set()
    for batch in batches:
        present.update(batch.columns(), batch.meta_info)
        if has_jagged_prompts(batch) and not spec.jagged:
            present.update(VERL_COLUMNS)
    for name in spec.reads:
        if name.endswith("?") or name in present:
            continue
        writer = "a custom column, not in docs/columns.md"
        if name in COLUMNS:
            writer = f"written by: {COLUMNS[name].writer}"
        raise ValueError(
            f"{role}.{spec.name} reads {name!r}, not in its batch ({writer}). Present: "
            f"{sorted(present)}"
        )


def check_writes(role: str, spec: MethodSpec, result: Any) -> None:
    """Raises ValueError if a returned batch lacks a column or meta entry that the method declares
    to write. Names that end in ? may be missing."""
    if spec.writes is None:
        return
    if not isinstance(result, DataProto):
        raise ValueError(
            f"{role}.{spec.name} declares writes={spec.writes} but returned {type(result).__name__}"
        )
    present = {*result.columns(), *result.meta_info}
    missing = [name for name in spec.writes if name not in present and not name.endswith("?")]
    if missing:
        raise ValueError(
            f"{role}.{spec.name} declares to write {missing} but returned only {sorted(present)}"
        )


def _as_names(
    argument: str, method: Callable[..., Any], names: Sequence[str] | None
) -> tuple[str, ...] | None:
    """Returns the names as a tuple. Raises ValueError for a single text, which would count as its
    letters, and for what is no text."""
    if names is None:
        return None
    are_texts = all(isinstance(name, str) for name in names)
    if isinstance(names, str) or not are_texts:
        raise ValueError(
            f"{argument} of {method.__qualname__} is a list of column names, got {names!r}"
        )
    return tuple(names)
