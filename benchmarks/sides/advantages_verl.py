"""verl's side of `advantages`: the functions of its core_algos."""

import torch
from verl.trainer.ppo.core_algos import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_policy_loss_vanilla,
)
from verl.workers.config import ActorConfig

from benchmarks.sides.advantages_work import GAMMA, LAM, data, serve_maths

CONFIG = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)


def gae() -> tuple[torch.Tensor, torch.Tensor]:
    return compute_gae_advantage_return(data["rewards"], data["values"], data["mask"], GAMMA, LAM)


def grpo() -> torch.Tensor:
    return compute_grpo_outcome_advantage(data["outcome"], data["mask"], data["index"])[0]


def loss(log_prob: torch.Tensor) -> torch.Tensor:
    columns = data["old_log_prob"], log_prob, data["advantages"], data["mask"]
    return compute_policy_loss_vanilla(*columns, loss_agg_mode="token-mean", config=CONFIG)[0]


if __name__ == "__main__":
    serve_maths(gae, grpo, loss)
