"""The work of both sides of `overlap`: the batch, and what a worker does with it, in plain torch
and NumPy."""

import time

import numpy as np
import torch

VOCABULARY = 256
WIDTH = 128


def columns(rows: int, length: int, seed: int) -> dict[str, np.ndarray]:
    """7 columns (rows, length) of an RL batch, 5 int64 and 2 float32; the same numbers for the same
    seed."""
    random = np.random.default_rng(seed)
    tokens = random.integers(VOCABULARY, size=(rows, length))
    batch = {"input_ids": tokens, "responses": np.roll(tokens, -1, axis=1)}
    batch |= {
        name: np.ones((rows, length), dtype=np.int64)
        for name in ("attention_mask", "response_mask")
    }
    batch["position_ids"] = np.tile(np.arange(length), (rows, 1))
    return batch | {
        name: random.standard_normal((rows, length), dtype=np.float32)
        for name in ("old_log_probs", "advantages")
    }


class Trainer:
    """A small network, a token in and a distribution over the next one out, and its optimizer."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, WIDTH),
            torch.nn.Linear(WIDTH, 4 * WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(4 * WIDTH, WIDTH),
            torch.nn.Linear(WIDTH, VOCABULARY, bias=False),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(
        self, input_ids: torch.Tensor, responses: torch.Tensor, advantages: torch.Tensor
    ) -> torch.Tensor:
        """One optimizer step on a policy-gradient loss, in micro-batches of 4 rows; returns (rows,)
        losses."""
        losses = []
        for rows in torch.arange(len(input_ids)).split(4):
            log_probs = self.model(input_ids[rows]).log_softmax(-1)
            taken = log_probs.gather(-1, responses[rows].unsqueeze(-1)).squeeze(-1)
            losses.append(-(taken * advantages[rows]).mean(-1))
            (losses[-1].sum() / len(input_ids)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.cat(losses).detach()


class Device:
    """What a role's worker has: a trainer, or only a device that would be busy for some seconds."""

    def __init__(self, seed: int) -> None:
        self.trainer = Trainer(seed)

    def update(self, batch: dict[str, torch.Tensor], sleep_s: float) -> tuple[torch.Tensor, float]:
        """(rows,) float32 that depends on every column, and the seconds it took."""
        started = time.perf_counter()
        if sleep_s:
            result = sum(column.double().sum(-1) for column in batch.values()).float()
            time.sleep(max(0.0, sleep_s - (time.perf_counter() - started)))
        else:
            result = self.trainer.step(batch["input_ids"], batch["responses"], batch["advantages"])
        return result, time.perf_counter() - started
