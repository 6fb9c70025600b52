"""A real AsyncLLM computes in a process of its own; the engine in the worker and transformers are
the references."""

import functools
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import rollout_requests
from forked_workers import start_ray
from rollout_requests import assert_drawn_by, make_requests, rows_of
from test_vllm_requests import PROMPTS, in_engine, tokens
from test_vllm_rollout import (
    DEADLINE_S,
    ModelAndFolder,
    call,
    expect_error,
    prompt_batch,
    rollout_settings,
    scaled,
    start_processes,
)
from transformers import LlamaForCausalLM

from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.config.rollout import RolloutConfig
from verl_like.workers.rollout import get_rollout_engine
from verl_like.workers.weights.exports import WeightExport, collect_weights
from verl_like.workers.weights.shared_memory import SharedMemoryTransport

pytestmark = [pytest.mark.vllm, pytest.mark.ray]

# All tokens of a response are computed while the test asks for something: none ends early.
ENDLESS = replace(rollout_requests.SAMPLING, max_tokens=100, stop_token_ids=())
TRANSPORT = SharedMemoryTransport()


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., ModelAndFolder]) -> ModelAndFolder:
    return tiny_llama(tie=True)


WORKER = {"response_length": ENDLESS.max_tokens}
ASYNC = {"name": "vllm_async", "weight_transport": "shared_memory", **WORKER}
SETTINGS = {
    "in the worker": WORKER,
    "recompute": ASYNC,
    "keep": {**ASYNC, "kv_after_update": "keep"},
}
# Each starts an engine.
KV = ["recompute", pytest.param("keep", marks=pytest.mark.proof)]


@pytest.fixture(scope="module")
def engine(model: ModelAndFolder) -> Iterator[Callable[[str], Any]]:
    """Starts the engine of a name in `SETTINGS` at its first use."""
    start_ray(with_vllm=True, num_cpus=2, object_store_memory=200 << 20)
    yield functools.cache(lambda name: start_processes(model, ranks=[0], **SETTINGS[name])[0])
    ray.shutdown()


def shared(
    model: LlamaForCausalLM, version: int, bucket_bytes: int = 1 << 14
) -> list[WeightExport]:
    """Weights in memory of this process."""
    export = collect_weights(
        model.named_parameters(),
        dtype=next(model.parameters()).dtype,
        rank=0,
        world_size=1,
        version=version,
        bucket_bytes=bucket_bytes,
        allocate=TRANSPORT.allocate,
    )
    return [TRANSPORT.publish(export)]


@pytest.mark.proof
@pytest.mark.parametrize("kv", KV)
def test_a_response_has_the_same_tokens_in_both_engines_however_its_request_comes(
    engine: Callable[[str], Any], model: ModelAndFolder, kv: str
) -> None:
    exports, requests = shared(model[1], 3), make_requests(PROMPTS)
    for process in (engine("in the worker"), engine(kv)):
        call(process, "load_weights", exports, 3)
    expected = in_engine(engine("in the worker"), rollout_requests.run, requests)
    for run, *arguments in (
        (rollout_requests.run, requests),
        (rollout_requests.run, requests[::-1]),
        (rollout_requests.run_late, requests, 1),
        (rollout_requests.run_paused, requests, 2),
    ):
        completions = in_engine(engine(kv), run, *arguments)
        assert tokens(completions) == tokens(expected)
        for request in requests:
            assert_drawn_by({3: model[1]}, request, completions[request.name], kv="recompute")
    completions, gone, again = in_engine(
        engine(kv), rollout_requests.run_with_abort, requests, ["b", "f"], 0
    )
    assert gone == ["b", "f"] and tokens(completions) | tokens(again) == tokens(expected)
    outputs = [
        call(each, "generate_sequences", prompt_batch())
        for each in (engine(kv), engine("in the worker"))
    ]
    assert rows_of(outputs[0], "responses") == rows_of(outputs[1], "responses")


@pytest.mark.parametrize("kv", KV)
def test_tokens_after_new_weights_are_drawn_with_them_and_say_so(
    engine: Callable[[str], Any], model: ModelAndFolder, kv: str
) -> None:
    requests = {request.name: request for request in make_requests(PROMPTS, ENDLESS)}
    requests["f"] = replace(requests["f"], sampling=replace(ENDLESS, max_tokens=4))
    models, versions = {3: model[1]}, [3]
    call(engine(kv), "load_weights", shared(model[1], 3), 3)
    for factor in (0.8, 0.9):
        new = versions[-1] + 1
        models[new] = scaled(model[1], factor)
        early, queued, late = [[requests[name] for name in names] for names in ("abf", "d", "ce")]
        completions = in_engine(
            engine(kv),
            rollout_requests.run_with_update_when_one_ended,
            early,
            queued,
            late,
            shared(models[new], new),
        )
        assert completions["f"].versions == ((new - 1, 0, 4),)
        for name in "ab":
            (_, _, end), second = completions[name].versions
            assert completions[name].versions[0] == (new - 1, 0, end) and second == (new, end, 100)
            assert end >= 4
        for name in "cde":
            assert completions[name].versions == ((new, 0, 100),)
        for name, completion in completions.items():
            assert_drawn_by(models, requests[name], completion, kv=kv)
        versions.append(new)


