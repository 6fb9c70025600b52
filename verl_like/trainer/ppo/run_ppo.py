"""PPO for the run shell: what is PPO's own of a run."""

import contextlib

from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.ppo.inputs import PPOInputs, check_inputs
from verl_like.trainer.ppo.ray_trainer import RayPPOTrainer, get_trainer, require_trainer_of_driver
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.run.shell import run
from verl_like.trainer.run.worker_template import WorkerTemplate
from verl_like.trainer.state.run_state import PluginPPOState, PPOState


def run_ppo(config: PPOConfig, template: WorkerTemplate | None = None) -> int:
    """Runs PPO; returns the exit code."""
    state_schema = PPOState if get_trainer() is RayPPOTrainer else PluginPPOState
    return run(config, check_ppo_inputs, fit, PPO_DISPLAY, template, state_schema)


def check_ppo_inputs(config: PPOConfig, cleanup: contextlib.ExitStack) -> PPOInputs:
    """`check_inputs`, after a look at the plugins; raises ValueError or RewardError."""
    require_trainer_of_driver()
    return check_inputs(config, cleanup)


def fit(inputs: PPOInputs, recorder: RunRecorder) -> None:
    """Starts the workers and trains to the end."""
    trainer = get_trainer().of(inputs, recorder)
    trainer.init_workers()
    trainer.fit()
