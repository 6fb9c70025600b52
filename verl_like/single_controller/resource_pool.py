"""How many processes run on each node, and the ranks that follow from it."""

from __future__ import annotations


class ResourcePool:
    """`process_on_nodes[i]` processes on node i; ranks count node by node. Uneven pools such as [8, 4] are fine."""

    def __init__(self, process_on_nodes: list[int] | None = None, max_colocate_count: int = 1) -> None:
        self.process_on_nodes: list[int] = []
        for num_processes in process_on_nodes or []:
            self.add_node(num_processes)
        if max_colocate_count < 1:
            raise ValueError(
                f"max_colocate_count is the number of groups that may share the pool, got {max_colocate_count}"
            )
        self.max_colocate_count = max_colocate_count

    def add_node(self, num_processes: int) -> None:
        if not isinstance(num_processes, int) or num_processes < 1:
            raise ValueError(f"a pool has at least one process on each of its nodes, got {num_processes!r}")
        self.process_on_nodes.append(num_processes)

    @property
    def store(self) -> list[int]:
        """verl's name for `process_on_nodes`."""
        return self.process_on_nodes

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    def local_world_size_list(self) -> list[int]:
        """For each rank, the number of processes of this pool on its node: [2, 1] gives [2, 2, 1]."""
        return [num_processes for num_processes in self.process_on_nodes for _ in range(num_processes)]

    def local_rank_list(self) -> list[int]:
        """For each rank, its number on its node: [2, 1] gives [0, 1, 0]."""
        return [local_rank for num_processes in self.process_on_nodes for local_rank in range(num_processes)]
