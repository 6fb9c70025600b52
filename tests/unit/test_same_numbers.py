"""How two versions are compared (scripts/same_numbers): what differs is found, and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from scripts.same_numbers.compare import (
    compare_metrics,
    compare_steps,
    compare_tensors,
    is_gradient,
    is_weight,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two equal runs of two steps."""
    for name, date in (("here", "2026-11-23_05-00-00"), ("other", "2026-11-23_05-01-00")):
        run = tmp_path / name
        folder = run / date / "global_step_2/actor/checkpoint"
        folder.mkdir(parents=True)
        for step in (1, 2):
            tokens = np.array([[5, step, 0]])
            np.savez(
                run / f"step_{step:03}.npz",
                tokens=tokens,
                old_log_probs=np.array([[-0.5, -2.0 * step, 0.0]]),
            )
        rows = [
            {"step": step, "actor/loss": 0.25 * step, "timing_s/step": 1.0} for step in (0, 1, 2)
        ]
        (folder.parents[2] / "metrics.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
        tensors = {"model.w": np.array([3.0, 4.0]), "optimizer.w.exp_avg": np.array([0.3, 0.4])}
        save_file(tensors, folder / "rank_00000.safetensors")
        (run / "latest").symlink_to(date)
    return tmp_path / "here", tmp_path / "other"


def test_equal_runs_are_equal_bit_for_bit(runs: tuple[Path, Path]):
    differences = [
        *compare_steps(*runs),
        *compare_metrics(*runs),
        compare_tensors("weights", *runs, is_weight),
        compare_tensors("gradients", *runs, is_gradient),
    ]
    assert {each.quantity: each.num_values for each in differences} == {
        "tokens": 6,
        "old_log_probs": 6,
        "actor/loss": 2,
        "weights": 2,
        "gradients": 2,
    }
    assert [(str(each), each.relative) for each in differences] == [("equal bit for bit", 0.0)] * 5


def test_a_difference_is_relative_to_the_largest_value_and_says_since_when(runs: tuple[Path, Path]):
    here, other = runs
    np.savez(
        here / "step_002.npz",
        tokens=np.array([[5, 2, 0]]),
        old_log_probs=np.array([[-0.5, -4.04, 0.0]]),
    )
    tokens, log_probs = compare_steps(here, other)
    assert tokens.relative == 0.0
    assert log_probs.relative == pytest.approx(0.01) and log_probs.first_step == 2
    assert str(log_probs) == "1.0e-02 apart, from step 2 on"
    (file,) = here.glob("2*/metrics.jsonl")
    file.write_text(file.read_text().replace("0.25", "0.20"))
    (loss,) = compare_metrics(here, other)
    assert loss.relative == pytest.approx(0.1) and loss.first_step == 1


def test_a_tensor_that_differs_counts_by_its_norm_and_alone(runs: tuple[Path, Path]):
    here, other = runs
    (file,) = here.glob("2*/global_step_*/*/checkpoint/*.safetensors")
    save_file({"model.w": np.array([3.0, 4.5]), "optimizer.w.exp_avg": np.array([0.3, 0.4])}, file)
    assert compare_tensors("weights", here, other, is_weight).relative == pytest.approx(0.5 / 5)
    assert compare_tensors("gradients", here, other, is_gradient).relative == 0.0


def test_a_value_that_is_no_number_on_one_side_is_infinitely_far_and_the_sign_of_zero_counts(
    runs: tuple[Path, Path],
):
    here, other = runs
    np.savez(
        here / "step_001.npz",
        tokens=np.array([[5, 1, 0]]),
        old_log_probs=np.array([[-0.5, np.nan, -0.0]]),
    )
    _, log_probs = compare_steps(here, other)
    assert log_probs.relative > 1e300
    np.savez(
        here / "step_001.npz",
        tokens=np.array([[5, 1, 0]]),
        old_log_probs=np.array([[-0.5, -2.0, -0.0]]),
    )
    _, log_probs = compare_steps(here, other)
    assert 0.0 < log_probs.relative < 1e-200 and log_probs.first_step == 1


def test_a_missing_step_column_metric_or_file_is_an_error(runs: tuple[Path, Path]):
    here, other = runs
    np.savez(here / "step_001.npz", tokens=np.array([[5, 1, 0]]))
    with pytest.raises(ValueError, match=r"has no old_log_probs in the steps \[1\]"):
        list(compare_steps(here, other))
    (here / "step_002.npz").unlink()
    with pytest.raises(ValueError, match=r"has 1 recorded steps, .* has 2"):
        list(compare_steps(here, other))
    (file,) = here.glob("2*/metrics.jsonl")
    file.write_text(file.read_text().replace("actor/loss", "actor/lost"))
    with pytest.raises(ValueError, match=r"has no actor/loss in the steps \[1, 2\]"):
        list(compare_metrics(here, other))
    (checkpoint,) = here.glob("2*/global_step_*/*/checkpoint/*.safetensors")
    checkpoint.unlink()
    with pytest.raises(ValueError, match="has the files"):
        compare_tensors("weights", here, other, is_weight)


def test_the_recorder_writes_what_the_estimator_gets_and_computes_what_the_library_computes(
    tmp_path: Path,
):
    program = """
import numpy as np, torch
import same_numbers_recorder as recorder
rewards, mask = torch.tensor([[0.0, 2.0], [1.0, 9.0]]), torch.tensor([[1, 1], [1, 0]])
index = np.array(["a", "a"], dtype=object)
for _ in range(2):
    own = recorder.recorded_grpo(rewards, mask, index, responses=torch.tensor([[7, 8], [9, 3]]))
assert all(map(torch.equal, own, recorder.grpo(rewards, mask, index)))
"""
    variables = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/scripts/same_numbers",
        "SAME_NUMBERS_OUT": str(tmp_path),
    }
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | variables)
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["step_001.npz", "step_002.npz"]
    recorded = np.load(tmp_path / "step_002.npz")
    assert recorded["tokens"].tolist() == [[7, 8], [9, 0]]  # nothing after the response
    assert recorded["rewards"].tolist() == [[0.0, 2.0], [1.0, 0.0]]
    assert sorted(recorded.files) == ["response_mask", "rewards", "tokens"]
