"""What every rollout engine does with prompts, tokens and weights, shown on the small reference
engine."""

import dataclasses
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from rollout_requests import generate_sequences, rows_of, stream_sequences
from transformers import LlamaForCausalLM

from verl_like.protocol import DataProto, Metric, pad_dataproto_to_divisor
from verl_like.protocol.padded import padded
from verl_like.protocol.row_ops import deep_equal, jagged_from_lists, jagged_parts
from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.config.rollout import RolloutConfig, SamplingConfig
from verl_like.workers.rollout import RolloutEngine, RolloutError, get_rollout_engine
from verl_like.workers.rollout.batch import assemble
from verl_like.workers.rollout.hf_engine import HfEngine
from verl_like.workers.rollout.request import Completion, Sampling, check_completion, request_seed
from verl_like.workers.weights.arrival import WeightSyncError
from verl_like.workers.weights.exports import collect_weights

PROMPTS = [[10, 11, 12], [20], [30, 31, 32, 33, 34]]
WIDTH = 6


def prompt_batch(
    prompts: list[list[int]] = PROMPTS, *, step: int = 1, validate: bool = False
) -> DataProto:
    batch = {
        "prompts": jagged_from_lists(prompts, torch.int64),
        "uid": np.array([f"0-{i}" for i in range(len(prompts))], dtype=object),
    }
    return DataProto.from_single_dict(batch, meta_info={"global_steps": step, "validate": validate})


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., tuple[str, LlamaForCausalLM]]) -> tuple[str, LlamaForCausalLM]:
    return tiny_llama()


def make_engine(
    model: tuple[str, LlamaForCausalLM], *, load: bool = True, rank: int = 0, **settings: Any
) -> RolloutEngine:
    path, trained = model
    # The actor reads them
    log_probs = {"log_prob_use_dynamic_bsz": False, "log_prob_max_token_len_per_gpu": 1}
    shape = {"prompt_length": WIDTH, "response_length": 20}
    config = RolloutConfig(
        **{"name": "hf", "dtype": "float32", "n": 3, **shape, **log_probs, **settings}
    )
    engine = get_rollout_engine(config.name)(
        config, TrainedModelConfig(path=path), rank=rank, world_size=2, seed=5, device="cpu"
    )
    if load:
        engine.load_weights([export(trained, version=7)], 7)
    return engine


def export(model: LlamaForCausalLM, version: int) -> Any:
    return collect_weights(
        model.named_parameters(), dtype=torch.float32, rank=0, world_size=1, version=version
    )


def log_probs_of(model: LlamaForCausalLM, output: DataProto, temperature: float) -> torch.Tensor:
    """Of the tokens of all responses, recomputed one row at a time."""
    expected = []
    for prompt, response in zip(
        rows_of(output, "prompts"), rows_of(output, "responses"), strict=True
    ):
        log_probs = (
            model(torch.tensor([prompt + response])).logits[0].double() / temperature
        ).log_softmax(-1)
        of_response = log_probs[len(prompt) - 1 : -1]
        expected.append(of_response.gather(-1, torch.tensor(response)[:, None])[:, 0].float())
    return torch.cat(expected)


def drawn_log_probs(output: DataProto) -> torch.Tensor:
    """Of the tokens of all responses, as the engine says; it says one of each."""
    log_probs, offsets = jagged_parts(output.batch["rollout_log_probs"])
    assert torch.equal(offsets, jagged_parts(output.batch["responses"])[1])
    return log_probs


