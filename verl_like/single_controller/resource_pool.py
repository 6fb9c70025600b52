"""How many processes run on each node, and the ranks that follow from it."""

from collections.abc import Sequence


class ResourcePool:
    """Processes on nodes, `process_on_nodes[i]` on node i. Ranks count node by node; uneven pools
    such as [8, 4] are fine. At most `max_colocate_count` worker groups hold it at a time."""

    def __init__(self, process_on_nodes: Sequence[int], max_colocate_count: int = 1) -> None:
        if not all(
            isinstance(num_processes, int) and num_processes > 0
            for num_processes in process_on_nodes
        ):
            raise ValueError(
                f"a pool has at least one process on each of its nodes, got {process_on_nodes!r}"
            )
        if max_colocate_count < 1:
            raise ValueError(
                "max_colocate_count is the number of groups that may share the pool, got "
                f"{max_colocate_count}"
            )
        self.process_on_nodes = self.store = list(process_on_nodes)  # verl has both names
        self.max_colocate_count = max_colocate_count

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    def local_world_size_list(self) -> list[int]:
        """For each rank, the number of processes of this pool on its node: [2, 1] gives [2, 2,
        1]."""
        return [
            num_processes for num_processes in self.process_on_nodes for _ in range(num_processes)
        ]

    def local_rank_list(self) -> list[int]:
        """For each rank, its number on its node: [2, 1] gives [0, 1, 0]."""
        return [
            local_rank
            for num_processes in self.process_on_nodes
            for local_rank in range(num_processes)
        ]
