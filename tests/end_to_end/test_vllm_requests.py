"""Requests one by one to a real vLLM, and weights between its steps; transformers is the
reference."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import rollout_requests
import torch
from forked_workers import start_ray
from rollout_requests import assert_drawn_by, make_requests
from test_vllm_rollout import (
    DEADLINE_S,
    LONGEST,
    ModelAndFolder,
    call,
    export,
    prompt_batch,
    rollout_settings,
    scaled,
    start_processes,
)

from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.config.rollout import RolloutConfig
from verl_like.workers.rollout import Completion, get_rollout_engine

pytestmark = [pytest.mark.vllm, pytest.mark.ray]

# LONGEST has a whole block of the prefix cache before its end.
PROMPTS = {
    "a": [10, 11, 12],
    "b": LONGEST,
    "c": [20],
    "d": LONGEST,
    "e": LONGEST,
    "f": [10, 11, 12],
}


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., ModelAndFolder]) -> ModelAndFolder:
    return tiny_llama(tie=True)


@pytest.fixture(scope="module")
def engines(model: ModelAndFolder) -> Iterator[dict[str, Any]]:
    """An engine by `rollout.kv_after_update`."""
    start_ray(with_vllm=True, num_cpus=2, object_store_memory=200 << 20)
    options = ("recompute", "keep")
    with_option = [
        start_processes(model, ranks=[rank], kv_after_update=kv) for rank, kv in enumerate(options)
    ]
    yield {kv: process for kv, (process,) in zip(options, with_option, strict=True)}
    ray.shutdown()


def in_engine(process: Any, run: Callable[..., Any], *args: Any) -> Any:
    return ray.get(process.run.remote(run.__name__, *args), timeout=DEADLINE_S)


def tokens(completions: dict[str, Completion]) -> dict[str, list[int]]:
    return {name: completion.token_ids.tolist() for name, completion in completions.items()}


@pytest.mark.parametrize("kv", ["recompute", "keep"])
@torch.no_grad()
def test_greedy_tokens_for_the_comparison_are_of_temperature_1_and_leave_nothing_in_the_prefix_cache(
    engines: dict[str, Any], model: ModelAndFolder, kv: str
) -> None:
    call(engines[kv], "load_weights", export(model[1], 2), 2)
    later = make_requests({"b": LONGEST})
    drawn, after = in_engine(engines[kv], rollout_requests.draw_and_forget, prompt_batch(), later)
    assert after["b"].num_cached_tokens == 0  # LONGEST was drawn for too
    assert len(drawn) == 3
    for prompt, completion in zip(([10, 11, 12], [20], LONGEST), drawn.values(), strict=True):
        tokens = completion.token_ids.tolist()
        assert len(tokens) == 8
        of_text = (
            model[1](torch.tensor([prompt + tokens]))
            .logits[0]
            .log_softmax(-1)[len(prompt) - 1 : -1]
        )
        assert of_text.argmax(-1).tolist() == tokens
        torch.testing.assert_close(
            torch.tensor(completion.log_probs), of_text.max(-1).values, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_a_response_has_the_same_tokens_however_its_request_comes(
    engines: dict[str, Any], model: ModelAndFolder, kv: str
) -> None:
    process, requests = engines[kv], make_requests(PROMPTS)
    call(process, "load_weights", export(model[1], 3), 3)
    expected = in_engine(process, rollout_requests.run, requests)
    for request in requests:
        assert_drawn_by({3: model[1]}, request, expected[request.name], kv="recompute")
    assert len({tuple(each) for each in tokens(expected).values()}) == len(PROMPTS)
    for route in (
        in_engine(process, rollout_requests.run, requests[::-1]),
        in_engine(process, rollout_requests.run_late, requests, 3),
        in_engine(process, rollout_requests.run_paused, requests, 2),
    ):
        assert tokens(route) == tokens(expected)
    completions, gone, again = in_engine(
        process, rollout_requests.run_with_abort, requests, ["b", "f"], 2
    )
    assert gone == ["b", "f"] and tokens(completions) | tokens(again) == tokens(expected)
    assert set(again) == {"b", "f"}


def test_each_request_is_sampled_and_ended_as_it_says(
    engines: dict[str, Any], model: ModelAndFolder
) -> None:
    call(engines["keep"], "load_weights", export(model[1], 3), 3)
    sampling = rollout_requests.Sampling(1.3, top_k=9, top_p=0.8, max_tokens=9, stop_token_ids=())
    until = dataclasses.replace(
        sampling, top_k=-1, max_tokens=20, stop_token_ids=tuple(range(2, 40))
    )
    requests = [*make_requests({name: PROMPTS[name] for name in "abc"}, sampling)]
    requests += make_requests({f"until {name}": PROMPTS[name] for name in "abc"}, until)
    completions = in_engine(engines["keep"], rollout_requests.run, requests)
    for request in requests:
        assert_drawn_by({3: model[1]}, request, completions[request.name], kv="recompute")
    assert [len(completions[name].token_ids) for name in "abc"] == [9, 9, 9]
    ended = [completions[f"until {name}"].token_ids.tolist() for name in "abc"]
    assert all(
        2 <= tokens[-1] < 40 and not any(2 <= token < 40 for token in tokens[:-1])
        for tokens in ended
    )


def test_a_refused_response_is_told_and_leaves_nothing_behind(
    engines: dict[str, Any], model: ModelAndFolder
) -> None:
    call(engines["recompute"], "load_weights", export(model[1], 3), 3)
    requests = make_requests(PROMPTS)
    expected = in_engine(engines["recompute"], rollout_requests.run, requests)
    after = in_engine(
        engines["recompute"],
        rollout_requests.run_with_a_response_that_is_refused,
        prompt_batch(),
        requests,
    )
    assert tokens(after) == tokens(expected)


def test_the_reference_engine_draws_the_same_tokens(
    engines: dict[str, Any], model: ModelAndFolder
) -> None:
    reference = get_rollout_engine("hf")(
        RolloutConfig(**rollout_settings(name="hf")),
        TrainedModelConfig(path=model[0]),
        rank=0,
        world_size=1,
        seed=5,
        device="cpu",
    )
    greedy = rollout_requests.Sampling(0.0, top_k=-1, top_p=1.0, max_tokens=12, stop_token_ids=(1,))
    requests = make_requests(PROMPTS, greedy)
    reference.load_weights(export(model[1], 3), 3)
    call(engines["keep"], "load_weights", export(model[1], 3), 3)
    expected = rollout_requests.run(reference, requests)
    assert tokens(in_engine(engines["keep"], rollout_requests.run, requests)) == tokens(expected)


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_tokens_after_new_weights_are_drawn_with_them_and_say_so(
    engines: dict[str, Any], model: ModelAndFolder, kv: str
) -> None:
    requests = {request.name: request for request in make_requests(PROMPTS)}
    early, queued, late = [[requests[name] for name in names] for names in ("abc", "d", "ef")]
    models, versions = {3: model[1]}, [3]
    call(engines[kv], "load_weights", export(model[1], 3), 3)
    # Twice: what was drawn with the second weights must not be found by the third
    for factor in (0.8, 0.9):
        new = versions[-1] + 1
        models[new] = scaled(model[1], factor)
        completions = in_engine(
            engines[kv],
            rollout_requests.run_with_update,
            early,
            queued,
            late,
            export(models[new], new),
            4,
        )
        assert set(completions) == set(PROMPTS)
        lengths = {name: len(completion.token_ids) for name, completion in completions.items()}
        unfinished = [name for name in "abc" if lengths[name] > 4]
        assert len(unfinished) > 1
        for name in unfinished:
            assert completions[name].versions == ((new - 1, 0, 4), (new, 4, lengths[name]))
        for name in "def":
            assert completions[name].versions == ((new, 0, lengths[name]),)
        for name, completion in completions.items():
            assert_drawn_by(models, requests[name], completion, kv=kv)
        versions.append(new)