def test_responses_follow_their_prompts_and_padded_ones_have_masks_and_positions_that_go_on_over_them() -> (
    None
):
    prompts = prompt_batch([[10, 11], [20, 21, 22]])
    completions = [
        Completion([40, 41, 1], [-1.0, -2.0, -3.0], ((8, 0, 2), (9, 2, 3))),
        Completion([42, 43, 44, 45], [-0.5] * 4, ((9, 0, 4),)),
        Completion([1], [-4.0], ((9, 0, 1),)),
        Completion([46, 1], [-0.25, -0.75], ((9, 0, 2),)),
    ]
    output = assemble(prompts, completions)
    assert rows_of(output, "prompts") == [[10, 11]] * 2 + [[20, 21, 22]] * 2
    assert rows_of(output, "responses") == [[40, 41, 1], [42, 43, 44, 45], [1], [46, 1]]
    assert rows_of(output, "response_mask") == [[1, 1, 1], [1, 1, 1, 1], [1], [1, 1]]
    assert rows_of(output, "rollout_log_probs") == [
        [-1.0, -2.0, -3.0],
        [-0.5] * 4,
        [-4.0],
        [-0.25, -0.75],
    ]
    output.meta_info["padding"] = (WIDTH, 4, 0)
    columns = padded(output).batch
    assert columns["prompts"].tolist() == [[0, 0, 0, 0, 10, 11]] * 2 + [[0, 0, 0, 20, 21, 22]] * 2
    assert columns["responses"].tolist() == [
        [40, 41, 1, 0],
        [42, 43, 44, 45],
        [1, 0, 0, 0],
        [46, 1, 0, 0],
    ]
    assert columns["response_mask"].tolist() == [
        [1, 1, 1, 0],
        [1, 1, 1, 1],
        [1, 0, 0, 0],
        [1, 1, 0, 0],
    ]
    assert columns["input_ids"][0].tolist() == [0, 0, 0, 0, 10, 11, 40, 41, 1, 0]
    assert columns["attention_mask"][0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 0]
    assert columns["position_ids"][0].tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 4, 5]
    assert columns["position_ids"][2].tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5, 6]
    assert columns["rollout_log_probs"][2].tolist() == [-4.0, 0.0, 0.0, 0.0]
    assert columns["rollout_log_probs"].dtype == torch.float32
    versions = output.non_tensor_batch["policy_version"]
    assert versions.tolist() == [((8, 0, 2), (9, 2, 3)), ((9, 0, 4),), ((9, 0, 1),), ((9, 0, 2),)]
    integers = (
        "prompts",
        "responses",
        "response_mask",
        "input_ids",
        "attention_mask",
        "position_ids",
    )
    assert {columns[name].dtype for name in integers} == {torch.int64}


def test_the_responses_of_a_prompt_follow_each_other(model: tuple[str, LlamaForCausalLM]) -> None:
    output = generate_sequences(make_engine(model), prompt_batch())
    assert rows_of(output, "prompts") == [PROMPTS[i] for i in (0, 0, 0, 1, 1, 1, 2, 2, 2)]
    lengths = [sum(mask) for mask in rows_of(output, "response_mask")]
    assert output.non_tensor_batch["policy_version"].tolist() == [
        ((7, 0, length),) for length in lengths
    ]
    assert len({tuple(row) for row in rows_of(output, "responses")}) == 9


def test_a_response_ends_with_its_first_end_token(model: tuple[str, LlamaForCausalLM]) -> None:
    output = generate_sequences(make_engine(model, n=32), prompt_batch())
    lengths = set()
    columns = [
        rows_of(output, name) for name in ("responses", "response_mask", "rollout_log_probs")
    ]
    for tokens, mask, log_probs in zip(*columns, strict=True):
        length = tokens.index(1) + 1 if 1 in tokens else 20
        lengths.add(length)
        assert mask == [1] * length
        assert len(tokens) == length
        assert all(value < 0 for value in log_probs) and len(log_probs) == length
    assert 20 in lengths and len(lengths) > 5


def test_ignore_eos_generates_up_to_the_limit(model: tuple[str, LlamaForCausalLM]) -> None:
    output = generate_sequences(make_engine(model, n=32, ignore_eos=True), prompt_batch())
    assert any(1 in tokens for tokens in rows_of(output, "responses"))
    assert rows_of(output, "response_mask") == [[1] * 20] * 96


