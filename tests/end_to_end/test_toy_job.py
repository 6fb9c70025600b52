"""The toy jobs of the examples learn, with vLLM: PPO on two pools and GRPO on one, from a quarter
of the sums right."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from runs import metrics_of, run_on_ray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.split_placement.make_toy_world import Settings, make_toy_world

ROOT = Path(__file__).parents[2]
SPLIT_PLACEMENT, GRPO = ROOT / "examples/split_placement", ROOT / "examples/grpo"
ACCURACY = "val-core/verl_like/arithmetic/reward/mean@1"
pytestmark = [pytest.mark.ray, pytest.mark.vllm]


def train(
    folder: Path, seed: int, steps: int, *settings: str, example: Path = SPLIT_PLACEMENT
) -> list[dict]:
    """The rows of metrics.jsonl of a run of some steps, validated at its start and end and as
    `settings` say.

    The model and the data are those of the examples, in their place, because making them takes a
    minute.
    """
    world = ROOT / ".toy_world"
    make_toy_world(world, Settings(seed=1))
    paths = [
        f"data.train_files={world}/train.parquet",
        f"data.val_files={world}/test.parquet",
        f"actor_rollout_ref.model.path={world}/model",
        f"trainer.default_local_dir={folder}/runs",
    ]
    length = [
        f"trainer.seed={seed}",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={steps}",
    ]
    run_on_ray([*paths, *length, *settings], "toy", str(example / "config"))
    return metrics_of(folder)


VLLM_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}
"""Environment of a process with one engine, which computes in that process."""


def assert_vllm_generates(model: Path) -> None:
    """Loads a saved model as a server would, in a process of its own."""
    program = (
        "import sys, vllm\n"
        "engine = vllm.LLM(sys.argv[1], dtype='float32', enforce_eager=True, max_model_len=32, "
        "max_num_seqs=1)\n"
        "print(engine.generate('1+2=', vllm.SamplingParams(max_tokens=2, "
        "ignore_eos=True))[0].outputs[0].token_ids)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(model)],
        env=os.environ | VLLM_SETTINGS,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.strip().splitlines()[-1].split(",")) == 2


@pytest.mark.proof
@pytest.mark.timeout(600)  # the world is made where there is none
@pytest.mark.usefixtures("drawn_charts")
def test_the_toy_job_raises_held_out_accuracy_and_leaves_metrics_a_report_and_a_model_that_loads(
    tmp_path: Path,
):
    start, *steps = train(tmp_path, seed=1, steps=8)
    run = tmp_path / "runs/latest"
    assert start["step"] == 0 and start[ACCURACY] < 0.4
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6, 7, 8] and steps[-1][ACCURACY] > 0.8
    for row in steps:
        assert row["training/rollout_probs_diff_max"] < 1e-4  # the engine has the trainer's weights
        assert row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0
        assert {"critic/vf_loss", "actor/pg_loss", "timing_s/gen"} <= row.keys()
    assert steps[0]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)
    assert steps[1]["actor/reward_kl_penalty"] != 0  # the reference stayed behind
    events = [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]
    assert {e["pool"] for e in events if e["method"] == "update_actor"} == {
        "actor_rollout_ref_pool"
    }
    assert {e["pool"] for e in events if e["method"] == "update_critic"} == {"critic_pool"}
    assert "<svg" in (run / "report.html").read_text()
    assert (
        yaml.safe_load((run / "config.yaml").read_text())["role_mapping"]["critic"] == "critic_pool"
    )
    trained = run / "global_step_8/actor/huggingface"
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(trained),
        AutoTokenizer.from_pretrained(trained),
    )
    assert model(**tokenizer("1+2=", return_tensors="pt")).logits.isfinite().all()


@pytest.mark.proof
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_toy_job_gets_every_held_out_sum_right_within_30_steps_of_seed(
    tmp_path: Path, seed: int, record_property: Callable[[str, object], None]
):
    rows = [row for row in train(tmp_path, seed, 30, "trainer.test_freq=2") if ACCURACY in row]
    accuracies = {row["step"]: row[ACCURACY] for row in rows}
    record_property(
        "result", ", ".join(f"step {step}: {value:.3f}" for step, value in accuracies.items())
    )
    assert accuracies[0] < 0.4
    assert max(accuracies.values()) > 0.99
    assert_vllm_generates(tmp_path / "runs/latest/global_step_30/actor/huggingface")


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_the_grpo_recipe_gets_nine_in_ten_held_out_sums_right_within_40_steps(
    tmp_path: Path, record_property: Callable[[str, object], None]
):
    rows = train(tmp_path, 1, 40, "trainer.test_freq=5", example=GRPO)
    accuracies = {row["step"]: row[ACCURACY] for row in rows if ACCURACY in row}
    record_property(
        "result", ", ".join(f"step {step}: {value:.3f}" for step, value in accuracies.items())
    )
    assert accuracies[0] < 0.4 and accuracies[40] > 0.9
    assert "critic/grad_norm" not in rows[-1] and rows[-1]["actor/kl_loss"] > 0


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_two_runs_of_one_seed_are_equal_to_the_last_bit(
    tmp_path: Path, record_property: Callable[[str, object], None]
):
    results = []
    for name in ("first", "second"):
        rows = train(tmp_path / name, 1, 5)
        weights = {
            path.parent.parent.name: load_file(path)
            for path in sorted(
                (tmp_path / name / "runs/latest/global_step_5").rglob("*.safetensors")
            )
        }
        results.append((rows, weights))
    (rows, weights), (rows_again, weights_again) = results
    assert weights.keys() == {"actor", "critic"} == weights_again.keys()
    for role, tensors in weights.items():
        assert all(
            torch.equal(tensor, weights_again[role][name]) for name, tensor in tensors.items()
        )
    timed = ("timing_s/", "perf/", "reward/early_ratio")
    numbers, numbers_again = (
        [
            {name: row[name] for name in row if not name.startswith(timed) and "/perf/" not in name}
            for row in of_run
        ]
        for of_run in (rows, rows_again)
    )
    assert numbers == numbers_again and len(numbers) == 6
    record_property(
        "result",
        f"{len(numbers[-1])} metrics of 5 steps and {sum(map(len, weights.values()))} tensors are "
        "equal",
    )
