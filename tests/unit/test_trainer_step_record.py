"""What a step's row counts as its time, and the table of where a run's processes are."""

import json
import time
from types import SimpleNamespace

import pytest
from test_trainer_record import REQUIRED, event

from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.run.run_recorder import RunRecorder, placement_rows


def test_neither_a_validation_nor_a_checkpoint_counts_in_the_speed_of_a_step(tmp_path):
    config = load_ppo_config(
        [*REQUIRED, f"trainer.default_local_dir={tmp_path}", "trainer.nnodes=2"]
    )
    recorder = RunRecorder(config, PPO_DISPLAY)
    with recorder.step(3, total_steps=9) as log:
        recorder.timeline.record(event("update_actor", 0, 1.0, 1.5))
        log({"perf/total_num_tokens": 600})
        with recorder.validation():
            recorder.timeline.record(event("generate_sequences", 0, 2.0, 2.25, role="rollout"))
            time.sleep(0.02)
        with recorder.timer("save_checkpoint"):
            time.sleep(0.03)
    recorder.close("Done.")
    (row,) = [
        json.loads(line) for line in (recorder.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert row["timing_s/update_actor"] == 0.5 and "timing_s/gen" not in row
    assert row["timing_s/testing"] >= 0.02 and row["timing_s/save_checkpoint"] >= 0.03
    seconds = row["timing_s/step"] - row["timing_s/testing"] - row["timing_s/save_checkpoint"]
    assert row["perf/total_throughput"] == pytest.approx(600 / seconds)
    assert row["perf/throughput"] == pytest.approx(37.5 / seconds)  # of 16 processes


def test_a_step_that_a_resumed_run_completes_keeps_the_times_that_it_had(tmp_path):
    recorder = RunRecorder(
        load_ppo_config([*REQUIRED, f"trainer.default_local_dir={tmp_path}"]), PPO_DISPLAY
    )
    before = {"training/global_step": 4, "timing_s/step": 100.0, "perf/time_per_step": 100.0}
    with recorder.step(4, total_steps=9, row=before) as log:
        log({"val-core/acc": 0.5})
        recorder.seconds["testing"] = 3.0
    recorder.close("Done.")
    (row,) = [
        json.loads(line) for line in (recorder.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert row == {"step": 4, **before, "val-core/acc": 0.5, "timing_s/testing": 3.0}


def test_the_summary_of_a_run_names_its_files(tmp_path, capsys):
    recorder = RunRecorder(
        load_ppo_config([*REQUIRED, f"trainer.default_local_dir={tmp_path}"]), PPO_DISPLAY
    )
    with recorder.step(1, total_steps=1):
        recorder.timeline.record(event("update_actor", 0, 1.0, 1.5))
    (recorder.run_dir / "tensorboard").mkdir()
    recorder.close("Done.")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for file, what in (
        ("report.html", "report"),
        ("metrics.jsonl", "metrics"),
        ("timeline.jsonl", "timeline"),
    ):
        assert [file, what] in lines
    assert ["tensorboard", "tensorboard"] in lines


def test_the_placement_of_a_run_is_shown_where_there_is_one(tmp_path, capsys):
    recorder = RunRecorder(
        load_ppo_config([*REQUIRED, f"trainer.default_local_dir={tmp_path}"]), PPO_DISPLAY
    )
    recorder.show_placement([])
    assert "Placement" not in capsys.readouterr().out
    recorder.show_placement([{"pool": "policy_pool", "node": "10.0.0.7"}])
    said = capsys.readouterr().out
    assert "Placement" in said and "policy_pool" in said and "10.0.0.7" in said
    recorder.close("Done.")


def test_the_placement_has_a_row_for_each_node_of_each_group():
    two_nodes = SimpleNamespace(worker_nodes=["n1", "n2", "n1"], worker_pids=[11, 12, 13])
    one_node = SimpleNamespace(worker_nodes=["n2"], worker_pids=[14])
    assert placement_rows([("a", ["actor", "ref"], two_nodes), ("b", ["critic"], one_node)]) == [
        {"pool": "a", "node": "n1", "ranks": "0, 2", "processes": "11, 13", "roles": "actor + ref"},
        {"pool": "a", "node": "n2", "ranks": "1", "processes": "12", "roles": "actor + ref"},
        {"pool": "b", "node": "n2", "ranks": "0", "processes": "14", "roles": "critic"},
    ]
