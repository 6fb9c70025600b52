"""The dataflow in one process, without Ray: the debugger's way in, and the shortest one for a reader."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from runs import metrics_of, tiny_run_settings

from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker_group import WorkerGroup
from verl_like.trainer import run_ppo
from verl_like.trainer.config import load_config
from verl_like.trainer.ppo_trainer import RayPPOTrainer
from verl_like.trainer.run_recorder import RunRecorder
from verl_like.trainer.scoring import RuleScorer
from verl_like.workers.rollout import base


class LocalTrainer(RayPPOTrainer):
    """The same `fit` on workers that are objects of this process."""

    def start_groups(self) -> dict[str, WorkerGroup]:
        return {
            role: LocalWorkerGroup(worker_class, role=role, on_call=self.recorder.timeline.record)
            for role, worker_class in self.role_worker_mapping.items()
        }


def run_locally(folder: Path, tiny_llama: Callable, *settings: str, steps: int = 2) -> RunRecorder:
    """Some steps in this process; what is in `folder` then is as after any run."""
    folder.mkdir(exist_ok=True)
    settings = (*tiny_run_settings(folder, tiny_llama), "trainer.n_gpus_per_node=1", *settings)
    config = run_ppo.with_training_steps(load_config(settings), steps)
    tokenizer = run_ppo.load_tokenizer(config.actor_rollout_ref.model)
    datasets = [run_ppo.load_dataset(config, tokenizer, part) for part in ("train", "val")]
    rewards = run_ppo.start_reward_manager(config)
    recorder = RunRecorder(config)
    trainer = LocalTrainer(
        config, tokenizer, run_ppo.build_role_worker_mapping(config, {}), None, *datasets,
        RuleScorer(rewards, tokenizer, scores_every_row=True), recorder,
    )  # fmt: skip
    trainer.init_workers()
    trainer.fit()
    rewards.close()
    recorder.close("Done.")
    return recorder


def test_a_whole_ppo_step_runs_in_one_process_without_ray(tmp_path: Path, tiny_llama: Callable):
    recorder = run_locally(tmp_path, tiny_llama, "algorithm.use_kl_in_reward=true")
    assert not ray.is_initialized()
    last = metrics_of(tmp_path)[-1]
    assert last["step"] == 2 and last["actor/grad_norm"] > 0 and last["critic/grad_norm"] > 0
    assert last["training/rollout_probs_diff_max"] < 1e-4
    rows = [json.loads(line) for line in (recorder.run_dir / "timeline.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows if row["method"] == "update_actor"} == {1, 2}
    assert {"init_model", "export_weights", "load_weights"} <= {row["method"] for row in rows if row["step"] == 0}
    methods = {row["method"] for row in rows}
    assert {"generate_sequences", "compute_ref_log_prob", "update_critic", "update_actor", "load_weights"} <= methods


def test_checkpoints_in_the_critics_warm_up_change_nothing_and_the_actors_schedule_ends_with_the_run(
    tmp_path: Path, tiny_llama: Callable
):
    settings = ["trainer.critic_warmup=1", "trainer.val_before_train=false", "trainer.test_freq=-1"]
    settings += [f"{part}.optim.lr_scheduler_type=linear" for part in ("actor_rollout_ref.actor", "critic")]
    run_locally(tmp_path / "saving", tiny_llama, *settings, "trainer.save_freq=1", steps=3)
    run_locally(tmp_path / "not_saving", tiny_llama, *settings, steps=3)
    saving, not_saving = metrics_of(tmp_path / "saving"), metrics_of(tmp_path / "not_saving")
    for a, b in zip(saving, not_saving, strict=True):
        different = {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
        assert all(name.startswith(("timing_s/", "perf/")) or "/perf/" in name for name in different), different
    # Three steps train the critic and the last two the actor.
    assert [row["critic/lr"] for row in saving] == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    assert [row.get("actor/lr") for row in saving] == [None, 1e-3, 5e-4]


def test_rewards_are_the_same_whether_samples_are_scored_as_they_end_or_together(
    tmp_path: Path, tiny_llama: Callable, monkeypatch: pytest.MonkeyPatch
):
    rows = []
    for seconds_between_parts in (0.0, math.inf):
        monkeypatch.setattr(base, "_SECONDS_BETWEEN_PARTS", seconds_between_parts)
        folder = tmp_path / str(seconds_between_parts)
        # One prompt at a time, so that the engine has something to tell.
        run_locally(folder, tiny_llama, "actor_rollout_ref.rollout.max_num_seqs=2", "trainer.val_before_train=false")
        rows.append(metrics_of(folder))
    early, together = rows
    assert [row["reward/early_ratio"] for row in early] == [1.0, 1.0]
    assert [row["reward/early_ratio"] for row in together] == [0.0, 0.0]
    for a, b in zip(early, together, strict=True):
        same = {name for name in a if a[name] == b[name]}
        timed = {name for name in a if name.startswith(("timing_s/", "perf/")) or "/perf/" in name}
        assert set(a) == set(b) and set(a) - same <= timed | {"reward/early_ratio"}
        assert {"critic/score/mean", "actor/pg_loss", "val-core/exact_match/acc/mean@1"} <= same
