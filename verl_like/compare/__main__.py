"""Shows runs over each other on one page: `python -m verl_like.compare RUN_DIR...`.

The page needs no other file and no network. Runs may be running, because their folders are only
read.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_like.compare.page import matches, metrics_of, write_comparison
from verl_like.compare.run_folder import read_runs
from verl_like.trainer.run.display import printable


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 2 input refused."""
    parser = argparse.ArgumentParser(prog="python -m verl_like.compare", allow_abbrev=False)
    parser.add_argument(
        "run_dirs",
        nargs="+",
        type=Path,
        metavar="RUN_DIR",
        help="folder of a run, such as outputs/verl_like/ppo/latest",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("compare.html"), help="the page; compare.html if not given"
    )
    parser.add_argument(
        "--metrics",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="metrics to show besides those of the report, such as 'perf/mfu/*'",
    )
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    try:
        runs = read_runs(options.run_dirs)
        for run in runs:
            if out.is_relative_to(run.path):
                raise ValueError(f"{out} is in the folder of a run: give another place with --out.")
        write_comparison(out, runs, options.metrics)
    except ValueError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{out} cannot be written ({error}): give another place with --out.")
    names = metrics_of(runs)
    for pattern in options.metrics:
        if not any(matches(name, [pattern]) for name in names):
            sys.stderr.write(f"verl_like: no run has a metric like {pattern} yet.\n")
    sys.stdout.write(f"{printable(str(out))}\n")
    return 0


def _refuse(message: str) -> int:
    """Says why the input is refused, and returns the exit code."""
    on_one_line = " ".join(printable(message).split())
    sys.stderr.write(f"verl_like: {on_one_line}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
