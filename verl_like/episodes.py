"""Shows episodes of agents in a terminal: `python -m verl_like.episodes RUN_DIR`.

The run may be running, because its folder is only read.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_like.trainer.run.episodes import EPISODES, EpisodeRecord, newest, read_episodes
from verl_like.trainer.run.messages import say


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 2 input refused."""
    parser = argparse.ArgumentParser(prog="python -m verl_like.episodes", allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run with agents")
    parser.add_argument(
        "--step", type=int, help="show this one, and not the last step and the last validation"
    )
    parser.add_argument(
        "--failed", action="store_true", help="show only those of which an attempt or reward failed"
    )
    options = parser.parse_args(arguments)
    file = options.run_dir / EPISODES

    def is_wanted(record: EpisodeRecord) -> bool:
        is_of_step = options.step in (None, record.step)
        return is_of_step and (bool(record.failures) or not options.failed)

    try:
        shown = newest(filter(is_wanted, read_episodes(file)))
    except OSError as error:
        return say(
            f"{file} cannot be read ({error}): give the folder of a run, such as "
            "outputs/verl_like/ppo/latest.",
            exit_code=2,
        )
    if not shown:
        return say(
            f"{file} has no such episode yet: a run with agents writes some of each step. Leave "
            "out --step and --failed to see the newest.",
            exit_code=2,
        )
    for record in shown:
        text = "\n".join(record.lines())
        sys.stdout.write(f"{text}\n\n")
    sys.stdout.write("The policy drew the lines that begin with >.\n")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `head` ends it without a message
    sys.exit(main(sys.argv[1:]))
