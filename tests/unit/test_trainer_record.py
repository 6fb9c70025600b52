"""The record of a run: files, phases, trackers, report."""

import contextlib
import io
import json
import re
import signal
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable

import pytest
import rich.console

from verl_like.single_controller import CallEvent
from verl_like.single_controller.decorator import Dispatch, register
from verl_like.single_controller.local import LocalWorkerGroup
from verl_like.single_controller.worker import Worker
from verl_like.single_controller.worker_group import ClassWithInitArgs
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.config.roles import process_groups
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.run import tracking
from verl_like.trainer.run.console import RunConsole
from verl_like.trainer.run.report import write_report
from verl_like.trainer.run.run_recorder import RunRecorder, _link_latest, _new_run_dir, _shown
from verl_like.trainer.run.timeline import Timeline
from verl_like.trainer.run.tracking import TRACKERS, TrackedRun, Tracker, Tracking, require_trackers
from verl_like.trainer.state import checkpoint

REQUIRED = ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=m"]


def event(
    method: str, rank: int, started: float, finished: float, pool: str = "a", role: str = "actor"
) -> CallEvent:
    return CallEvent(pool, role, method, rank, started, finished)


def test_a_phase_lasts_from_the_first_start_to_the_last_end_and_leaves_validation_out():
    timeline = Timeline(io.StringIO(), PPO_DISPLAY)
    timeline.start_step(1)
    timeline.record(event("update_actor", 0, 99.0, 100.0))
    timeline.start_step(2)
    timeline.record(event("generate_sequences", 0, 10.0, 11.0))
    timeline.record(event("generate_sequences", 1, 10.5, 12.0))
    timeline.is_validating = True
    timeline.record(event("generate_sequences", 0, 50.0, 90.0))
    assert timeline.phase_seconds() == {"gen": 2.0}


def test_the_critical_path_is_the_sum_of_each_stages_busiest_process():
    timeline = Timeline(io.StringIO(), PPO_DISPLAY)
    timeline.record(event("init_model", 0, 0.0, 90.0))
    timeline.start_step(3)
    for call in (
        event("generate_sequences", 0, 10.0, 14.0, role="rollout"),
        event("generate_sequences", 1, 10.0, 12.0, role="rollout"),
        event("score", 0, 11.0, 15.0, "driver", "rules"),  # one second of it after the generation
        event("score", 0, 15.0, 15.5, "driver", "rules"),
        event("compute_log_prob", 0, 14.5, 15.0),
        event("compute_ref_log_prob", 0, 15.0, 16.5, role="ref"),  # the same process: 0.5 + 1.5
        event("compute_values", 0, 14.5, 16.0, "b", "critic"),
        event("update_actor", 0, 17.0, 20.0),
        event("update_critic", 0, 17.0, 22.0, "b", "critic"),
        event("export_weights", 0, 20.0, 22.5),  # half a second of it after the updates
        # Waited for the export, then took a second
        event("load_weights", 0, 22.0, 23.5, role="rollout"),
        event("save_hf", 0, 30.0, 40.0),
    ):
        timeline.record(call)
    timeline.is_validating = True
    timeline.record(event("generate_sequences", 0, 50.0, 90.0, role="rollout"))
    assert timeline.critical_path_seconds() == 4.0 + 2.0 + 5.0 + 0.5 + 1.0
    timeline.is_validating = False
    timeline.start_step(4)
    timeline.record(event("update_actor", 0, 60.0, 70.0))
    assert timeline.critical_path_seconds() == 10.0


def test_calls_of_independent_pools_that_were_made_one_after_the_other_are_half_of_the_time():
    timeline = Timeline(io.StringIO(), PPO_DISPLAY)
    timeline.record(event("update_critic", 0, 10.0, 13.0, "b", "critic"))
    timeline.record(event("update_actor", 0, 13.0, 16.0))
    assert timeline.critical_path_seconds() / (16.0 - 10.0) == 0.5


def test_training_roles_of_a_pool_share_a_process_and_the_engine_has_its_own():
    mapping = {"actor": "a", "rollout": "a", "ref": "a", "critic": "b"}
    assert process_groups(mapping) == [
        ("a", ["actor", "ref"]),
        ("a", ["rollout"]),
        ("b", ["critic"]),
    ]