def test_a_torn_update_never_serves_and_a_later_one_does(
    engine: Callable[[str], Any], model: ModelAndFolder
) -> None:
    process, new = engine("recompute"), scaled(model[1], 0.7)
    requests = make_requests({"a": PROMPTS["a"]}, ENDLESS)
    for num_loaded, version in ((2, 7), (19, 9)):  # of 20 parameters
        call(process, "load_weights", shared(model[1], version), version)
        call(process, "pause")
        call(process, "submit", requests)
        exports = shared(new, version + 1, bucket_bytes=1)
        expect_error(
            process.run.remote("load_torn", exports, num_loaded),
            "fd/none, which ended",
            "Exception",
        )
        call(process, "resume")  # must not let the engine compute
        with pytest.raises(ray.exceptions.RayTaskError, match="no verified weights"):
            call(process, "step")
        call(process, "load_weights", exports, version + 1)
        completion = in_engine(process, rollout_requests.run, [])["a"]
        assert completion.versions == ((version + 1, 0, 100),)
        assert_drawn_by({version + 1: new}, requests[0], completion, kv="recompute")


def test_wrong_weights_are_named_and_never_serve(
    engine: Callable[[str], Any], model: ModelAndFolder
) -> None:
    process, names = (
        engine("recompute"),
        [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up")],
    )
    message = f"version 11 did not arrive at rollout rank 0: 2 of 20 .*: {', '.join(names)}."
    expect_error(process.run.remote("load_swapped", shared(model[1], 11), *names), message)
    with pytest.raises(ray.exceptions.RayTaskError, match="no verified weights"):
        call(process, "generate_sequences", prompt_batch())


@pytest.mark.proof
def test_a_response_may_take_longer_than_any_other_answer(
    engine: Callable[[str], Any], model: ModelAndFolder
) -> None:
    process = engine("recompute")
    call(process, "load_weights", shared(model[1], 30), 30)
    assert (
        in_engine(process, rollout_requests.run_beyond_the_limit, make_requests(PROMPTS)).keys()
        == PROMPTS.keys()
    )


@pytest.mark.proof
def test_an_engine_process_that_dies_is_told(
    engine: Callable[[str], Any], model: ModelAndFolder
) -> None:
    process = engine("keep")  # nobody else needs it any more
    call(process, "load_weights", shared(model[1], 20), 20)
    call(process, "submit", make_requests(PROMPTS, ENDLESS))
    computing = in_engine(process, rollout_requests.engine_process)
    mapped = re.findall(r"/dev/shm/\S+", Path(f"/proc/{computing}/maps").read_text())
    os.kill(computing, signal.SIGKILL)
    expect_error(process.run.remote("run", []), "EngineCore", "EngineDeadError")
    assert not any(map(os.path.exists, mapped))

    process = engine("recompute")
    computing = in_engine(process, rollout_requests.engine_process)
    os.kill(computing, signal.SIGSTOP)
    loading = process.call.remote("load_weights", shared(model[1], 20), 20)
    assert not ray.wait([loading], timeout=2)[0]
    os.kill(computing, signal.SIGKILL)
    expect_error(loading, "EngineCore", "EngineDeadError")


@pytest.mark.proof
def test_the_kernel_ends_an_engine_process_whose_worker_was_killed(model: ModelAndFolder) -> None:
    ours, theirs = multiprocessing.Pipe()  # without Ray, which ends what its workers have started
    worker = multiprocessing.get_context("spawn").Process(
        target=own_an_engine, args=(theirs, model[0])
    )
    worker.start()
    assert ours.poll(DEADLINE_S)
    computing = psutil.Process(ours.recv())
    computing.suspend()  # nothing that it does itself can end it
    worker.kill()
    worker.join(30)
    assert not psutil.wait_procs([computing], timeout=30)[1]


def own_an_engine(connection: Connection, path: str) -> None:
    config, model_config = RolloutConfig(**rollout_settings(**ASYNC)), TrainedModelConfig(path=path)
    engine = get_rollout_engine(config.name)(
        config, model_config, rank=0, world_size=1, seed=5, device="cpu"
    )
    connection.send(rollout_requests.engine_process(engine))
    time.sleep(600)


@pytest.mark.proof
def test_an_engine_process_that_does_not_start_says_where_the_cause_is(
    engine: Any, model: ModelAndFolder
) -> None:
    with pytest.raises(ray.exceptions.RayTaskError, match="did not start") as failed:
        start_processes(model, ranks=[0], **ASYNC, gpu_memory_utilization=1e-9)
    (log,) = set(re.findall(r"the end of (/\S+) says why", str(failed.value)))
    assert (
        "ValueError: No available memory for the cache blocks."
        in Path(log).read_text().splitlines()[-1]
    )


def test_what_the_engine_in_its_own_process_cannot_do_is_refused() -> None:
    with pytest.raises(
        ValueError, match="set weight_transport=shared_memory, between nodes gloo, or name=vllm"
    ):
        RolloutConfig(**rollout_settings(name="vllm_async"))
    with pytest.raises(ValueError, match="name=vllm_async with tensor_model_parallel_size=2"):
        shared_by_two = {"weight_transport": "gloo", "tensor_model_parallel_size": 2}
        RolloutConfig(**rollout_settings(name="vllm_async", **shared_by_two))
