"""verl's side of `advantages`: the functions of its core_algos."""

from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_policy_loss_vanilla,
)
from verl.workers.config import ActorConfig

from benchmarks.serve import serve, stopwatch
from benchmarks.sides.advantages_data import GAMMA, LAM, batch

data: dict[str, Any] = {}


def load(rows: int, length: int, holes: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    for name, column in batch(rows, length, holes).items():
        data[name] = column.astype(object) if name == "index" else torch.from_numpy(column)
    data["config"] = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    return {}


def _gae() -> tuple[torch.Tensor, torch.Tensor]:
    return compute_gae_advantage_return(data["rewards"], data["values"], data["mask"], GAMMA, LAM)


def _grpo() -> torch.Tensor:
    return compute_grpo_outcome_advantage(data["outcome"], data["mask"], data["index"])[0]


def _loss(log_prob: torch.Tensor) -> torch.Tensor:
    columns = data["old_log_prob"], log_prob, data["advantages"], data["mask"]
    return compute_policy_loss_vanilla(*columns, loss_agg_mode="token-mean", config=data["config"])[0]


def gae() -> dict[str, Any]:
    with stopwatch() as seconds:
        _gae()
    return {"seconds": seconds[0]}


def grpo() -> dict[str, Any]:
    with stopwatch() as seconds:
        _grpo()
    return {"seconds": seconds[0]}


def loss() -> dict[str, Any]:
    log_prob = data["log_prob"].clone().requires_grad_()
    with stopwatch() as forward:
        value = _loss(log_prob)
    with stopwatch() as backward:
        value.backward()
    return {"forward": forward[0], "both": forward[0] + backward[0]}


def outputs() -> dict[str, np.ndarray]:
    advantages, returns = _gae()
    log_prob = data["log_prob"].clone().requires_grad_()
    value = _loss(log_prob)
    value.backward()
    return {
        "advantages": advantages.numpy(),
        "returns": returns.numpy(),
        "grpo": _grpo().numpy(),
        "loss": np.array(value.item()),
        "gradient": log_prob.grad.numpy() * int(data["mask"].sum()),
    }


if __name__ == "__main__":
    serve(load, gae, grpo, loss, outputs)
