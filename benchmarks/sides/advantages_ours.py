"""verl_like's side of `advantages`."""

from functools import partial

import torch

from benchmarks.sides.advantages_work import GAMMA, LAM, data, serve_maths
from verl_like.algorithms import (
    ClipRange,
    agg_loss,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_policy_loss,
)


def gae() -> tuple[torch.Tensor, torch.Tensor]:
    return compute_gae_advantage_return(data["rewards"], data["values"], data["mask"], GAMMA, LAM)


def grpo() -> torch.Tensor:
    return compute_grpo_outcome_advantage(data["outcome"], data["mask"], data["index"])[0]


def loss(log_prob: torch.Tensor) -> torch.Tensor:
    aggregate = partial(agg_loss, loss_agg_mode="token-mean", num_tokens=int(data["mask"].sum()), num_sequences=1)
    columns = data["old_log_prob"], log_prob, data["advantages"], data["mask"]
    return compute_policy_loss(*columns, clip=ClipRange(0.2, 0.2, 3.0), aggregate=aggregate)[0]


if __name__ == "__main__":
    serve_maths(gae, grpo, loss)
