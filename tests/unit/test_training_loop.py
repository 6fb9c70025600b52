"""The loop of every trainer: the order in which it takes, learns, hands on, validates and saves, and an early end."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from verl_like.protocol import DataProto, Metric
from verl_like.single_controller.decorator import Dispatch, register
from verl_like.single_controller.local.worker_group import LocalWorkerGroup
from verl_like.single_controller.worker import Worker
from verl_like.single_controller.worker_group import ClassWithInitArgs
from verl_like.trainer import checkpoint
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.detached.side import SideRecorder
from verl_like.trainer.experience import Experience, Update
from verl_like.trainer.run_recorder import RunRecorder
from verl_like.trainer.run_state import IS_COMPLETE, LAST_ROW
from verl_like.trainer.supervised.config import SFTConfig, broken_supervised_rules
from verl_like.trainer.supervised.run_supervised import KINDS
from verl_like.trainer.training_loop import TrainingLoop


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
            yield Experience(DataProto(meta_info={"number": number}), None, {"loop/taken": Metric.sum(number)})
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
            given = ["data.train_files=t", "data.val_files=v", "model.path=m", f"trainer.default_local_dir={tmp_path}"]
            given += ["trainer.total_training_steps=5", "trainer.logger=[]", *settings]
            config = load_config(SFTConfig, broken_supervised_rules, given)
            recorder = RunRecorder(config, KINDS[SFTConfig].display)
            after.callback(recorder.lock.close)
            after.callback(recorder.console.close)
            return recorder

        yield start


def test_a_step_learns_each_part_as_it_is_taken_and_hands_on_when_all_are_learned(recorder_with: Callable):
    recorder = recorder_with()
    loop = Loop(recorder.config, recorder)
    loop.global_step = 3
    metrics = {name: metric.value for name, metric in loop.step().items()}
    assert metrics == {"loop/taken": 33, "loop/parts": 2, "loop/doubled": 66, "loop/accounted": 7}
    parts = [["take 3", "learn 3", "measure 3", "beside 3"], ["take 30", "learn 30", "measure 30", "beside 30"]]
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
    assert [(recorder.run_dir / f"global_step_{step}/model/huggingface").exists() for step in (4, 5)] == [False, True]


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
    assert lengths == {2: len("".join(rows[:2])), 4: len("".join(rows[:4])), 5: len("".join(rows[:4]))}
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


def test_a_step_of_a_side_is_reported_with_what_was_saved_of_it(tmp_path: Path, recorder_with: Callable):
    side = SideRecorder("trainer_0", node="", run_dir=tmp_path)
    loop = Loop(recorder_with("trainer.save_freq=2").config, side)
    loop.global_step, loop.ends_after = 1, 4
    assert loop.fit() == 4 and side.saves_when_ended
    report = side.report()
    assert [(step, metrics["loop/taken"].value) for step, metrics, _ in report.rows] == [(2, 22), (3, 33), (4, 44)]
    assert list(report.states) == [(2, {"global_step": 2}), (4, {"global_step": 4})]
    assert list(report.files) == [(2, {}), (4, {})] and report.pending is None
    assert not side.rows and not side.states and not side.files
    assert report.rows[0][1]["timing_s/step"].reduction == "max" and "timing_s/save_checkpoint" in report.rows[0][1]


def test_a_row_of_a_side_has_metrics_that_say_how_those_of_several_trainers_are_merged():
    side = SideRecorder("trainer_0", node="")
    with pytest.raises(AssertionError, match="rows of several trainers are merged"), side.step(1, 2) as log:
        log({"loop/taken": 3.0})


def test_a_loop_with_a_step_of_earlier_versions_is_refused_by_what_takes_its_place():
    with pytest.raises(
        ValueError, match=r"Old has a step\(self, prompts\), .* leave out prompts, and override take or"
    ):
        type("Old", (Loop,), {"step": lambda self, prompts, upcoming=None: {}})
    with pytest.raises(ValueError, match=r"Older has a method next_step, .* override step, which returns the metrics"):
        type("Older", (Loop,), {"next_step": lambda self: {}})
    type("Present", (Loop,), {"step": lambda self, *batches, **options: {}})
