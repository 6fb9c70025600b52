"""Requests and weights that reach two processes of a vLLM replica at different times; transformers
is the reference."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch
from forked_workers import start_ray
from rollout_requests import assert_drawn_by, make_requests, openmp_limit
from test_vllm_rollout import DEADLINE_S, ModelAndFolder, export, rollout_settings, scaled

from verl_like.single_controller.worker import reserve_port
from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.config.rollout import RolloutConfig
from verl_like.workers.rollout import Completion, GenerationRequest, get_rollout_engine
from verl_like.workers.rollout.engine_thread import EngineThread
from verl_like.workers.weights.exports import WeightExport

pytestmark = [pytest.mark.vllm, pytest.mark.ray]

NUM_THREADS = 3  # of the limit; the machine has another number of cores
LATE_S = 0.2
STEPS_WITH_NEWS = 2, 5, 8, 11
"""During which the first rank is asked for something."""


@ray.remote(num_cpus=0)
class ReplicaProcess:
    """A rank of a replica, whose engine has a thread as in a rollout worker. It notes what the
    engine does when."""

    def build(self, path: str, rank: int, size: int, port: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.set_num_threads(NUM_THREADS)
        self.log: list[tuple[int, str]] = []
        self.facts: dict[str, Any] = {}
        self.num_steps = 0
        self.rank = rank
        config = RolloutConfig(**rollout_settings(tensor_model_parallel_size=size))
        model = TrainedModelConfig(path=path)
        place = {"rank": rank, "world_size": size, "seed": 5, "device": "cpu"}
        self.thread = EngineThread(
            lambda: self.noting(get_rollout_engine("vllm")(config, model, **place))
        )

    def noting(self, engine: Any) -> Any:
        step, submit, load, abort = engine.step, engine.submit, engine.load_weights, engine.abort

        def noted_step() -> Any:
            self.num_steps += 1
            while (
                self.rank == 0 and self.num_steps in STEPS_WITH_NEWS and not self.thread._commands
            ):
                time.sleep(0.001)
            self.facts = {
                "has_gradients": torch.is_grad_enabled(),
                "threads": (openmp_limit(), torch.get_num_threads()),
            }
            return step()

        def noted_submit(requests: list[GenerationRequest]) -> None:
            self.log += [(self.num_steps, request.name) for request in requests]
            submit(requests)

        def noted_load(exports: list[WeightExport], version: int, **options: Any) -> str:
            self.log.append((self.num_steps, f"weights {version}"))
            return load(exports, version, **options)

        def noted_abort(names: list[str]) -> list[str]:
            self.log += [(self.num_steps, f"no {name}") for name in names]
            return abort(names)

        engine.step, engine.submit, engine.load_weights, engine.abort = (
            noted_step,
            noted_submit,
            noted_load,
            noted_abort,
        )
        return engine

    def ask(self, in_step: int, what: str, *args: Any, **options: Any) -> None:
        """What a worker asks of the engine, on the second rank some time after the first one
        did."""
        while self.rank == 0 and self.num_steps < in_step:
            time.sleep(0.001)
        time.sleep(LATE_S * self.rank)
        getattr(self.thread, what)(*args, **options)

    def completions(self, names: list[str]) -> dict[str, Completion]:
        ended: dict[str, Completion] = {}
        while len(ended) < len(names):
            ended |= self.thread.collect(1.0, names)
        return ended

    def noted(self) -> tuple[list[tuple[int, str]], dict[str, Any]]:
        return self.log, self.facts


@pytest.fixture(scope="module")
def processes(
    tiny_llama: Callable[..., ModelAndFolder],
) -> Iterator[tuple[list[Any], ModelAndFolder]]:
    """The two ranks of a replica, and an engine of one process."""
    model = tiny_llama(tie=True)
    start_ray(with_vllm=True, num_cpus=2, object_store_memory=200 << 20)
    holder, port = reserve_port()
    made = [ReplicaProcess.remote() for _ in range(3)]
    places = [(0, 2), (1, 2), (0, 1)]
    built = [
        each.build.remote(model[0], *place, port) for each, place in zip(made, places, strict=True)
    ]
    ray.get(built, timeout=DEADLINE_S)
    holder.close()
    yield made, model
    ray.shutdown()


@pytest.mark.proof
def test_both_ranks_take_the_same_requests_and_weights_between_the_same_steps(
    processes: tuple[list[Any], ModelAndFolder],
) -> None:
    made, (_, model) = processes
    changed = scaled(model, 0.8)
    prompts = {name: [10 + place, 11, 12] for place, name in enumerate("abcd")}
    requests = {request.name: request for request in make_requests(prompts)}
    asked: list[Any] = []

    def ask(in_step: int, what: str, *args: Any, **options: Any) -> None:
        asked.extend(each.ask.remote(in_step, what, *args, **options) for each in made)

    ask(0, "load_weights", export(model, 3), 3)
    ask(0, "submit", [requests["a"], requests["d"]])
    ask(2, "submit", [requests["b"]])
    ask(5, "load_weights", export(changed, 5), 5, drain=False)
    ask(8, "submit", [requests["c"]])
    ask(11, "abort", ["d"])
    ray.get(asked, timeout=DEADLINE_S)
    drawn = ray.get([each.completions.remote(list("abc")) for each in made], timeout=DEADLINE_S)
    noted = ray.get([each.noted.remote() for each in made], timeout=DEADLINE_S)
    expected = [
        (0, "weights 3"),
        (0, "a"),
        (0, "d"),
        (2, "b"),
        (5, "weights 5"),
        (8, "c"),
        (11, "no d"),
    ]
    limits = {"has_gradients": False, "threads": (NUM_THREADS, NUM_THREADS)}
    assert noted == [(expected, limits)] * 3

    first, second, alone = drawn
    for name in "abc":
        assert (
            first[name].token_ids.tolist()
            == second[name].token_ids.tolist()
            == alone[name].token_ids.tolist()
        )
        assert first[name].versions == second[name].versions == alone[name].versions
        for other in (second, alone):
            assert other[name].log_probs.tolist() == pytest.approx(
                first[name].log_probs.tolist(), abs=1e-5
            )
        assert_drawn_by({3: model, 5: changed}, requests[name], first[name], kv="recompute")
    length = {name: len(completion.token_ids) for name, completion in first.items()}
    assert first["a"].versions == ((3, 0, 5), (5, 5, length["a"]))
    assert first["b"].versions == ((3, 0, 3), (5, 3, length["b"]))
    assert first["c"].versions == ((5, 0, length["c"]),)
