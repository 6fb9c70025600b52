"""Requests one by one to a rollout engine, and weights between them, shown on the small reference
engine."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rollout_requests import (
    SAMPLING,
    assert_drawn_by,
    load_swapped,
    make_requests,
    run,
    run_late,
    run_paused,
    run_with_abort,
    run_with_update,
    scaled,
)
from transformers import LlamaForCausalLM

from verl_like.protocol.row_ops import deep_equal
from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.config.rollout import RolloutConfig
from verl_like.workers.rollout import Completion, RolloutEngine, RolloutError, get_rollout_engine
from verl_like.workers.weights.arrival import StaleWeightsError, WeightSyncError
from verl_like.workers.weights.exports import WeightExport, collect_weights

PROMPTS = {"a": [10, 11, 12], "b": [20], "c": [30, 31, 32, 33, 34], "d": [10, 11, 12], "e": [7, 7]}
ModelAndFolder = tuple[str, LlamaForCausalLM]


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., ModelAndFolder]) -> ModelAndFolder:
    return tiny_llama()


@pytest.fixture(scope="module")
def changed(model: ModelAndFolder) -> LlamaForCausalLM:
    """The same model with other weights."""
    return scaled(model[1], 0.8)


def export(model: LlamaForCausalLM, version: int) -> list[WeightExport]:
    named = model.named_parameters()
    return [collect_weights(named, dtype=torch.float32, rank=0, world_size=1, version=version)]


def make_engine(model: ModelAndFolder, **settings: Any) -> RolloutEngine:
    # The actor reads them
    log_probs = {"log_prob_use_dynamic_bsz": False, "log_prob_max_token_len_per_gpu": 1}
    shape = {"prompt_length": 6, "response_length": 20}
    config = RolloutConfig(**{"name": "hf", "dtype": "float32", **shape, **log_probs, **settings})
    engine = get_rollout_engine("hf")(
        config, TrainedModelConfig(path=model[0]), rank=0, world_size=1, seed=5, device="cpu"
    )
    engine.load_weights(export(model[1], 3), 3)
    return engine


def tokens(completions: dict[str, Completion]) -> dict[str, list[int]]:
    return {name: completion.token_ids.tolist() for name, completion in completions.items()}


def test_a_response_has_the_same_tokens_however_its_request_comes(model: ModelAndFolder) -> None:
    engine, requests = make_engine(model), make_requests(PROMPTS)
    expected = tokens(run(engine, requests))
    assert len({tuple(each) for each in expected.values()}) == len(PROMPTS)
    assert tokens(run(engine, requests[::-1])) == expected
    assert tokens(run_late(engine, requests, steps_between=3)) == expected
    assert {
        name: each for request in requests for name, each in tokens(run(engine, [request])).items()
    } == expected
    assert tokens(run_paused(engine, requests, steps=2)) == expected
    assert tokens(run(make_engine(model, max_num_seqs=2), requests)) == expected


def test_each_request_is_sampled_as_it_says(model: ModelAndFolder) -> None:
    greedy = dataclasses.replace(SAMPLING, temperature=0.0, max_tokens=4, stop_token_ids=())
    requests = [*make_requests({"sampled": [10, 11]}), *make_requests({"greedy": [10, 11]}, greedy)]
    completions = run(make_engine(model), requests)
    assert (
        tokens(completions)["sampled"] == tokens(run(make_engine(model), requests[:1]))["sampled"]
    )
    ids = torch.tensor([[10, 11]])
    for token in completions["greedy"].token_ids:
        assert int(model[1](ids).logits[0, -1].argmax()) == token
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    assert len(completions["greedy"].token_ids) == 4


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_tokens_after_new_weights_are_drawn_with_them_and_say_so(
    model: ModelAndFolder, changed: LlamaForCausalLM, kv: str
) -> None:
    requests = {request.name: request for request in make_requests(PROMPTS)}
    early, queued, late = [[requests[name] for name in names] for names in ("abc", "d", "e")]
    engine = make_engine(model, kv_after_update=kv)
    completions = run_with_update(engine, early, queued, late, export(changed, 5), steps=4)
    for name, completion in completions.items():
        assert_drawn_by({3: model[1], 5: changed}, requests[name], completion, kv=kv)
    lengths = {name: len(completion.token_ids) for name, completion in completions.items()}
    unfinished = [name for name in "abc" if lengths[name] > 4]
    assert unfinished and all(
        completions[name].versions == ((3, 0, 4), (5, 4, lengths[name])) for name in unfinished
    )
    assert completions["d"].versions == ((5, 0, lengths["d"]),) and completions["e"].versions == (
        (5, 0, lengths["e"]),
    )


def test_kept_and_recomputed_keys_give_different_log_probabilities(
    model: ModelAndFolder, changed: LlamaForCausalLM
) -> None:
    requests = make_requests({"a": PROMPTS["a"]})
    kept, recomputed = [
        run_with_update(
            make_engine(model, kv_after_update=kv), requests, [], [], export(changed, 5), steps=2
        )["a"]
        for kv in ("keep", "recompute")
    ]
    assert kept.log_probs[:2].tolist() == recomputed.log_probs[:2].tolist()
    assert abs(kept.log_probs[2] - recomputed.log_probs[2]) > 1e-4


def test_a_paused_engine_takes_new_weights_and_stays_paused(
    model: ModelAndFolder, changed: LlamaForCausalLM
) -> None:
    engine, requests = make_engine(model), make_requests({"a": PROMPTS["a"]})
    engine.submit(requests)
    engine.step()
    engine.pause()
    engine.load_weights(export(changed, 5), 5)
    assert engine.step() == []
    engine.resume()
    ((_, completion),) = [each for ended in engine.stream() for each in ended]
    assert [span[:2] for span in completion.versions] == [(3, 0), (5, 1)]


def test_aborted_requests_leave_and_the_others_do_not_notice(model: ModelAndFolder) -> None:
    requests = make_requests(PROMPTS)
    expected = tokens(run(make_engine(model), requests))
    completions, gone, again = run_with_abort(
        make_engine(model, max_num_seqs=3), requests, ["b", "e"], steps=2
    )
    assert gone == ["b", "e"]
    assert tokens(completions) == {name: expected[name] for name in "acd"}
    assert tokens(again) == {name: expected[name] for name in "be"}


def test_requests_that_cannot_be_served_are_refused_and_none_of_them_is_taken_in(
    model: ModelAndFolder,
) -> None:
    engine = make_engine(model)
    for wrong, message in (
        (
            {"x": [1] * 7},
            "The prompt of x has 7 tokens, but 1 to 6 are allowed with rollout.prompt_length=6",
        ),
        ({"x": []}, "The prompt of x has 0 tokens"),
        ({"x": [5, 68]}, "The prompt of x has tokens outside of the vocabulary of 68"),
        ({"x": [-1]}, "The prompt of x has tokens outside"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(make_requests({"a": [10]} | wrong))
    with pytest.raises(ValueError, match="A request named a is in flight"):
        engine.submit(make_requests({"a": [10]}) * 2)
    too_long = dataclasses.replace(SAMPLING, max_tokens=21)
    with pytest.raises(ValueError, match=r"a asks for 21 tokens, .* rollout.response_length=20"):
        engine.submit(make_requests({"a": [10]}, too_long))
    submit, engine._submit = engine._submit, lambda requests: (submit(requests[:1]), 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.submit(make_requests({"a": [10], "b": [10]}))
    engine._submit = submit
    assert not engine._has_work()
    assert list(engine.stream()) == []
    engine.submit(make_requests({"a": [10]}))
    with pytest.raises(ValueError, match="A request named a is in flight"):
        engine.submit(make_requests({"b": [10], "a": [11]}))
    with pytest.raises(RuntimeError, match="1 requests are in flight"):
        engine.sleep()
    assert [name for ended in engine.stream() for name, _ in ended] == ["a"]


def test_an_engine_whose_new_weights_did_not_arrive_draws_no_token_until_others_did(
    model: ModelAndFolder, changed: LlamaForCausalLM
) -> None:
    engine, requests = make_engine(model), make_requests({"a": PROMPTS["a"]})
    engine.submit(requests)
    assert engine.step() == []
    with pytest.raises(WeightSyncError):
        load_swapped(
            engine,
            export(changed, 4),
            *(f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")),
        )
    with pytest.raises(RuntimeError, match="no verified weights"):
        engine.step()
    engine.load_weights(export(changed, 5), 5)
    ((_, completion),) = [each for ended in engine.stream() for each in ended]
    assert [span[:2] for span in completion.versions] == [(3, 0), (5, 1)]
    assert_drawn_by({3: model[1], 5: changed}, requests[0], completion, kv="recompute")


def test_weights_that_changed_on_their_way_are_refused_and_the_engine_goes_on_with_its_own(
    model: ModelAndFolder, changed: LlamaForCausalLM
) -> None:
    engine, requests, exports = (
        make_engine(model),
        make_requests({"a": PROMPTS["a"]}),
        export(changed, 4),
    )
    expected = run(engine, requests)
    exports[0].buckets[0].data[0] ^= 1
    with pytest.raises(StaleWeightsError, match="Weights of version 4 changed on their way: 1 of"):
        engine.load_weights(exports, 4)
    assert deep_equal(run(engine, requests), expected)


def test_a_request_that_the_engine_lost_is_noticed(model: ModelAndFolder) -> None:
    engine = make_engine(model)
    engine.submit(make_requests({"a": PROMPTS["a"], "b": PROMPTS["b"]}))
    engine._abort(["b"])
    with pytest.raises(RolloutError, match=r"lost 1 requests: \['b'\]"):
        list(engine.stream())
