"""OpenRLHF's side of `planner`: as in its trainer, first fit gives the number of micro-batches,
which are balanced."""

from typing import Any

from openrlhf.utils.seqlen_balancing import (
    get_minimum_num_micro_batch_size,
    get_seqlen_balanced_partitions,
)

from benchmarks.serve import serve
from benchmarks.sides.planner_data import BUDGET, lengths, timed


def micro_batches(law: str, rows: int, limit: float) -> dict[str, Any]:
    own = lengths(law, rows).tolist()

    def plan() -> list[list[int]]:
        count = get_minimum_num_micro_batch_size(own, BUDGET, 1, 1)
        return get_seqlen_balanced_partitions(own, count, equal_size=False)

    return timed(plan, limit)


if __name__ == "__main__":
    serve(micro_batches)
