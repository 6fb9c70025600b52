"""The record of a detached run: what several sides report becomes rows in the order of the steps,
and checkpoints."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verl_like.files import file_digest
from verl_like.protocol import Metric
from verl_like.single_controller import CallEvent
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.detached import DetachedConfig, broken_detached_rules
from verl_like.trainer.detached.record import DetachedRecord
from verl_like.trainer.detached.side import SideRecorder
from verl_like.trainer.loop.recorder import Recorder
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.state import checkpoint
from verl_like.trainer.state.resume import find_run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], DetachedRecord]]:
    """Starts a run of three steps by two trainers, or continues it."""
    settings = [
        "data.train_files=t",
        "data.val_files=v",
        "actor_rollout_ref.model.path=m",
        "device=cpu",
    ]
    settings += ["placement=detached", "detached.num_trainers=2", "trainer.total_training_steps=3"]
    config = load_config(
        DetachedConfig,
        broken_detached_rules,
        [*settings, f"trainer.default_local_dir={tmp_path}", "trainer.logger=[]"],
    )
    started: list[DetachedRecord] = []

    def run() -> DetachedRecord:
        started.append(
            DetachedRecord(config, RunRecorder(config, PPO_DISPLAY, find_run(config)[0]))
        )
        return started[-1]

    yield run
    for record in started:
        record.recorder.console.close()


def do_step(
    record: DetachedRecord,
    index: int,
    step: int,
    is_last_to_do_it: bool,
    *,
    writes: int | None = None,
) -> None:
    """A trainer does a step and saves its part of a checkpoint; by then that of `writes` is
    written, or this one."""
    written = step if writes is None else writes
    partial = checkpoint.partial_of_step(record.recorder.run_dir, written)
    file = partial / f"actor/checkpoint/rank_{index}.safetensors"
    saved = {"ledger": {"next_number": 4 * step} if is_last_to_do_it else None}
    metrics = {"actor/loss": Metric.mean(step + index), "timing_s/step": Metric.max(1.0)}
    report = SideRecorder(f"trainer_{index}", node="")
    report.rows.append((step, metrics, 5.0))
    report.states.append((step, saved))
    if written:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{index} {written}")
        report.files.append((written, {str(file.relative_to(partial)): file_digest(file)}))
    record.add(report.name, report)


def validate(record: DetachedRecord, version: int) -> None:
    report = SideRecorder("maker_0", node="")
    report.log_validation({"val-core/acc": version}, version)
    record.add("maker_0", report)


def rows_of(record: DetachedRecord) -> list[tuple[int, float]]:
    """The step and the loss of each row, or of a validation the accuracy."""
    rows = map(json.loads, (record.recorder.run_dir / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row.get("actor/loss", row.get("val-core/acc"))) for row in rows]


def test_a_step_is_written_and_saved_when_all_trainers_have_done_it_and_its_validation_is_not_before_it(
    start: Callable[[], DetachedRecord],
):
    record = start()
    run_dir = record.recorder.run_dir
    validate(record, 0)
    do_step(record, 1, 1, False)
    validate(record, 1)
    record.log()
    assert (
        rows_of(record) == [(0, 0.0)] and record.validated == 0 and checkpoint.steps(run_dir) == []
    )
    do_step(record, 0, 1, True)
    record.log()
    assert rows_of(record) == [(0, 0.0), (1, 1.5), (1, 1.0)] and record.validated == 1
    whole = checkpoint.read(checkpoint.folder_of_step(run_dir, 1))
    assert (whole.state["ledger"], whole.state["validated"]) == ({"next_number": 4}, 0)
    manifest = json.loads((whole.folder / "manifest.json").read_text())
    assert list(manifest["files"]) == [
        f"actor/checkpoint/rank_{index}.safetensors" for index in (0, 1)
    ]

    do_step(record, 0, 2, False)
    do_step(record, 1, 2, True)
    validate(record, 2)
    record.log()
    record.recorder.lock.close()  # it dies with checkpoints of steps 1 and 2
    (checkpoint.folder_of_step(run_dir, 2) / "manifest.json").write_text("")

    record = start()
    assert record.recorder.run_dir == run_dir and (record.step, record.validated) == (1, 0)
    assert rows_of(record) == [(0, 0.0), (1, 1.5)], "the validation came after the checkpoint"
    validate(record, 1)
    for step in (2, 3):
        do_step(record, 0, step, True)
        do_step(record, 1, step, False)
    validate(record, 2)
    record.log()
    expected = [(0, 0.0), (1, 1.5), (1, 1.0), (2, 2.5), (2, 2.0), (3, 3.5)]
    assert rows_of(record) == expected
    assert checkpoint.steps(run_dir) == [1, 2, 3], "the last one does not wait for its validation"
    assert checkpoint.read(checkpoint.folder_of_step(run_dir, 3)).state["validated"] == 2
    validate(record, 3)
    record.log()
    record.renew_checkpoint()
    assert rows_of(record) == [*expected, (3, 3.0)]
    last = checkpoint.read(checkpoint.folder_of_step(run_dir, 3))
    assert (last.state["ledger"], last.state["validated"]) == ({"next_number": 12}, 3)
    for name in ("metrics.jsonl", "timeline.jsonl"):
        assert last.state["files"][name] == (run_dir / name).stat().st_size
    record.recorder.lock.close()


@pytest.mark.parametrize("outcome", ["Stopped: maker_0 died.", "Interrupted."])
def test_a_run_that_ends_before_its_last_validation_keeps_the_checkpoint_of_its_last_step(
    outcome: str, start: Callable[[], DetachedRecord]
):
    record = start()
    for step in (1, 2, 3):
        do_step(record, 1, step, False)
        do_step(record, 0, step, True)
        record.log()
    record.recorder.close(outcome)
    run_dir = record.recorder.run_dir
    assert checkpoint.steps(run_dir) == [1, 2, 3]
    last = checkpoint.read(checkpoint.folder_of_step(run_dir, 3))
    assert (last.state["ledger"], last.state["validated"]) == ({"next_number": 12}, -1)
    record.recorder.lock.close()


def test_a_checkpoint_that_is_written_during_the_next_step_is_that_of_its_step(
    start: Callable[[], DetachedRecord],
):
    record = start()
    run_dir = record.recorder.run_dir
    do_step(record, 0, 1, True, writes=0)
    do_step(record, 1, 1, False, writes=0)
    record.log()
    length = (run_dir / "metrics.jsonl").stat().st_size
    do_step(record, 0, 2, True, writes=1)
    record.log()
    assert rows_of(record) == [(1, 1.5)] and not checkpoint.steps(run_dir), (
        "one trainer has not written its part"
    )
    do_step(record, 1, 2, False, writes=1)
    record.log()
    assert rows_of(record) == [(1, 1.5), (2, 2.5)] and checkpoint.steps(run_dir) == [1]
    whole = checkpoint.read(checkpoint.folder_of_step(run_dir, 1))
    assert (
        whole.state["ledger"] == {"next_number": 4}
        and whole.state["files"]["metrics.jsonl"] == length
    )
    (checkpoint.partial_of_step(run_dir, 2) / "actor").mkdir(parents=True)
    record.recorder.close("Stopped.")  # before the second one is written
    assert checkpoint.steps(run_dir) == [1] and not list(run_dir.glob("*.partial"))
    record.recorder.lock.close()


def test_a_part_that_is_not_seen_where_the_checkpoint_is_completed_ends_the_run(
    start: Callable[[], DetachedRecord],
):
    record = start()
    do_step(record, 0, 1, False)
    do_step(record, 1, 1, True)
    (
        checkpoint.partial_of_step(record.recorder.run_dir, 1)
        / "actor/checkpoint/rank_0.safetensors"
    ).unlink()
    with pytest.raises(OSError, match=r"rank_0\.safetensors, which is not seen from here"):
        record.log()
    record.recorder.lock.close()


def test_a_run_heeds_sigterm_with_a_checkpoint_as_soon_as_a_trainer_would_save(
    start: Callable[[], DetachedRecord],
):
    record = start()
    report = SideRecorder("trainer_1", node="")
    record.add("trainer_1", report)
    assert not record.recorder.saves_when_ended
    report.saves_when_ended = True
    record.add("trainer_1", report)
    record.add("maker_0", SideRecorder("maker_0", node=""))
    assert record.recorder.saves_when_ended
    record.recorder.lock.close()


def test_what_a_side_has_to_say_is_said_once_with_its_name(
    start: Callable[[], DetachedRecord], capsys: pytest.CaptureFixture
):
    record, side = start(), SideRecorder("trainer_1", node="")
    side.notes.append("the checkpoint lacks the buffers of an earlier version")
    for _ in range(2):
        record.add(side.name, side.report())
    assert (
        capsys.readouterr().out.count(
            "trainer_1: the checkpoint lacks the buffers of an earlier version"
        )
        == 1
    )


def test_the_record_of_a_run_and_that_of_a_side_take_down_the_same(
    start: Callable[[], DetachedRecord], capsys: pytest.CaptureFixture
):
    """What a side was told arrives at the run as if the run had been told."""
    record, side = start(), SideRecorder("trainer_0", node="")
    call = CallEvent("trainer_pool", "actor", "update_actor", 0, 1.0, 1.5)
    rows = [{"pool": "trainer_pool", "roles": "actor"}]

    def tell(recorder: Recorder) -> None:
        recorder.record(call)
        recorder.say("the engine is not known")
        recorder.show_placement(rows)
        recorder.show_generations(0, 1, lambda row: {"prompt": f"prompt {row}"}, num_shown=1)
        recorder.show_episodes([{"step": 4, "rows": [[("five", True)]]}])
        with recorder.timer("testing"):
            pass

    tell(record.recorder)
    tell(side)
    record.add("trainer_0", side.report())
    assert side.placement == record.recorder.placement == rows
    assert record.recorder.seconds.keys() == side.seconds.keys() == {"testing"}
    first, second = (
        json.loads(line)
        for line in (record.recorder.run_dir / "timeline.jsonl").read_text().splitlines()
    )
    assert first == second and first["method"] == "update_actor"
    episodes = (record.recorder.run_dir / "episodes.jsonl").read_text().splitlines()
    assert episodes == ['{"step": 4, "rows": [[["five", true]]]}'] * 2
    record.add("trainer_0", side.report())  # with nothing new
    assert (record.recorder.run_dir / "episodes.jsonl").read_text().count("five") == 2
    said = capsys.readouterr().out
    assert (
        said.count("the engine is not known\n") == 2
        and "trainer_0: the engine is not known\n" in said
    )
    # A side's generations stay there: the run shows the metrics alone.
    assert said.count("prompt 0") == 1


def test_the_share_of_a_step_in_which_a_side_waited_is_in_its_row(start: Callable):
    record = start()
    waiting = SideRecorder("maker_0", node="")
    # The step of one second ends at 5.0: half a second of the first wait is in it.
    waiting.waits.extend([(3.5, 4.5), (4.75, 5.5)])
    record.add(waiting.name, waiting)
    for index in range(2):
        do_step(record, index, step=1, is_last_to_do_it=index == 1)
    record.log()
    (row,) = [
        json.loads(line)
        for line in (record.recorder.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert row["detached/idle/maker_0"] == pytest.approx(0.5 + 0.25)