def test_every_run_gets_a_folder_of_its_own_and_latest_points_to_the_newest(tmp_path):
    first, second = _new_run_dir(tmp_path), _new_run_dir(tmp_path)
    _link_latest(first)
    _link_latest(second)
    assert first != second and first.is_dir() and second.is_dir()
    assert (tmp_path / "latest").resolve() == second


def steps_of(file) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_a_tracker_that_fails_is_switched_off_and_metrics_stay_on_disk(
    tmp_path, monkeypatch, caplog
):
    calls = []

    def broken(metrics: dict[str, float], step: int) -> None:
        calls.append(step)
        raise ConnectionError("no network")

    monkeypatch.setitem(TRACKERS, "broken", lambda run: Tracker(broken, list))
    tracking = Tracking(["console", "broken"], tmp_path, "project", "experiment", {})
    tracking.log({"reward": 1.0}, step=1)
    tracking.log({"reward": 2.0}, step=2)
    (said,) = tracking.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "reward": 1.0}, {"step": 2, "reward": 2.0}]
    assert calls == [1]
    assert said.startswith(
        "Tracker broken lacks 2 of 2 rows of metrics (ConnectionError: no network)"
    )
    assert (
        "Tracker broken failed and is off for the rest of the run: ConnectionError: no network"
        in caplog.text
    )


def test_a_tracker_of_a_continued_run_begins_behind_the_last_row_whose_step_is_a_number(
    tmp_path, monkeypatch
):
    begins = []

    def start(run: TrackedRun) -> Tracker:
        begins.append(run.next_step)
        return Tracker(print, list)

    monkeypatch.setitem(TRACKERS, "other", start)
    for content in ("", '{"step": 4}\n{"step": null}\n{"step": "7"}\n{"st'):
        (tmp_path / "metrics.jsonl").write_text(content)
        Tracking(["other"], tmp_path, "project", "experiment", {}).close()
    assert begins == [None, 5]


@pytest.mark.parametrize("error", [ConnectionError("no network"), SystemExit("no key")])
def test_a_tracker_that_does_not_start_is_named_and_the_others_go_on(
    tmp_path, monkeypatch, caplog, error
):
    def broken(run: TrackedRun) -> Tracker:
        raise error

    calls = []
    monkeypatch.setitem(TRACKERS, "broken", broken)
    monkeypatch.setitem(
        TRACKERS, "other", lambda run: Tracker(lambda *call: calls.append(call), list, "id 1")
    )
    tracking = Tracking(["broken", "other"], tmp_path, "project", "experiment", {})
    tracking.log({"reward": 1.0}, step=3)
    (said,) = tracking.close()
    assert (
        calls == [({"reward": 1.0}, 3)]
        and "broken does not start" in caplog.text
        and str(error) in caplog.text
    )
    assert said.startswith("Tracker broken lacks 1 of 1 rows of metrics (")
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"other": "id 1"}


@pytest.mark.parametrize("hangs_in", ["start", "log", "finish"])
def test_a_tracker_that_hangs_holds_up_neither_a_step_nor_the_end_of_the_run(
    tmp_path, monkeypatch, hangs_in
):
    monkeypatch.setattr(tracking, "FINISH_S", 1.5)
    monkeypatch.setattr(tracking, "MAX_WAITING", 3)
    never = threading.Event()
    others = []

    def hang(*_: object) -> None:
        never.wait(600)

    def start(run: TrackedRun) -> Tracker:
        if hangs_in == "start":
            hang()
        return Tracker(hang if hangs_in == "log" else print, hang if hangs_in == "finish" else list)

    monkeypatch.setitem(TRACKERS, "hanging", start)
    monkeypatch.setitem(
        TRACKERS, "other", lambda run: Tracker(lambda metrics, step: others.append(step), list)
    )
    record = Tracking(["hanging", "other"], tmp_path, "project", "experiment", {})
    for step in range(1, 4):
        record.log({"reward": 0.5}, step)
    (said,) = record.close()
    never.set()
    missing = 0 if hangs_in == "finish" else 3
    assert said.startswith(
        f"Tracker hanging lacks {missing} of 3 rows of metrics (it did not end within 1.5 s)"
    )
    assert others == steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3]


