"""A real vLLM says which experts computed each token, and the trainer that replays them computes the
engine's log-probabilities."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny_experts import NUM_EXPERTS, NUM_ROUTERS, TOP_K, write_experts
from tiny_worker_models import local_group, policy_config

from verl_like.protocol import DataProto, metric_values
from verl_like.protocol.row_ops import jagged_from_lists
from verl_like.workers.actor import ActorWorker
from verl_like.workers.config.models import TrainedModelConfig
from verl_like.workers.config.rollout import RolloutConfig
from verl_like.workers.rollout import get_rollout_engine
from verl_like.workers.rollout.base import RolloutEngine
from verl_like.workers.rollout.batch import assemble
from verl_like.workers.rollout.request import Completion, GenerationRequest, Sampling

pytestmark = pytest.mark.vllm

DEADLINE_S = 120
SPAWNED = multiprocessing.get_context("spawn")
"""The engine's process has to be a child of this one, or it would end itself."""
DRAWN = 12
BLOCK = 128
SAMPLING = Sampling(temperature=0.7, top_k=-1, top_p=1.0, max_tokens=DRAWN, stop_token_ids=(1,))
IN_MEMORY = {"weight_transport": "shared_memory", "free_cache_engine": False}


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(2, 48, (length,), generator=generator).tolist() for length in lengths]


def make_engine(path: str, vllm_arguments: dict[str, Any], **settings: Any) -> RolloutEngine:
    """An engine that captures routing, with the weights of the model's files."""
    config = RolloutConfig(
        prompt_length=300,
        response_length=20,
        log_prob_use_dynamic_bsz=False,
        log_prob_max_token_len_per_gpu=1,
        **settings,
    )
    engine_class: Any = get_rollout_engine(config.name)

    class WithWeights(engine_class):
        def _make(self, **arguments: Any) -> Any:
            return super()._make(**arguments | {"load_format": "auto"} | vllm_arguments)

    model = TrainedModelConfig(path=path)
    engine = WithWeights(
        config, model, rank=0, world_size=1, seed=5, device="cpu", records_routing=True
    )
    engine.llm.update_weight_version("0")
    engine.policy_version = 0
    return engine


@dataclass
class Drawn:
    """What an engine has drawn: a completion for each request, and how often it made room."""

    completions: list[Completion]
    num_preemptions: int = 0
    num_kept: int = 0
    """The requests that the engine still knows in the end."""


def draw(
    path: str,
    prompts: Sequence[Sequence[int]],
    num_samples: int,
    vllm_arguments: dict[str, Any],
    settings: dict[str, Any],
    steps_before_update: int = 0,
) -> Drawn:
    """Draws `num_samples` responses to each prompt. Runs in a process of its own.

    With `steps_before_update` the cache is then dropped as by new weights, while responses are in
    flight, and the last sample of each prompt is submitted after that.
    """
    engine: Any = make_engine(path, vllm_arguments, **settings)
    drawn = Drawn([])
    if engine.config.name == "vllm":
        scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def count(*arguments: Any, **options: Any) -> Any:
            drawn.num_preemptions += 1
            return preempt(*arguments, **options)

        scheduler._preempt_request = count
    requests = []
    for i, prompt in enumerate(prompts):
        for k in range(num_samples):
            name = f"prompt-{i}, sample {k}"
            requests.append(GenerationRequest(name, prompt, seed=10 * i + k, sampling=SAMPLING))
    dropped = GenerationRequest("dropped", prompts[0], seed=7, sampling=SAMPLING)
    late = requests[num_samples - 1 :: num_samples] if steps_before_update else []
    engine.submit([*(request for request in requests if request not in late), dropped])
    completions = dict(engine.step())
    engine.abort(["dropped"])
    for _step in range(steps_before_update):
        completions.update(engine.step())
    if steps_before_update:
        engine.llm.reset_prefix_cache(reset_running_requests=True)
        engine.submit(late)
    for ended in engine.stream():
        completions.update(ended)
    drawn.completions = [completions[request.name] for request in requests]
    if engine.config.name == "vllm":
        worker = engine.llm.llm_engine.model_executor.driver_worker.worker
        drawn.num_kept = len(worker.routing.requests)
    else:
        engine.llm.llm_engine.shutdown()  # or this process would wait for the engine's at its end
    return drawn


def drawn_in_process(
    path: str,
    prompts: Sequence[Sequence[int]],
    num_samples: int = 3,
    vllm_arguments: dict[str, Any] | None = None,
    steps_before_update: int = 0,
    **settings: Any,
) -> tuple[DataProto, Drawn]:
    """The batch that is made of what an engine in its own process has drawn."""
    arguments = (path, prompts, num_samples, vllm_arguments or {}, settings, steps_before_update)
    with ProcessPoolExecutor(1, mp_context=SPAWNED) as process:
        answer = process.submit(draw, *arguments)
        drawn = answer.result(timeout=DEADLINE_S)
    columns = {"prompts": jagged_from_lists(prompts, torch.int64)}
    return assemble(DataProto.from_dict(tensors=columns), drawn.completions), drawn


