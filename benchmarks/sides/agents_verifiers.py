"""The null harness of verifiers beside the class way: the same task of one turn, in verifiers' own
environment, whose packages alone this file needs."""

import asyncio
import os
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.env import RunSlot
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from benchmarks.serve import serve

__all__ = ["Products"]
AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
state: dict[str, Any] = {}


class ProductData(vf.TaskData):
    ground_truth: str


class Product(vf.Task[ProductData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.ground_truth in trace.last_reply)


class Products(vf.Taskset[Product, vf.TasksetConfig]):
    def load(self) -> list[Product]:
        return []


def start(address: str) -> dict[str, Any]:
    """Loads the environment. `address` is that of the model."""
    os.environ["BENCHMARK_KEY"] = "benchmark"
    config = {"taskset": {"id": "agents_verifiers"}, "agent": AGENT}
    state["environment"] = load_environment(resolve_env_config(config))
    client = EvalClientConfig(base_url=f"{address}/v1", api_key_var="BENCHMARK_KEY")
    state["context"] = ModelContext(client=client, model="policy", sampling=vf.SamplingConfig())
    return {}


async def episodes(tasks: list[Product]) -> list[Any]:
    environment = state["environment"]
    async with environment.serving():
        return await asyncio.gather(
            *[environment.run_slot(RunSlot(task), state["context"]) for task in tasks]
        )


def run(prompts: list[list[dict[str, str]]], ground_truths: list[str]) -> dict[str, Any]:
    """Runs an episode for each prompt: what the model replied, the rewards, and the CPU seconds of
    this process and of those that it has started."""
    tasks = []
    for index, (prompt, truth) in enumerate(zip(prompts, ground_truths, strict=True)):
        data = ProductData(idx=index, prompt=prompt[0]["content"], ground_truth=truth)
        tasks.append(Product(data))
    before = sum(os.times()[:4])
    ended = asyncio.run(episodes(tasks))
    cpu = sum(os.times()[:4]) - before
    traces = [episode.traces[0] for episode in ended]
    return {
        "cpu": {"verifiers": cpu},
        "replies": [trace.last_reply for trace in traces],
        "errors": [str(error) for trace in traces for error in trace.errors],
    }


if __name__ == "__main__":
    serve(start, run)
