"""A real vLLM, in a Ray actor as in a run, generates with the trainer's weights; transformers is
the reference."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import rollout_requests
import torch
from forked_workers import start_ray
from rollout_requests import rows_of, scaled
from tiny_experts import write_experts
from transformers import LlamaForCausalLM

from scripts.null_gpu.names import ROOT, faults_of, uses_of_source
from verl_like.protocol import DataProto, pad_dataproto_to_divisor
from verl_like.protocol.row_ops import jagged_from_lists
from verl_like.single_controller.worker import reserve_port
from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.config.rollout import RolloutConfig, SamplingConfig
from verl_like.workers.models.lora import model_buffers
from verl_like.workers.rollout import GenerationRequest, get_rollout_engine
from verl_like.workers.weights.exports import WeightExport, collect_weights
from verl_like.workers.weights.file_layout import file_layout

pytestmark = [pytest.mark.vllm, pytest.mark.ray]

WIDTH, LENGTH = 140, 20  # the longest prompt fills a 128-token block of the prefix cache
DEADLINE_S = 240
ModelAndFolder = tuple[str, LlamaForCausalLM]


@ray.remote(num_cpus=0)
class RolloutProcess:
    """What a rollout worker is to its engine: a process with the ranks in its environment."""

    def build(
        self, settings: dict[str, Any], path: str, rank: int, world_size: int, port: int
    ) -> tuple[int, bool]:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_RANK=str(rank),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        adapter = settings.pop("adapter", {})
        config = RolloutConfig(**settings)
        self.engine = get_rollout_engine(config.name)(
            config,
            TrainedModelConfig(path=path, **adapter),
            rank=rank,
            world_size=world_size,
            seed=5,
            device="cpu",
        )
        return self.engine.dp_rank, self.engine.is_collect

    def call(self, method: str, *args: Any) -> Any:
        if method == "generate_sequences":
            return rollout_requests.generate_sequences(self.engine, *args)
        return getattr(self.engine, method)(*args)

    def run(self, function: str, *args: Any) -> Any:
        """What a function of rollout_requests.py does with the engine."""
        return getattr(rollout_requests, function)(self.engine, *args)

    def call_without_loading(self, method: str, *args: Any) -> Any:
        """Calls the engine while its `_load`, which overwrites the weights, does nothing."""
        load, self.engine._load = self.engine._load, lambda exports, version: None
        try:
            return self.call(method, *args)
        finally:
            self.engine._load = load

    def call_and_change_a_weight(self, method: str, *args: Any) -> Any:
        """Calls the engine, whose `_load` then changes one number of a parameter that a kernel
        reads as it is."""
        load = self.engine._load

        def load_and_change(exports: list[WeightExport], version: int) -> None:
            load(exports, version)
            self.engine.llm.apply_model(
                lambda model: model.model.embed_tokens.weight[3, 2].add_(1.0)
            )

        self.engine._load = load_and_change
        try:
            return self.call(method, *args)
        finally:
            self.engine._load = load


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    start_ray(with_vllm=True, num_cpus=2, object_store_memory=200 << 20)
    yield
    ray.shutdown()


def rollout_settings(**settings: Any) -> dict[str, Any]:
    shape = {"prompt_length": WIDTH, "response_length": LENGTH, "max_num_seqs": 64}
    # The actor reads them
    log_probs = {"log_prob_use_dynamic_bsz": False, "log_prob_max_token_len_per_gpu": 1}
    return {"dtype": "float32", "n": 4, **shape, **log_probs, **settings}


def start_processes(model: ModelAndFolder, *, ranks: list[int], **settings: Any) -> list[Any]:
    """Starts these ranks of a group of two."""
    holder, port = reserve_port()
    env = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    processes = [RolloutProcess.options(runtime_env=env).remote() for _ in ranks]
    building = [
        process.build.remote(rollout_settings(**settings), model[0], rank, 2, port)
        for rank, process in zip(ranks, processes, strict=True)
    ]
    placed = ray.get(building, timeout=DEADLINE_S)
    holder.close()
    size = settings.get("tensor_model_parallel_size", 1)
    assert placed == [(rank // size, rank % size == 0) for rank in ranks]
    return processes


def call(process: Any, method: str, *args: Any) -> Any:
    return ray.get(process.call.remote(method, *args), timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def tied_model(tiny_llama: Callable[..., ModelAndFolder]) -> ModelAndFolder:
    return tiny_llama(tie=True)


@pytest.fixture(scope="module")
def replicas(ray_cluster: None, tied_model: ModelAndFolder) -> Iterator[list[Any]]:
    """Two replicas of one process each, with a tied model; each test brings the weights that it
    needs."""
    processes = start_processes(
        tied_model, ranks=[0, 1], val_kwargs=SamplingConfig(), max_num_batched_tokens=WIDTH + 60
    )
    yield processes
    for process in processes:
        ray.kill(process)


@pytest.fixture(scope="module")
def process(replicas: list[Any]) -> Any:
    """The second replica."""
    return replicas[1]


LONGEST = [2 + i % 66 for i in range(WIDTH)]


def prompt_batch(
    prompts: tuple[list[int], ...] = ([10, 11, 12], [20], LONGEST),
    *,
    step: int = 1,
    validate: bool = False,
) -> DataProto:
    batch = {
        "prompts": jagged_from_lists(prompts, torch.int64),
        "uid": np.array([f"0-{i}" for i in range(len(prompts))], dtype=object),
    }
    return DataProto.from_single_dict(batch, meta_info={"global_steps": step, "validate": validate})


def export(
    model: LlamaForCausalLM,
    version: int,
    world_size: int = 2,
    bucket_bytes: int = 1 << 14,
    dtype: torch.dtype = torch.float32,
) -> list[WeightExport]:
    return [
        collect_weights(
            model.named_parameters(),
            model_buffers(model),
            layout=file_layout(model),
            dtype=dtype,
            rank=rank,
            world_size=world_size,
            version=version,
            bucket_bytes=bucket_bytes,
        )
        for rank in range(world_size)
    ]


def assert_generated_by(model: LlamaForCausalLM, output: DataProto) -> None:
    """Every log-probability equals that of `model` on the row's tokens, and each response ends
    where it should."""
    columns = [
        rows_of(output, name)
        for name in ("prompts", "responses", "response_mask", "rollout_log_probs")
    ]
    for prompt, response, mask, found in zip(*columns, strict=True):
        length = response.index(1) + 1 if 1 in response else LENGTH
        assert len(response) == length and mask == [1] * length
        log_probs = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        expected = log_probs[-length - 1 : -1].gather(-1, torch.tensor(response)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(found), expected, rtol=0, atol=1e-5)


@ray.remote(num_cpus=0)
def parameters_here(folder: str, names: set[str]) -> dict[str, Any]:
    """The parameters of the names that the CPU builds of torch and vLLM have."""
    sys.path.append(folder)
    from scripts.null_gpu.names import resolve_all

    return resolve_all(names)


class ArgumentsOfVllm(Exception):
    """Has the arguments by which an engine would make vLLM."""


@ray.remote(num_cpus=0)
def arguments_of_vllm(path: str, lora_rank: int, records_routing: bool) -> dict[str, Any]:
    """The arguments of an engine of its own, which is not made."""
    engine_class: Any = get_rollout_engine("vllm")

    class Unmade(engine_class):
        def _make(self, **arguments):
            raise ArgumentsOfVllm(arguments)

    model = TrainedModelConfig(path=path, lora_rank=lora_rank)
    config = RolloutConfig(**rollout_settings())
    try:
        ranks = {"rank": 0, "world_size": 1}
        Unmade(config, model, **ranks, seed=5, device="cpu", records_routing=records_routing)
    except ArgumentsOfVllm as made:
        return made.args[0]
    raise AssertionError("the engine was made")


def test_a_mixture_has_adapters_of_its_attention_alone_whether_its_routing_is_recorded_or_not(
    ray_cluster: None, tmp_path: Path
) -> None:
    path = write_experts(tmp_path, "qwen3_moe")
    asked = {
        (lora_rank, records): arguments_of_vllm.remote(path, lora_rank, records)
        for lora_rank in (0, 8)
        for records in (False, True)
    }
    for (lora_rank, records), answer in asked.items():
        arguments = ray.get(answer, timeout=DEADLINE_S)
        assert ("worker_cls" in arguments) == ("additional_config" in arguments) == records
        assert arguments.get("enable_lora", False) == bool(lora_rank)
        adapted = arguments.get("lora_target_modules", [])
        assert set(adapted) == ({"q_proj", "k_proj", "v_proj", "o_proj"} if lora_rank else set())


def test_the_calls_of_the_source_fit_the_cpu_builds(ray_cluster: None) -> None:
    """`tests/unit/test_gpu_names.py` has the CUDA builds. In a process of its own, since importing
    vLLM changes more than its modules."""
    uses = uses_of_source()
    names = {use.name for use in uses}
    known = ray.get(parameters_here.remote(str(ROOT), names), timeout=DEADLINE_S)
    here = [use for use in uses if use.name in known]
    assert len(here) > 0.9 * len(uses)
    assert faults_of(here, known) == []


def test_weights_arrive_before_and_after_an_update(
    process: Any, tied_model: ModelAndFolder
) -> None:
    _, model = tied_model
    call(process, "load_weights", export(model, 1), 1)
    before = call(process, "generate_sequences", prompt_batch())
    assert_generated_by(model, before)
    assert [spans[0][0] for spans in before.non_tensor_batch["policy_version"]] == [1] * 12

    other = scaled(model, 0.8)
    call(process, "load_weights", export(other, 2), 2)
    after = call(process, "generate_sequences", prompt_batch())
    assert_generated_by(other, after)
    assert [spans[0][0] for spans in after.non_tensor_batch["policy_version"]] == [2] * 12
    assert rows_of(before, "responses") != rows_of(after, "responses")


def test_prompts_come_back_n_times_each_and_responses_end_where_they_should(
    process: Any, tied_model: ModelAndFolder
) -> None:
    call(process, "load_weights", export(tied_model[1], 2), 2)
    output = call(process, "generate_sequences", prompt_batch())
    assert rows_of(output, "prompts") == [
        row for row in rows_of(prompt_batch(), "prompts") for _ in range(4)
    ]
    responses = rows_of(output, "responses")
    assert len({tuple(row) for row in responses}) == 12
    lengths = [len(row) for row in responses]
    assert min(lengths) < LENGTH == max(lengths)
    assert rows_of(output, "response_mask") == [[1] * length for length in lengths]


def test_prompts_that_do_not_fit_into_one_step_are_computed_whole_in_the_next(
    process: Any, tied_model: ModelAndFolder
) -> None:
    call(process, "load_weights", export(tied_model[1], 2), 2)
    output = call(
        process, "generate_sequences", prompt_batch((LONGEST, LONGEST[::-1], LONGEST[60:]))
    )
    assert_generated_by(tied_model[1], output)


def test_greedy_responses_equal_those_of_transformers(
    process: Any, tied_model: ModelAndFolder, tiny_llama: Callable[..., ModelAndFolder]
) -> None:
    path, model = tied_model
    call(process, "load_weights", export(model, 2), 2)
    reference = get_rollout_engine("hf")(
        RolloutConfig(**rollout_settings(name="hf")),
        TrainedModelConfig(path=path),
        rank=0,
        world_size=1,
        seed=5,
        device="cpu",
    )
    reference.load_weights(export(model, 2), 2)
    batch = prompt_batch(validate=True)
    expected, got = (
        rollout_requests.generate_sequences(reference, batch),
        call(process, "generate_sequences", batch),
    )
    assert len(got) == 3
    for name in ("prompts", "responses", "response_mask"):
        assert rows_of(got, name) == rows_of(expected, name), name
    for found, wanted in zip(
        rows_of(got, "rollout_log_probs"), rows_of(expected, "rollout_log_probs"), strict=True
    ):
        assert found == pytest.approx(wanted, rel=0, abs=1e-5)


def test_a_step_is_drawn_again_the_same_and_another_step_differs(
    process: Any, tied_model: ModelAndFolder
) -> None:
    call(process, "load_weights", export(tied_model[1], 2), 2)
    first = call(process, "generate_sequences", prompt_batch(step=7))
    other = call(process, "generate_sequences", prompt_batch(step=8))
    again = call(process, "generate_sequences", prompt_batch(step=7))
    for name in ("responses", "rollout_log_probs"):
        assert rows_of(first, name) == rows_of(again, name)
    assert rows_of(first, "responses") != rows_of(other, "responses")


def test_responses_are_the_same_on_one_and_two_replicas_in_any_order_and_with_padding(
    replicas: list[Any], tied_model: ModelAndFolder
) -> None:
    def drawn(process: Any, rows: list[int], *, pad_to: int = 1) -> dict[str, list[list[int]]]:
        batch, pad_size = pad_dataproto_to_divisor(prompt_batch(step=9).select_idxs(rows), pad_to)
        responses = rows_of(call(process, "generate_sequences", batch), "responses")
        uids = batch.non_tensor_batch["uid"][: len(batch) - pad_size]
        return {uid: responses[4 * i : 4 * i + 4] for i, uid in enumerate(uids)}

    for process in replicas:
        call(process, "load_weights", export(tied_model[1], 2), 2)
    first, second = replicas
    whole = drawn(first, [0, 1, 2])
    assert drawn(first, [2, 0]) | drawn(second, [1], pad_to=2) == whole
    assert drawn(second, [2, 1, 0]) == whole
    assert len({tuple(tokens) for group in whole.values() for tokens in group}) == 12


def test_responses_are_told_as_they_end_and_a_generation_can_be_given_up(
    process: Any, tied_model: ModelAndFolder
) -> None:
    call(process, "load_weights", export(tied_model[1], 2), 2)
    parts, output = ray.get(
        process.run.remote("stream_sequences", prompt_batch()), timeout=DEADLINE_S
    )
    responses = rows_of(output, "responses")
    told = [
        (row_of(request), completion.token_ids.tolist())
        for part in parts
        for request, completion in part
    ]
    lengths = [len(token_ids) for _, token_ids in told]
    # A step of the engine is a token of every response, so they end in the order of their lengths.
    assert lengths == sorted(lengths) and len(parts) >= 3
    assert dict(told) == dict(enumerate(responses)) and len(told) == len(responses)

    first, nothing = ray.get(
        process.run.remote("stream_sequences", prompt_batch(), True), timeout=DEADLINE_S
    )
    assert len(first) == 1 and nothing is None
    again = call(process, "generate_sequences", prompt_batch())
    assert rows_of(again, "responses") == responses


def row_of(request: GenerationRequest) -> int:
    """Its row among the responses, 4 to a prompt."""
    return 4 * int(request.uid.removeprefix("0-")) + request.index


def test_a_prompt_is_computed_once_for_its_samples_and_again_with_new_weights(
    process: Any, tied_model: ModelAndFolder
) -> None:
    def hit_rate() -> float:
        metric = call(process, "generate_sequences", prompt_batch()).meta_info["metrics"][
            "rollout/prefix_cache_hit_rate"
        ]
        return metric.value

    call(process, "load_weights", export(tied_model[1], 2), 2)
    # Of 4 x (3 + 1 + 140) prompt tokens, three of the four long prompts find its first block of
    # 128; later all do.
    assert hit_rate() == pytest.approx(3 * 128 / 576)
    assert hit_rate() == pytest.approx(4 * 128 / 576)
    call(process, "load_weights", export(tied_model[1], 2), 2)
    assert hit_rate() == pytest.approx(3 * 128 / 576)


def test_first_tokens_are_drawn_with_the_models_probabilities(
    process: Any, tied_model: ModelAndFolder
) -> None:
    model = tied_model[1]
    call(process, "load_weights", export(model, 2), 2)
    vocab_size = model.config.vocab_size
    counts = torch.zeros(vocab_size)
    for step in range(4):
        batch = prompt_batch(step=step).select_idxs([1]).repeat(64)
        batch.non_tensor_batch["uid"] = np.array([f"0-{i}" for i in range(64)], dtype=object)
        responses = rows_of(call(process, "generate_sequences", batch), "responses")
        counts += torch.bincount(torch.tensor([row[0] for row in responses]), minlength=vocab_size)
    probs = model(torch.tensor([[20]])).logits[0, -1].softmax(-1)
    expected = probs * counts.sum()
    common = expected > 5
    chi_square = float(((counts - expected) ** 2 / expected)[common].sum())
    degrees = int(common.sum())
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5  # five standard deviations


def expect_error(outcome: Any, message: str, kind: str = "WeightSyncError") -> None:
    with pytest.raises(ray.exceptions.RayTaskError, match=message) as error:
        ray.get(outcome, timeout=DEADLINE_S)
    assert kind in str(error.value)


def test_weights_that_did_not_arrive_are_noticed_and_stop_the_engine(
    process: Any, tied_model: ModelAndFolder
) -> None:
    model = tied_model[1]
    call(process, "load_weights", export(model, 3), 3)
    other = scaled(model, 0.9)
    did_not_arrive = "version 4 did not arrive at rollout rank 1: {} of 20 tensors differ from the trainer's: {}".format
    for method, message in (
        ("call_without_loading", did_not_arrive(20, "model.embed_tokens.weight, ")),
        ("call_and_change_a_weight", did_not_arrive(1, "model.embed_tokens.weight.")),
    ):
        expect_error(getattr(process, method).remote("load_weights", export(other, 4), 4), message)

    for skipped, changed in (
        ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ):
        call(process, "load_weights", export(model, 3), 3)
        named = [(name, value) for name, value in other.named_parameters() if name != skipped]
        short = [collect_weights(named, dtype=torch.float32, rank=0, world_size=1, version=4)]
        message = rf"vLLM's parameter {changed} of .* cannot be checked"
        expect_error(process.call.remote("load_weights", short, 4), message)

    for first, second in (
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"),
        ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"),
    ):
        loading = process.run.remote("load_swapped", export(other, 4), first, second)
        expect_error(loading, did_not_arrive(2, f"{first}, {second}."))
    with pytest.raises(ray.exceptions.RayTaskError, match="no verified weights"):
        call(process, "generate_sequences", prompt_batch())

    message = "version 2 was sent to an engine that already had 3"
    expect_error(process.call.remote("load_weights", export(model, 2), 2), message)
    call(process, "load_weights", export(other, 4), 4)
    assert_generated_by(other, call(process, "generate_sequences", prompt_batch()))


def test_an_update_that_changed_on_its_way_leaves_the_engine_as_it_was(
    process: Any, tied_model: ModelAndFolder
) -> None:
    call(process, "load_weights", export(tied_model[1], 5), 5)
    corrupt = export(scaled(tied_model[1], 0.9), 6)
    corrupt[1].buckets[1].data[101] ^= 1
    message = f"version 6 changed on their way: 1 of 20 .*: {corrupt[1].buckets[1].names[0]}"
    expect_error(process.call.remote("load_weights", corrupt, 6), message, "StaleWeightsError")
    assert_generated_by(tied_model[1], call(process, "generate_sequences", prompt_batch()))


def test_vllms_nccl_and_ipc_get_what_they_ask_for_and_without_a_gpu_the_engine_then_refuses_to_generate(
    process: Any, tied_model: ModelAndFolder
) -> None:
    """Nothing is sent: vLLM takes our arguments, and stops where it needs a GPU."""
    named = list(tied_model[1].named_parameters())
    announced = collect_weights(
        named, dtype=torch.float32, rank=0, world_size=1, version=7, allocate=None
    )
    exports = [replace(announced, address=("127.0.0.1", 1))]
    errors = ray.get(process.run.remote("load_by_nccl", exports, 7), timeout=DEADLINE_S)
    assert errors == [
        "Cannot access accelerator device when none is available.",
        "NCCL weight transfer not initialized. Call init_transfer_engine() first.",
    ]
    error = ray.get(process.run.remote("load_by_ipc", [announced], 7), timeout=DEADLINE_S)
    assert error == "Torch not compiled with CUDA enabled"  # in `packed_ipc_consumer`
    with pytest.raises(ray.exceptions.RayTaskError, match="no verified weights"):
        call(process, "generate_sequences", prompt_batch())
    call(process, "load_weights", export(tied_model[1], 7), 7)
    assert_generated_by(tied_model[1], call(process, "generate_sequences", prompt_batch()))


# Of 20 parameters: none; the embedding and, of the first fused projection, q alone; all but the
# final norm.
@pytest.mark.parametrize("num_loaded", [0, 2, 19])
def test_an_engine_with_a_torn_update_refuses_to_generate_until_a_whole_one(
    process: Any, tied_model: ModelAndFolder, num_loaded: int
) -> None:
    call(process, "load_weights", export(tied_model[1], 7), 7)
    new = scaled(tied_model[1], 0.9)
    # A parameter in a bucket
    loading = process.run.remote("load_torn", export(new, 8, bucket_bytes=1), num_loaded)
    expect_error(loading, "in memory of another process, /proc/self/fd/none, which ended")
    with pytest.raises(ray.exceptions.RayTaskError, match="no verified weights"):
        call(process, "generate_sequences", prompt_batch())
    call(process, "load_weights", export(new, 7), 7)
    assert_generated_by(new, call(process, "generate_sequences", prompt_batch()))


def test_a_head_size_without_a_cpu_kernel_is_refused(
    process: Any, tiny_llama: Callable[..., ModelAndFolder]
) -> None:
    path, _ = tiny_llama(head_dim=16)
    with pytest.raises(ray.exceptions.RayTaskError, match="no kernel for head_dim=16"):
        ray.get(process.build.remote(rollout_settings(), path, 0, 1, 0), timeout=DEADLINE_S)


def test_a_process_that_has_torch_groups_already_is_refused(
    process: Any, tied_model: ModelAndFolder
) -> None:
    with pytest.raises(
        ray.exceptions.RayTaskError, match="give the rollout role processes of its own"
    ):
        ray.get(
            process.build.remote(rollout_settings(), tied_model[0], 0, 1, 0), timeout=DEADLINE_S
        )


def test_a_replica_of_two_processes_generates_like_one(
    ray_cluster: None, tiny_llama: Callable[..., ModelAndFolder]
) -> None:
    # One key/value head on two processes: both hold a copy of it, which counts once in the
    # fingerprint.
    model = tiny_llama(num_key_value_heads=1)
    replica = start_processes(model, ranks=[0, 1], tensor_model_parallel_size=2)
    for version, weights in ((1, model[1]), (2, scaled(model[1], 0.8))):
        exports = export(weights, version)
        ray.get(
            [p.call.remote("load_weights", exports, version) for p in replica], timeout=DEADLINE_S
        )
        first, second = ray.get(
            [p.call.remote("generate_sequences", prompt_batch()) for p in replica],
            timeout=DEADLINE_S,
        )
        assert_generated_by(weights, first)
        assert first.equal(second)
    exports, corrupt = export(model[1], 3), export(model[1], 3)
    corrupt[0].buckets[0].data[7] ^= 1
    loading = [
        p.call.remote("load_weights", each, 3)
        for p, each in zip(replica, (exports, corrupt), strict=True)
    ]
    for outcome, message in zip(
        loading, ("are stale on another rank", "changed on their way"), strict=True
    ):
        with pytest.raises(
            ray.exceptions.RayTaskError, match=f"StaleWeightsError: Weights of version 3 {message}"
        ):
            ray.get(outcome, timeout=DEADLINE_S)
    ended = [p.call.remote("generate_sequences", prompt_batch()) for p in replica]
    assert_generated_by(weights, ray.get(ended, timeout=DEADLINE_S)[0])
    for p in replica:
        ray.kill(p)
