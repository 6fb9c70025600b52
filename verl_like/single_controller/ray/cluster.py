"""What the nodes of the Ray cluster have and what is free, and whether a set of pools fits on them."""

from __future__ import annotations

import time

import ray
import ray._private.state

from verl_like.single_controller.failure import PlacementError

Resources = dict[str, float]
_POLL_S = 0.2


def wait_until_available(requests: dict[str, list[Resources]], timeout_s: float) -> None:
    """Return once every node entry of every pool in `requests` fits on the free part of a node, all at once.

    Resources of groups that were just shut down come back within moments, hence the wait. Raises PlacementError with a
    table: at once if the cluster is too small, after `timeout_s` if others hold what is missing.
    """
    entries = [entry for pool in requests.values() for entry in pool]
    if not fits(entries, list(node_resources(total=True).values())):
        raise PlacementError(f"the cluster is too small for the resource pools\n{placement_table(requests)}")
    deadline = time.monotonic() + timeout_s
    while not fits(entries, list(node_resources(total=False).values())):
        if time.monotonic() > deadline:
            raise PlacementError(
                f"the resource pools were not free within {timeout_s:g} s\n{placement_table(requests)}"
            )
        time.sleep(_POLL_S)


def fits(entries: list[Resources], nodes: list[Resources]) -> bool:
    """Whether each entry can be put whole on one node, all entries together. Nodes that look alike are tried once."""
    if not entries:
        return True
    entry, *others = sorted(entries, key=lambda e: (e.get("GPU", 0), e.get("CPU", 0)), reverse=True)
    tried: list[Resources] = []
    for index, node in enumerate(nodes):
        if node in tried or any(node.get(name, 0) < amount for name, amount in entry.items()):
            continue
        tried.append(node)
        left = {name: free - entry.get(name, 0) for name, free in node.items()}
        if fits(others, [*nodes[:index], left, *nodes[index + 1 :]]):
            return True
    return False


def node_resources(total: bool) -> dict[str, Resources]:
    """GPUs and CPUs of each live node, by address: all of them, or those that are free."""
    free = {} if total else ray._private.state.available_resources_per_node()
    nodes = {}
    for node in ray.nodes():
        if node["Alive"]:
            resources = node["Resources"] if total else free.get(node["NodeID"], {})
            nodes[f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"] = {
                name: resources.get(name, 0.0) for name in ("GPU", "CPU")
            }
    return nodes


def placement_table(requests: dict[str, list[Resources]]) -> str:
    """Requested resources by pool and node entry against free / all resources by node."""
    lines = [f"  {'requested by':<40} {'GPU':>9} {'CPU':>9}"]
    for pool, entries in requests.items():
        for index, entry in enumerate(entries):
            lines.append(f"  {f'{pool}, node {index}':<40} {entry.get('GPU', 0):>9g} {entry.get('CPU', 0):>9g}")
    free = node_resources(total=False)
    lines.append(f"  {'node':<40} {'GPU':>9} {'CPU':>9}   (free / all)")
    for address, everything in node_resources(total=True).items():
        gpu, cpu = (f"{free.get(address, {}).get(k, 0):g} / {everything[k]:g}" for k in ("GPU", "CPU"))
        lines.append(f"  {address:<40} {gpu:>9} {cpu:>9}")
    lines.append("  fix: smaller entries in resource_pool_spec, fewer groups per pool, or more or larger nodes")
    return "\n".join(lines)