def test_rollout_log_probs_are_those_of_the_sampling_temperature(
    model: tuple[str, LlamaForCausalLM],
) -> None:
    output = generate_sequences(make_engine(model, temperature=0.7), prompt_batch())
    assert torch.allclose(drawn_log_probs(output), log_probs_of(model[1], output, 0.7), atol=1e-5)


def test_rollout_log_probs_are_renormalised_over_the_top_k_tokens(
    model: tuple[str, LlamaForCausalLM],
) -> None:
    output = generate_sequences(make_engine(model, top_k=2, n=8), prompt_batch())
    logits = model[1](torch.tensor([PROMPTS[1]])).logits[0, -1]
    best = logits.topk(2)
    expected = dict(zip(best.indices.tolist(), best.values.log_softmax(-1).tolist(), strict=True))
    tokens, log_probs = rows_of(output, "responses"), rows_of(output, "rollout_log_probs")
    for row in range(8, 16):
        assert log_probs[row][0] == pytest.approx(expected[tokens[row][0]], abs=1e-5)


def test_tokens_are_drawn_with_the_models_probabilities(
    model: tuple[str, LlamaForCausalLM],
) -> None:
    output = generate_sequences(
        make_engine(model, top_k=5, n=2000, response_length=1, max_num_seqs=2000),
        prompt_batch().select_idxs([1]),
    )
    best = model[1](torch.tensor([PROMPTS[1]])).logits[0, -1].topk(5)
    counts = torch.bincount(torch.tensor(rows_of(output, "responses"))[:, 0], minlength=68)
    expected = 2000 * best.values.softmax(-1)
    chi_square = float(((counts[best.indices] - expected) ** 2 / expected).sum())
    assert int(counts[best.indices].sum()) == 2000
    # Five standard deviations above the mean of 4 degrees of freedom
    assert chi_square < 4 + 5 * 8**0.5


def test_validation_decodes_greedily_unless_told_otherwise(
    model: tuple[str, LlamaForCausalLM],
) -> None:
    output = generate_sequences(make_engine(model), prompt_batch(validate=True))
    assert len(output) == 3
    for prompt, response in zip(PROMPTS, rows_of(output, "responses"), strict=True):
        ids = torch.tensor([prompt])
        for token in response:
            assert int(model[1](ids).logits[0, -1].argmax()) == token
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    assert torch.allclose(drawn_log_probs(output), log_probs_of(model[1], output, 1.0), atol=1e-5)


def test_validation_has_its_own_number_of_samples_and_temperature(
    model: tuple[str, LlamaForCausalLM],
) -> None:
    sampling = SamplingConfig(n=2, temperature=0.5)
    output = generate_sequences(
        make_engine(model, val_kwargs=sampling), prompt_batch(validate=True)
    )
    assert len(output) == 6
    assert torch.allclose(drawn_log_probs(output), log_probs_of(model[1], output, 0.5), atol=1e-5)


def drawn(engine: RolloutEngine, prompts: DataProto) -> dict[tuple[str, int], list[int]]:
    """The response tokens by uid of the prompt and index of the sample; padding rows are left
    out."""
    output = generate_sequences(engine, prompts)
    n, is_pad = (
        len(output) // len(prompts),
        prompts.batch.get("is_pad", torch.zeros(len(prompts))).tolist(),
    )
    responses = rows_of(output, "responses")
    return {
        (uid, k): responses[row * n + k]
        for row, uid in enumerate(prompts.non_tensor_batch["uid"])
        for k in range(n)
        if not is_pad[row]
    }


