"""How many processes run on each node, and the ranks that follow from it."""

from collections.abc import Sequence


class ResourcePool:
    """Processes on nodes, `process_on_nodes[i]` of them on node i.

    Ranks count node by node. Pools may be uneven, such as [8, 4]. At most `max_colocate_count`
    worker groups hold a pool at a time.
    """

    def __init__(self, process_on_nodes: Sequence[int], max_colocate_count: int = 1) -> None:
        for num_processes in process_on_nodes:
            if not isinstance(num_processes, int) or num_processes <= 0:
                raise ValueError(
                    "a pool has at least one process on each of its nodes, got "
                    f"{process_on_nodes!r}"
                )
        if max_colocate_count < 1:
            raise ValueError(
                "max_colocate_count is the number of groups that may share the pool, got "
                f"{max_colocate_count}"
            )
        self.process_on_nodes = list(process_on_nodes)
        self.store = self.process_on_nodes  # verl has both names
        self.max_colocate_count = max_colocate_count

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    def local_world_size_list(self) -> list[int]:
        """Returns for each rank the number of processes of this pool on its node: [2, 1] gives [2,
        2, 1]."""
        sizes = []
        for num_processes in self.process_on_nodes:
            sizes += [num_processes] * num_processes
        return sizes

    def local_rank_list(self) -> list[int]:
        """Returns for each rank its number on its node: [2, 1] gives [0, 1, 0]."""
        local_ranks: list[int] = []
        for num_processes in self.process_on_nodes:
            local_ranks += range(num_processes)
        return local_ranks
