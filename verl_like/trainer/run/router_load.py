"""The load of a mixture's experts in a step: its counts, and metrics of them."""

import math
from statistics import mean

from verl_like.trainer.run.tracking import Row
from verl_like.workers.models.router_load import LOAD_COUNT

Load = list[list[float]]
"""How many tokens each expert of each layer has computed."""


def split_load(row: Row) -> tuple[Row, Load]:
    """Takes the counts of the load out of a row of metrics.

    Returns the row, with metrics of the load if there are counts, and the counts, or an empty list.
    """
    others = {}
    counts: dict[tuple[int, int], float] = {}
    for name, value in row.items():
        if name.startswith(LOAD_COUNT):
            numbers = name.removeprefix(LOAD_COUNT)
            layer, expert = map(int, numbers.split("/"))
            counts[layer, expert] = value
        else:
            others[name] = value
    load: Load = []
    for (layer, _expert), count in sorted(counts.items()):
        if layer == len(load):
            load.append([])
        load[layer].append(count)
    used = [of_layer for of_layer in load if any(of_layer)]
    if used:
        peaks = [max(of_layer) / mean(of_layer) for of_layer in used]
        others["router_load/max_over_mean"] = max(peaks)
        others["router_load/entropy"] = mean(map(_evenness, used))
    return others, load


def _evenness(counts: list[float]) -> float:
    """Returns the entropy of the shares, as a share of that of equal ones."""
    total = sum(counts)
    entropy = 0.0
    for count in counts:
        if count:
            share = count / total
            entropy -= share * math.log(share)
    greatest = math.log(len(counts))
    return entropy / greatest
