"""Whole runs with real parts: Ray, FSDP2 over gloo, an inference engine, reward processes."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from listening import Listeners, assert_loopback
from runs import SPLIT, metrics_of, run_on_ray, tiny_run_settings
from test_local_step import run_locally
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from waiting_rollout import SCORED

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.ray


TELLING_REWARD = """
import os, pathlib

def compute_score(data_source, solution_str, ground_truth, extra_info):
    pathlib.Path(os.environ["PATH_OF_THE_FILE_THAT_A_REWARD_MAKES"]).touch()
    return {"score": len(set(solution_str)) / 4, "acc": float("1" in solution_str)}
"""


@pytest.mark.proof
def test_colocated_and_split_runs_give_equal_results(
    tmp_path: Path, tiny_llama: Callable, monkeypatch: pytest.MonkeyPatch
):
    """One `fit` serves every placement: the updates overlap or queue, ranks get equal work or their
    rows as they come, rewards are computed after generation or, as the split run's engines insist,
    while it goes on. The numbers are the same."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    names = [
        "critic/score/mean",
        "actor/pg_loss",
        "critic/vf_loss",
        "actor/grad_norm",
        "critic/grad_norm",
    ]
    names += ["actor/entropy", "val-core/exact_match/acc/mean@1", "response_length/mean"]
    runs = {}
    for name, settings in (
        ("colocated", ["placement=colocated", "trainer.balance_batch=true"]),
        (
            "split",
            [
                *SPLIT,
                "trainer.balance_batch=false",
                "worker_classes.rollout=waiting_rollout.WaitingRollout",
            ],
        ),
    ):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setenv(SCORED, str(folder / "scored"))
        # The hf engine takes one prompt at a time.
        settings += [
            *tiny_run_settings(folder, tiny_llama),
            "actor_rollout_ref.rollout.max_num_seqs=2",
        ]
        (folder / "reward.py").write_text(TELLING_REWARD)
        run_on_ray([*settings, "data.max_response_length=48", "trainer.val_before_train=false"])
        runs[name] = metrics_of(folder)
        assert all(0 < row["perf/overlap"] <= 1 for row in runs[name])
    results = [[[row[key] for key in names] for row in rows] for rows in runs.values()]
    torch.testing.assert_close(
        torch.tensor(results[0]), torch.tensor(results[1]), rtol=1e-5, atol=1e-6
    )
    balanced, unbalanced = (
        [sum(row[f"perf/imbalance/{kind}"] for row in rows) for rows in runs.values()]
        for kind in ("balanced", "unbalanced")
    )
    assert balanced[0] < unbalanced[0] == balanced[1] == unbalanced[1]
    assert all(row["reward/early_ratio"] >= 0.5 for row in runs["split"])
    events = [
        json.loads(line)
        for line in (tmp_path / "split/runs/latest/timeline.jsonl").read_text().splitlines()
    ]
    first_step = [e for e in events if e["step"] == 1 and not e["is_validating"]]
    scored = min(e["started"] for e in first_step if e["method"] == "score")
    assert scored < max(e["finished"] for e in first_step if e["method"] == "generate_sequences")


def test_a_new_role_a_reward_model_and_a_reference_on_pools_of_their_own_and_plugins_take_part(
    tmp_path: Path, tiny_llama: Callable, plugins: str, monkeypatch: pytest.MonkeyPatch
):
    """`examples/new_role`: nothing in the library knows the role. Rules, reward model and role add
    up. Estimator, loss, engine and trainer are a plugin's. On Ray all is as in one process, and the
    processes listen at loopback addresses alone."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    policy, _ = tiny_llama()
    judge = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    with torch.no_grad():
        judge.score.weight.zero_()  # judges every response 0, so that the sum is known
    judge.save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(policy).save_pretrained(tmp_path / "judge")
    (tmp_path / "one.py").write_text("def compute_score(**arguments):\n    return 1.0\n")
    settings = [
        "worker_classes.likelihood=examples.new_role.likelihood.LikelihoodWorker",
        "role_mapping.likelihood=ref_pool",
        "role_mapping.ref=ref_pool",
        "algorithm.use_kl_in_reward=true",
        "reward_model.enable=true",
        f"reward_model.model.path={tmp_path / 'judge'}",
        f"custom_reward_function.path={tmp_path / 'one.py'}",
        f"reward_models.second.path={tmp_path / 'judge'}",
        "role_mapping.second=ref_pool",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        plugins,
        "algorithm.adv_estimator=centred_by_plugin",
        "algorithm.options.scale=200.0",
        "actor_rollout_ref.actor.policy_loss.loss_mode=form_of_verl",
        "actor_rollout_ref.rollout.name=engine_of_plugin",
    ]
    run_locally(
        tmp_path / "here", tiny_llama, *settings, "resource_pool_spec.ref_pool=[1]", steps=1
    )
    (tmp_path / "ray").mkdir()
    # Each role has its pool, all ranks of a pool share each sequence, and two samples a prompt.
    settings += ["placement=separate", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"]
    settings += ["actor_rollout_ref.actor.use_prefix_grouper=true"]
    settings += [
        f"resource_pool_spec.{pool}_pool=[2]"
        for pool in ("actor", "rollout", "ref", "reward_model")
    ]
    settings += ["actor_rollout_ref.rollout.weight_transport=gloo"]
    listeners = Listeners()
    listeners.start()
    run_on_ray([*tiny_run_settings(tmp_path / "ray", tiny_llama), *settings])
    found = listeners.end()
    assert_loopback(found)
    assert {"gcs_server", "raylet", "makers, trainers and workers"} <= {kind for kind, _ in found}
    events = [
        json.loads(line)
        for line in (tmp_path / "ray/runs/latest/timeline.jsonl").read_text().splitlines()
    ]
    assert {(e["pool"], e["role"]) for e in events if e["method"] == "annotate"} == {
        ("ref_pool", "likelihood")
    }
    assert {e["pool"] for e in events if e["method"] == "compute_ref_log_prob"} == {"ref_pool"}
    scoring = {(e["pool"], e["role"]) for e in events if e["method"] == "compute_rm_score"}
    assert scoring == {("reward_model_pool", "reward_model"), ("ref_pool", "second")}
    assert {e["pool"] for e in events if e["method"] == "generate_sequences"} == {"rollout_pool"}
    (row,), (expected,) = metrics_of(tmp_path / "ray"), metrics_of(tmp_path / "here")
    # Rules 1, judge 0, and the custom role 0.1 times a mean log-probability, which is at least
    # -log(68) on average.
    assert 0.5 < row["critic/score/mean"] < 1
    assert 0.5 < row["val-core/exact_match/reward/mean@1"] < 1
    names = [
        name
        for name in row
        if name.startswith(("actor/", "critic/", "val-core/")) and "/perf/" not in name
    ]
    assert {"actor/pg_loss", "actor/grad_norm", "critic/advantages/max"} <= set(names) and row[
        "actor/grad_norm"
    ] > 0
    assert {n: row[n] for n in names} == pytest.approx(
        {n: expected[n] for n in names}, rel=1e-4, abs=1e-5
    )
    assert {path.name for path in (tmp_path / "ray/runs/latest/global_step_1").iterdir()} == {
        "actor",
        "manifest.json",
    }
