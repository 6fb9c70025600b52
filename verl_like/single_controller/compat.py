"""What code written for verl calls of worker groups and pools, and the library itself does not
call."""

import abc
from typing import Any

from verl_like.protocol import Future
from verl_like.single_controller.dispatch import Dispatch, DispatchMode


class VerlWorkerGroup(abc.ABC):
    """Calls of verl's WorkerGroup by the name of a method, for its users."""

    @abc.abstractmethod
    def dispatched_by(self, name: str, mode: DispatchMode) -> Any:
        """Returns the registered method `name` with another dispatch mode; its `remote` submits a
        call. Raises ValueError for other names."""

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> Future[list[Any]]:
        """Calls a registered method by its name on every rank, whatever its dispatch mode.

        Arguments are as in Dispatch.ALL_TO_ALL. The future's value is the list of results, by rank.
        Raises ValueError for other names.
        """
        method = self.dispatched_by(method_name, Dispatch.ALL_TO_ALL)
        return method.remote(*args, **kwargs)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Returns the results of `execute_all_async`."""
        future = self.execute_all_async(method_name, *args, **kwargs)
        return future.get()

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Does what `execute_all_async` does, on rank 0 alone. The future's value is its result."""
        method = self.dispatched_by(method_name, Dispatch.RANK_ZERO)
        return method.remote(*args, **kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of `execute_rank_zero`."""
        future = self.execute_rank_zero(method_name, *args, **kwargs)
        return future.get()


class VerlResourcePool(abc.ABC):
    """The further names that verl's pools have for the same numbers."""

    process_on_nodes: list[int]

    @abc.abstractmethod
    def local_ranks(self) -> list[tuple[int, int]]:
        """Returns for each rank its number on its node, and the number of the pool's processes
        there."""

    def local_rank_list(self) -> list[int]:
        """Returns for each rank its number on its node: [2, 1] gives [0, 1, 0]."""
        return [local_rank for local_rank, _ in self.local_ranks()]

    def local_world_size_list(self) -> list[int]:
        """Returns for each rank the number of the pool's processes on its node: [2, 1] gives
        [2, 2, 1]."""
        return [num_processes for _, num_processes in self.local_ranks()]
