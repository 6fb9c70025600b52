"""Runs a method on the worker: it resolves its arguments, and checks what it reads and writes."""

import asyncio
import inspect
import time
from collections.abc import Generator, Iterator
from typing import Any

from verl_like.protocol import CallHeader, DataProto
from verl_like.protocol.row_ops import write_count
from verl_like.single_controller.decorator import (
    MethodSpec,
    check_reads,
    check_writes,
    registered_methods,
)
from verl_like.single_controller.dispatch import Arguments, map_arguments
from verl_like.single_controller.failure import WorkerError
from verl_like.single_controller.shard import BatchShard, Fetch, ForwardedFuture
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
        self, role: str, worker: Worker, method: str, arguments: Arguments, fetch: Fetch
    ) -> Iterator[Any]:
        """Yields what the method yields, then the header, then the method's result. Raises
        WorkerError."""
        started = time.time()
        try:
            result = yield from self._run(role, worker, method, arguments, fetch)
        except WorkerError:
            # An argument is the result of a call that failed. That failure is the one to report.
            raise
        except Exception as error:
            raise WorkerError.of(error, role, worker.rank, self.node, method) from error
        num_rows = 0
        if isinstance(result, DataProto):
            num_rows = len(result)
        yield CallHeader(num_rows, started, time.time())
        yield result

    def _run(
        self, role: str, worker: Worker, method: str, arguments: Arguments, fetch: Fetch
    ) -> Generator[Any, None, Any]:
        """Does what `run` says, but yields only what the method yields, and returns the method's
        result."""
        worker_cls = type(worker)
        if worker_cls not in self.specs:
            self.specs[worker_cls] = registered_methods(worker_cls)
        spec = self.specs[worker_cls][method]
        shards: list[BatchShard] = []
        batches: list[DataProto] = []

        def resolve(value: Any) -> Any:
            if isinstance(value, ForwardedFuture):
                return value.resolve(fetch)
            if not isinstance(value, BatchShard):
                return value
            batch = value.resolve(fetch)
            shards.append(value)
            batches.append(batch)
            return argument_of(spec, batch)

        args, kwargs = map_arguments(resolve, *arguments)
        check_reads(role, spec, batches)
        # Kept from before the call: a method may put another tensor in a column's place, and may
        # have written into the first one all the same.
        inputs = [(batch.tensors(), batch.column_versions()) for batch in batches]
        result = getattr(worker, method)(*args, **kwargs)
        if inspect.isawaitable(result):
            result = self.loop.run_until_complete(result)
        elif inspect.isgenerator(result):
            result = yield from result
        # It may replace columns in its batch, which is its own container, but not write into them.
        for columns, counts in inputs:
            for name, column in columns.items():
                if write_count(column) != counts[name]:
                    raise ValueError(
                        f"{role}.{method} wrote in place into the input column {name!r}, which "
                        "other workers share: write into a copy (`.clone()`) or make a new tensor"
                    )
        check_writes(role, spec, result)
        if not isinstance(result, DataProto):
            return result
        devices = {tensor.device.type for tensor in result.tensors().values()}
        if devices - {"cpu"}:
            # In a container of its own: the worker may keep what it returned
            result = result.select().to("cpu")
        if not batches:
            return result
        result = result_of(spec, result, batches[0])
        num_rows = len(batches[0])
        if shards[0].ordered and len(result) not in (0, num_rows):
            raise ValueError(
                f"{method} returned {len(result)} rows for {num_rows} input rows: with an Ordered "
                "batch return one row per input row, in order, or only meta_info"
            )
        return result
