"""When a run validates and saves, and what it times, in one process."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import metrics_of
from test_local_step import local_trainer, run_locally
from test_resume import numbers_of
from test_resume_of_own_roles import COUNTING_JUDGE

from verl_like.trainer.state.resume import find_run

VALIDATED = "val-core/exact_match/acc/mean@1"
GRPO = "algorithm.adv_estimator=grpo"
EVERY_STEP = [GRPO, "trainer.val_before_train=false", "trainer.test_freq=1"]


def saved(folder: Path) -> list[str]:
    """Model folders and checkpoints of a run, by step."""
    run = folder / "runs/latest"
    return sorted(str(path.relative_to(run)) for path in run.glob("global_step_*/*/*"))


def test_a_run_that_only_validates_has_the_numbers_of_the_first_validation_and_leaves_others_alone(
    tmp_path: Path, tiny_llama: Callable
):
    settings = [GRPO, "trainer.test_freq=-1", "trainer.save_freq=1"]
    run_locally(tmp_path, tiny_llama, *settings, steps=1)
    trained = (tmp_path / "runs/latest").resolve()
    of_training = metrics_of(tmp_path)[0]
    files = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    # With three steps the run of one step would go on.
    recorder = run_locally(tmp_path, tiny_llama, *settings, "trainer.val_only=true", steps=3)
    assert recorder.run_dir != trained
    (row,) = metrics_of(tmp_path)
    scores = {name: value for name, value in row.items() if name.startswith("val-core/")}
    assert scores
    assert scores == {name: of_training[name] for name in scores}
    assert not saved(tmp_path)
    assert (recorder.run_dir / "report.html").stat().st_size > 1000
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == files
    events = (recorder.run_dir / "timeline.jsonl").read_text().splitlines()
    assert "update_actor" not in {json.loads(event)["method"] for event in events}


def test_a_run_validates_before_every_second_step_and_at_its_end_and_saves_every_third(
    tmp_path: Path, tiny_llama: Callable, capsys: pytest.CaptureFixture[str]
):
    settings = [GRPO, "trainer.test_freq=2", "trainer.save_freq=3", "trainer.log_val_generations=2"]
    recorder = run_locally(tmp_path, tiny_llama, *settings, steps=5)
    assert [row["step"] for row in recorder.generations] == [0, 0, 5, 5]  # the first, and the last
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows if VALIDATED in row] == [0, 2, 4, 5]
    assert [row["step"] for row in rows if "timing_s/testing" in row] == [2, 4, 5]
    assert [row["step"] for row in rows if "timing_s/save_checkpoint" in row] == [3, 5]
    parts = [(3, "checkpoint"), (5, "checkpoint"), (5, "huggingface")]
    assert saved(tmp_path) == [f"global_step_{step}/actor/{part}" for step, part in parts]
    timed = {name.removeprefix("timing_s/") for name in rows[1] if name.startswith("timing_s/")}
    assert {"gen", "reward", "adv", "update_actor", "update_weights", "step"} <= timed
    # Eight prompts are two batches of four: the third step begins the second epoch.
    assert [row["training/epoch"] for row in rows[1:]] == [0, 0, 1, 1, 2]
    assert [row["training/global_step"] for row in rows[1:]] == [1, 2, 3, 4, 5]
    validated = {name for name in rows[0] if name != "step"}
    assert all(name.startswith(("val-core/", "val-aux/")) for name in validated)
    assert "val-aux/early_ratio" not in validated
    events = [
        json.loads(line)
        for line in (tmp_path / "runs/latest/timeline.jsonl").read_text().splitlines()
    ]
    assert {event["step"] for event in events if event["method"] == "update_actor"} == {
        1,
        2,
        3,
        4,
        5,
    }
    assert re.search(r"step 5/5\b", capsys.readouterr().out)


def test_a_run_that_neither_validates_nor_saves_on_the_way_still_leaves_its_models(
    tmp_path: Path, tiny_llama: Callable
):
    settings = ["trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    run_locally(tmp_path, tiny_llama, *settings, steps=2)
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2] and not any(VALIDATED in row for row in rows)
    parts = ("checkpoint", "huggingface")
    assert saved(tmp_path) == [
        f"global_step_2/{role}/{part}" for role in ("actor", "critic") for part in parts
    ]
    # Random responses of at most four tokens to prompts of four or five; the limits are 4 and 8.
    assert all(
        row["prompt_length/max"] <= 5 and row["prompt_length/clip_ratio"] == 0 for row in rows
    )
    assert all(
        (row["response_length/clip_ratio"] > 0) == (row["response_length/max"] == 4) for row in rows
    )


def test_a_run_that_validates_and_saves_in_every_step_does(tmp_path: Path, tiny_llama: Callable):
    settings = ["trainer.val_before_train=false", "trainer.test_freq=1", "trainer.save_freq=1"]
    run_locally(tmp_path, tiny_llama, GRPO, *settings, steps=2)
    assert [row["step"] for row in metrics_of(tmp_path) if VALIDATED in row] == [1, 2]
    assert len(saved(tmp_path)) == 3


@pytest.mark.parametrize("method", ["learn", "save"])
def test_a_run_that_sigterm_ends_leaves_its_models_wherever_in_the_step_it_comes(
    tmp_path: Path, tiny_llama: Callable, method: str
):
    save_freq = {"learn": -1, "save": 2}[method]
    with local_trainer(
        tmp_path, tiny_llama, GRPO, f"trainer.save_freq={save_freq}", steps=4
    ) as trainer:
        owner = trainer if method == "save" else trainer.learner
        call = getattr(owner, method)

        def call_and_terminate(*arguments: Any) -> Any:
            if trainer.global_step == 2:
                trainer.recorder.terminate(signal.SIGTERM, None)
            return call(*arguments)

        setattr(owner, method, call_and_terminate)
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
    assert saved(tmp_path) == ["global_step_2/actor/checkpoint", "global_step_2/actor/huggingface"]


class EndsHere(Exception):
    """What ends a run in a test, as the death of a worker does."""


def run_that_ends_in_validation(
    folder: Path, tiny_llama: Callable, step: int, *settings: str
) -> None:
    """Two steps, of which the validation of one raises an error."""
    with local_trainer(folder, tiny_llama, *EVERY_STEP, *settings) as trainer:
        validate = trainer.validate

        def validate_or_end() -> dict[str, float]:
            if trainer.global_step == step:
                raise EndsHere
            return validate()

        trainer.validate = validate_or_end
        with pytest.raises(EndsHere):
            trainer.fit()


def test_a_run_that_ends_in_its_last_validation_has_its_models_and_goes_on_with_that_validation(
    tmp_path: Path, tiny_llama: Callable
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_locally(whole, tiny_llama, *EVERY_STEP)
    run_that_ends_in_validation(parts, tiny_llama, 2)
    assert saved(parts) == ["global_step_2/actor/checkpoint", "global_step_2/actor/huggingface"]
    assert [row["step"] for row in metrics_of(parts)] == [1]
    run_locally(parts, tiny_llama, *EVERY_STEP)
    assert len(list((parts / "runs").glob("2*"))) == 1
    assert numbers_of(parts) == numbers_of(whole) and VALIDATED in numbers_of(parts)[1]
    assert metrics_of(parts)[1]["timing_s/update_actor"] > 0
    run_locally(parts, tiny_llama, *EVERY_STEP)
    assert len(list((parts / "runs").glob("2*"))) == 2, (
        "a run that has its last validation is complete"
    )


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param(True, id="ended in its last validation"),
        pytest.param(False, id="complete", marks=pytest.mark.proof),
    ],
)
def test_a_run_goes_on_with_more_steps_as_if_it_had_had_them_from_the_start(
    ends: bool, tmp_path: Path, tiny_llama: Callable, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "counting_judge.py").write_text(COUNTING_JUDGE)  # a role that a validation changes
    monkeypatch.syspath_prepend(tmp_path)
    settings = ["worker_classes.judge=counting_judge.Judge", "role_mapping.judge=global_pool"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_locally(whole, tiny_llama, *EVERY_STEP, *settings, steps=3)
    if ends:
        run_that_ends_in_validation(parts, tiny_llama, 2, *settings)
    else:
        run_locally(parts, tiny_llama, *EVERY_STEP, *settings)
    run_locally(parts, tiny_llama, *EVERY_STEP, *settings, steps=3)
    assert len(list((parts / "runs").glob("2*"))) == 1
    assert [row["step"] for row in metrics_of(parts)] == [1, 2, 3]
    assert numbers_of(parts) == numbers_of(whole)


def test_a_run_that_lacks_its_last_validation_has_all_steps_of_one_with_fewer(
    tmp_path: Path, tiny_llama: Callable
):
    run_that_ends_in_validation(tmp_path, tiny_llama, 2)
    run_locally(tmp_path, tiny_llama, *EVERY_STEP, steps=1)
    assert len(list((tmp_path / "runs").glob("2*"))) == 2


def test_sigterm_after_the_last_validation_changes_nothing(tmp_path: Path, tiny_llama: Callable):
    with local_trainer(tmp_path, tiny_llama, *EVERY_STEP) as trainer:
        renew = trainer.recorder.renew_checkpoint

        def terminate_and_renew(*arguments: Any) -> None:
            trainer.recorder.terminate(signal.SIGTERM, None)
            renew(*arguments)

        trainer.recorder.renew_checkpoint = terminate_and_renew
        trainer.fit()
    assert find_run(trainer.config)[0] is None, "the run is complete"


def test_a_model_that_is_taken_away_during_the_last_validation_is_no_error(
    tmp_path: Path, tiny_llama: Callable
):
    with local_trainer(tmp_path, tiny_llama, *EVERY_STEP) as trainer:
        validate = trainer.validate

        def take_and_validate() -> dict[str, float]:
            if trainer.global_step == 2:
                (tmp_path / "runs/latest/global_step_2/actor/huggingface").rename(tmp_path / "mine")
            return validate()

        trainer.validate = take_and_validate
        trainer.fit()
    assert VALIDATED in metrics_of(tmp_path)[1]


def test_sigterm_in_the_last_validation_ends_the_run_at_once_with_all_its_steps(
    tmp_path: Path, tiny_llama: Callable
):
    with local_trainer(tmp_path, tiny_llama, *EVERY_STEP) as trainer:
        validate = trainer.validate

        def terminate_and_validate() -> dict[str, float]:
            if trainer.global_step == 2:
                trainer.recorder.terminate(signal.SIGTERM, None)
                pytest.fail("the run goes on")
            return validate()

        trainer.validate = terminate_and_validate
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
    assert saved(tmp_path) == ["global_step_2/actor/checkpoint", "global_step_2/actor/huggingface"]


def test_sigterm_in_the_last_step_leaves_its_validation_to_the_run_that_goes_on(
    tmp_path: Path, tiny_llama: Callable, capsys: pytest.CaptureFixture[str]
):
    with local_trainer(tmp_path, tiny_llama, *EVERY_STEP) as trainer:
        save = trainer.save

        def terminate_and_save() -> Path:
            trainer.recorder.terminate(signal.SIGTERM, None)
            return save()

        trainer.save = terminate_and_save
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
    assert (
        "SIGTERM: all steps are saved; the same command validates the last one."
        in capsys.readouterr().out
    )
    assert [row["step"] for row in metrics_of(tmp_path)] == [1]
    run_locally(tmp_path, tiny_llama, *EVERY_STEP)
    assert [VALIDATED in row for row in metrics_of(tmp_path)] == [True, True]