@pytest.mark.parametrize("validate", [False, True])
def test_responses_do_not_depend_on_the_replica_the_other_rows_or_their_order(
    model: tuple[str, LlamaForCausalLM], validate: bool
) -> None:
    sampling = {"temperature": 0.9, "top_k": 40, "top_p": 0.95}
    settings = {"n": 3, **sampling, "val_kwargs": SamplingConfig(n=2, **sampling)}
    first, second = (make_engine(model, rank=rank, **settings) for rank in range(2))
    batch = prompt_batch(step=3, validate=validate)
    whole = drawn(first, batch)
    assert len({tuple(tokens) for tokens in whole.values()}) == (6 if validate else 9)
    assert drawn(second, batch.select_idxs([2, 0])) | drawn(first, batch.select_idxs([1])) == whole
    assert (
        drawn(make_engine(model, max_num_seqs=3, **settings), batch.select_idxs([2, 1, 0])) == whole
    )
    with_padding_rows, _ = pad_dataproto_to_divisor(batch.select_idxs([1]), 3)
    assert drawn(second, with_padding_rows).items() <= whole.items()


def test_other_steps_run_seeds_phases_and_prompts_draw_other_responses(
    model: tuple[str, LlamaForCausalLM],
) -> None:
    # 20 tokens, never equal
    settings = {"ignore_eos": True, "val_kwargs": SamplingConfig(n=3, temperature=1.0)}
    engine, twins = make_engine(model, **settings), [[20], [20]]
    other_run = make_engine(model, **settings)
    other_run.seed = 6
    responses = [
        *drawn(engine, prompt_batch(twins, step=1)).values(),
        *drawn(engine, prompt_batch(twins, step=2)).values(),
        *drawn(engine, prompt_batch(twins, step=1, validate=True)).values(),
        *drawn(other_run, prompt_batch(twins, step=1)).values(),
    ]
    assert len({tuple(tokens) for tokens in responses}) == len(responses) == 4 * 2 * 3


def test_a_requests_seed_is_a_fixed_function_of_all_its_parts() -> None:
    # printf "(1, 2, False, '0-17', 3)" | b2sum -l 64, without its last bit
    assert request_seed(1, 2, False, "0-17", 3) == 9169157909155209609
    others = [
        (2, 1, False, "0-17", 3),
        (1, 3, False, "0-17", 2),
        (1, 2, True, "0-17", 3),
        (1, 2, False, "1-17", 3),
    ]
    seeds = {request_seed(*key) for key in [(1, 2, False, "0-17", 3), *others]}
    assert len(seeds) == 5 and max(seeds) < 2**63


def test_a_prompt_that_is_there_twice_or_without_a_uid_is_refused(
    model: tuple[str, LlamaForCausalLM],
) -> None:
    engine = make_engine(model)
    with pytest.raises(
        ValueError,
        match=r"several rows of the prompts \['0-1'\], which would draw the same responses",
    ):
        generate_sequences(engine, prompt_batch().select_idxs([0, 1, 1]))
    with pytest.raises(ValueError, match=r"needs the column 'uid'"):
        generate_sequences(engine, prompt_batch().select(non_tensor_batch_keys=[]))


def test_lists_of_tokens_and_log_probabilities_become_arrays_and_arrays_stay() -> None:
    token_ids, log_probs = np.array([40, 1]), np.array([-0.5, -1.0], np.float32)
    given = Completion(token_ids, log_probs, ((7, 0, 2),))
    assert given.token_ids is token_ids and given.log_probs is log_probs
    made = Completion([40, 1], [-0.5, -1.0], ((7, 0, 2),))
    assert deep_equal(made, given) and not deep_equal(
        made, dataclasses.replace(given, log_probs=[-0.5, -0.75])
    )


GOOD = Completion([40, 41, 1], [-1.0, -2.0, -3.0], ((7, 0, 3),))
SAMPLING = Sampling(temperature=1.0, top_k=-1, top_p=1.0, max_tokens=4, stop_token_ids=(1,))


