"""Resources of the nodes of the Ray cluster, and the choice of a node for each entry of the
resource pools."""

import math

import ray
import ray._private.state

Resources = dict[str, float]


def assign(entries: list[Resources], nodes: dict[str, Resources]) -> list[str] | None:
    """Chooses a node for each entry, such that all of them fit at once. Returns None if they do not
    fit. No entry is split over nodes.

    Entries are multiples of one bundle, and a node counts by how many bundles fit on it: nodes with
    equally many GPUs count the same, however many of their CPUs are free.
    """
    if not entries:
        return []
    bundle = {}
    for kind in entries[0]:
        amounts = [int(entry[kind]) for entry in entries]
        bundle[kind] = math.gcd(*amounts)

    def bundles(resources: Resources) -> int:
        fitting = [resources.get(kind, 0) // amount for kind, amount in bundle.items()]
        return int(min(fitting))

    sizes = list(map(bundles, entries))
    capacities = list(map(bundles, nodes.values()))
    entry_numbers = range(len(entries))
    largest_first = sorted(entry_numbers, key=sizes.__getitem__, reverse=True)
    sorted_sizes = [sizes[entry] for entry in largest_first]
    chosen = _assign(sorted_sizes, capacities, set())
    if chosen is None:
        return None
    names = list(nodes)
    node_of_entry = dict(zip(largest_first, chosen, strict=True))
    return [names[node_of_entry[entry]] for entry in entry_numbers]


def _assign(
    sizes: list[int], capacities: list[int], failed: set[tuple[int, ...]]
) -> list[int] | None:
    """Returns the index of a capacity for each size, or None.

    `failed` holds the states, of the number of sizes and the capacities, for which there is none.
    """
    if not sizes:
        return []
    size, *others = sizes
    state = (len(sizes), *sorted(capacities))
    num_places = sum(capacity // size for capacity in capacities)
    if sizes.count(size) > num_places or state in failed:
        return None
    for i, capacity in enumerate(capacities):
        if capacity < size or capacity in capacities[:i]:  # equal capacities are tried once
            continue
        left = list(capacities)
        left[i] -= size
        chosen = _assign(others, left, failed)
        if chosen is not None:
            return [i, *chosen]
    failed.add(state)
    return None


def node_resources(total: bool) -> dict[str, Resources]:
    """Returns GPUs and CPUs of each live node, by its id: all of them, or those that are free."""
    free = {}
    if not total:
        free = ray._private.state.available_resources_per_node()
    nodes = {}
    for node in ray.nodes():
        if node["Alive"]:
            name = node["NodeID"]
            resources = node["Resources"] if total else free.get(name, {})
            nodes[name] = {kind: resources.get(kind, 0.0) for kind in ("GPU", "CPU")}
    return nodes


def placement_table(requests: dict[str, list[Resources]]) -> str:
    """Makes a table of the requested resources by pool and node entry against the free and all
    resources by node."""
    lines = [_table_row("requested by", "GPU", "CPU")]
    for pool, entries in requests.items():
        for index, entry in enumerate(entries):
            gpu = f"{entry.get('GPU', 0):g}"
            cpu = f"{entry.get('CPU', 0):g}"
            lines.append(_table_row(f"{pool}, node {index}", gpu, cpu))
    free = node_resources(total=False)
    heading = _table_row("node", "GPU", "CPU")
    lines.append(f"{heading}   (free / all)")
    resources_of_nodes = node_resources(total=True)
    # Last, so that it has every node that is shown.
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    for name, everything in resources_of_nodes.items():
        free_here = free.get(name, {})
        gpu = f"{free_here.get('GPU', 0):g} / {everything['GPU']:g}"
        cpu = f"{free_here.get('CPU', 0):g} / {everything['CPU']:g}"
        shown_name = f"{addresses[name]} ({name[:6]})"
        lines.append(_table_row(shown_name, gpu, cpu))
    lines.append(
        "  fix: smaller entries in resource_pool_spec, fewer groups per pool, or more or larger "
        "nodes"
    )
    return "\n".join(lines)


def _table_row(name: str, gpu: str, cpu: str) -> str:
    return f"  {name:<40} {gpu:>9} {cpu:>9}"
