"""Resource pools as Ray placement groups: one group of bundles per node, one bundle per process."""

from __future__ import annotations

import collections
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from verl_like.single_controller.failure import PlacementError
from verl_like.single_controller.ray.cluster import Resources, placement_table, wait_for_nodes
from verl_like.single_controller.resource_pool import ResourcePool

PLACEMENT_DEADLINE_S = 10.0

Bundle = tuple[PlacementGroup, int]  # a placement group and the index of one of its bundles

# How many worker groups of this driver hold each bundle, by (placement group id, bundle index).
_groups_on_bundle: collections.Counter[tuple[str, int]] = collections.Counter()


class RayResourcePool(ResourcePool):
    """Processes on the nodes of a Ray cluster, reserved by ResourcePoolManager or when the first worker group starts.

    Args:
        process_on_nodes: processes per node; all processes of one entry are on one node.
        use_gpu: one GPU per process; otherwise CPUs only.
        name_prefix: the pool's name in messages and in Ray.
        max_colocate_count: how many worker groups may hold the pool at a time, each with its own processes; a bundle
            has that many CPUs, and each group takes one CPU and 1/max_colocate_count of the GPU.
        detached: the pool outlives the driver.
    """

    def __init__(
        self,
        process_on_nodes: list[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 1,
        detached: bool = False,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name = name_prefix or f"pool-{secrets.token_hex(3)}"
        self.detached = detached
        self._placement_groups: list[PlacementGroup] | None = None

    def bundle_resources(self) -> Resources:
        """What one process's bundle asks of its node."""
        return {"CPU": self.max_colocate_count, **({"GPU": 1} if self.use_gpu else {})}

    def node_requests(self) -> list[Resources]:
        """What the processes of each node entry together ask of their node."""
        return [{kind: v * n for kind, v in self.bundle_resources().items()} for n in self.process_on_nodes]

    def get_placement_groups(self, timeout_s: float = PLACEMENT_DEADLINE_S) -> list[PlacementGroup]:
        """One placement group per node entry, reserved on the first call.

        Raises PlacementError with a table of requested against available resources if they cannot be had in time.
        """
        if self._placement_groups is None:
            reserve([self], timeout_s)
        assert self._placement_groups is not None
        return self._placement_groups

    def placement_group(self, index: int, node: str) -> PlacementGroup:
        """Ask Ray for the bundles of one node entry on the node of that id."""
        num_processes = self.process_on_nodes[index]
        return placement_group(
            bundles=[self.bundle_resources()] * num_processes,
            strategy="STRICT_PACK",
            name=f"{self.name}:{index}",
            lifetime="detached" if self.detached else None,
            bundle_label_selector=[{"ray.io/node-id": node}] * num_processes,
        )

    def bundles(self) -> list[Bundle]:
        """Each rank's bundle."""
        return [
            (group, index)
            for group, num_processes in zip(self.get_placement_groups(), self.process_on_nodes, strict=True)
            for index in range(num_processes)
        ]

    def take(self) -> list[Bundle]:
        """The bundles, for one more worker group. Raises ValueError if max_colocate_count groups hold one already."""
        bundles = self.bundles()
        if any(_groups_on_bundle[_key(bundle)] >= self.max_colocate_count for bundle in bundles):
            raise ValueError(
                f"pool {self.name} already holds {self.max_colocate_count} worker group(s): raise max_colocate_count, "
                "shut one down, or colocate the roles in one process (create_colocated_worker_cls)"
            )
        _groups_on_bundle.update(_key(bundle) for bundle in bundles)
        return bundles

    def give_back(self, bundles: Sequence[Bundle]) -> None:
        _groups_on_bundle.subtract(_key(bundle) for bundle in bundles)

    def release(self) -> None:
        """Give the reservation back to the cluster; whatever still runs on the pool is killed by Ray."""
        for group in self._placement_groups or ():
            remove_placement_group(group)
        self._placement_groups = None


def reserve(pools: Sequence[RayResourcePool], timeout_s: float = PLACEMENT_DEADLINE_S) -> None:
    """Reserve every pool, all of them or none, on nodes that have room for all at once.

    Raises PlacementError with a table of requested against available resources if they cannot be had in time.
    """
    requests = {pool.name: pool.node_requests() for pool in pools}
    nodes = iter(wait_for_nodes(requests, timeout_s))
    # Left to itself, Ray takes the emptiest node for each group, and no room may be left for a larger one.
    groups = {
        pool.name: [pool.placement_group(index, next(nodes)) for index in range(len(pool.process_on_nodes))]
        for pool in pools
    }
    everything = [group for its_groups in groups.values() for group in its_groups]
    try:
        ray.get([group.ready() for group in everything], timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        table = placement_table(requests)
        for group in everything:
            remove_placement_group(group)
        raise PlacementError(f"the resource pools were not placed within {timeout_s:g} s\n{table}") from None
    for pool in pools:
        pool._placement_groups = groups[pool.name]


def _key(bundle: Bundle) -> tuple[str, int]:
    return bundle[0].id.hex(), bundle[1]


class SubRayResourcePool(RayResourcePool):
    """A window of consecutive ranks of another pool, on the same bundles."""

    def __init__(
        self, parent: RayResourcePool, first_rank: int, world_size: int, name_prefix: str | None = None
    ) -> None:
        window = range(first_rank, first_rank + world_size)
        nodes = [node for node, n in enumerate(parent.process_on_nodes) for _ in range(n)]
        per_node = collections.Counter(nodes[rank] for rank in window)
        super().__init__(
            [per_node[node] for node in sorted(per_node)],
            use_gpu=parent.use_gpu,
            name_prefix=name_prefix or f"{parent.name}[{first_rank}:{first_rank + world_size}]",
            max_colocate_count=parent.max_colocate_count,
            detached=parent.detached,
        )
        self.parent, self.first_rank = parent, first_rank

    def get_placement_groups(self, timeout_s: float = PLACEMENT_DEADLINE_S) -> list[PlacementGroup]:
        self.parent.get_placement_groups(timeout_s)
        return list(dict.fromkeys(group for group, _ in self.bundles()))

    def bundles(self) -> list[Bundle]:
        return self.parent.bundles()[self.first_rank : self.first_rank + self.world_size]

    def release(self) -> None:
        raise ValueError(f"{self.name} is a part of pool {self.parent.name}: release that")


class MergedRayResourcePool(RayResourcePool):
    """Two pools as one: the ranks of the first, then those of the second."""

    def __init__(self, first: RayResourcePool, second: RayResourcePool) -> None:
        super().__init__(
            [*first.process_on_nodes, *second.process_on_nodes],
            use_gpu=first.use_gpu,
            name_prefix=f"{first.name}+{second.name}",
            max_colocate_count=first.max_colocate_count,
            detached=first.detached,
        )
        self.pools = (first, second)

    def get_placement_groups(self, timeout_s: float = PLACEMENT_DEADLINE_S) -> list[PlacementGroup]:
        return [group for pool in self.pools for group in pool.get_placement_groups(timeout_s)]

    def bundles(self) -> list[Bundle]:
        return [bundle for pool in self.pools for bundle in pool.bundles()]

    def release(self) -> None:
        for pool in self.pools:
            pool.release()


def split_resource_pool(pool: RayResourcePool, split_size: int | list[int]) -> list[SubRayResourcePool]:
    """Windows of a pool: of `split_size` ranks each, or of the sizes listed. Raises ValueError if they do not fit."""
    sizes = [split_size] * (pool.world_size // split_size) if isinstance(split_size, int) else split_size
    if sum(sizes) != pool.world_size or min(sizes, default=0) < 1:
        raise ValueError(f"pool {pool.name} has {pool.world_size} processes, which {split_size} does not split exactly")
    return [SubRayResourcePool(pool, sum(sizes[:index]), size) for index, size in enumerate(sizes)]


def merge_resource_pool(first: RayResourcePool, second: RayResourcePool) -> MergedRayResourcePool:
    """Raises ValueError if the pools differ in use_gpu, max_colocate_count or detached."""
    for name in ("use_gpu", "max_colocate_count", "detached"):
        if getattr(first, name) != getattr(second, name):
            raise ValueError(
                f"pools {first.name} and {second.name} cannot be merged: {name} is {getattr(first, name)} "
                f"and {getattr(second, name)}"
            )
    return MergedRayResourcePool(first, second)


@dataclass
class ResourcePoolManager:
    """The pools of a run and the pool of each role.

    `resource_pool_spec` maps a pool's name to its processes per node, `mapping` a role to a pool's name.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[str, str]
    use_gpu: bool = True
    max_colocate_count: int = 1
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for role, pool in self.mapping.items():
            if pool not in self.resource_pool_spec:
                raise ValueError(
                    f"role {role} is mapped to pool {pool!r}, which is not in resource_pool_spec "
                    f"({sorted(self.resource_pool_spec)})"
                )

    def create_resource_pool(self) -> None:
        """Make and reserve the pools; raises PlacementError with a table, within 10 s, unless the cluster holds all."""
        pools = {
            name: RayResourcePool(processes, self.use_gpu, name, self.max_colocate_count)
            for name, processes in self.resource_pool_spec.items()
        }
        reserve(list(pools.values()))
        self.resource_pool_dict = pools

    def get_resource_pool(self, role: str) -> RayResourcePool:
        if role not in self.mapping:
            raise ValueError(f"role {role!r} has no pool: add it to role_mapping ({self.mapping})")
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Number of GPUs of all pools together."""
        return sum(map(sum, self.resource_pool_spec.values())) if self.use_gpu else 0