def scored(path: str, batch: DataProto, mode: str) -> tuple[torch.Tensor, dict[str, float]]:
    """The trainer's log-probabilities in float32, and its metrics."""
    config = policy_config(path, micro=5, router_replay={"mode": mode})
    rows = batch
    if mode == "disabled":
        rows = batch.select(batch_keys=["prompts", "responses", "response_mask"])
    output = local_group(ActorWorker, config).compute_log_prob(rows).get()
    return output.batch["old_log_probs"].values(), metric_values(output.meta_info["metrics"])


def assert_recorded(batch: DataProto, family: str) -> None:
    """Each token has the experts of each layer but the last of a row, which has none."""
    column = batch.batch["routed_experts"]
    for row in range(len(batch)):
        ids = column[row]
        num_tokens = len(batch.batch["prompts"][row]) + len(batch.batch["responses"][row])
        assert ids.shape == (num_tokens, NUM_ROUTERS[family], TOP_K) and ids.dtype == torch.int8
        assert (ids[-1] == -1).all()
        assert ids[:-1].min() >= 0 and ids[:-1].max() < NUM_EXPERTS


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("vllm", "mixtral"),
        pytest.param("vllm", "glm4_moe", marks=pytest.mark.proof),
        pytest.param("vllm_async", "qwen3_moe", marks=pytest.mark.proof),
        pytest.param("vllm", "gpt_oss", marks=pytest.mark.proof),
        pytest.param("compiled", "qwen3_moe", marks=pytest.mark.proof),
    ],
)
def test_with_the_engines_routing_the_trainer_has_the_engines_log_probs(tmp_path, name, family):
    """The longer prompts fill blocks of the prefix cache, which their samples share.

    With weights of the range 0.3 transformers' own log-probabilities in float32 are 1.2e-5 to
    1.6e-5 from those in float64.
    """
    path = write_experts(tmp_path / "model", family, initializer_range=0.1)
    settings = IN_MEMORY if name == "vllm_async" else {}
    if name == "compiled":
        name = "vllm"
        settings = {"enforce_eager": False}
    prompts = prompts_of(5, 2 * BLOCK + 3, BLOCK + 9)
    batch, drawn = drawn_in_process(path, prompts, name=name, dtype="float32", **settings)
    cached = [completion.num_cached_tokens for completion in drawn.completions]
    assert sorted(set(cached)) == [0, BLOCK, 2 * BLOCK] and drawn.num_kept == 0
    assert_recorded(batch, family)
    assert metric_values(batch.meta_info["metrics"])["rollout/num_unrecorded_tokens"] == 0
    log_probs, metrics = scored(path, batch, "R3")
    difference = (log_probs - batch.batch["rollout_log_probs"].values()).abs().max()
    assert difference < 1e-5
    assert metrics["router_replay/routers_differ"] == 0


@pytest.mark.proof
def test_routing_of_a_bfloat16_engine_lowers_the_difference_of_log_probs(tmp_path):
    path = write_experts(tmp_path / "model", "mixtral")
    batch, _drawn = drawn_in_process(
        path, prompts_of(30, 31, 32, 33, 34), name="vllm", dtype="bfloat16"
    )
    assert_recorded(batch, "mixtral")
    drawn = batch.batch["rollout_log_probs"].values()
    replayed, metrics = scored(path, batch, "R3")
    own, _metrics = scored(path, batch, "disabled")
    assert 0 < metrics["router_replay/routers_differ"] < metrics["router_replay/tokens_differ"] < 1
    assert (replayed - drawn).abs().mean() < (own - drawn).abs().mean() / 1.5


@pytest.mark.proof
def test_a_request_that_lost_its_cache_keeps_the_routing_by_which_it_was_drawn(tmp_path):
    """Of four blocks each request needs two, when its response has grown over the first one."""
    path = write_experts(tmp_path / "model", "mixtral")
    prompts = prompts_of(BLOCK - 2, BLOCK - 4, BLOCK - 6, BLOCK - 7)
    batch, drawn = drawn_in_process(
        path, prompts, 1, {"num_gpu_blocks_override": 5}, name="vllm", dtype="float32"
    )
    assert drawn.num_preemptions > 0 and drawn.num_kept == 0
    assert_recorded(batch, "mixtral")
    log_probs, metrics = scored(path, batch, "R3")
    assert (log_probs - batch.batch["rollout_log_probs"].values()).abs().max() < 1e-5
    assert metrics["router_replay/routers_differ"] == 0


@pytest.mark.proof
def test_a_new_request_has_the_routing_of_blocks_that_a_resumed_one_computes_in_the_same_pass(
    tmp_path,
):
    """When weights arrive, responses in flight lose their cache and are computed again, in the pass
    in which new requests with the same prompts take the blocks."""
    path = write_experts(tmp_path / "model", "mixtral", initializer_range=0.1)
    batch, drawn = drawn_in_process(
        path,
        prompts_of(2 * BLOCK + 3, BLOCK + 9),
        steps_before_update=4,
        name="vllm",
        dtype="float32",
    )
    cached = [completion.num_cached_tokens for completion in drawn.completions]
    assert cached[2] == 2 * BLOCK and cached[5] == BLOCK
    assert drawn.num_preemptions >= 2
    assert_recorded(batch, "mixtral")
    log_probs, metrics = scored(path, batch, "R3")
    assert (log_probs - batch.batch["rollout_log_probs"].values()).abs().max() < 1e-5
    assert metrics["router_replay/routers_differ"] == 0
