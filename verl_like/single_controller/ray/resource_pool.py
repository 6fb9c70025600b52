"""Resource pools as Ray placement groups: one group of bundles per node, one bundle per process."""

import itertools
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from verl_like.single_controller.compat import VerlResourcePool
from verl_like.single_controller.failure import PlacementError
from verl_like.single_controller.ray.cluster import (
    Resources,
    assign,
    node_resources,
    placement_table,
)

PLACEMENT_DEADLINE_S = 10.0
NUM_TRIES = 4  # of reserving within the deadline
_POLL_S = 0.2

Bundle = tuple[PlacementGroup, int]  # a placement group and the index of one of its bundles


class RayResourcePool(VerlResourcePool):
    """Processes on the nodes of a Ray cluster, reserved by ResourcePoolManager or when the first
    worker group starts.

    Args:
        process_on_nodes: the number of processes on each node. Ranks count node by node, and nodes
            may have different numbers, such as [8, 4].
        use_gpu: one GPU per process; otherwise CPUs only.
        name_prefix: the pool's name in messages and in Ray.
        max_colocate_count: how many worker groups may hold the pool at a time, each with processes
            of its own. A bundle has that many CPUs, and each group takes one CPU and
            1/max_colocate_count of the GPU.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 1,
    ) -> None:
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
        self.store = self.process_on_nodes  # verl's other name
        self.max_colocate_count = max_colocate_count
        self.name = name_prefix or f"pool-{secrets.token_hex(3)}"
        self.use_gpu = use_gpu
        self._placement_groups: list[PlacementGroup] | None = None
        self._num_groups = 0  # worker groups that hold the pool

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    def local_ranks(self) -> list[tuple[int, int]]:
        """Returns for each rank its number on its node, and the number of the pool's processes
        there."""
        local_ranks = []
        for num_processes in self.process_on_nodes:
            for local_rank in range(num_processes):
                local_ranks.append((local_rank, num_processes))
        return local_ranks

    def bundle_resources(self) -> Resources:
        """Returns what one process's bundle asks of its node."""
        resources: Resources = {"CPU": self.max_colocate_count}
        if self.use_gpu:
            resources["GPU"] = 1
        return resources

    def node_requests(self) -> list[Resources]:
        """Returns what the processes of each node entry together ask of their node."""
        of_process = self.bundle_resources()
        requests = []
        for num_processes in self.process_on_nodes:
            of_node = {kind: num_processes * amount for kind, amount in of_process.items()}
            requests.append(of_node)
        return requests

    def get_placement_groups(self, timeout_s: float = PLACEMENT_DEADLINE_S) -> list[PlacementGroup]:
        """Returns one placement group per node entry. The first call reserves them, and raises what
        `reserve` raises."""
        if self._placement_groups is None:
            reserve([self], timeout_s)
        assert self._placement_groups is not None
        return self._placement_groups

    def take(self) -> list[Bundle]:
        """Returns each rank's bundle, for one more worker group. Raises ValueError if
        max_colocate_count groups hold them."""
        if self._num_groups == self.max_colocate_count:
            raise ValueError(
                f"pool {self.name} already holds {self.max_colocate_count} worker group(s): raise "
                "max_colocate_count, shut one down, or colocate the roles in one process "
                "(create_colocated_worker_cls)"
            )
        bundles = []
        for node, group in enumerate(self.get_placement_groups()):
            for index in range(self.process_on_nodes[node]):
                bundles.append((group, index))
        self._num_groups += 1
        return bundles

    def give_back(self, bundles: Sequence[Bundle]) -> None:
        """Notes that a worker group that held these bundles is gone."""
        group, _ = bundles[0]
        if group in (self._placement_groups or ()):  # otherwise `release` has freed them
            self._num_groups -= 1

    def release(self) -> None:
        """Gives the reservation back to the cluster. Ray kills whatever still runs on the pool."""
        for group in self._placement_groups or ():
            remove_placement_group(group)
        self._placement_groups = None
        self._num_groups = 0


