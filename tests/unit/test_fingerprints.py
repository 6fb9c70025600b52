"""Fingerprints see where every number of every parameter is, and add up over shards; wrong weights
do not go unseen."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
import torch
from rollout_requests import (
    assert_drawn_by,
    load_changed,
    load_swapped,
    load_torn,
    make_requests,
    run,
)
from transformers import LlamaForCausalLM

from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.config.rollout import RolloutConfig
from verl_like.workers.rollout import RolloutEngine, get_rollout_engine
from verl_like.workers.weights import exports
from verl_like.workers.weights.arrival import WeightSyncError, check_arrival
from verl_like.workers.weights.exports import WeightBucket, WeightExport, collect_weights
from verl_like.workers.weights.fingerprints import fingerprint_tensor


def signed(value: int, bits: int) -> int:
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def odd_factor(index: int) -> int:
    mixed = signed((index + 1) * 0x1E3779B97F4A7C15, 64)
    mixed = signed((mixed ^ (mixed >> 32)) * 0x3F58476D1CE4E5B9, 64)
    return (mixed ^ (mixed >> 29)) | 1


def mixed_bits(bits: int, factor: int) -> int:
    mixed = signed(bits * 0x2C1B3C6D, 32)
    mixed = signed((mixed ^ (mixed >> 15)) * factor, 32)
    return mixed ^ (mixed >> 15)


def fingerprint_in_integers(values: np.ndarray, first_row: int = 0, first_column: int = 0) -> int:
    matrix = values.astype(np.float32).view(np.int32)
    matrix = matrix.reshape(len(matrix), -1)
    column_factors = [(odd_factor(first_column + j) >> 32) | 1 for j in range(matrix.shape[1])]
    total = 0
    for i, row in enumerate(matrix.tolist()):
        total += odd_factor(first_row + i) * sum(map(mixed_bits, row, column_factors))
    return total % 2**64


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(300, 240), (2, 70_001), (70_001,), (5, 3, 7), ()])
def test_the_fingerprint_equals_an_independent_computation(shape: tuple[int, ...]) -> None:
    values = random_tensor(*shape)
    assert fingerprint_tensor(values) == fingerprint_in_integers(values.numpy().reshape(shape or 1))
    assert fingerprint_tensor(values, 11, 1300) == fingerprint_in_integers(
        values.numpy().reshape(shape or 1), 11, 1300
    )


def test_the_fingerprints_of_rows_and_columns_add_up_and_padding_adds_nothing() -> None:
    whole = random_tensor(50, 37).bfloat16()
    for row in (1, 20, 49, 50):
        for column in (1, 8, 36, 37):
            padded = torch.cat(
                [whole[row:, column:], torch.zeros(3, 37 - column, dtype=torch.bfloat16)]
            ).float()
            pieces = (
                fingerprint_tensor(whole[:row, :column]),
                fingerprint_tensor(whole[:row, column:], 0, column),
                fingerprint_tensor(whole[row:, :column], row),
                fingerprint_tensor(padded, row, column),
            )
            assert sum(pieces) % 2**64 == fingerprint_tensor(whole.float())


def test_the_fingerprint_notices_one_bit() -> None:
    values = random_tensor(40, 25).bfloat16()
    changed = values.clone()
    changed.view(torch.int16)[30, 20] ^= 1
    assert fingerprint_tensor(values) != fingerprint_tensor(changed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fingerprint_notices_numbers_that_trade_places(dtype: torch.dtype) -> None:
    values = random_tensor(64, 64, seed=3).to(dtype)
    values[0, :32] = torch.tensor([1.0, -1.0]).repeat(16)  # values of few bits
    generator, num_different = torch.Generator().manual_seed(4), 0
    for number in range(200):
        (i, j), (k, m) = torch.randint(64, (2, 2), generator=generator).tolist()
        swapped = values.clone()
        if number % 4 == 0:
            i, j, k, m = 0, 2 * (j // 4), 0, 2 * (m // 4) + 1  # a 1 and a -1 of the first row
        if number % 4 <= 1:
            swapped[i, j], swapped[k, m] = values[k, m], values[i, j]
        elif number % 4 == 2:
            swapped[[i, k]] = values[[k, i]]
        else:
            swapped[:, [j, m]] = values[:, [m, j]]
        if not torch.equal(values, swapped):
            assert fingerprint_tensor(swapped) != fingerprint_tensor(values)
            num_different += 1
    assert num_different > 180
    assert fingerprint_tensor(values) != fingerprint_tensor(values.T)


def test_parameters_that_differ_are_named_up_to_five() -> None:
    expected = {f"layer.{i}": i for i in range(9)}
    # printf "[('layer.0', 0), ..., ('layer.8', 8)]" | b2sum -l 64
    assert check_arrival(expected, dict(reversed(expected.items())), "Lost") == "24021e735fd11654"
    with pytest.raises(
        WeightSyncError,
        match=r"^Lost: 2 of 9 tensors differ from the trainer's: layer.3, layer.4.$",
    ):
        check_arrival(expected, expected | {"layer.3": 4, "layer.4": 3}, "Lost")
    with pytest.raises(
        WeightSyncError, match=r"7 of 9 .*: layer.2, layer.3, layer.4, layer.5, layer.6, ...\.$"
    ):
        check_arrival(expected, {"layer.0": 0, "layer.1": 1}, "Lost")
    with pytest.raises(WeightSyncError, match=r"1 of 9 .*: more.$"):
        check_arrival(expected, expected | {"more": 0}, "Lost")


ModelAndFolder = tuple[str, LlamaForCausalLM]


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., ModelAndFolder]) -> ModelAndFolder:
    return tiny_llama()


def export(model: LlamaForCausalLM, version: int, **options: int) -> WeightExport:
    named = model.named_parameters()
    return collect_weights(
        named, dtype=torch.float32, rank=0, world_size=1, version=version, **options
    )


@pytest.fixture
def engine(model: ModelAndFolder) -> RolloutEngine:
    """With version 7 of the weights."""
    path, trained = model
    # The actor reads them
    log_probs = {"log_prob_use_dynamic_bsz": False, "log_prob_max_token_len_per_gpu": 1}
    config = RolloutConfig(
        name="hf", dtype="float32", prompt_length=6, response_length=20, **log_probs
    )
    engine = get_rollout_engine("hf")(
        config, TrainedModelConfig(path=path), rank=1, world_size=2, seed=5, device="cpu"
    )
    engine.load_weights([export(trained, 7)], 7)
    return engine


def changed(model: LlamaForCausalLM) -> LlamaForCausalLM:
    other = LlamaForCausalLM(model.config).requires_grad_(False)
    other.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})
    return other


def test_weights_of_a_new_version_that_are_the_old_ones_are_noticed(
    engine: RolloutEngine, model: ModelAndFolder
) -> None:
    engine._load = lambda *weights: None
    message = (
        "version 8 did not arrive at rollout rank 1: 21 of 21 tensors differ from the "
        "trainer's: lm_head.weight, "
    )
    with pytest.raises(WeightSyncError, match=message):
        engine.load_weights([export(changed(model[1]), 8)], 8)
    assert engine.policy_version is None


def test_a_number_that_changes_as_it_is_loaded_is_noticed_and_its_parameter_named(
    engine: RolloutEngine, model: ModelAndFolder
) -> None:
    def off_by_a_bit(bucket: WeightBucket) -> WeightBucket:
        first = 4 * sum(map(math.prod, bucket.shapes[: bucket.names.index("model.norm.weight")]))
        data = bucket.data.copy()
        data[first] ^= 1
        return dataclasses.replace(bucket, data=data)

    with pytest.raises(
        WeightSyncError, match=r"did not arrive .*: 1 of 21 tensors differ .*: model.norm.weight.$"
    ):
        load_changed(engine, [export(changed(model[1]), 8)], off_by_a_bit)
    assert engine.policy_version is None


PAIRS = [
    ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"),
    ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"),
]


@pytest.mark.parametrize("names", PAIRS)
def test_projections_that_the_engine_takes_for_each_other_are_noticed_and_named(
    engine: RolloutEngine, model: ModelAndFolder, names: tuple[str, str]
) -> None:
    right = export(changed(model[1]), 8)
    message = (
        "did not arrive at rollout rank 1: 2 of 21 tensors differ from the trainer's: "
        f"{', '.join(names)}.$"
    )
    with pytest.raises(WeightSyncError, match=message):
        load_swapped(engine, [right], *names)
    assert engine.policy_version is None
    engine.load_weights([right], 8)
    assert engine.policy_version == 8


def assert_refused_before_anything_is_loaded(
    engine: RolloutEngine, wrong: WeightExport, message: str
) -> None:
    before = {name: value.clone() for name, value in engine.model.named_parameters()}
    with pytest.raises(
        WeightSyncError, match=f"Weights of version 8 changed on their way: {message}"
    ):
        engine.load_weights([wrong], 8)
    assert all(torch.equal(value, before[name]) for name, value in engine.model.named_parameters())
    assert engine.policy_version == 7


def test_one_wrong_number_is_noticed_before_anything_is_loaded(
    engine: RolloutEngine, model: ModelAndFolder
) -> None:
    corrupt = export(changed(model[1]), 8)
    assert corrupt.buckets[0].names[0] == "model.embed_tokens.weight"  # of 17,408 bytes
    corrupt.buckets[0].data[12345] ^= 1
    message = "1 of 21 tensors differ from the trainer's: model.embed_tokens.weight.$"
    assert_refused_before_anything_is_loaded(engine, corrupt, message)


def test_from_the_object_store_every_number_is_read_once_where_nothing_is_to_be_kept(
    engine: RolloutEngine, model: ModelAndFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[str] = []
    count = exports.iterate_buckets

    def counted_buckets(buckets: Iterable[WeightBucket]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in count(buckets):
            counted.append(name)
            yield name, tensor

    monkeypatch.setattr(exports, "iterate_buckets", counted_buckets)
    engine.load_weights([export(model[1], 8)], 8, checks_first=False)
    assert len(counted) == 21
    engine.load_weights([export(model[1], 9)], 9)
    assert len(counted) == 21 + 2 * 21
    # Which the trainer may write into
    for version, transport in ((10, "shared_memory"), (11, "gloo")):
        counted.clear()
        engine.config = engine.config.updated({"weight_transport": transport})
        engine.load_weights([export(model[1], version)], version, checks_first=False)
        assert len(counted) == 2 * 21


def test_a_number_that_changed_in_the_object_store_is_noticed_when_it_was_loaded(
    engine: RolloutEngine, model: ModelAndFolder
) -> None:
    corrupt, right = export(changed(model[1]), 8), export(changed(model[1]), 8)
    corrupt.buckets[0].data[12345] ^= 1
    message = (
        "version 8 did not arrive at rollout rank 1: 1 of 21 tensors differ .*: "
        "model.embed_tokens.weight.$"
    )
    with pytest.raises(WeightSyncError, match=message):
        engine.load_weights([corrupt], 8, checks_first=False)
    with pytest.raises(RuntimeError, match="no verified weights"):
        engine.submit(make_requests({"a": [10, 11]}))
    engine.load_weights([right], 8, checks_first=False)
    assert engine.policy_version == 8


@pytest.mark.parametrize("names", PAIRS)
def test_projections_that_trade_places_are_noticed_before_anything_is_loaded(
    engine: RolloutEngine, model: ModelAndFolder, names: tuple[str, str]
) -> None:
    right, wrong = changed(model[1]), changed(model[1])
    first, second = map(wrong.get_parameter, names)
    first.data, second.data = second.data, first.data
    swapped = dataclasses.replace(export(wrong, 8), fingerprints=export(right, 8).fingerprints)
    message = f"2 of 21 tensors differ from the trainer's: {', '.join(names)}.$"
    assert_refused_before_anything_is_loaded(engine, swapped, message)


@pytest.mark.parametrize("num_loaded", [0, 1, 20])
def test_an_engine_with_a_torn_update_refuses_to_generate_until_a_whole_one(
    engine: RolloutEngine, model: ModelAndFolder, num_loaded: int
) -> None:
    new = export(changed(model[1]), 8, bucket_bytes=1)  # a parameter in a bucket
    requests = make_requests({"a": [10, 11]})
    with pytest.raises(WeightSyncError, match=r"in memory of another process, .* which ended"):
        load_torn(engine, [new], num_loaded)
    with pytest.raises(RuntimeError, match="no verified weights"):
        engine.submit(requests)
    engine.load_weights([new], 8)
    assert_drawn_by({8: changed(model[1])}, requests[0], run(engine, requests)["a"], kv="recompute")


def test_one_hexadecimal_number_stands_for_all_weights(
    engine: RolloutEngine, model: ModelAndFolder
) -> None:
    first = engine.load_weights([export(model[1], 8)], 8)
    other = engine.load_weights([export(changed(model[1]), 9)], 9)
    assert engine.load_weights([export(model[1], 10)], 10) == first != other
    assert len(first) == 16 and int(first, 16) >= 0
