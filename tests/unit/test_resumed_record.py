"""What a resumed run goes on with, of the record that it was to write."""

import pytest
from omegaconf import OmegaConf

from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.config.detached import DetachedConfig
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.state import checkpoint
from verl_like.trainer.state.resume import ResumedRun, lock_run, read_config, rename_keys

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
