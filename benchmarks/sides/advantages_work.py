"""The batch that both sides of `advantages` work on, from a seed, and the functions they answer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.serve import serve, stopwatch

GAMMA = 0.99
LAM = 0.95
SAMPLES_PER_PROMPT = 8


def batch(rows: int, length: int, holes: bool) -> dict[str, np.ndarray]:
    """(rows, length) float32 columns and an int64 mask: responses of a quarter to the full length,
    whose reward is on the last token for `outcome` and on every token for `rewards`; with holes, a
    fifth of the tokens are not the policy's, in runs of 16."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(length // 4, length + 1, (rows, 1))
    mask = np.arange(length) < lengths
    if holes:
        mask &= np.repeat(rng.random((rows, length // 16)) < 0.8, 16, axis=1)

    def normal(scale: float) -> np.ndarray:
        return rng.standard_normal((rows, length), dtype=np.float32) * np.float32(scale)

    last = mask & (mask[:, ::-1].cumsum(1)[:, ::-1] == 1)
    old_log_prob = normal(1.0) - 2
    return {
        "mask": mask.astype(np.int64),
        "rewards": np.where(mask, normal(0.1), 0),
        "outcome": np.where(last, normal(1.0), 0),
        "values": normal(1.0),
        "advantages": normal(1.0),
        "old_log_prob": old_log_prob,
        "log_prob": old_log_prob + normal(0.2),
        "index": np.repeat(np.arange(rows // SAMPLES_PER_PROMPT), SAMPLES_PER_PROMPT).astype(str),
    }


data: dict[str, Any] = {}


def serve_maths(
    gae_of_batch: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    grpo_of_batch: Callable[[], torch.Tensor],
    loss_of: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Serves a side, given its advantages and returns, its GRPO advantages, and its policy loss of
    log-probabilities (rows, length), all on `data`."""

    def load(rows: int, length: int, holes: bool) -> dict[str, Any]:
        torch.set_num_threads(1)
        for name, column in batch(rows, length, holes).items():
            data[name] = column.astype(object) if name == "index" else torch.from_numpy(column)
        return {}

    def gae() -> dict[str, Any]:
        with stopwatch() as seconds:
            gae_of_batch()
        return {"seconds": seconds[0]}

    def grpo() -> dict[str, Any]:
        with stopwatch() as seconds:
            grpo_of_batch()
        return {"seconds": seconds[0]}

    def loss() -> dict[str, Any]:
        log_prob = data["log_prob"].clone().requires_grad_()
        with stopwatch() as forward:
            value = loss_of(log_prob)
        with stopwatch() as backward:
            value.backward()
        return {"forward": forward[0], "both": forward[0] + backward[0]}

    def outputs() -> dict[str, np.ndarray]:
        advantages, returns = gae_of_batch()
        log_prob = data["log_prob"].clone().requires_grad_()
        value = loss_of(log_prob)
        value.backward()
        return {
            "advantages": advantages.numpy(),
            "returns": returns.numpy(),
            "grpo": grpo_of_batch().numpy(),
            "loss": np.array(value.item()),
            "gradient": log_prob.grad.numpy() * int(data["mask"].sum()),
        }

    serve(load, gae, grpo, loss, outputs)
