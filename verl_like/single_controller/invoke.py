"""Runs a method on the worker: resolves its arguments, checks what it reads and writes."""

import asyncio
import inspect
import os
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from verl_like.protocol import CallHeader, DataProto
from verl_like.protocol.row_ops import write_count
from verl_like.single_controller.decorator import (
    MethodSpec,
    check_reads,
    check_writes,
    registered_methods,
)
from verl_like.single_controller.failure import WorkerError
from verl_like.single_controller.shard import BatchShard, Fetch, ForwardedFuture, ResolvedShard
from verl_like.single_controller.shortage import shortage_of
from verl_like.single_controller.verl_layout import argument_of, result_of
from verl_like.single_controller.worker import Worker


class Invoker:
    """Runs methods of the workers of one process, one at a time. Both backends use it."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.specs: dict[type, dict[str, MethodSpec]] = {}
        # One loop for all calls, so that what an async method opened is still usable in the next
        # call.
        self.loop = asyncio.new_event_loop()

    def run(
        self,
        role: str,
        worker: Worker,
        method: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        fetch: Fetch,
    ) -> Iterator[Any]:
        """Yields what the method yields, then the header, then the method's result; raises
        WorkerError."""
        started = time.time()
        try:
            result = yield from self._run(role, worker, method, args, kwargs, fetch)
        # An argument is the result of a call that failed: that failure is the one to report
        except WorkerError:
            raise
        except Exception as error:
            cause = "".join(traceback.format_exception(error))
            place = role, worker.rank, self.node, os.getpid()
            raise WorkerError(*place, method, cause, shortage_of(error)) from error
        yield CallHeader(len(result) if isinstance(result, DataProto) else 0, started, time.time())
        yield result

    def _run(
        self,
        role: str,
        worker: Worker,
        method: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        fetch: Fetch,
    ) -> Generator[Any, None, Any]:
        if type(worker) not in self.specs:
            self.specs[type(worker)] = registered_methods(type(worker))
        spec = self.specs[type(worker)][method]
        shards: list[ResolvedShard] = []

        def resolve(value: Any) -> Any:
            if isinstance(value, ForwardedFuture):
                return value.resolve(fetch)
            if not isinstance(value, BatchShard):
                return value
            shards.append(value.resolve(fetch))
            return argument_of(spec, shards[-1].data)

        args = [resolve(value) for value in args]
        kwargs = {name: resolve(value) for name, value in kwargs.items()}
        check_reads(role, spec, [shard.data for shard in shards])
        # The method may replace columns in its batch, which is its own container, but not write
        # into their tensors.
        inputs = [(shard.data.tensors(), shard.data.column_versions()) for shard in shards]
        result = getattr(worker, method)(*args, **kwargs)
        if inspect.isawaitable(result):
            result = self.loop.run_until_complete(result)
        elif inspect.isgenerator(result):
            result = yield from result
        changed = [
            name
            for data, before in inputs
            for name, column in data.items()
            if write_count(column) != before[name]
        ]
        if changed:
            raise ValueError(
                f"{role}.{method} wrote in place into the input column {changed[0]!r}, which "
                "other workers share: write into a copy (`.clone()`) or make a new tensor"
            )
        check_writes(role, spec, result)
        if not isinstance(result, DataProto):
            return result
        if any(tensor.device.type != "cpu" for tensor in result.tensors().values()):
            # In a container of its own: the worker may keep what it returned
            result = result.select().to("cpu")
        if shards:
            result = result_of(spec, result, shards[0].data)
        if shards and shards[0].ordered and len(result) not in (0, len(shards[0].data)):
            raise ValueError(
                f"{method} returned {len(result)} rows for {len(shards[0].data)} input rows: with "
                "an Ordered batch return one row per input row, in order, or only meta_info"
            )
        return result
