"""The loop of every trainer: the order in which it takes, learns, hands on, validates and saves,
and an early end."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from verl_like.protocol import DataProto, Metric
from verl_like.single_controller.decorator import Dispatch, register
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker import Worker
from verl_like.single_controller.worker_group import ClassWithInitArgs
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.errors import ConfigError
from verl_like.trainer.config.supervised import SFTConfig, broken_supervised_rules
from verl_like.trainer.detached.side import SideRecorder
from verl_like.trainer.loop.experience import Experience, Update
from verl_like.trainer.loop.training_loop import TrainingLoop
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.state import checkpoint
from verl_like.trainer.state.run_state import IS_COMPLETE, LAST_ROW
from verl_like.trainer.supervised.run_supervised import KINDS


def to_the_rank(group: Any, number: int) -> tuple[tuple, dict]:
    return ([number],), {}


def of_the_rank(group: Any, outputs: list[DataProto]) -> DataProto:
    return outputs[0]


class Model(Worker):
    """Doubles numbers as its update, and writes a file as its checkpoint."""

    @register(dispatch_mode={"dispatch_fn": to_the_rank, "collect_fn": of_the_rank}, blocking=False)
    def update(self, number: float) -> DataProto:
        return DataProto(meta_info={"metrics": {"loop/doubled": Metric.sum(2 * number)}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, path: str, wait: bool) -> None:
        Path(path).mkdir(parents=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_result(self, wait: bool) -> dict:
        return {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_hf(self, path: str) -> None:
        Path(path).mkdir(parents=True)
        (Path(path) / "model").write_text("m")


class Loop(TrainingLoop):
    """Two parts a step, of the numbers 1 and 10 times the step. It notes what it does."""

    ends_after = 5

    def __init__(self, config: Any, recorder: Any, val_dataset: Any = None) -> None:
        self.config, self.recorder, self.val_dataset = config, recorder, val_dataset
        group = LocalWorkerGroup(ClassWithInitArgs(Model), role="model")
        self.trained = {"model": group}
        self.done: list[str] = []

    @property
    def last_step(self) -> int:
        return self.ends_after

    def take(self) -> Iterator[Experience]:
        for factor in (1, 10):
            number = factor * self.global_step
            self.done.append(f"take {number}")
            yield Experience(
                DataProto(meta_info={"number": number}), None, {"loop/taken": Metric.sum(number)}
            )
            self.done.append(f"beside {number}")

    def learn(self, experience: Experience) -> Update:
        number = experience.batch.meta_info["number"]
        self.done.append(f"learn {number}")
        return Update([self.trained["model"].update.remote(number)], {"loop/parts": Metric.sum(1)})

    def metrics_of(self, experience: Experience) -> dict[str, Metric]:
        self.done.append(f"measure {experience.batch.meta_info['number']}")
        return {}

    def account(self, learned: Mapping[str, Metric]) -> dict[str, Metric]:
        self.done.append(f"account for {learned['loop/doubled'].value:g}")
        return {"loop/accounted": Metric.max(7)}

    def hand_on(self) -> None:
        self.done.append(f"hand on {self.global_step}")

    def validate(self) -> dict[str, float]:
        self.done.append(f"validate {self.global_step}")
        return {"val-core/loss": 1.0 / (1 + self.global_step)}

    def save(self) -> Path:
        self.done.append(f"save {self.global_step}")
        return super().save()


@pytest.fixture
def recorder_with(tmp_path: Path) -> Iterator[Callable[..., RunRecorder]]:
    """Makes the record of a run with these settings."""
    with contextlib.ExitStack() as after:

        def start(*settings: str) -> RunRecorder:
            given = [
                "data.train_files=t",
                "data.val_files=v",
                "model.path=m",
                f"trainer.default_local_dir={tmp_path}",
            ]
            given += ["trainer.total_training_steps=5", "trainer.logger=[]", *settings]
            config = load_config(SFTConfig, broken_supervised_rules, given)
            recorder = RunRecorder(config, KINDS[SFTConfig].display)
            after.callback(recorder.lock.close)
            after.callback(recorder.console.close)
            return recorder

        yield start


@pytest.mark.parametrize("before", ["true", "false"])
def test_a_run_that_only_validates_validates_once_and_neither_trains_nor_saves(
    recorder_with: Callable, before: str
):
    recorder = recorder_with(
        "trainer.val_only=true", f"trainer.val_before_train={before}", "trainer.test_freq=1"
    )
    loop = Loop(recorder.config, recorder, val_dataset=["a row"])
    assert loop.fit() == 0
    assert loop.done == ["validate 0"]
    rows = [json.loads(line) for line in (recorder.run_dir / "metrics.jsonl").open()]
    assert [(row["step"], row["val-core/loss"]) for row in rows] == [(0, 1.0)]
    assert not checkpoint.steps(recorder.run_dir)


def test_a_run_that_only_validates_needs_rows_and_continues_no_run(tmp_path: Path):
    needed = ["data.train_files=t", "model.path=m", "trainer.val_only=true"]
    with pytest.raises(ConfigError, match=r"trainer\.val_only=true needs rows to validate with"):
        load_config(SFTConfig, broken_supervised_rules, needed)
    resumed = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}"]
    message = r"trainer: val_only=true with trainer\.resume_mode=resume_path"
    with pytest.raises(ConfigError, match=message):
        load_config(SFTConfig, broken_supervised_rules, [*needed, "data.val_files=v", *resumed])


def test_a_step_learns_each_part_as_it_is_taken_and_hands_on_when_all_are_learned(
    recorder_with: Callable,
):
    recorder = recorder_with()
    loop = Loop(recorder.config, recorder)
    loop.global_step = 3
    metrics = {name: metric.value for name, metric in loop.step().items()}
    assert metrics == {"loop/taken": 33, "loop/parts": 2, "loop/doubled": 66, "loop/accounted": 7}
    parts = [
        ["take 3", "learn 3", "measure 3", "beside 3"],
        ["take 30", "learn 30", "measure 30", "beside 30"],
    ]
    assert loop.done == [*parts[0], *parts[1], "account for 66", "hand on 3"]


def seen(loop: Loop) -> list[str]:
    return [entry for entry in loop.done if entry.startswith(("hand on", "validate", "save"))]


def test_a_step_is_validated_before_it_is_saved_and_the_last_one_after(recorder_with: Callable):
    recorder = recorder_with("trainer.test_freq=2", "trainer.save_freq=4")
    loop = Loop(recorder.config, recorder, val_dataset=["a row"])
    assert loop.fit() == 5
    expected = ["validate 0", "hand on 1", "hand on 2", "validate 2", "hand on 3"]
    expected += ["hand on 4", "validate 4", "save 4", "hand on 5", "save 5", "validate 5"]
    assert seen(loop) == expected
    assert [
        (recorder.run_dir / f"global_step_{step}/model/huggingface").exists() for step in (4, 5)
    ] == [False, True]


def test_the_checkpoint_of_the_step_before_is_completed_while_the_update_runs(
    recorder_with: Callable,
):
    recorder = recorder_with("trainer.save_freq=1", "trainer.test_freq=-1")
    loop = Loop(recorder.config, recorder)
    commit = recorder.commit_checkpoint

    def noted_commit(wait: bool, timeout_s: float | None = None) -> None:
        loop.done.append(
            f"commit {recorder.pending.step if recorder.pending else None} "
            f"{'waits' if wait else ''}"
        )
        commit(wait, timeout_s)

    recorder.commit_checkpoint = noted_commit
    loop.ends_after = 2
    loop.fit()
    second_step = loop.done[loop.done.index("take 2") :]
    assert second_step[:4] == ["take 2", "learn 2", "commit 1 ", "measure 2"]
    assert second_step[-3:] == ["save 2", "commit None waits", "commit None waits"]


@pytest.mark.parametrize("save_freq", [2, -1])
def test_a_run_that_sigterm_ends_after_its_step_has_the_whole_record_and_its_models(
    save_freq: int, recorder_with: Callable
):
    recorder = recorder_with(f"trainer.save_freq={save_freq}", "trainer.test_freq=-1")
    show_step = recorder.console.show_step

    def end_in_step_2(step: int, *arguments: Any) -> None:
        show_step(step, *arguments)
        recorder.is_ending |= step == 2

    recorder.console.show_step = end_in_step_2
    with pytest.raises(KeyboardInterrupt):
        Loop(recorder.config, recorder).fit()
    state = checkpoint.read(recorder.run_dir / "global_step_2").state
    assert LAST_ROW not in state
    assert (
        state["files"]["metrics.jsonl"] == (recorder.run_dir / "metrics.jsonl").stat().st_size > 0
    )
    assert (recorder.run_dir / "global_step_2/model/huggingface/model").read_text() == "m"


def test_sigterm_in_the_validation_before_the_first_step_ends_the_run_at_once(
    recorder_with: Callable,
):
    recorder = recorder_with("trainer.test_freq=1")
    loop = Loop(recorder.config, recorder, val_dataset=["a row"])
    seen_in_validation: list[bool] = []
    loop.validate = lambda: seen_in_validation.append(recorder.saves_when_ended) or {}
    loop.ends_after = 2
    loop.fit()
    assert seen_in_validation == [False, True, False]


def test_a_loop_whose_source_ends_early_ends_with_the_models_of_that_step(recorder_with: Callable):
    class EndingLoop(Loop):
        def account(self, learned: Mapping[str, Metric]) -> dict[str, Metric]:
            self.ends_after = min(self.ends_after, 2)
            return super().account(learned)

    recorder = recorder_with("trainer.test_freq=5")
    loop = EndingLoop(recorder.config, recorder, val_dataset=["a row"])
    assert loop.fit() == 2
    assert seen(loop) == ["validate 0", "hand on 1", "hand on 2", "save 2", "validate 2"]
    assert (recorder.run_dir / "global_step_2/model/huggingface/model").read_text() == "m"
    state = checkpoint.read(recorder.run_dir / "global_step_2").state
    assert state["global_step"] == 2 and state[IS_COMPLETE] is True


def test_a_checkpoint_before_the_end_of_its_step_has_the_row_so_far_and_another_the_record_with_the_row(
    recorder_with: Callable,
):
    recorder = recorder_with("trainer.save_freq=2", "trainer.test_freq=-1")
    Loop(recorder.config, recorder).fit()
    lengths = {}
    rows = (recorder.run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    for step in (2, 4, 5):
        state = checkpoint.read(recorder.run_dir / f"global_step_{step}").state
        lengths[step] = state["files"]["metrics.jsonl"]
        assert (LAST_ROW in state) == (step == 5)
    # The last one was saved before its row was written.
    assert lengths == {
        2: len("".join(rows[:2])),
        4: len("".join(rows[:4])),
        5: len("".join(rows[:4])),
    }
    assert state[LAST_ROW]["loop/taken"] == 55 and state[LAST_ROW]["training/global_step"] == 5


def test_what_a_step_began_to_save_before_it_failed_is_no_checkpoint(recorder_with: Callable):
    recorder = recorder_with("trainer.save_freq=2", "trainer.test_freq=-1")

    def log_or_fail(metrics: Mapping[str, float], step: int) -> None:
        if step == 2:
            raise OSError("No space left on device")

    recorder.tracking.log = log_or_fail
    with pytest.raises(OSError, match="No space left"):
        Loop(recorder.config, recorder).fit()
    recorder.close("Stopped.")
    assert not list(recorder.run_dir.glob("global_step_*"))


def test_a_step_of_a_side_is_reported_with_what_was_saved_of_it(
    tmp_path: Path, recorder_with: Callable
):
    side = SideRecorder("trainer_0", node="", run_dir=tmp_path)
    loop = Loop(recorder_with("trainer.save_freq=2").config, side)
    loop.global_step, loop.ends_after = 1, 4
    pending: list[int | None] = []
    reports: list[SideRecorder] = []
    run_step = loop.run_step

    def run_and_report() -> None:
        run_step()
        pending.append(side.pending and side.pending.step)
        reports.append(side.report())

    loop.run_step = run_and_report
    assert loop.fit() == 4 and side.saves_when_ended
    assert pending == [2, None, None] and all(report.pending is None for report in reports)
    rows = [row for report in reports for row in report.rows]
    assert [(step, metrics["loop/taken"].value) for step, metrics, _ in rows] == [
        (2, 22),
        (3, 33),
        (4, 44),
    ]
    assert [list(report.states) for report in reports] == [
        [(2, {"global_step": 2})],
        [],
        [(4, {"global_step": 4})],
    ]
    assert [list(report.files) for report in reports] == [[], [(2, {})], [(4, {})]]
    assert not side.rows and not side.states and not side.files
    timed = [{name for name in metrics if name.startswith("timing_s/")} for _, metrics, _ in rows]
    assert timed[0] == timed[2] == {"timing_s/step", "timing_s/save_checkpoint"} and timed[1] == {
        "timing_s/step"
    }
    seconds = [metrics["timing_s/step"] for _, metrics, _ in rows]
    assert all(each.value > 0 and each.reduction == "max" for each in seconds)


def test_a_row_of_a_side_has_metrics_that_say_how_those_of_several_trainers_are_merged():
    side = SideRecorder("trainer_0", node="")
    with (
        pytest.raises(AssertionError, match="rows of several trainers are merged"),
        side.step(1, 2) as log,
    ):
        log({"loop/taken": 3.0})


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (
            {"step": lambda self, prompts, upcoming=None: {}},
            "step has the arguments prompts, upcoming, .* leave them",
        ),
        (
            {"step": lambda self, *, batch: {}},
            "step has the arguments batch, .* and override take or learn",
        ),
        (
            {"next_step": lambda self: {}},
            "has a method next_step, .*: override step, which takes its batch itself, or",
        ),
        (
            {"one_step": lambda self: None},
            "has a method one_step, .*: override run_step, which is every step with its",
        ),
        (
            {"last_step": lambda self: None},
            "last_step is a method, and it is the number of the last step: make it a",
        ),
    ],
)
def test_a_loop_with_a_step_of_earlier_versions_is_refused_by_what_takes_its_place(
    methods: dict, message: str
):
    with pytest.raises(ValueError, match=message):
        type("Old", (Loop,), methods)


def test_a_loop_may_have_a_step_of_its_own_whatever_its_first_argument_is_called():
    type("Present", (Loop,), {"step": lambda trainer, *batches, **options: {}})
