"""What each stage changed, from what it recorded: a table."""

import argparse
import json
from pathlib import Path

SOURCE = "verl_like/arithmetic"
TRUE = f"val-core/{SOURCE}/acc/mean@1"
LEARNT = f"val-aux/{SOURCE}/reward/mean@1"


def first_and_last(run: Path, metric: str) -> tuple[float, float]:
    """The metric before the first step of a run and after its last one."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    values = [row[metric] for row in rows if metric in row]
    return values[0], values[-1]


def effects(world: Path, reward_model: Path, ppo: Path) -> list[tuple[str, str, float, float]]:
    """Rows of (stage, measure, before, after), all on held-out sums."""
    made = json.loads((world / "world.json").read_text())
    fine_tuning = made["exact_match_before_warm_up"], made["held_out_exact_match"]
    return [
        ("fine-tuning", "exact match", *fine_tuning),
        ("reward model", "pair accuracy", *first_and_last(reward_model, "val-core/accuracy")),
        ("PPO", "true reward", *first_and_last(ppo, TRUE)),
        ("PPO", "learnt reward", *first_and_last(ppo, LEARNT)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=Path, required=True, help="folder of make_toy_world.py")
    parser.add_argument("--reward_model", type=Path, required=True, help="run of main_rm")
    parser.add_argument("--ppo", type=Path, required=True, help="run of main_ppo")
    arguments = parser.parse_args()
    print(f"\n{'held-out sums':14} {'measure':14} {'before':>8} {'after':>8}")
    for stage, measure, before, after in effects(
        arguments.world, arguments.reward_model, arguments.ppo
    ):
        print(f"{stage:14} {measure:14} {before:8.3f} {after:8.3f}")
    print(f"\nCurves of the true reward beside the learnt one: {arguments.ppo}/report.html")


if __name__ == "__main__":
    main()