def reserve(pools: Sequence[RayResourcePool], timeout_s: float = PLACEMENT_DEADLINE_S) -> None:
    """Reserves those of the pools that are not reserved yet, all or none, on nodes that have room
    for all at once.

    Resources of groups that were just shut down come back within moments, hence the wait. Raises
    PlacementError with a table of requested against available resources: at once if the cluster is
    too small, after `timeout_s` if others hold what is missing.
    """
    pools = [pool for pool in pools if pool._placement_groups is None]
    requests = {}
    requests_by_node = []
    for pool in pools:
        requests[pool.name] = pool.node_requests()
        requests_by_node += requests[pool.name]
    if assign(requests_by_node, node_resources(total=True)) is None:
        raise PlacementError(
            f"the cluster is too small for the resource pools\n{placement_table(requests)}"
        )
    deadline = time.monotonic() + timeout_s
    while True:
        chosen = assign(requests_by_node, node_resources(total=False))
        if chosen is not None:
            nodes = iter(chosen)
            groups_of_pools = [_create_groups(pool, nodes) for pool in pools]
            everything = list(itertools.chain(*groups_of_pools))
            try:
                ready = [group.ready() for group in everything]
                ray.get(ready, timeout=timeout_s / NUM_TRIES)
                break
            except ray.exceptions.GetTimeoutError:  # somebody else took a node at the same time
                # Groups that are ready are given back too.
                for group in everything:
                    remove_placement_group(group)
        if time.monotonic() > deadline:
            raise PlacementError(
                f"the resource pools were not free within {timeout_s:g} s\n"
                f"{placement_table(requests)}"
            )
        time.sleep(_POLL_S)
    for pool, groups in zip(pools, groups_of_pools, strict=True):
        pool._placement_groups = groups


def _create_groups(pool: RayResourcePool, nodes: Iterator[str]) -> list[PlacementGroup]:
    """Makes a placement group for each node entry of the pool. Takes the pool's nodes off the
    iterator."""
    groups = []
    for index, num_processes in enumerate(pool.process_on_nodes):
        # Left to itself, Ray gives each group the emptiest node, and may leave no node with room
        # for a larger group.
        on_node = {"ray.io/node-id": next(nodes)}
        group = placement_group(
            bundles=[pool.bundle_resources()] * num_processes,
            strategy="STRICT_PACK",
            name=f"{pool.name}:{index}",
            bundle_label_selector=[on_node] * num_processes,
        )
        groups.append(group)
    return groups


@dataclass
class ResourcePoolManager:
    """The pools of a run and the pool of each role.

    `resource_pool_spec` maps a pool's name to its processes per node, `mapping` a role to a pool's
    name. `without_gpu` names the pools that take CPUs only, also with `use_gpu`.
    """

    resource_pool_spec: Mapping[str, Sequence[int]]
    mapping: dict[str, str]
    use_gpu: bool = True
    max_colocate_count: int = 1
    without_gpu: Collection[str] = ()
    resource_pool_dict: dict[str, RayResourcePool] = field(init=False)

    def __post_init__(self) -> None:
        for role, pool in self.mapping.items():
            if pool not in self.resource_pool_spec:
                raise ValueError(
                    f"role {role} is mapped to pool {pool!r}, which is not in resource_pool_spec "
                    f"({sorted(self.resource_pool_spec)})"
                )
        self.resource_pool_dict = {}
        for name, processes in self.resource_pool_spec.items():
            takes_gpus = self.use_gpu and name not in self.without_gpu
            self.resource_pool_dict[name] = RayResourcePool(
                processes, takes_gpus, name, self.max_colocate_count
            )

    def create_resource_pool(self) -> None:
        """Reserves the pools. Raises PlacementError with a table, within 10 s, unless the cluster
        holds all."""
        reserve(list(self.resource_pool_dict.values()))

    def get_resource_pool(self, role: str) -> RayResourcePool:
        if role not in self.mapping:
            raise ValueError(f"role {role!r} has no pool: add it to role_mapping ({self.mapping})")
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Returns the number of GPUs of all pools together."""
        pools = self.resource_pool_dict.values()
        return sum(pool.world_size for pool in pools if pool.use_gpu)
