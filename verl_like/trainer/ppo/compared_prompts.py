"""Chooses the prompts whose log-probabilities are compared after each update, so that their tokens
reach all experts of a mixture."""

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_like.protocol import DataProto
from verl_like.trainer.ppo.engine_check import NUM_PROMPTS
from verl_like.workers.models.routed_experts import ROUTED_EXPERTS, RouterShape

# Legend: B rows, L layers with a router, E experts, k selected experts.

NUM_CANDIDATES = 64
"""How many prompts are tried."""


def prompts_that_reach(drawn: Sequence[DataProto], shape: RouterShape) -> tuple[list[int], Tensor]:
    """Chooses among the prompts that every replica has answered.

    Args:
        drawn: B rows of each replica, in the same order, with a column `routed_experts`.
        shape: that of the model's routers.

    Returns the numbers of the chosen rows: the first `NUM_PROMPTS`, and each later one that reaches
    an expert which no row before it reaches in some replica. Returns also the experts that the
    chosen rows reach in all replicas, (L, E) bool.
    """
    num_rows = len(drawn[0])
    columns = [replica.tensors()[ROUTED_EXPERTS] for replica in drawn]
    reached = torch.zeros(len(drawn), shape.num_layers, shape.num_experts, dtype=torch.bool)
    chosen = []
    for row in range(num_rows):
        of_row = torch.stack([experts_of(column[row], shape) for column in columns])
        is_new = of_row & ~reached
        if row < NUM_PROMPTS or is_new.any():
            chosen.append(row)
            reached |= of_row
    return chosen, reached.all(0)


def experts_of(ids: Tensor, shape: RouterShape) -> Tensor:
    """Returns which experts compute a token of a sequence, (L, E) bool.

    `ids` is (tokens, L, k). Tokens without a record, which have `OWN`, count for nothing.
    """
    of_layers = ids.long().transpose(0, 1).flatten(1)
    # The first place is for OWN, which is -1.
    computes = torch.zeros(shape.num_layers, 1 + shape.num_experts, dtype=torch.bool)
    computes.scatter_(1, of_layers + 1, True)
    return computes[:, 1:]


def said_of_experts(num_prompts: int, reached: Tensor) -> str:
    """Returns what the start of a run says of the experts that are compared, `reached` (L, E)."""
    begin = f"Arrival shown by numbers: the tokens of {num_prompts} prompts are compared"
    if reached.all():
        return f"{begin}, and each expert of each layer computes some of them."
    missing = []
    for layer, of_layer in enumerate(reached):
        numbers = torch.nonzero(~of_layer).flatten().tolist()
        if numbers:
            experts = ", ".join(map(str, numbers))
            missing.append(f"{experts} of router {layer}")
    return (
        f"{begin}, and these experts compute none of them, so nothing shows whether their weights "
        f"arrive: {'; '.join(missing)}."
    )
