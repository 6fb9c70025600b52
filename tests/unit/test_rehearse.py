"""The rehearsal's sums, from what processes measured; the measuring itself needs CUDA's build of
torch."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_experts import NUM_EXPERTS, NUM_ROUTERS, TOP_K, write_experts

from verl_like.rehearse.gpu_size import bytes_of_gpu
from verl_like.rehearse.measured import Measured
from verl_like.rehearse.null_gpu import NullGpu
from verl_like.rehearse.processes import Pool, Process, measure_run
from verl_like.rehearse.report import most_at_once, report
from verl_like.rehearse.training_process import rows_of, with_plans
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.memory.sums import PlannedPool, RolloutShare
from verl_like.workers.models.routed_experts import ROUTED_EXPERTS, RouterShape, check_routing
from verl_like.workers.planning.partition import MicroBatching

GB = 10**9


def measured(phase: str, allocated: float, reserved: float, **parts: float) -> Measured:
    sizes = {part.replace("_", " "): int(size * GB) for part, size in parts.items()}
    return Measured(phase, int(allocated * GB), int(reserved * GB), sizes)


def test_a_gpu_is_named_or_has_a_size():
    assert bytes_of_gpu("85.5GB") == 85_500_000_000
    assert bytes_of_gpu("H100-80") == pytest.approx(84.9e9, rel=1e-3)
    with pytest.raises(
        ValueError, match=r"--gpu H100: give one of A100-40, .*, or a size such as 85.5GB"
    ):
        bytes_of_gpu("H100")
    with pytest.raises(ValueError, match="--gpu 0GB"):
        bytes_of_gpu("0GB")


def test_the_null_gpu_is_seen_by_a_caller_that_sees_none_of_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "seen.py").write_text(
        "import json, os\nprint(json.dumps(os.environ['CUDA_VISIBLE_DEVICES']))"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    gpu = object.__new__(NullGpu)  # without the library, which the loader then ignores
    gpu.python, gpu.folder, gpu.library = Path(sys.executable), tmp_path, tmp_path / "none.so"
    assert gpu.run("seen", {}, 1_000_000) == "0"


@pytest.fixture
def pools() -> list[Pool]:
    """Training and an engine on the same GPUs: the update of rank 0 needs 40 GB, while the engine
    keeps 2 asleep."""
    update = measured("actor update", 34, 40, actor_weights=7, actor_optimizer=14)
    rest = measured("between calls", 21, 22)
    training = [
        Process(("actor", "ref"), rank, 4, (measured("actor load", 21, load), update, rest))
        for rank, load in ((0, 22), (3, 21))
    ]
    engine = Process(
        ("rollout",),
        0,
        4,
        (measured("generation", 15, 15), measured("asleep", 2, 2)),
        is_counted=True,
    )
    return [Pool("policy_pool", (2, 2), (*training, engine))]


def test_what_lies_on_a_gpu_at_once_is_added_up_and_compared_with_its_size(pools: list[Pool]):
    text, fits = report(pools, 50 * GB, {})
    assert fits
    assert "policy_pool: 4 GPUs of 50.0 GB" in text
    assert re.search(
        r"actor update +34\.0 +40\.0 .* actor weights 7\.0, actor optimizer 14\.0, activations .* "
        r"13\.0",
        text,
    )
    # 2 while the engine sleeps, and 1 of each of the two processes; generation takes 15 + 22.
    assert (
        "Most on one GPU, actor+ref rank 0 of 4, actor update: this process 40.0 + rollout "
        "meanwhile 2.0" in text
    )
    assert "= 44.0 GB" in text and "It fits: 6.0 GB are left." in text


def test_a_phase_that_does_not_fit_is_named_with_the_keys_that_lower_it(pools: list[Pool]):
    said = "torch.OutOfMemoryError: CUDA out of memory."
    text, fits = report(pools, 43 * GB, {("policy_pool", "actor+ref rank 0 of 4"): said})
    assert not fits
    assert (
        "This does not fit. Torch says: torch.OutOfMemoryError: CUDA out of memory. What lowers"
        in text
    )
    assert "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true" in text


def test_a_phase_that_ran_at_the_real_size_fits_although_the_sum_is_more(pools: list[Pool]):
    most, other, engine = most_at_once(pools[0])
    assert (most.process.rank, most.phase.phase, most.total) == (0, "actor update", 44 * GB)
    assert most.beside == 4 * GB  # the sleeping engine, and two contexts
    assert (other.process.rank, other.total, engine.total) == (3, 44 * GB, (15 + 22 + 2) * GB)
    ran = {("policy_pool", f"actor+ref rank {rank} of 4"): "" for rank in (0, 3)}
    text, fits = report(pools, 43 * GB, ran)
    assert fits and "It fits, with nothing to spare" in text


def test_a_pool_does_not_fit_where_one_of_its_processes_does_not(pools: list[Pool]):
    one = {("policy_pool", "actor+ref rank 0 of 4"): ""}
    text, fits = report(pools, 43 * GB, one)
    assert not fits and "Most on one GPU, actor+ref rank 3 of 4, actor update" in text
    both = one | {("policy_pool", "actor+ref rank 3 of 4"): ""}
    # Which nobody runs for the engine: generation takes 39
    text, fits = report(pools, 38 * GB, both)
    assert not fits and "rollout rank 0 of 4, counted, generation" in text


def test_the_host_memory_of_the_first_node_is_that_of_rank_0_and_of_its_other_processes():
    def with_host(rank: int, **heaps_of_phases: float) -> Process:
        phases = tuple(
            Measured(f"model {phase}", 0, 0, {}, heap=int(heap * GB), pinned=GB, shared=GB // 2)
            for phase, heap in heaps_of_phases.items()
        )
        return Process(("model",), rank, 6, phases)

    pool = Pool(
        "model_pool", (3, 3), (with_host(0, load=27, save=5), with_host(5, load=0.5, save=4))
    )
    text, _ = report([pool], 80 * GB, {})
    # 27 + 2 x 0.5, and 3 times what is pinned and shared.
    sums = "pinned 3.0 + shared 1.5 + heap 28.0 = 32.5 GB"
    assert (
        f"Host memory of the first node, 3 training processes, at most in model load: {sums}"
        in text
    )
    pool = Pool("model_pool", (9,), pool.processes)
    text, _ = report([pool], 80 * GB, {})
    assert (
        "9 training processes, at most in model save: pinned 9.0 + shared 4.5 + heap 37.0 = 50.5 GB"
        in text
    )


class NoGpu:
    """Answers for the null GPU; `failure` is the last line of an engine that does not start."""

    def __init__(self, failure: str = "") -> None:
        self.failure = failure
        self.calls: list[tuple[str, int]] = []

    def run(self, module: str, task: dict[str, Any], device_bytes: int) -> Any:
        self.calls.append((module.rpartition(".")[2], device_bytes))
        phase = {"phase": "between calls", "allocated": 1, "reserved": 2, "parts": {}}
        if not module.endswith("engine_process"):
            return [phase]
        if self.failure:
            raise RuntimeError(f"Traceback\n{self.failure}")
        return {"phases": [phase], "note": "a cache"}


def planned(**rollout: Any) -> PlannedPool:
    own_classes = {"rollout": "mine.Rollout"} if rollout.pop("is_own", False) else {}
    settings = {"name": "vllm", "tensor_model_parallel_size": 1} | rollout
    policy = SimpleNamespace(rollout=SimpleNamespace(**settings))
    config = SimpleNamespace(actor_rollout_ref=policy, worker_classes=own_classes)
    return PlannedPool(
        "rollout_pool",
        config,
        (4,),
        [],
        RolloutShare({"engine's share": 34 * GB}, {"asleep": 2 * GB}),
    )


def test_an_engine_of_one_process_runs_on_a_gpu_of_the_real_size_and_others_are_counted():
    gpu = NoGpu()
    (pool,) = measure_run(gpu, {}, [planned()], 85 * GB)
    assert gpu.calls == [("engine_process", 85 * GB)]
    (engine,) = pool.processes
    assert (engine.note, engine.is_counted, engine.phases[0].reserved) == ("a cache", False, 2)
    others = {"name": "hf"}, {"tensor_model_parallel_size": 2}, {"is_own": True}
    for options, device_bytes in (*((other, GB) for other in others), ({}, None)):
        gpu = NoGpu()
        (pool,) = measure_run(gpu, {}, [planned(**options)], device_bytes)
        assert not gpu.calls and pool.processes[0].is_counted
        assert [phase.reserved for phase in pool.processes[0].phases] == [34 * GB, 2 * GB]


def test_an_engine_that_does_not_start_keeps_its_error_and_the_numbers_of_the_plan():
    gpu = NoGpu("[rank0]: ValueError: No available memory for the cache blocks.")
    (pool,) = measure_run(gpu, {}, [planned()], 85 * GB)
    (engine,) = pool.processes
    assert engine.refusal == "ValueError: No available memory for the cache blocks."
    assert engine.phases[0].reserved == 34 * GB
    with pytest.raises(RuntimeError, match="no module named vllm"):
        measure_run(NoGpu("ModuleNotFoundError: no module named vllm"), {}, [planned()], 85 * GB)


def engine_pool(refusal: str = "") -> Pool:
    generation = Measured(
        "rollout generation", 34 * GB, 34 * GB, {"weights": 15 * GB, "cache": 17 * GB}, heap=GB
    )
    rest = Measured("between calls", 2 * GB, 2 * GB, {}, heap=GB, pinned=15 * GB)
    note = "Its cache has room for 32,000 tokens: 16 sequences of full length."
    engine = Process(
        ("rollout",), 0, 4, (generation, rest), note=note, refusal=refusal, is_counted=bool(refusal)
    )
    return Pool("rollout_pool", (4,), (engine,))


def test_an_engine_that_ran_shows_its_cache_and_what_it_pins_while_it_sleeps():
    text, fits = report([engine_pool()], 85 * GB, {})
    assert fits
    assert re.search(
        r"rollout generation +34\.0 +34\.0 +0\.0 +0\.0 +1\.0  weights 15\.0, cache 17\.0, activ",
        text,
    )
    assert "Its cache has room for 32,000 tokens" in text
    # Level 1 of vLLM's sleep copies an engine's weights to pinned memory: of four engines 60 GB.
    assert (
        "4 engine processes, at most in between calls: pinned 60.0 + shared 0.0 + heap 4.0 = 64.0 "
        "GB" in text
    )


def test_an_engine_that_does_not_start_does_not_fit_and_its_error_is_said():
    error = "ValueError: No available memory for the cache blocks."
    pool = engine_pool(error)
    text, fits = report([pool], 85 * GB, {})
    assert not fits
    assert (
        f"This does not fit. The engine says: {error} What gives an engine room: a larger" in text
    )


def test_a_worker_that_holds_two_models_is_called_for_one_and_a_custom_role_for_none():
    # As DPO plans them
    reference, model = SimpleNamespace(name="reference"), SimpleNamespace(name="model")
    pool: Any = SimpleNamespace(models=[reference, model])
    assert with_plans({"model": "worker of DPO", "custom": "no model"}, pool) == [
        ("worker of DPO", model)
    ]


def test_ranks_that_share_sequences_fill_two_micro_batches_together_and_rows_have_a_routing(
    tmp_path: Path,
):
    """A micro-batch has 3 x 50 tokens, which are 12 rows of 12 tokens."""
    config = load_ppo_config(
        [
            *("data.train_files=a.parquet", "data.val_files=b.parquet"),
            *("data.max_prompt_length=7", "data.max_response_length=5"),
            f"actor_rollout_ref.model.path={write_experts(tmp_path, 'glm4_moe')}",
            "actor_rollout_ref.actor.router_replay.mode=R3",
        ]
    )
    model: Any = SimpleNamespace(sequence_length=12, ranks_of_sequence=3)
    rows = rows_of(config, model, MicroBatching(num_rows=1, max_tokens=50, by_tokens=True))
    assert len(rows) == 2 * 12
    shape = RouterShape(NUM_ROUTERS["glm4_moe"], NUM_EXPERTS, TOP_K)
    check_routing(rows.batch[ROUTED_EXPERTS], torch.full((24,), 12), shape)
