"""verl_like's side of `advantages`."""

from types import SimpleNamespace

import torch

from benchmarks.sides.advantages_work import GAMMA, LAM, data, serve_maths
from verl_like.algorithms.advantages.gae import compute_gae_advantage_return
from verl_like.algorithms.advantages.grpo import compute_grpo_outcome_advantage
from verl_like.algorithms.aggregation import BatchCounts
from verl_like.algorithms.policy_losses.vanilla import compute_policy_loss_vanilla


def gae() -> tuple[torch.Tensor, torch.Tensor]:
    return compute_gae_advantage_return(data["rewards"], data["values"], data["mask"], GAMMA, LAM)


def grpo() -> torch.Tensor:
    return compute_grpo_outcome_advantage(data["outcome"], data["mask"], data["index"])[0]


def loss(log_prob: torch.Tensor) -> torch.Tensor:
    counts = BatchCounts(batch_num_tokens=int(data["mask"].sum()), global_batch_size=1)
    config = SimpleNamespace(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0)
    columns = data["old_log_prob"], log_prob, data["advantages"], data["mask"]
    return compute_policy_loss_vanilla(*columns, "token-mean", config, counts=counts)[0]


if __name__ == "__main__":
    serve_maths(gae, grpo, loss)