def test_rows_that_find_no_room_are_counted_and_the_others_keep_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "MAX_WAITING", 4)
    taken, begun, goes_on = [], threading.Event(), threading.Event()

    def slow(metrics: dict[str, float], step: int) -> None:
        begun.set()
        assert goes_on.wait(60)
        taken.append((step, metrics["reward"]))

    monkeypatch.setitem(TRACKERS, "slow", lambda run: Tracker(slow, list))
    record = Tracking(["slow"], tmp_path, "project", "experiment", {})
    record.log({"reward": 10.0}, 1)
    assert begun.wait(60)
    metrics = {}
    for step in range(2, 10):
        metrics["reward"] = 10.0 * step  # the same dictionary: the row that waits is a copy
        record.log(metrics, step)
    goes_on.set()
    (said,) = record.close()
    assert taken == [(step, 10.0 * step) for step in range(1, 6)]
    assert said.startswith(
        "Tracker slow lacks 4 of 9 rows of metrics (more than 4 rows waited for it)"
    )
    assert steps_of(tmp_path / "metrics.jsonl") == [*range(1, 10)]


def test_the_summary_of_a_run_says_which_tracker_lacks_rows(tmp_path, monkeypatch, capsys):
    def start(run: TrackedRun) -> Tracker:
        raise ConnectionError("no network")

    monkeypatch.setitem(TRACKERS, "mlflow", start)
    settings = [f"trainer.default_local_dir={tmp_path}", "trainer.logger=[mlflow]"]
    recorder = RunRecorder(load_ppo_config([*REQUIRED, *settings]), PPO_DISPLAY)
    recorder.tracking.log({"reward": 0.5}, 1)
    recorder.close("Done.")
    assert (
        "Tracker mlflow lacks 1 of 1 rows of metrics (ConnectionError: no network)"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("content", ["{", "[]", '{"first": 3}', "\xff", "[" * 100_000])
def test_a_file_of_ids_that_is_damaged_is_named_and_the_trackers_begin_a_run(
    tmp_path, monkeypatch, caplog, content
):
    (tmp_path / "trackers.json").write_text(content, encoding="latin-1")
    given = []
    monkeypatch.setitem(
        TRACKERS, "first", lambda run: given.append(run.run_id) or Tracker(print, list, "new")
    )
    Tracking(["first"], tmp_path, "project", "experiment", {}).close()
    assert given == [None] and f"{tmp_path}/trackers.json cannot be read" in caplog.text
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"first": "new"}


def test_tensorboard_gets_every_metric(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracking = Tracking(["tensorboard"], tmp_path, "project", "experiment", {})
    tracking.log({"actor/loss": 0.5}, step=3)
    tracking.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/loss")] == [(3, 0.5)]


def test_tensorboard_shows_no_step_twice_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first_step, values in ((1, (0.5, 0.25, 0.125)), (2, (4.0, 8.0))):
        tracking = Tracking(["tensorboard"], tmp_path, "project", "experiment", {})
        for step, value in enumerate(values, first_step):
            tracking.log({"loss": value}, step=step)
        tracking.close()
        # As the resume cuts it
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
        time.sleep(1.1)  # files of one second have no order
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0.5), (2, 4.0), (3, 8.0)]


def test_a_resumed_run_gives_each_tracker_the_id_of_the_run_that_it_began(tmp_path, monkeypatch):
    given = []

    def start(name: str) -> Callable[[TrackedRun], Tracker]:
        def begin(run: TrackedRun) -> Tracker:
            given.append((name, run.run_id))
            return Tracker(print, list, run.run_id or f"run of {name}")

        return begin

    monkeypatch.setitem(TRACKERS, "first", start("first"))
    monkeypatch.setitem(TRACKERS, "second", start("second"))
    for backends in (["first", "second"], ["second"], ["console", "first", "second"]):
        assert Tracking(backends, tmp_path, "project", "experiment", {}).close() == []
    assert sorted(given[:2]) == [("first", None), ("second", None)]
    assert given[2] == ("second", "run of second")
    assert sorted(given[3:]) == [("first", "run of first"), ("second", "run of second")]


