"""What a person sees of a run: the placement table, a progress bar, one line a step, sampled
generations."""

import io
import math
import sys
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from verl_like.trainer.run.display import Display, printable


class RunConsole:
    """Prints to standard output; on a terminal a progress bar with the time left stays at the
    bottom."""

    def __init__(self, display: Display, redacted: Callable[[str], str]) -> None:
        self.display = display
        self.redacted = redacted
        """Masks the secrets in a text."""
        # The encoding of a terminal may lack a character
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
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
            # Seconds; a step of a large model takes minutes, and rich forgets after 30 s
            speed_estimate_period=3600,
        )
        self.task = self.progress.add_task("training", total=None, start=False)

    def say(self, text: str) -> None:
        self.console.print(escape(printable(self.redacted(text))))

    def show_table(self, title: str, rows: list[dict[str, str]]) -> None:
        table = Table(*rows[0], title=title, title_justify="left")
        for row in rows:
            table.add_row(*(escape(printable(self.redacted(cell))) for cell in row.values()))
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
        total = metrics["timing_s/step"]
        times = {phase: metrics.get(f"timing_s/{phase}", 0.0) for phase in self.display.phases}
        seconds = [
            f"{phase} {seconds:.2f}" for phase, seconds in times.items() if seconds > 0.02 * total
        ]
        validation = [
            f"[bold]{escape(printable(name))} {value:.3f}[/]"
            for name, value in metrics.items()
            if name.startswith("val-core/")
        ]
        start = f"[bold cyan]step {step:>{len(str(total_steps))}}/{total_steps}[/]"
        line = [start, *shown, f"[dim]{total:.2f} s: {', '.join(seconds)}[/]", *validation]
        self.console.print("  ".join(line))
        self.progress.update(self.task, completed=step)

    def show_validation(self, step: int, metrics: dict[str, float]) -> None:
        """The lines of a validation before the first training step."""
        for name, value in metrics.items():
            if name.startswith("val-core/"):
                shown = f"{escape(printable(name))} {value:.3f}"
                self.console.print(f"[bold cyan]validation at step {step}[/]  [bold]{shown}[/]")

    def close(self) -> None:
        self.progress.stop()
