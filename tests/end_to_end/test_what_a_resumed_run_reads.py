"""What a run is compared by when it goes on: its settings, and what is behind its paths."""

import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml
from runs import tiny_run_settings
from test_which_run_is_resumed import run_until

from verl_like.trainer.config import PPOConfig, load_ppo_config
from verl_like.trainer.config.detached import DetachedBlock
from verl_like.trainer.state.resume import (
    _FREE_KEYS,
    differing_keys,
    find_run,
    fingerprints_of,
    settings_of,
)


@pytest.fixture
def config_with(tmp_path: Path, tiny_llama: Callable) -> Callable[..., PPOConfig]:
    settings = [*tiny_run_settings(tmp_path, tiny_llama), "trainer.total_training_steps=4"]
    return lambda *further: load_ppo_config([*settings, *further])


def with_paths(*overrides: str) -> PPOConfig:
    required = [
        "data.train_files=t",
        "data.val_files=v",
        "actor_rollout_ref.model.path=m",
        "device=cpu",
    ]
    return load_ppo_config([*required, *overrides])


def changed(before: dict[str, str], *overrides: str) -> list[str]:
    now = fingerprints_of(with_paths(*overrides))
    return sorted(key for key in {*before, *now} if before.get(key) != now.get(key))


def test_a_file_counts_whole_and_by_content_and_a_folder_by_the_ends_of_its_files(tmp_path: Path):
    data, model = tmp_path / "data.parquet", tmp_path / "model"
    model.mkdir()
    weights = model / "weights.safetensors"
    data.write_bytes(bytes(3 << 20))
    weights.write_bytes(bytes(3 << 20))
    settings = [f"data.train_files={data}", f"actor_rollout_ref.model.path={model}"]
    before = fingerprints_of(with_paths(*settings))
    data.rename(moved := tmp_path / "moved.parquet")
    settings[0] = f"data.train_files={moved}"
    assert changed(before, *settings) == []
    for file, position, keys in [
        (moved, 2_000_000, ["data.train_files"]),
        (weights, 1_500_000, []),  # in its middle MiB
        (weights, 1, ["actor_rollout_ref.model.path", "critic.model.path"]),
        (weights, (3 << 20) - 1, ["actor_rollout_ref.model.path", "critic.model.path"]),
    ]:
        with open(file, "r+b") as opened:
            os.pwrite(opened.fileno(), b"1", position)
        assert changed(before, *settings) == keys
        with open(file, "r+b") as opened:
            os.pwrite(opened.fileno(), b"\0", position)


def test_what_is_not_on_the_disk_counts_by_its_whole_name():
    own = [f"actor_rollout_ref.model.path={name}" for name in ("Qwen/X", "evil/X")]
    assert "actor_rollout_ref.model.path" in changed(fingerprints_of(with_paths(own[0])), own[1])
    reward = "custom_reward_function.path="
    before = fingerprints_of(with_paths(f"{reward}https://one.example/score"))
    assert changed(before, f"{reward}https://two.example/score") == ["custom_reward_function.path"]
    assert changed(before) == ["custom_reward_function.path"]  # null


def test_a_path_that_is_null_now_is_refused(config_with: Callable):
    run_until(2, config_with())
    with pytest.raises(
        ValueError, match=r"read other files than there are now: custom_reward_function\.path"
    ):
        find_run(config_with("custom_reward_function.path=null"))


def test_arguments_of_the_reward_are_compared_as_they_are_whatever_they_are_called(
    config_with: Callable, tmp_path: Path
):
    log = tmp_path / "log"
    arguments = ["log_path", "seeds_path", "data_files"]
    values = [str(log), "{a: 1}", "[3, 4]"]
    given = [
        f"+custom_reward_function.reward_kwargs.{a}={v}"
        for a, v in zip(arguments, values, strict=True)
    ]
    folder = run_until(2, config_with(*given))
    log.write_text("what the reward wrote")
    assert differing_keys(config_with(*given), folder) == []
    find_run(config_with(*given))[0].lock.close()
    (differing,) = differing_keys(config_with(*given[:2]), folder)
    assert differing.startswith("custom_reward_function.reward_kwargs={")


def test_a_free_key_is_free_together_with_the_keys_that_follow_it(config_with: Callable):
    folder = run_until(1, config_with())
    for override in [
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "critic.ppo_micro_batch_size_per_gpu=1",
        "reward_model.micro_batch_size_per_gpu=3",
        "critic.ppo_max_token_len_per_gpu=1000",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "trainer.total_epochs=7",
        "trainer.n_gpus_per_node=1",
        "placement=split",
    ]:
        assert differing_keys(config_with(override), folder) == [], override


def test_a_key_that_is_newer_than_a_run_has_its_default_there(config_with: Callable):
    folder = run_until(1, config_with())
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    del saved["data"]["shuffle"], saved["critic"]["ppo_epochs"], saved["algorithm"]["kl_ctrl"]
    (folder / "config.yaml").write_text(yaml.safe_dump(saved))
    assert differing_keys(config_with(), folder) == []
    assert differing_keys(config_with("data.shuffle=false"), folder) == [
        "data.shuffle=True (here: False)"
    ]
    assert differing_keys(config_with("actor_rollout_ref.actor.ppo_epochs=2"), folder) == [
        "actor_rollout_ref.actor.ppo_epochs=1 (here: 2)",
        "critic.ppo_epochs=1 (here: 2)",
    ]


def test_another_number_of_training_steps_is_noted(config_with: Callable):
    run_until(2, config_with())
    for steps, num_notes in ((4, 1), (6, 2)):
        run, notes = find_run(config_with(f"trainer.total_training_steps={steps}"))
        run.lock.close()
        assert len(notes) == num_notes
    assert "was to have 4 training steps: a schedule of the learning rate" in notes[1]


@pytest.mark.parametrize("name", ["config.yaml", "inputs.json"])
@pytest.mark.parametrize("text", ["", "{", None])
def test_a_run_whose_settings_cannot_be_read_is_noted_or_refused(
    name: str, text: str | None, config_with: Callable
):
    folder = run_until(2, config_with())
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    run, notes = find_run(config_with())
    assert (
        run is None
        and len(notes) == 1
        and f"{folder} is unfinished and is not continued: it has no" in notes[0]
    )
    with pytest.raises(ValueError, match=f"{folder} has no config.yaml .* can be read"):
        find_run(
            config_with("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}")
        )


def test_every_key_that_may_change_is_a_key(config_with: Callable):
    keys = [key for key, _ in settings_of(config_with().model_dump(mode="json"))]
    keys += [f"detached.{name}" for name in DetachedBlock.model_fields]
    assert [free for free in _FREE_KEYS if not any(fnmatchcase(key, free) for key in keys)] == []
    fixed = {key for key in keys if not any(fnmatchcase(key, free) for free in _FREE_KEYS)}
    assert {
        "trainer.seed",
        "data.train_batch_size",
        "actor_rollout_ref.rollout.n",
        "algorithm.gamma",
    } <= fixed
    assert {
        "actor_rollout_ref.actor.optim.lr",
        "critic.cliprange_value",
        "actor_rollout_ref.rollout.name",
    } <= fixed