@pytest.mark.parametrize("name", ["mlflow", "trackio", "wandb"])
def test_an_installed_tracker_goes_on_in_its_run(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    ids = []
    for folder in ("one", "one", "other"):
        (tmp_path / folder).mkdir(exist_ok=True)
        tracking = Tracking([name], tmp_path / folder, "project", "experiment", {"seed": 1})
        tracking.log({"val-core/acc/mean@1": 0.5}, step=len(ids))
        assert tracking.close() == []
        ids.append(json.loads((tmp_path / folder / "trackers.json").read_text())[name])
    assert ids[0] == ids[1] != ids[2]


def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape("pip install -e '.[wandb]'")):
        require_trackers(["console", "wandb"])


def report(tmp_path, **changes) -> str:
    arguments = {
        "title": "project / run",
        "summary": "Done.",
        "metrics": [{"step": 1, "critic/score/mean": 0.1}, {"step": 2, "critic/score/mean": 0.9}],
        "steps": [],
        "placement": [{"pool": "a", "roles": "actor"}],
        "router_load": [],
        "generations": [],
        "episodes": [],
        "config": "trainer: {}",
        "display": PPO_DISPLAY,
    } | changes
    write_report(tmp_path / "report.html", **arguments)
    return (tmp_path / "report.html").read_text()


def test_the_report_is_self_contained_and_draws_a_curve_for_each_metric_there_is(tmp_path):
    text = report(tmp_path)
    assert text.count("<svg") == 1  # only the reward has points
    assert not re.findall(r"""(?:src|href)=["']https?://""", text)


