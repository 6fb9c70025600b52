"""The example of three stages: its pairs, its true reward, its table, and as a proof the whole
command."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.rlhf_three_stages.effects import effects
from examples.rlhf_three_stages.make_pairs import SAMPLING, pairs_of
from examples.rlhf_three_stages.true_reward import compute_score
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.supervised import RMConfig, broken_supervised_rules

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "examples/rlhf_three_stages/config")


def test_each_distinct_wrong_response_is_rejected_against_a_right_one():
    prompt = [{"role": "user", "content": "68+35="}]
    pairs = pairs_of(prompt, ["93", "103", "93", "113", "103", " "], "103")
    assert pairs == [
        {"prompt": prompt, "chosen": "103", "rejected": wrong} for wrong in ("93", "113")
    ]
    assert pairs_of(prompt, ["103", "103"], "103") == [] == pairs_of(prompt, ["93", "113"], "103")


def test_the_true_reward_is_a_metric_that_scores_nothing():
    assert compute_score("verl_like/arithmetic", "103", "103") == {"score": 0.0, "acc": 1.0}
    assert compute_score("verl_like/arithmetic", "93", "103") == {"score": 0.0, "acc": 0.0}


def test_the_configurations_of_the_stages_fit_together():
    ppo = load_ppo_config(["reward_model.model.path=folder"], "ppo", CONFIG)
    drawn = load_ppo_config(SAMPLING, "ppo", CONFIG)
    files = ["data.train_files=t", "data.val_files=v"]
    reward_model = load_config(RMConfig, broken_supervised_rules, files, "rm", CONFIG)
    assert drawn.actor_rollout_ref.model == ppo.actor_rollout_ref.model
    assert reward_model.model.path == ppo.actor_rollout_ref.model.path
    run = (ROOT / "examples/rlhf_three_stages/run.sh").read_text()
    assert f"reward_model/latest/global_step_{reward_model.num_steps_of_run}/" in run
    assert f"runs=outputs/{ppo.trainer.project_name}\n" in run


def test_the_table_has_the_first_and_the_last_value_of_each_measure(tmp_path: Path):
    source = "verl_like/arithmetic"
    ppo = [
        {"step": 0, f"val-core/{source}/acc/mean@1": 0.25, f"val-aux/{source}/reward/mean@1": -2.0},
        {"step": 1, "critic/score/mean": 7.0},
        {"step": 2, f"val-core/{source}/acc/mean@1": 0.5, f"val-aux/{source}/reward/mean@1": 3.0},
    ]
    pairs = [
        {"step": step, "val-core/accuracy": value}
        for step, value in ((0, 0.5), (4, 0.75), (8, 0.875))
    ]
    for name, rows in (("rm", pairs), ("ppo", ppo)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(
            "".join(f"{json.dumps(row)}\n" for row in rows)
        )
    world = {"exact_match_before_warm_up": 0.125, "held_out_exact_match": 0.25}
    (tmp_path / "world.json").write_text(json.dumps(world))
    assert [row[2:] for row in effects(tmp_path, tmp_path / "rm", tmp_path / "ppo")] == [
        (0.125, 0.25),
        (0.5, 0.875),
        (0.25, 0.5),
        (-2.0, 3.0),
    ]


@pytest.mark.proof
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_each_of_the_three_stages_has_its_effect_in_a_fresh_clone(
    tmp_path: Path, record_property: Callable[[str, object], None]
):
    for name in ("verl_like", "examples", "scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / ".venv").symlink_to((ROOT / ".venv").resolve())
    command = ["bash", "examples/rlhf_three_stages/run.sh"]
    subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=True,
        timeout=1700,
    )
    runs = tmp_path / "outputs/verl_like_example_three_stages"
    rows = effects(tmp_path / ".toy_world", runs / "reward_model/latest", runs / "ppo/latest")
    record_property(
        "result",
        "; ".join(f"{name} {before:.3f} to {after:.3f}" for _, name, before, after in rows),
    )
    fine_tuning, pairs, true_reward, learnt_reward = (row[2:] for row in rows)
    assert fine_tuning[0] == 0 and 0.2 < fine_tuning[1] < 0.35
    assert pairs[0] < 0.65 and pairs[1] > 0.9
    assert true_reward[0] == pytest.approx(fine_tuning[1], abs=0.02) and true_reward[1] > 0.75
    assert learnt_reward[1] > learnt_reward[0] + 4
    report = (runs / "ppo/latest/report.html").read_text()
    assert "<!-- reward/acc/mean -->" in report and "<!-- reward/rm_scores/mean -->" in report
