"""Runs of a tiny mixture of experts with a real vLLM and its routing replayed: detached at staleness
0, continued, and with experts that are distributed, they are the synchronous one. These are
proofs."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import APART, largest_difference, metrics_of, run_apart, run_on_ray, tiny_run_settings
from safetensors.torch import load_file
from tiny_experts import CONFIGS
from transformers import AutoModelForCausalLM

NUM_STEPS = 4
POLICY = "actor_rollout_ref"
RUN = [
    "algorithm.adv_estimator=grpo",
    f"{POLICY}.rollout.n=4",
    f"{POLICY}.rollout.dtype=float32",
    f"{POLICY}.actor.router_replay.mode=R3",
    f"{POLICY}.actor.ppo_mini_batch_size=2",
    f"{POLICY}.actor.optim.lr=1e-4",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
]
SYNCHRONOUS = ["trainer.n_gpus_per_node=2"]
DETACHED = [*APART, "trainer.n_gpus_per_node=2", "trainer.max_staleness=0"]
# The weights of a compiled engine change much, so that one which computes with old ones is noticed.
COMPILED = [f"{POLICY}.rollout.enforce_eager=false", f"{POLICY}.actor.optim.lr=1e-2"]
DISTRIBUTED = f"{POLICY}.actor.fsdp_config.expert_parallel_size=2"
pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.proof, pytest.mark.timeout(1800)]


def train(folder: Path, tiny_llama: Callable, num_steps: int, *settings: str) -> None:
    """A run to this step, or one that goes on to it."""
    tokens_of, llama = tiny_llama()
    path = folder / "experts"
    if not path.exists():
        config = copy.deepcopy(CONFIGS["qwen3_moe"])
        config.vocab_size = llama.config.vocab_size
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    all_settings = [
        *tiny_run_settings(folder, tiny_llama, engine="vllm"),
        *RUN,
        f"{POLICY}.model.path={path}",
        f"{POLICY}.model.tokenizer_path={tokens_of}",
        f"trainer.total_training_steps={num_steps}",
        *settings,
    ]
    if "placement=detached" in settings:
        assert run_apart(all_settings) == 0
    else:
        run_on_ray(all_settings)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The actor's weights at the end."""
    return load_file(
        folder / f"runs/latest/global_step_{NUM_STEPS}/actor/huggingface/model.safetensors"
    )


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Callable) -> Path:
    """The folder of a synchronous run."""
    folder = tmp_path_factory.mktemp("synchronous")
    train(folder, tiny_llama, NUM_STEPS, *SYNCHRONOUS)
    return folder


def test_the_engines_routing_is_the_trainers_and_so_are_its_log_probabilities(synchronous: Path):
    rows = metrics_of(synchronous)
    assert len(rows) == NUM_STEPS
    for row in rows:
        assert row["router_replay/routers_differ"] == 0
        assert row["rollout/num_unrecorded_tokens"] == 0
        assert row["router_replay/log_probs_diff_with"] < 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        [f"{POLICY}.rollout.tensor_model_parallel_size=2"],
        [f"{POLICY}.model.lora_rank=4", f"{POLICY}.actor.optim.lr=1e-2"],
        COMPILED,
        [
            *COMPILED,
            f"{POLICY}.rollout.name=vllm_async",
            f"{POLICY}.rollout.weight_transport=shared_memory",
        ],
        [*COMPILED, f"{POLICY}.rollout.tensor_model_parallel_size=2"],
        [*COMPILED, f"{POLICY}.model.lora_rank=4"],
    ],
)
def test_routing_is_that_of_the_trainer_with_a_shared_engine_and_with_an_adapter(
    settings: list[str], tmp_path: Path, tiny_llama: Callable
):
    train(tmp_path, tiny_llama, NUM_STEPS, *SYNCHRONOUS, *settings)
    rows = metrics_of(tmp_path)
    assert len(rows) == NUM_STEPS
    for row in rows:
        assert row["router_replay/log_probs_diff_with"] < 1e-5
        assert row["router_replay/routers_differ"] == 0
        assert row["rollout/num_unrecorded_tokens"] == 0


@pytest.mark.parametrize("placement", [SYNCHRONOUS, DETACHED])
def test_a_run_that_is_continued_and_a_detached_one_equal_the_synchronous_one_bit_for_bit(
    placement: list[str], synchronous: Path, tmp_path: Path, tiny_llama: Callable
):
    for num_steps in (2, NUM_STEPS):
        train(tmp_path, tiny_llama, num_steps, *placement)
    found = weights_of(tmp_path)
    expected = weights_of(synchronous)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    by_step = {row["step"]: row for row in metrics_of(tmp_path) if "actor/loss" in row}
    for row in metrics_of(synchronous):
        for name in ("actor/loss", "actor/grad_norm", "router_load/entropy", "critic/score/mean"):
            assert by_step[row["step"]][name] == row[name], name


def test_a_run_goes_on_with_distributed_experts_and_equals_the_other_up_to_rounding(
    synchronous: Path, tmp_path: Path, tiny_llama: Callable
):
    train(tmp_path, tiny_llama, 2, *SYNCHRONOUS, DISTRIBUTED)
    train(tmp_path, tiny_llama, NUM_STEPS, *SYNCHRONOUS)
    difference, name = largest_difference(tmp_path, synchronous)
    assert difference < 1e-4, name
    found = weights_of(tmp_path)
    for name, expected in weights_of(synchronous).items():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-5)
