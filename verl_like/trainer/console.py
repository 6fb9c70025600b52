"""What a person sees of a run: the placement table, a progress bar, one line a step, sampled generations."""

import math
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from verl_like.trainer.display import Display


class RunConsole:
    """Prints to standard output; on a terminal a progress bar with the time left stays at the bottom."""

    def __init__(self, display: Display) -> None:
        self.display = display
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
        for label, names, template in self.display.step_line:
            value = next((metrics[name] for name in names if name in metrics), math.nan)
            if not math.isnan(value):
                shown.append(f"{label} {template.format(value)}")
        times = {phase: metrics.get(f"timing_s/{phase}", 0.0) for phase in self.display.phases}
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
        names = [name for name in generations[0] if name != "step"]
        table = Table(*names, title=f"Generations at step {step}", title_justify="left")
        for row in generations:
            table.add_row(*(escape(str(row[name])) for name in names))
        self.progress.console.print(table)

    def close(self) -> None:
        self.progress.stop()
