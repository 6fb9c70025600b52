"""verl_like's side of `detached`: a maker in this process, the trainer with its buffer and the
ledger as actors."""

from typing import Any

import numpy as np
import ray
import torch

from benchmarks.serve import serve, stopwatch
from benchmarks.sides import dispatch_ray
from benchmarks.sides.detached_work import (
    BATCH,
    NUM_MADE,
    NUM_SAMPLES,
    PASSES,
    ROWS,
    in_order,
    samples,
    sums,
)
from verl_like.protocol import DataProto
from verl_like.trainer.config.detached import DetachedBlock
from verl_like.trainer.detached.buffer import ExperienceBuffer
from verl_like.trainer.detached.ledger import PromptLedger

TIMEOUT_S = 60
IN_FLIGHT = 4
TICKETS = 16
STALENESS = 10_000
"""So large that the ledger never holds the maker back."""
state: dict[str, Any] = {}


class Calls:
    """The methods of an actor as calls that wait for their results."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: ray.get(
            getattr(self.actor, name).remote(*arguments), timeout=TIMEOUT_S
        )


@ray.remote(num_cpus=1, concurrency_groups={"extend": IN_FLIGHT})
class Trainer:
    def __init__(self, ledger: Any) -> None:
        calls: Any = Calls(ledger)
        self.ledger = calls
        self.version = 0
        self.buffer = ExperienceBuffer(calls, trainer=0, limit=(STALENESS + 1) * BATCH)

    @ray.method(concurrency_group="extend")
    def extend(self, tickets: list[Any], batch: DataProto) -> int:
        return len(self.buffer.extend("maker", tickets, batch, {}))

    def collect(self) -> np.ndarray:
        found = []
        for _ in range(NUM_SAMPLES // BATCH):
            numbers, batch = self.buffer.take(BATCH, self.version, TIMEOUT_S)
            self.ledger.trained(numbers, self.version)
            self.version += 1
            found.append(sums({name: tensor.numpy() for name, tensor in batch.tensors().items()}))
        return in_order(found)


def start() -> dict[str, Any]:
    torch.set_num_threads(1)
    dispatch_ray.init(num_cpus=4, store_mib=1024)
    ledger = ray.remote(num_cpus=0)(PromptLedger).remote(
        10_000, BATCH, DetachedBlock(), max_staleness=STALENESS
    )
    state["trainer"] = Trainer.remote(ledger)
    state["ledger"] = Calls(ledger)
    return {}


def pass_on(seed: int, at_once: int) -> dict[str, Any]:
    """Hands over all samples, `at_once` of them in a call; seconds until the last batch is
    complete."""
    spans = np.empty(ROWS, dtype=object)
    spans[:] = [((0, 0, 1),)] * ROWS
    each = [
        DataProto.from_dict(
            {name: torch.from_numpy(column) for name, column in sample.items()},
            {"policy_version": spans},
        )
        for sample in samples(seed)
    ]
    batches = [
        DataProto.concat(each[index : index + at_once]) for index in range(0, NUM_MADE, at_once)
    ]
    trainer = state["trainer"]
    pending = []
    tickets = []
    with stopwatch() as seconds:
        collected = trainer.collect.remote()
        for batch in batches * PASSES:
            if not tickets:
                tickets = state["ledger"].take("maker", 0, max(at_once, TICKETS))
            if len(pending) == IN_FLIGHT:
                ray.get(pending.pop(0), timeout=TIMEOUT_S)
            pending.append(trainer.extend.remote(tickets[:at_once], batch))
            tickets = tickets[at_once:]
        found = ray.get(collected, timeout=TIMEOUT_S)
    return {"seconds": seconds[0], "sums": found}


serve(start, pass_on)
