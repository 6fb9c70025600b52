"""What every command `python -m verl_like.trainer.main_...` does before and after its run."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from verl_like.trainer.config.command_line import config_from_command_line
from verl_like.trainer.config.run_config import RunConfig
from verl_like.trainer.run import worker_template

Schema = TypeVar("Schema", bound=RunConfig)


@contextmanager
def entry_point(
    schema: type[Schema],
    rules: Callable[[Schema], Iterable[str]],
    name: str,
    usage: str,
    workers: Sequence[str],
) -> Iterator[tuple[Schema, worker_template.WorkerTemplate | None]]:
    """Surrounds a run of `python -m verl_like.trainer.<name>`. It yields the configuration, and on
    a CPU a template that imports the modules `workers`. An interrupt ends the process with code
    130."""
    try:
        command = f"python -m verl_like.trainer.{name}"
        arguments = sys.argv[1:]
        config: Any = config_from_command_line(schema, rules, arguments, command, usage)
        template = None
        # On a GPU an import may start CUDA, which a fork cannot use.
        if config.trainer.device == "cpu":
            template = worker_template.start(workers)
        yield config, template
    except KeyboardInterrupt:
        sys.exit(130)
