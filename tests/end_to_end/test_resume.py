"""A run that ended is continued as if it had not, in one process."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import metrics_of, tiny_run_settings
from safetensors.torch import load_file
from test_local_step import local_trainer, run_locally

from verl_like.single_controller.failure import WorkerError
from verl_like.trainer.config import PPOConfig, load_ppo_config
from verl_like.trainer.ppo.experience_maker import Experience
from verl_like.trainer.ppo.learner import Update
from verl_like.trainer.state import checkpoint

PPO = [
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "trainer.critic_warmup=1",
]
PPO += [
    "actor_rollout_ref.actor.optim.lr_scheduler_type=linear",
    "trainer.test_freq=2",
    "trainer.save_freq=1",
]
APART = ["+resource_pool_spec.rollout_pool=[1]", "role_mapping.rollout=rollout_pool"]
GRPO = ["algorithm.adv_estimator=grpo", "trainer.save_freq=1"]
FILTERED = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"]


def numbers_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of each step without its times."""
    times = ("timing_s/", "perf/", "reward/early_ratio")
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(times) and "/perf/" not in name
        }
        for row in metrics_of(folder)
    ]


def tensors_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Of every file of the step's checkpoint: weights, optimizers and the models that are
    exported."""
    checkpoint = folder / f"runs/latest/global_step_{step}"
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {
        f"{file.relative_to(checkpoint)} {name}": t
        for file in files
        for name, t in load_file(file).items()
    }


def run_until(
    last_step: int, folder: Path, tiny_llama: Callable, *settings: str, steps: int = 5
) -> None:
    """A run that is interrupted in the middle of the step after `last_step`."""
    with local_trainer(folder, tiny_llama, *settings, steps=steps) as trainer:
        learn = trainer.learner.learn

        def learn_or_end(experience: Experience) -> Update:
            if trainer.global_step > last_step:
                raise KeyboardInterrupt
            return learn(experience)

        trainer.learner.learn = learn_or_end
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()


def config_of(folder: Path, tiny_llama: Callable, *settings: str, steps: int = 5) -> PPOConfig:
    length = ["trainer.n_gpus_per_node=1", f"trainer.total_training_steps={steps}"]
    return load_ppo_config([*tiny_run_settings(folder, tiny_llama), *length, *settings])


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param([*PPO, *FILTERED], marks=pytest.mark.proof),
        [
            *GRPO,
            *FILTERED,
            "trainer.max_staleness=1",
            *APART,
            "algorithm.rollout_correction.bypass_mode=true",
        ],
    ],
    ids=["dynamic sampling", "dynamic sampling a step ahead"],
)
def test_a_run_that_is_interrupted_twice_equals_one_that_is_not(
    settings: list[str], tmp_path: Path, tiny_llama: Callable
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    # 7 rows in steps of 2: an epoch ends within a training step.
    (tmp_path / "ptx.jsonl").write_text(
        "\n".join(json.dumps({"text": "12+34=46"[:n]}) for n in range(2, 9))
    )
    settings = [
        *settings,
        f"data.ptx_files={tmp_path}/ptx.jsonl",
        "actor_rollout_ref.actor.ptx_coef=0.5",
    ]
    run_locally(whole, tiny_llama, *settings, steps=5)
    run_until(1, parts, tiny_llama, *settings)
    run_until(3, parts, tiny_llama, *settings)
    run_locally(parts, tiny_llama, *settings, steps=5)
    assert len(list((parts / "runs").glob("2*"))) == 1
    assert numbers_of(parts) == numbers_of(whole) and "actor/ptx_loss" in numbers_of(whole)[-1]
    assert [row["step"] for row in metrics_of(parts)] == [0, 1, 2, 3, 4, 5]
    assert any(row.get("rollout/num_prompt_batches", 1) > 1 for row in metrics_of(parts))
    expected = tensors_of(whole, 5)
    tensors = tensors_of(parts, 5)
    assert tensors.keys() == expected.keys() and any(
        name.endswith(".exp_avg_sq") for name in tensors
    )
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_a_checkpoint_that_is_written_during_later_steps_is_that_of_its_step(
    tmp_path: Path, tiny_llama: Callable
):
    settings = [*PPO, "trainer.save_freq=2"]
    run_locally(tmp_path / "plain", tiny_llama, *settings, steps=4)
    with local_trainer(tmp_path / "late", tiny_llama, *settings, steps=4) as trainer:
        goes_on, learn = threading.Event(), trainer.learner.learn
        writer = trainer.groups["actor"].workers[0].engine.writer
        write = writer._write
        writer._write = lambda *given: goes_on.wait(60) and write(*given)

        def learn_until_the_last_step(experience: Experience) -> Update:
            assert trainer.global_step < 3 or not checkpoint.steps(trainer.recorder.run_dir)
            if trainer.global_step == 4:
                goes_on.set()
            return learn(experience)

        trainer.learner.learn = learn_until_the_last_step
        trainer.fit()
        assert checkpoint.steps(trainer.recorder.run_dir) == [2, 4]
    expected, tensors = tensors_of(tmp_path / "plain", 2), tensors_of(tmp_path / "late", 2)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in expected.items())
    newest = checkpoint.read(tmp_path / "late/runs/latest/global_step_2")
    assert newest.state["global_step"] == newest.state["version"] == 2
    rows = (tmp_path / "late/runs/latest/metrics.jsonl").read_bytes()[
        : newest.state["files"]["metrics.jsonl"]
    ]
    assert [json.loads(row)["step"] for row in rows.splitlines()] == [0, 1, 2]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_the_one_before_is_continued(
    tmp_path: Path,
    tiny_llama: Callable,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    settings = [*GRPO, "trainer.max_ckpt_to_keep=1"]

    begin = checkpoint.begin

    def begin_where_a_folder_is(run_dir: Path, step: int) -> Path:
        folder = begin(run_dir, step)
        if step == 2:
            (folder / "actor/checkpoint/rank_00000.safetensors").mkdir(parents=True)
        return folder

    with (
        local_trainer(tmp_path, tiny_llama, *settings, steps=4) as trainer,
        monkeypatch.context() as patched,
    ):
        patched.setattr(checkpoint, "begin", begin_where_a_folder_is)
        message = (
            r"actor rank 0 .* failed in save_result: OSError: "
            r".*actor/checkpoint/rank_00000.safetensors cannot be"
        )
        with pytest.raises(WorkerError, match=message):
            trainer.fit()
        assert trainer.global_step == 3 and checkpoint.steps(trainer.recorder.run_dir) == [1]
    assert "The checkpoint that was being written is lost: actor rank 0" in capsys.readouterr().out
    run_locally(tmp_path, tiny_llama, *settings, steps=4)
    assert [row["step"] for row in metrics_of(tmp_path)] == [0, 1, 2, 3, 4]
    assert checkpoint.steps(tmp_path / "runs/latest") == [4]


def test_responses_that_are_ahead_go_on_with_all_that_is_known_of_them(
    tmp_path: Path, tiny_llama: Callable
):
    settings = [
        *GRPO,
        "trainer.max_staleness=1",
        *APART,
        "algorithm.rollout_correction.bypass_mode=true",
    ]
    run_until(2, tmp_path, tiny_llama, *settings)
    with local_trainer(tmp_path, tiny_llama, *settings, steps=5) as trainer:
        batch, metrics = trainer.generated.batch, trainer.generated.metrics
        assert batch.meta_info == {"epoch": 1, "global_steps": 3, "padding": (8, 4, 0)} and metrics
