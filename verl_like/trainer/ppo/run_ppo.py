"""A run of PPO: it gives the run shell the check of its inputs and its training."""

import contextlib
from pathlib import Path

from verl_like.trainer.config.schema import PPOConfig
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.ppo.inputs import PPOInputs, check_inputs
from verl_like.trainer.ppo.ray_trainer import RayPPOTrainer, get_trainer, require_trainer_of_driver
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.run.shell import CheckInputs, Fit, run, run_or_raise
from verl_like.trainer.run.worker_template import WorkerTemplate
from verl_like.trainer.state.run_state import PluginPPOState, PPOState


def run_ppo(config: PPOConfig, template: WorkerTemplate | None = None) -> int:
    """Runs PPO and returns the exit code of the process."""
    schema = state_schema()
    return run(config, check_ppo_inputs, fit, PPO_DISPLAY, template, schema)


def check_ppo_inputs(config: PPOConfig, cleanup: contextlib.ExitStack) -> PPOInputs:
    """Checks the plugins and then all inputs. Raises ValueError or RewardError for what the user
    has to change."""
    require_trainer_of_driver()
    return check_inputs(config, cleanup)


def fit(inputs: PPOInputs, recorder: RunRecorder) -> None:
    """Starts the workers and trains until the last step."""
    trainer = get_trainer().of(inputs, recorder)
    trainer.init_workers()
    trainer.fit()


def run_ppo_or_raise(
    config: PPOConfig,
    template: WorkerTemplate | None = None,
    check_inputs: CheckInputs = check_ppo_inputs,
    fit: Fit = fit,
    uses_ray: bool = True,
) -> Path:
    """Runs PPO for a caller in Python and returns the folder of the run. Raises as `run_or_raise`,
    which explains the arguments."""
    schema = state_schema()
    return run_or_raise(config, check_inputs, fit, PPO_DISPLAY, template, schema, uses_ray)


def state_schema() -> type[PPOState] | type[PluginPPOState]:
    """What the trainer keeps in a checkpoint. A plugin's trainer may keep more."""
    if get_trainer() is RayPPOTrainer:
        return PPOState
    return PluginPPOState
