"""Resources of the nodes of the Ray cluster, and the choice of a node for each entry of the
resource pools."""

import math

import ray
import ray._private.state

Resources = dict[str, float]


def assign(entries: list[Resources], nodes: dict[str, Resources]) -> list[str] | None:
    """A node for each entry, such that all of them fit at once; None if they do not. No entry is
    split over nodes.

    Entries are multiples of one bundle, and a node counts by how many bundles fit on it: nodes with
    equally many GPUs count the same, however many of their CPUs are free.
    """
    if not entries:
        return []
    bundle = {kind: math.gcd(*(int(entry[kind]) for entry in entries)) for kind in entries[0]}

    def bundles(resources: Resources) -> int:
        return int(min(resources.get(kind, 0) // amount for kind, amount in bundle.items()))

    sizes = list(map(bundles, entries))
    largest_first = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    chosen = _assign(
        [sizes[i] for i in largest_first], [bundles(node) for node in nodes.values()], set()
    )
    names = list(nodes)
    return (
        None
        if chosen is None
        else [names[i] for _, i in sorted(zip(largest_first, chosen, strict=True))]
    )


def _assign(
    sizes: list[int], capacities: list[int], failed: set[tuple[int, ...]]
) -> list[int] | None:
    """The index of a capacity for each size; `failed` holds (number of sizes, capacities) without
    one."""
    if not sizes:
        return []
    state = len(sizes), *sorted(capacities)
    too_many = sizes.count(sizes[0]) > sum(capacity // sizes[0] for capacity in capacities)
    if too_many or state in failed:
        return None
    size, *others = sizes
    for i, capacity in enumerate(capacities):
        if capacity < size or capacity in capacities[:i]:  # equal capacities are tried once
            continue
        chosen = _assign(others, [*capacities[:i], capacity - size, *capacities[i + 1 :]], failed)
        if chosen is not None:
            return [i, *chosen]
    failed.add(state)
    return None


def node_resources(total: bool) -> dict[str, Resources]:
    """GPUs and CPUs of each live node, by its id: all of them, or those that are free."""
    free = {} if total else ray._private.state.available_resources_per_node()
    nodes = {}
    for node in ray.nodes():
        if node["Alive"]:
            resources = node["Resources"] if total else free.get(node["NodeID"], {})
            nodes[node["NodeID"]] = {name: resources.get(name, 0.0) for name in ("GPU", "CPU")}
    return nodes


def placement_table(requests: dict[str, list[Resources]]) -> str:
    """Requested resources by pool and node entry against free / all resources by node."""
    lines = [f"  {'requested by':<40} {'GPU':>9} {'CPU':>9}"]
    for pool, entries in requests.items():
        for index, entry in enumerate(entries):
            lines.append(
                f"  {f'{pool}, node {index}':<40} {entry.get('GPU', 0):>9g} "
                f"{entry.get('CPU', 0):>9g}"
            )
    free = node_resources(total=False)
    everything = node_resources(total=True)
    lines.append(f"  {'node':<40} {'GPU':>9} {'CPU':>9}   (free / all)")
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    for name, node in everything.items():
        gpu, cpu = (f"{free.get(name, {}).get(k, 0):g} / {node[k]:g}" for k in ("GPU", "CPU"))
        lines.append(f"  {f'{addresses[name]} ({name[:6]})':<40} {gpu:>9} {cpu:>9}")
    lines.append(
        "  fix: smaller entries in resource_pool_spec, fewer groups per pool, or more or larger "
        "nodes"
    )
    return "\n".join(lines)
