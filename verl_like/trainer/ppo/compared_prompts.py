"""Chooses the prompts whose log-probabilities are compared after each update, so that their tokens
reach all experts of a mixture."""

from collections.abc import Sequence

import torch
from torch import Tensor

from verl_like.protocol import DataProto
from verl_like.trainer.ppo.engine_check import NUM_PROMPTS
from verl_like.workers.models.routed_experts import OWN, ROUTED_EXPERTS, RouterShape

# Legend: B rows, L layers with a router, E experts, k selected experts.

NUM_CANDIDATES = 64
"""How many prompts are tried."""
UNKNOWN_ROUTERS = (
    "Arrival shown by numbers: it is not known which experts the compared tokens depend on, so "
    "nothing shows whether the weights of all experts arrive."
)


def prompts_that_reach(
    drawn: Sequence[DataProto], num_drawn: int, shape: RouterShape
) -> tuple[list[int], Tensor]:
    """Chooses among the prompts that every replica has answered.

    Args:
        drawn: B rows of each replica, in the same order, with a column `routed_experts`.
        num_drawn: the number of tokens of each response.
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
        of_row = torch.stack([experts_of(column[row], num_drawn, shape) for column in columns])
        is_new = of_row & ~reached
        if row < NUM_PROMPTS or is_new.any():
            chosen.append(row)
            reached |= of_row
    return chosen, reached.all(0)


def experts_of(ids: Tensor, num_drawn: int, shape: RouterShape) -> Tensor:
    """Returns on which experts the log-probabilities of a response depend, (L, E) bool.

    Nothing is drawn after the last token. In the last layer only the tokens before drawn ones
    count, because nothing else reads its output. Tokens without a record, which have `OWN`, count
    for nothing.

    Args:
        ids: those of prompt and response, (tokens, L, k).
        num_drawn: the number of tokens of the response.
        shape: that of the model's routers.
    """
    counted = ids.to(torch.int64, copy=True)
    counted[-1] = OWN
    counted[: -1 - num_drawn, -1] = OWN
    of_layers = counted.transpose(0, 1).flatten(1)
    # The first place is for OWN, which is -1.
    computes = torch.zeros(shape.num_layers, 1 + shape.num_experts, dtype=torch.bool)
    computes.scatter_(1, of_layers + 1, True)
    return computes[:, 1:]


def said_of_experts(num_prompts: int, reached: Tensor) -> str:
    """Returns what the start of a run says of the experts that are compared, `reached` (L, E)."""
    begin = f"Arrival shown by numbers: the tokens of {num_prompts} prompts are compared"
    if reached.all():
        return f"{begin}, and with the weights of the start they depend on each expert."
    missing = []
    for layer, of_layer in enumerate(reached):
        numbers = torch.nonzero(~of_layer).flatten().tolist()
        if numbers:
            experts = ", ".join(map(str, numbers))
            missing.append(f"{experts} of router {layer}")
    return (
        f"{begin}, and with the weights of the start they depend on all experts but these, so that "
        f"nothing shows whether their weights arrive: {'; '.join(missing)}."
    )