@pytest.mark.parametrize("token_ids", [["40", "1"], [40.5, 1.0], [2**70, 1], [[40], [41, 1]]])
def test_token_ids_that_are_no_whole_numbers_are_refused_before_they_are_cast(token_ids: list):
    with pytest.raises(
        (RolloutError, ValueError), match=r"no whole numbers of 64 bits|inhomogeneous"
    ):
        Completion(token_ids, [-1.0, -2.0], ((7, 0, 2),))


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        (Completion([], [], ()), "row 1 has 0 tokens"),
        (
            Completion([40] * 5, [-1.0] * 5, ((7, 0, 5),)),
            "row 1 has 5 tokens, but 1 to 4 are possible",
        ),
        (
            dataclasses.replace(GOOD, token_ids=[40, 68, 1]),
            "row 1 has tokens outside of the vocabulary of 68",
        ),
        (
            dataclasses.replace(GOOD, token_ids=[40, -1, 1]),
            "row 1 has tokens outside of the vocabulary of 68",
        ),
        (Completion([40, 41], [-1.0] * 2, ((7, 0, 2),)), "stops after 2 of 4 tokens at token 41"),
        (
            dataclasses.replace(GOOD, log_probs=[-1.0, math.nan, -3.0]),
            "log-probabilities [-1.0, nan, -3.0]",
        ),
        (dataclasses.replace(GOOD, log_probs=[-1.0]), "has 3 tokens but log-probabilities [-1.0]"),
        (dataclasses.replace(GOOD, versions=()), "has 3 tokens but spans of versions ()"),
        (dataclasses.replace(GOOD, versions=((7, 0, 2),)), "spans of versions ((7, 0, 2),)"),
        (dataclasses.replace(GOOD, versions=((7, 1, 3),)), "spans of versions ((7, 1, 3),)"),
        (
            dataclasses.replace(GOOD, versions=((7, 0, 2), (8, 1, 3))),
            "spans of versions ((7, 0, 2), (8, 1, 3))",
        ),
        (
            dataclasses.replace(GOOD, versions=((7, 0, 0), (8, 0, 3))),
            "spans of versions ((7, 0, 0), (8, 0, 3))",
        ),
    ],
)
def test_output_that_is_not_a_response_is_refused(completion: Completion, message: str) -> None:
    check_completion(GOOD, "row 1", SAMPLING, vocab_size=68)
    with pytest.raises(RolloutError) as error:
        check_completion(completion, "row 1", SAMPLING, vocab_size=68)
    assert message in str(error.value)


class Careless(HfEngine):
    """Changes what it generated before it gives it back."""

    def _step(self) -> list[tuple[str, Completion]]:
        return [
            (
                name,
                dataclasses.replace(completion, token_ids=[])
                if name == self.empties
                else completion,
            )
            for name, completion in super()._step()
            if name != self.loses
        ]


def test_a_lost_or_damaged_response_is_refused_by_row_and_uid(
    model: tuple[str, LlamaForCausalLM],
) -> None:
    engine = make_engine(model)
    expected = generate_sequences(engine, prompt_batch())
    engine.__class__, engine.loses, engine.empties = (
        Careless,
        "row 1 (uid 0-1), sample 2 of the batch",
        None,
    )
    with pytest.raises(
        RolloutError, match=r"lost 1 requests: \['row 1 \(uid 0-1\), sample 2 of the batch'\]"
    ):
        generate_sequences(engine, prompt_batch())
    engine.loses, engine.empties = None, "row 2 (uid 0-2), sample 0 of the batch"
    with pytest.raises(
        RolloutError, match=r"The response to row 2 \(uid 0-2\), sample 0 of the batch has 0 tokens"
    ):
        generate_sequences(engine, prompt_batch())
    engine.empties = None
    assert generate_sequences(engine, prompt_batch()).equal(expected), (
        "no request is left to the next batch"
    )


def test_finished_responses_are_told_while_others_are_generated(
    model: tuple[str, LlamaForCausalLM],
) -> None:
    engine = make_engine(model)
    prompts = prompt_batch()
    parts, output = stream_sequences(engine, prompts)
    assert output.equal(generate_sequences(engine, prompts))
    told = [each for part in parts for each in part]
    assert sorted((request.uid, request.index) for request, _ in told) == [
        (f"0-{row}", k) for row in range(3) for k in range(3)
    ]
    lengths = [len(completion.token_ids) for _, completion in told]
    assert lengths == sorted(lengths) and len(parts) == len(set(lengths)) > 2, (
        "a step is a token of each response"
    )
    for request, completion in told:
        row = 3 * int(request.uid.removeprefix("0-")) + request.index
        assert completion.token_ids.tolist() == rows_of(output, "responses")[row]


