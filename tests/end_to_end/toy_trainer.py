"""The smallest trainer: a number goes towards a target. A schema, a rule and a `fit` for the run
shell."""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, ClassVar

from verl_like.config_model import Follows, PositiveInt
from verl_like.trainer.config import RunConfig
from verl_like.trainer.config.command_line import config_from_command_line
from verl_like.trainer.config.run_config import RecordConfig
from verl_like.trainer.run.display import Display
from verl_like.trainer.run.run_recorder import RunRecorder
from verl_like.trainer.run.shell import run


class DescentConfig(RecordConfig):
    experiment_name: str = "descent"
    """Name of the run."""
    steps: PositiveInt = 3
    """Training steps."""


class ToyConfig(RunConfig):
    base_name: ClassVar[str] = "toy_trainer"

    trainer: DescentConfig
    target: float
    """Where the number goes."""
    rate: Annotated[float, Follows("${target}")]
    """Share of the way that a step goes."""


def the_rate_is_a_share(config: ToyConfig) -> Iterator[str]:
    if not 0 < config.rate < 1:
        yield f"rate={config.rate}: expected a number between 0 and 1"


@dataclass(frozen=True)
class ToyInputs:
    config: ToyConfig
    notes: tuple[str, ...] = ("from 0",)


def check_inputs(config: ToyConfig, cleanup: ExitStack) -> ToyInputs:
    cleanup.callback(lambda: sys.stdout.write("cleaned up\n"))
    if config.target == 0:
        raise ValueError("target=0 is where the number is; choose another.")
    return ToyInputs(config)


def fit(inputs: ToyInputs, recorder: RunRecorder) -> None:
    config, number = inputs.config, 0.0
    for step in range(1, config.trainer.steps + 1):
        with recorder.step(step, config.trainer.steps) as log:
            number += config.rate * (config.target - number)
            log({"toy/distance": config.target - number})
            time.sleep(0.01)


DISPLAY = Display(
    step_line=(("distance", ("toy/distance",), "{:.3f}"),),
    charts=(("Distance", ("toy/distance",), "units"),),
)


def main(arguments: list[str]) -> int:
    toy_config = config_from_command_line(ToyConfig, the_rate_is_a_share, arguments)
    return run(toy_config, check_inputs, fit, DISPLAY)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
