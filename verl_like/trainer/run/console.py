"""Prints what the user sees of a run: where the workers are, a progress bar, a line for each step,
and some generations."""

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

from verl_like.trainer.run.display import Display, TableRows, printable
from verl_like.trainer.run.tracking import Row


class RunConsole:
    """Prints to standard output. On a terminal it shows a progress bar with the time left."""

    def __init__(self, display: Display, redact: Callable[[str], str]) -> None:
        self.display = display
        self.redact = redact
        """Masks the secrets in a text."""
        # A character that the encoding of the output lacks is printed as an escape sequence, and
        # raises nothing.
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
            # In seconds. The default is 30, but a step of a large model takes minutes.
            speed_estimate_period=3600,
            # Nothing in the output of a notebook can stay at the bottom without ipywidgets.
            disable=self.console.is_jupyter,
        )
        self.task = self.progress.add_task("training", total=None, start=False)

    def say(self, text: str) -> None:
        """Prints a text."""
        self.console.print(self._shown(text))

    def show_table(self, title: str, rows: TableRows) -> None:
        """Prints a table."""
        table = Table(*rows[0], title=title, title_justify="left")
        for row in rows:
            cells = [self._shown(cell) for cell in row.values()]
            table.add_row(*cells)
        self.console.print(table)

    def _shown(self, text: str) -> str:
        """The text without secrets and control characters. Markup in it has no effect."""
        return escape(printable(self.redact(text)))

    def start_training(self, total_steps: int) -> None:
        """Shows the progress bar and starts its clock."""
        self.progress.start()
        self.progress.update(self.task, total=total_steps)
        self.progress.start_task(self.task)

    def show_step(self, step: int, total_steps: int, metrics: Row) -> None:
        """Prints the line of a step."""
        shown = []
        for label, names, template in self.display.step_line:
            values = [metrics[name] for name in names if name in metrics]
            value = values[0] if values else math.nan
            if not math.isnan(value):
                shown.append(f"{label} {template.format(value)}")
        total = metrics["timing_s/step"]
        times = []
        for phase in self.display.phases:
            seconds = metrics.get(f"timing_s/{phase}", 0.0)
            if seconds > 0.02 * total:
                times.append(f"{phase} {seconds:.2f}")
        validation = [f"[bold]{each}[/]" for each in _validation(metrics)]
        width = len(str(total_steps))
        start = f"[bold cyan]step {step:>{width}}/{total_steps}[/]"
        line = [start, *shown, f"[dim]{total:.2f} s: {', '.join(times)}[/]", *validation]
        self.console.print("  ".join(line))
        self.progress.update(self.task, completed=step)

    def show_validation(self, step: int, metrics: Row) -> None:
        """Prints the lines of a validation that is not part of a step."""
        for shown in _validation(metrics):
            self.console.print(f"[bold cyan]validation at step {step}[/]  [bold]{shown}[/]")

    def close(self) -> None:
        """Removes the progress bar."""
        self.progress.stop()


def _validation(metrics: Row) -> list[str]:
    """The name and the value of each metric of a validation, as text."""
    shown = []
    for name, value in metrics.items():
        if name.startswith("val-core/"):
            shown_name = escape(printable(name))
            shown.append(f"{shown_name} {value:.3f}")
    return shown
