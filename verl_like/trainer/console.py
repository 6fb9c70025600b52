"""What a person sees of a run: the placement table, a progress bar, one line a step, sampled generations."""

import math
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

# The metrics of the step line: label, metric names (the first that exists is shown), format.
STEP_LINE = [
    ("reward", ("critic/score/mean",), "{:.3f}"),
    ("KL", ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl"), "{:.4f}"),
    ("entropy", ("actor/entropy",), "{:.3f}"),
    ("length", ("response_length/mean",), "{:.1f}"),
    ("drift", ("training/rollout_probs_diff_mean",), "{:.1e}"),
    ("tok/s", ("perf/total_throughput",), "{:,.0f}"),
    ("overlap", ("perf/overlap",), "{:.0%}"),
]
PHASES = [
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "reward_model",
    "annotate",
    "update_critic",
    "update_actor",
    "update_weights",
    "testing",
    "save_checkpoint",
]


class RunConsole:
    """Prints to standard output; on a terminal a progress bar with the time left stays at the bottom."""

    def __init__(self) -> None:
        self.console = Console(soft_wrap=True, highlight=False)
        self.progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            speed_estimate_period=3600,  # seconds; a step of a large model takes minutes, and rich forgets after 30 s
        )
        self.task = self.progress.add_task("training", total=None, start=False)

    def say(self, text: str) -> None:
        self.console.print(escape(text))

    def show_placement(self, rows: list[dict[str, str]]) -> None:
        table = Table(*rows[0], title="Placement", title_justify="left")
        for row in rows:
            table.add_row(*row.values())
        self.console.print(table)

    def start_training(self, total_steps: int) -> None:
        self.progress.start()
        self.progress.update(self.task, total=total_steps)
        self.progress.start_task(self.task)

    def show_step(self, step: int, total_steps: int, metrics: dict[str, float]) -> None:
        shown = []
        for label, names, template in STEP_LINE:
            value = next((metrics[name] for name in names if name in metrics), math.nan)
            if not math.isnan(value):
                shown.append(f"{label} {template.format(value)}")
        times = {phase: metrics.get(f"timing_s/{phase}", 0.0) for phase in PHASES}
        noticeable = 0.02 * metrics["timing_s/step"]
        seconds = [f"{phase} {seconds:.2f}" for phase, seconds in times.items() if seconds > noticeable]
        validation = [f"[bold]{name} {value:.3f}[/]" for name, value in metrics.items() if name.startswith("val-core/")]
        width = len(str(total_steps))
        timing = f"[dim]{metrics['timing_s/step']:.2f} s: {', '.join(seconds)}[/]"
        line = [f"[bold cyan]step {step:>{width}}/{total_steps}[/]", *shown, timing, *validation]
        self.progress.console.print("  ".join(line))
        self.progress.update(self.task, completed=step)

    def show_validation(self, step: int, metrics: dict[str, float]) -> None:
        """The line of a validation that belongs to no training step."""
        for name, value in metrics.items():
            if name.startswith("val-core/"):
                self.progress.console.print(f"[bold cyan]validation at step {step}[/]  [bold]{name} {value:.3f}[/]")

    def show_generations(self, step: int, generations: list[dict[str, Any]]) -> None:
        table = Table(
            "prompt", "response", "ground truth", "score", title=f"Generations at step {step}", title_justify="left"
        )
        for row in generations:
            table.add_row(*(escape(str(row[key])) for key in ("prompt", "response", "ground_truth", "score")))
        self.progress.console.print(table)

    def close(self) -> None:
        self.progress.stop()
