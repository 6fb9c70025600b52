"""SIGTERM at any place of the training loop loses no step, and a signal in the last step loses no
exit code."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from verl_like.data.sampler import EpochSampler
from verl_like.protocol import DataProto, Metric
from verl_like.trainer.config import load_ppo_config
from verl_like.trainer.config.compose import load_config
from verl_like.trainer.config.supervised import SFTConfig, broken_supervised_rules
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.ppo.ray_trainer import RayPPOTrainer
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.state import checkpoint
from verl_like.trainer.supervised.run_supervised import KINDS
from verl_like.trainer.supervised.trainer import SupervisedTrainer


class PPOWithoutModels(RayPPOTrainer):
    """The loop of the trainer around steps that compute nothing."""

    trained: ClassVar[dict] = {}

    def next_prompts(self) -> DataProto:
        return DataProto(meta_info={"epoch": 0})

    def step(self) -> dict[str, Metric]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}


class SFTWithoutModel(SupervisedTrainer):
    """The loop around batches that nothing learns from."""

    trained: ClassVar[dict] = {}

    def __post_init__(self) -> None:
        self.sampler = EpochSampler(len(self.train_dataset), self.config.data.train_batch_size)

    def step(self) -> dict[str, Metric]:
        return {}


class Rows(list):
    def collate(self, indices: Sequence[int]) -> DataProto:
        return DataProto()


Trainer = PPOWithoutModels | SFTWithoutModel


@pytest.fixture(params=["ppo", "sft"])
def trainer_with(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Trainer]]:
    def start(*settings: str) -> Trainer:
        settings = "data.train_files=t", f"trainer.default_local_dir={tmp_path}", *settings
        settings = *settings, "trainer.val_before_train=false", "trainer.total_training_steps=4"
        if request.param == "sft":
            config = load_config(SFTConfig, broken_supervised_rules, [*settings, "model.path=m"])
            recorder = RunRecorder(config, KINDS[SFTConfig].display)
            trainer = SFTWithoutModel(config, Rows(range(64)), None, None, recorder)
        else:
            settings = *settings, "data.val_files=v", "actor_rollout_ref.model.path=m", "device=cpu"
            recorder = RunRecorder(load_ppo_config(settings), PPO_DISPLAY)
            trainer = PPOWithoutModels(
                recorder.config, None, {}, None, Rows(range(2048)), [], None, recorder
            )
        signal.signal(signal.SIGTERM, recorder.terminate)
        after.callback(recorder.console.close)
        return trainer

    with contextlib.ExitStack() as after:
        after.callback(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        yield start


def send_in_step(trainer: Trainer, step: int, owner: Any, name: str, times: int = 1) -> None:
    """The call `owner.name` of a step is interrupted by SIGTERM before it begins."""
    call = getattr(owner, name)

    def call_after_signal(*arguments: Any, **named: Any) -> Any:
        if trainer.global_step == step:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGTERM)
        return call(*arguments, **named)

    setattr(owner, name, call_after_signal)


@pytest.mark.parametrize(
    ("name", "save_freq"),
    [
        ("step", -1),
        ("log", -1),
        ("show_step", -1),
        ("log", 2),
        ("save", 2),
        ("begin_checkpoint", 2),
    ],
)
def test_sigterm_in_a_step_or_after_it_ends_the_run_with_a_checkpoint_of_it(
    name: str, save_freq: int, trainer_with: Callable[..., Trainer]
):
    trainer = trainer_with(f"trainer.save_freq={save_freq}")
    owners = {"log": trainer.recorder.tracking, "show_step": trainer.recorder.console}
    owners["begin_checkpoint"] = trainer.recorder
    send_in_step(trainer, 2, owners.get(name, trainer), name)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert trainer.global_step == 2 and checkpoint.steps(trainer.recorder.run_dir) == [2]


def test_sigterm_in_the_last_step_is_no_interrupt(trainer_with: Callable[..., Trainer]):
    trainer = trainer_with()
    send_in_step(trainer, 4, trainer, "step")
    trainer.fit()
    assert checkpoint.steps(trainer.recorder.run_dir) == [4]


def test_a_second_sigterm_ends_the_run_at_once_and_leaves_nothing_in_part(
    trainer_with: Callable[..., Trainer],
):
    trainer = trainer_with("trainer.save_freq=1")
    send_in_step(trainer, 2, trainer.recorder, "begin_checkpoint", times=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    run_dir = trainer.recorder.run_dir
    assert [path.name for path in run_dir.glob("global_step_2*")] == ["global_step_2.partial"]
    trainer.recorder.close("Interrupted.")
    assert [path.name for path in run_dir.glob("global_step_*")] == ["global_step_1"]