def test_an_engine_that_gets_no_prompt_returns_no_row_with_all_columns(
    model: tuple[str, LlamaForCausalLM],
) -> None:
    """As a replica does where there are fewer prompts than replicas."""
    engine = make_engine(model)
    whole = generate_sequences(engine, prompt_batch())
    none = generate_sequences(engine, prompt_batch()[[]])
    assert len(none) == 0 and none.columns().keys() == whole.columns().keys()
    for name, column in whole.tensors().items():
        values, offsets = jagged_parts(none.batch[name])
        assert offsets.tolist() == [0] and values.shape == (0,) and values.dtype == column.dtype, (
            name
        )


class Caching(HfEngine):
    """Claims that the first response to each prompt found this many of its tokens in the prefix
    cache."""

    def _step(self) -> list[tuple[str, Completion]]:
        cached = {
            f"row {row} (uid 0-{row}), sample 0 of the batch": num
            for row, num in enumerate(self.num_cached)
        }
        return [
            (name, dataclasses.replace(completion, num_cached_tokens=cached.get(name, 0)))
            for name, completion in super()._step()
        ]


def test_padding_rows_do_not_count_in_the_prefix_cache_hit_rate(
    model: tuple[str, LlamaForCausalLM],
) -> None:
    engine = make_engine(model)
    engine.__class__, engine.num_cached = Caching, [2, 1, 3]
    lengths = [len(prompt) for prompt in PROMPTS]
    for is_pad, num_cached, num_tokens in (
        ([False, False, True], 2 + 1, 3 * (lengths[0] + lengths[1])),
        ([False, True, True], 2, 3 * lengths[0]),
        ([True, True, True], 0, 0),
    ):
        with_padding_rows = prompt_batch().union(
            DataProto.from_dict(tensors={"is_pad": torch.tensor(is_pad)})
        )
        rate = generate_sequences(engine, with_padding_rows).meta_info["metrics"][
            "rollout/prefix_cache_hit_rate"
        ]
        assert rate == Metric.mean(num_cached / max(1, num_tokens), weight=num_tokens)


def test_an_empty_or_over_long_prompt_is_refused_by_row_and_uid(
    model: tuple[str, LlamaForCausalLM],
) -> None:
    engine = make_engine(model, prompt_length=3)
    with pytest.raises(ValueError, match=r"row 1 \(uid 0-1\), sample 0 of the batch has 0 tokens"):
        generate_sequences(engine, prompt_batch([[10], []]))
    with pytest.raises(
        ValueError,
        match=r"row 0 \(uid 0-0\), sample 0 of the batch has 4 tokens, but 1 to .*length=3",
    ):
        generate_sequences(engine, prompt_batch([[10, 11, 12, 13]]))


def test_an_engine_without_weights_does_not_generate(model: tuple[str, LlamaForCausalLM]) -> None:
    with pytest.raises(RuntimeError, match="no verified weights"):
        generate_sequences(make_engine(model, load=False), prompt_batch())


def test_new_weights_change_the_log_probs_and_the_version(
    model: tuple[str, LlamaForCausalLM],
) -> None:
    engine = make_engine(model)
    before = generate_sequences(engine, prompt_batch())
    changed = LlamaForCausalLM(model[1].config).eval().requires_grad_(False)
    engine.load_weights([export(changed, version=8)], 8)
    after = generate_sequences(engine, prompt_batch())
    assert {spans[0][0] for spans in after.non_tensor_batch["policy_version"]} == {8}
    assert torch.allclose(drawn_log_probs(after), log_probs_of(changed, after, 1.0), atol=1e-5)
    assert rows_of(before, "responses") != rows_of(after, "responses")


