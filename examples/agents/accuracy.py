"""The share of held-out products that are right before the first step and after the last, sampled
at temperature 1: a table."""

import argparse
import json
from pathlib import Path

from examples.agents.make_world import NUM_FACTORS


def accuracies(run: Path) -> dict[int, float]:
    """Returns for each validation of a run its step and the accuracy."""
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for task in NUM_FACTORS:
            name = f"val-core/verl_like/{task}/reward/mean@1"
            if name in row:
                found[row["step"]] = row[name]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of metrics.jsonl")
    print(f"\n{'run':24} {'before':>8} {'after':>8}")
    for run in parser.parse_args().runs:
        by_step = accuracies(run)
        before = by_step[min(by_step)]
        after = by_step[max(by_step)]
        print(f"{run.parent.name:24} {before:8.3f} {after:8.3f}")


if __name__ == "__main__":
    main()
