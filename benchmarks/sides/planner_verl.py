"""verl's side of `planner`: its dynamic micro-batches and its balanced partitions.

`rearrange_micro_batches` also slices the batch it is given, here the attention mask it needs and
one number a row.
"""

from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, rearrange_micro_batches

from benchmarks.serve import serve
from benchmarks.sides.planner_data import BUDGET, lengths, timed


def micro_batches(law: str, rows: int, limit: float) -> dict[str, Any]:
    own = torch.from_numpy(lengths(law, rows))
    mask = torch.arange(int(own.max())) < own[:, None]
    batch = TensorDict({"input_ids": torch.zeros(rows, 1), "attention_mask": mask}, [rows])
    return timed(lambda: rearrange_micro_batches(batch, BUDGET)[1], limit)


def shares(law: str, rows: int, parts: int, limit: float) -> dict[str, Any]:
    own = lengths(law, rows).tolist()
    return timed(lambda: get_seqlen_balanced_partitions(own, parts, equal_size=True), limit)


if __name__ == "__main__":
    serve(micro_batches, shares)
