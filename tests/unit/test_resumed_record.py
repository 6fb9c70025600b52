"""What a resumed run goes on with, of the record that it was to write."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.config.detached import DetachedConfig
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.state import checkpoint
from verl_like.trainer.state.resume import ResumedRun, lock_run, read_config, rename_keys
from verl_like.trainer.state.run_state import RecordState

REQUIRED = ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=m"]


def test_a_resumed_run_shows_the_generations_that_come_after_those_it_has_shown(tmp_path):
    config = load_ppo_config([*REQUIRED, f"trainer.default_local_dir={tmp_path}"])
    recorder, shown = RunRecorder(config, PPO_DISPLAY), []

    def row(number):
        shown.append(number)
        return {"response": str(number)}

    for step in (1, 2):
        recorder.show_generations(step, 7, row, num_shown=2)
    assert shown == [0, 1, 2, 3]
    partial = checkpoint.begin(recorder.run_dir, 2)
    recorder.begin_checkpoint(partial, 2, {"global_step": 2}, {})
    recorder.commit_checkpoint(wait=True)
    recorder.close("")
    saved, _ = checkpoint.newest(recorder.run_dir)
    assert saved.state["shown"]["num_validations"] == 2
    recorder.lock.close()
    resumed = RunRecorder(
        config, PPO_DISPLAY, ResumedRun(recorder.run_dir, saved, lock_run(recorder.run_dir))
    )
    resumed.show_generations(3, 7, row, num_shown=2)
    resumed.close("")
    assert shown == [0, 1, 2, 3, 4, 5]


def show(recorder: RunRecorder, step: int) -> None:
    """Shows a generation and an episode of a step."""
    recorder.show_generations(step, 1, lambda row: {"response": "r"}, num_shown=1)
    recorder.show_episodes([{"step": step}])


def saved_run(folder: Path) -> tuple[RunRecorder, checkpoint.Checkpoint]:
    """A run that showed generations and episodes in steps 1 and 2 and has a checkpoint of step
    1."""
    config = load_ppo_config([*REQUIRED, f"trainer.default_local_dir={folder}"])
    recorder = RunRecorder(config, PPO_DISPLAY)
    for step in (1, 2):
        show(recorder, step)
        if step == 1:
            partial = checkpoint.begin(recorder.run_dir, 1)
            recorder.begin_checkpoint(partial, 1, {"global_step": 1}, {})
            recorder.commit_checkpoint(wait=True)
    recorder.close("")
    recorder.lock.close()
    saved, _ = checkpoint.newest(recorder.run_dir)
    assert saved is not None
    return recorder, saved


def resume(recorder: RunRecorder, saved: checkpoint.Checkpoint) -> RunRecorder:
    lock = lock_run(recorder.run_dir)
    return RunRecorder(recorder.config, PPO_DISPLAY, ResumedRun(recorder.run_dir, saved, lock))


def steps_of(recorder: RunRecorder, name: str) -> list[int]:
    lines = (recorder.run_dir / name).read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


SHOWN = pytest.mark.parametrize("name", ["generations.jsonl", "episodes.jsonl"])


@SHOWN
def test_all_that_is_shown_is_in_a_file_that_a_resumed_run_cuts(tmp_path, name):
    recorder, saved = saved_run(tmp_path)
    assert steps_of(recorder, name) == [1, 2]
    resumed = resume(recorder, saved)
    assert steps_of(recorder, name) == [1]
    show(resumed, 2)
    resumed.close("")
    assert steps_of(recorder, name) == [1, 2]


@SHOWN
def test_a_run_of_an_earlier_version_without_such_a_file_goes_on(tmp_path, name):
    recorder, saved = saved_run(tmp_path)
    (recorder.run_dir / name).unlink()
    del saved.state["files"][name]
    RecordState.model_validate(saved.state)
    resumed = resume(recorder, saved)
    show(resumed, 2)
    resumed.close("")
    assert steps_of(recorder, name) == [2]


@SHOWN
@pytest.mark.parametrize("is_of_an_earlier_version", [False, True])
def test_a_link_in_the_place_of_such_a_file_is_refused(tmp_path, name, is_of_an_earlier_version):
    recorder, saved = saved_run(tmp_path)
    precious = tmp_path / "precious"
    precious.write_text("all that there is")
    (recorder.run_dir / name).unlink()
    (recorder.run_dir / name).symlink_to(precious)
    if is_of_an_earlier_version:
        del saved.state["files"][name]
    with pytest.raises(OSError, match=name):
        resume(recorder, saved)
    assert precious.read_text() == "all that there is"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: &one [1, 2]\nb: *one\n", "(it has an alias)"),
        ("a: " + "[" * 50 + "]" * 50, "(it is nested more than 50 levels deep)"),
    ],
)
def test_a_configuration_that_no_run_writes_is_refused_with_what_is_wrong_in_it(
    tmp_path, text, fault
):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError) as refused:
        read_config(tmp_path)
    assert str(refused.value) == f"{tmp_path}/config.yaml is not YAML that a run writes {fault}"
    (tmp_path / "config.yaml").write_text(f"a: {'[' * 49}7{']' * 49}")
    assert list(read_config(tmp_path)) == ["a"]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"trainer": {"pipeline_depth": 1}}, {"trainer": {"max_staleness": 1}}),
        (
            {"trainer": {"pipeline_depth": 0}, "detached": {"max_staleness": 3, "num_makers": 2}},
            {"trainer": {"max_staleness": 3}, "detached": {"num_makers": 2}},
        ),
        (
            {"trainer": {"pipeline_depth": 0}, "detached": {"max_staleness": 0}},
            {"trainer": {"max_staleness": 0}, "detached": {}},
        ),
        ({"trainer": {"max_staleness": 1}}, {"trainer": {"max_staleness": 1}}),
    ],
)
def test_the_record_of_a_run_of_an_earlier_version_is_read_by_the_keys_of_today(before, now):
    saved = OmegaConf.create(before)
    rename_keys(saved, DetachedConfig.replaced_keys)
    assert OmegaConf.to_container(saved) == now
