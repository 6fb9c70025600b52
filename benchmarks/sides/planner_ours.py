"""verl_like's side of `planner`."""

from typing import Any

from benchmarks.serve import serve
from benchmarks.sides.planner_data import BUDGET, lengths, timed
from verl_like.workers.planning.partition import balance, pack_into_micro_batches


def micro_batches(law: str, rows: int, limit: float) -> dict[str, Any]:
    own = lengths(law, rows).tolist()
    return timed(lambda: pack_into_micro_batches(own, BUDGET), limit)


def shares(law: str, rows: int, parts: int, limit: float) -> dict[str, Any]:
    own = lengths(law, rows).tolist()
    return timed(lambda: balance(own, parts), limit)


if __name__ == "__main__":
    serve(micro_batches, shares)