def test_the_report_has_a_picture_of_the_load_of_experts_if_there_are_any(tmp_path):
    assert "Load of the experts" not in report(tmp_path)
    text = report(tmp_path, router_load=[[3.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    assert "Load of the experts in the last step" in text and text.count("<svg") == 2
    for label in ("expert", "layer with a router", "tokens / mean"):
        assert f"<!-- {label} -->" in text


def test_the_row_of_a_step_has_metrics_of_the_load_and_the_report_its_counts(tmp_path):
    recorder = RunRecorder(
        load_ppo_config([*REQUIRED, f"trainer.default_local_dir={tmp_path}", "trainer.logger=[]"]),
        PPO_DISPLAY,
    )
    for step, count in ((1, 4.0), (2, 6.0)):
        with recorder.step(step, 2) as log:
            log({"router_load/count/0/0": count, "router_load/count/0/1": 2.0})
    recorder.close("Done.")
    rows = (recorder.run_dir / "metrics.jsonl").read_text().splitlines()
    last = json.loads(rows[-1])
    assert last["router_load/max_over_mean"] == 1.5 and "router_load/count/0/0" not in last
    assert recorder.router_load == [[6.0, 2.0]]
    assert "Load of the experts" in (recorder.run_dir / "report.html").read_text()


def test_the_report_has_histograms_of_staleness_effective_sample_size_and_drift(tmp_path):
    shares = [
        {"training/staleness/share_0": 1 - share, "training/staleness/share_1": share}
        for share in (0, 0.5, 0.4)
    ]
    sizes = [
        {"actor/eff_sample_size": size, "actor/rollout_kl": 1 - size} for size in (0.5, 0.9, 0.9)
    ]
    rows = [{"step": step, **of_step, **sizes[step]} for step, of_step in enumerate(shares)]
    text = report(tmp_path, metrics=[*rows, {"step": 3, "actor/eff_sample_size": 0.9}])
    bar = re.compile(
        r'd="M \S+ (\S+) \nL \S+ \S+ \nL \S+ (\S+) [^"]*" clip-path="[^"]*" style="fill: #1f77b4"'
    )
    heights = [
        [float(low) - float(high) for low, high in bar.findall(figure)]
        for figure in text.split("<svg")[1:]
    ]
    shown = [[height / max(bars) for height in bars if height] for bars in heights]
    assert shown == [
        pytest.approx([1, 0.9 / 2.1], 1e-4),
        pytest.approx([1 / 3, 1], 1e-4),
        pytest.approx([1, 0.5], 1e-4),
    ]


def test_the_report_lists_the_speed_of_the_steps_without_the_first(tmp_path):
    rows = [{"step": 0, "val-core/a": 0.5}]
    rows += [
        {"step": i, "timing_s/step": s, "perf/mfu/actor": m}
        for i, s, m in ((1, 90, 0.01), (2, 3, 0.5), (3, 4, 0.25))
    ]
    text = report(tmp_path, metrics=rows)
    assert "<td>perf/mfu/actor</td><td>0.5</td><td>0.25</td><td>0.5</td>" in text
    assert "<td>timing_s/step</td><td>4</td><td>3</td><td>4</td>" in text
    assert "<td>timing_s/step</td><td>90</td>" in report(tmp_path, metrics=rows[:2])


def test_text_of_the_model_cannot_become_markup_in_the_report(tmp_path):
    text = report(tmp_path, generations=[{"response": "<script>alert(1)</script>"}])
    assert "<script>" not in text and "&lt;script&gt;" in text


HOSTILE = "$\\frac{$ [/bold] \x1b[2J \x00 \ud800"
"""A name with mathematics that does not parse, markup that closes nothing, control characters and
half a character."""


def test_a_run_whose_names_are_not_text_ends_with_its_report_and_summary(tmp_path, capsys):
    recorder = RunRecorder(
        load_ppo_config([*REQUIRED, f"trainer.default_local_dir={tmp_path}"]), PPO_DISPLAY
    )
    name = f"val-core/{HOSTILE}/acc"
    recorder.log_validation({name: 0.125})
    with recorder.step(1, total_steps=1) as log:
        recorder.timeline.record(event(f"update_{HOSTILE}", 0, 1.0, 1.5, pool=HOSTILE))
        log({name: 0.375})
    recorder.show_generations(1, 1, lambda row: {"response": HOSTILE}, num_shown=1)
    recorder.show_placement([{"pool": HOSTILE}])
    recorder.close(f"Stopped: {HOSTILE}")
    said = capsys.readouterr().out
    assert "0.125 at first, 0.375 at last" in said and "report is not written" not in said
    assert "\x1b[2J" not in said and "\ud800" not in said
    drawn = (recorder.run_dir / "report.html").read_text(encoding="utf-8")
    assert drawn.count("<svg") == 4  # three charts and the timeline
    assert "val-core/$\\frac{$ [/bold]" in drawn


def test_a_generation_that_has_a_secret_of_the_run_is_shown_and_kept_without_it(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("JUDGE_API_KEY", "canary of the environment")
    recorder = RunRecorder(
        load_ppo_config([*REQUIRED, f"trainer.default_local_dir={tmp_path}"]), PPO_DISPLAY
    )
    text = "canary of the environment " * 20
    recorder.show_generations(1, 1, lambda row: {"response": text}, num_shown=1)
    recorder.close("Done.")
    assert recorder.generations[0]["response"].startswith("*** *** ")
    assert "canary" not in capsys.readouterr().out + (recorder.run_dir / "report.html").read_text()


def test_a_damaged_row_of_metrics_costs_that_row_alone(tmp_path):
    recorder = RunRecorder(
        load_ppo_config([*REQUIRED, f"trainer.default_local_dir={tmp_path}"]), PPO_DISPLAY
    )
    recorder.tracking.log({"reward": 0.5}, 1)
    recorder.tracking.jsonl.write('{"step": 2, "rew\n[1, 2]\n' + "[" * 100_000 + "\n")
    recorder.tracking.log({"reward": 0.25}, 3)
    recorder.close("Done.")
    assert "2 rows of metrics" in (recorder.run_dir / "report.html").read_text()


def test_a_report_that_cannot_be_drawn_is_named_and_the_summary_follows(tmp_path, capsys):
    recorder = RunRecorder(
        load_ppo_config([*REQUIRED, f"trainer.default_local_dir={tmp_path}"]), PPO_DISPLAY
    )
    recorder.tracking.jsonl.write('{"step": 1, "timing_s/step": "fast"}\n')
    recorder.close("Done.")
    said = capsys.readouterr().out
    assert "The report is not written: " in said and "\nDone." in said and "metrics.jsonl" in said


def test_the_summary_offers_no_model_of_a_checkpoint_that_was_set_aside(tmp_path, capsys):
    recorder = RunRecorder(
        load_ppo_config([*REQUIRED, f"trainer.default_local_dir={tmp_path}"]), PPO_DISPLAY
    )
    for step in (4, 12):
        model = checkpoint.begin(recorder.run_dir, step) / "actor/huggingface"
        model.mkdir(parents=True)
        (model / "model.safetensors").write_text("weights")
        checkpoint.commit(checkpoint.partial_of_step(recorder.run_dir, step), step, {}, {})
    checkpoint.set_aside(recorder.run_dir, after=4)
    recorder.close("Done.")
    said = capsys.readouterr().out
    assert "global_step_4/actor/huggingface" in said and "global_step_12" not in said


def test_the_timeline_shows_the_last_steps_that_neither_validated_nor_saved(tmp_path):
    timeline = Timeline(file := io.StringIO(), PPO_DISPLAY)
    timeline.record(event("init_model", 0, 0.0, 0.5))
    for step in range(1, 8):
        timeline.start_step(step)
        timeline.record(event("update_actor", 0, step + 0.1, step + 0.4))
        timeline.is_validating = step in (5, 7)
        if timeline.is_validating:
            timeline.record(event("generate_sequences", 0, step + 0.5, step + 0.9))
        timeline.is_validating = False
        if step == 3:
            timeline.record(event("save_hf", 0, step + 0.5, step + 0.9))
        if step == 1:
            assert [row["method"] for rows in timeline.last_steps() for row in rows] == [
                "update_actor"
            ]
    assert [rows[0]["step"] for rows in timeline.last_steps()] == [2, 4, 6]
    assert [json.loads(line)["step"] for line in file.getvalue().splitlines()] == [
        0,
        1,
        2,
        3,
        3,
        4,
        5,
        5,
        6,
        7,
        7,
    ]
    text = report(tmp_path, metrics=[], steps=timeline.last_steps())
    assert [step for step in range(8) if f" step {step} " in text] == [2, 4, 6]
    assert "update_actor" in text and "save_hf" not in text


def test_a_run_in_which_every_step_validates_shows_those():
    timeline = Timeline(io.StringIO(), PPO_DISPLAY)
    for step in range(1, 6):
        timeline.start_step(step)
        timeline.is_validating = True
        timeline.record(event("generate_sequences", 0, step, step + 0.5))
    assert [rows[0]["step"] for rows in timeline.last_steps()] == [3, 4, 5]


class SlowWriter(Worker):
    """Has written when it is waited for."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_result(self, wait: bool) -> dict | None:
        return {} if wait else None


@pytest.mark.parametrize("num_signals", [0, 1, 2])
def test_a_run_that_ends_completes_the_checkpoint_that_is_being_written_unless_it_gets_a_second_sigterm(
    num_signals, tmp_path
):
    recorder = RunRecorder(
        load_ppo_config([*REQUIRED, f"trainer.default_local_dir={tmp_path}"]), PPO_DISPLAY
    )
    recorder.saves_when_ended = True
    recorder.tracking.log({"reward": 0.5}, 7)
    group = LocalWorkerGroup(ClassWithInitArgs(SlowWriter), role="actor")
    recorder.begin_checkpoint(
        checkpoint.begin(recorder.run_dir, 7), 7, {"kl_coef": 0.25}, {"actor": group}
    )
    recorder.commit_checkpoint(wait=False)
    assert not checkpoint.steps(recorder.run_dir)
    for number in range(num_signals):
        with pytest.raises(KeyboardInterrupt) if number else contextlib.nullcontext():
            recorder.terminate(signal.SIGTERM, None)
    recorder.close("Interrupted.")
    newest, _ = checkpoint.newest(recorder.run_dir)
    assert (
        (newest.step, newest.state["kl_coef"]) == (7, 0.25) if num_signals < 2 else newest is None
    )


def test_neither_memory_nor_the_calls_that_a_step_looks_at_grow_over_5000_steps(tmp_path):
    config = load_ppo_config(
        [*REQUIRED, f"trainer.default_local_dir={tmp_path}", "trainer.logger=[]"]
    )
    recorder = RunRecorder(config, PPO_DISPLAY)
    recorder.console.show_step = lambda *_: None  # printing would take most of the time
    kept = {}
    for step in range(1, 5001):
        with recorder.step(step, total_steps=5000) as log:
            for rank in range(2):
                recorder.timeline.record(event("update_actor", rank, step, step + 0.5))
            log({f"metric_{i}": step / (i + 1) for i in range(9)} | {"perf/total_num_tokens": 100})
        if step == 200:
            tracemalloc.start()
        if step in (400, 5000):
            kept[step] = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(recorder.timeline.rows) == 2
    assert kept[5000] - kept[400] < 50_000  # bytes; to keep every step would take 100 times as much
    recorder.close("Done.")
    assert len((recorder.run_dir / "timeline.jsonl").read_text().splitlines()) == 2 * 5000
    assert "5000 rows of metrics" in (recorder.run_dir / "report.html").read_text()


def test_the_time_left_is_known_after_two_steps_however_long_they_take():
    console = RunConsole(PPO_DISPLAY, str)
    clock = iter(range(0, 10_000, 45))  # every look at the clock is 45 seconds later
    console.progress.get_time = lambda: float(next(clock))
    for task in console.progress.tasks:
        task._get_time = console.progress.get_time
    console.start_training(total_steps=100)
    for step in (1, 2, 3):
        console.show_step(
            step, 100, {"timing_s/step": 45.0, "timing_s/gen": 1.0, "critic/score/mean": 0.5}
        )
    console.close()
    assert console.progress.tasks[0].time_remaining > 45


def test_in_a_notebook_there_are_lines_and_no_bar_which_would_need_another_package(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    console = RunConsole(PPO_DISPLAY, str)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # rich warns where it cannot show a bar
        console.start_training(total_steps=3)
        console.show_step(1, 3, {"timing_s/step": 2.5, "critic/score/mean": 0.5})
        console.close()


def test_the_step_line_shows_reward_kl_lengths_drift_speed_and_the_seconds_of_each_phase(capsys):
    console = RunConsole(PPO_DISPLAY, str)
    console.show_step(
        7,
        100,
        {
            "critic/score/mean": 0.5,
            "actor/ppo_kl": 0.01,
            "actor/entropy": 1.5,
            "response_length/mean": 3.25,
            "training/rollout_probs_diff_mean": 2e-7,
            "perf/total_throughput": 1234.0,
            "timing_s/step": 1.5,
            "timing_s/gen": 0.25,
            "timing_s/update_actor": 0.5,
            "val-core/a/reward/mean@1": 0.75,
        },
    )
    line = capsys.readouterr().out
    for part in (
        "step   7/100",
        "reward 0.500",
        "KL 0.0100",
        "entropy 1.500",
        "length 3.2",
        "drift 2.0e-07",
    ):
        assert part in line
    for part in (
        "tok/s 1,234",
        "1.50 s: gen 0.25, update_actor 0.50",
        "val-core/a/reward/mean@1 0.750",
    ):
        assert part in line


def test_a_long_text_is_shown_on_one_line_without_its_middle():
    assert _shown("a" * 30 + "b" * 30, max_length=20) == "a" * 10 + " ... " + "b" * 10
    assert _shown("one\ntwo", max_length=7) == "one two"


def test_a_tracker_is_told_the_project_and_the_experiment_of_the_run(tmp_path, monkeypatch):
    told = []

    def start(run: TrackedRun) -> Tracker:
        told.append((run.project, run.experiment))
        return Tracker(lambda metrics, step: None, list)

    monkeypatch.setitem(TRACKERS, "mlflow", start)
    settings = [f"trainer.default_local_dir={tmp_path}", "trainer.logger=[mlflow]"]
    settings += ["trainer.project_name=sums", "trainer.experiment_name=of_two"]
    recorder = RunRecorder(load_ppo_config([*REQUIRED, *settings]), PPO_DISPLAY)
    recorder.tracking.log({"reward": 1.0}, step=1)
    recorder.close("Done.")
    assert told == [("sums", "of_two")]