def test_weights_older_than_the_engines_are_refused(model: tuple[str, LlamaForCausalLM]) -> None:
    engine = make_engine(model)
    with pytest.raises(WeightSyncError, match="version 6 was sent to an engine that already had 7"):
        engine.load_weights([export(model[1], version=6)], 6)


def test_a_parameter_that_the_trainer_skips_is_noticed(model: tuple[str, LlamaForCausalLM]) -> None:
    engine = make_engine(model)
    changed = LlamaForCausalLM(model[1].config).requires_grad_(False)
    some = [
        (name, value) for name, value in changed.named_parameters() if name != "model.norm.weight"
    ]
    some = [(name, value) for name, value in some if "layers.1.mlp.down_proj" not in name]
    short = collect_weights(some, dtype=torch.float32, rank=0, world_size=1, version=8)
    skipped = "model.layers.1.mlp.down_proj.weight, model.norm.weight"
    with pytest.raises(
        WeightSyncError, match=f"2 of 19 tensors differ from the trainer's: {skipped}."
    ):
        engine.load_weights([short], 8)


def test_a_missing_vllm_says_what_to_install(
    model: tuple[str, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "vllm" else find_spec(name, *rest),
    )
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '\.\[cpu\]'"):
        make_engine(model, name="vllm")


def test_tensor_parallel_size_must_divide_the_processes(
    model: tuple[str, LlamaForCausalLM],
) -> None:
    with pytest.raises(
        ValueError,
        match=r"tensor_model_parallel_size=4 does not divide the 2 processes of the rollout pool",
    ):
        make_engine(model, tensor_model_parallel_size=4)


def test_the_processes_of_a_replica_are_consecutive_ranks(
    model: tuple[str, LlamaForCausalLM],
) -> None:
    engines = [make_engine(model, load=False, rank=rank) for rank in range(2)]
    assert [(engine.dp_rank, engine.is_collect) for engine in engines] == [(0, True), (1, True)]


def test_an_engine_that_does_not_know_which_experts_compute_refuses_to_record_them(model):
    config = make_engine(model).config
    with pytest.raises(
        ValueError, match=r"rollout.name=hf does not say .* set name=vllm, or mode="
    ):
        get_rollout_engine("hf")(
            config,
            TrainedModelConfig(path=model[0]),
            rank=0,
            world_size=2,
            seed=5,
            device="cpu",
            records_routing=True,
        )


def test_a_batch_of_responses_has_their_routing_unless_they_are_not_trained():
    prompts = DataProto.from_dict(
        tensors={"prompts": jagged_from_lists([[3, 4], [5]], torch.int64)}, non_tensors={}
    )
    first = np.array([[[1], [2]], [[-1], [-1]], [[3], [4]], [[-1], [-1]]], np.int16)
    second = np.array([[[5], [6]], [[-1], [-1]]], np.int16)
    drawn = [
        Completion([7, 8], [-1.0, -1.0], ((0, 0, 2),), routed_experts=first),
        Completion([9], [-1.0], ((0, 0, 1),), routed_experts=second),
    ]
    batch = assemble(prompts, drawn)
    values, offsets = jagged_parts(batch.batch["routed_experts"])
    assert values.dtype == torch.int16 and offsets.tolist() == [0, 4, 6]
    assert values.tolist() == [*first.tolist(), *second.tolist()]
    assert batch.meta_info["metrics"]["rollout/num_unrecorded_tokens"].value == 1
    for purpose in ("validate", "greedy"):
        prompts.meta_info = {purpose: True}
        assert "routed_experts" not in assemble(prompts, drawn).batch
    prompts.meta_info = {}
    with pytest.raises(ValueError, match="response 1 of 2 has no routing, and others have"):
        assemble(prompts, [drawn[0], Completion([9], [-1.0], ((0, 0, 1),))])
