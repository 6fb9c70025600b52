"""verl's side of `detached`: its MessageQueue actor, put to and got from as its rollouter and
trainer do (verl/experimental/fully_async_policy: fully_async_rollouter.py `put_sample`,
fully_async_trainer.py `_get_samples_from_queue`, detach_utils.py
`assemble_batch_from_rollout_samples`)."""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from verl import DataProto
from verl.experimental.fully_async_policy.message_queue import MessageQueue, MessageQueueClient

from benchmarks.serve import serve, stopwatch
from benchmarks.sides import dispatch_ray
from benchmarks.sides.detached_work import BATCH, NUM_SAMPLES, PASSES, in_order, samples, sums

TIMEOUT_S = 60
IN_FLIGHT = 4
state: dict[str, Any] = {}


@dataclass
class RolloutSample:
    """verl's class of this name, whose module imports engines that the benchmark's environment does
    not have."""

    full_batch: DataProto
    sample_id: str
    epoch: int
    rollout_status: dict[str, Any]


@ray.remote(num_cpus=1)
class Trainer:
    def __init__(self, queue: Any) -> None:
        self.client = MessageQueueClient(queue)

    async def collect(self) -> np.ndarray:
        found = []
        for _ in range(NUM_SAMPLES // BATCH):
            pickled = []
            while len(pickled) < BATCH:
                sample, _ = await self.client.get_sample()
                pickled.append(sample)
            batch = DataProto.concat(
                [ray.cloudpickle.loads(sample).full_batch for sample in pickled]
            )
            found.append(sums({name: tensor.numpy() for name, tensor in batch.batch.items()}))
        return in_order(found)


def start() -> dict[str, Any]:
    torch.set_num_threads(1)
    dispatch_ray.init(num_cpus=4, store_mib=1024)
    queue = MessageQueue.remote(config=None, max_queue_size=NUM_SAMPLES)
    state["client"], state["trainer"] = MessageQueueClient(queue), Trainer.remote(queue)
    return {}


async def _put_all(made: list[RolloutSample]) -> None:
    """As many puts at a time as ours has calls."""
    places = asyncio.Semaphore(IN_FLIGHT)

    async def put(sample: RolloutSample) -> None:
        async with places:
            assert await state["client"].put_sample(ray.cloudpickle.dumps(sample))

    await asyncio.gather(*map(put, made))


def pass_on(seed: int, at_once: int) -> dict[str, Any]:
    """Hands over all samples, one in a call; seconds until the last batch is complete."""
    assert at_once == 1
    made = [
        RolloutSample(
            DataProto.from_dict(
                {name: torch.from_numpy(column) for name, column in sample.items()}
            ),
            f"{index}",
            0,
            {},
        )
        for index, sample in enumerate(samples(seed))
    ]
    with stopwatch() as seconds:
        collected = state["trainer"].collect.remote()
        asyncio.run(_put_all(made * PASSES))
        found = ray.get(collected, timeout=TIMEOUT_S)
    return {"seconds": seconds[0], "sums": found}


serve(start, pass_on)
