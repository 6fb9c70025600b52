"""Draws the page that shows runs over each other."""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from matplotlib import color_sequences, colormaps
from matplotlib.colors import to_hex

from verl_like.compare.run_folder import RunFolder
from verl_like.trainer.ppo.display import PPO_DISPLAY
from verl_like.trainer.run.charts import Curve, chart, names_of_chart, points_by_metric, timelines
from verl_like.trainer.run.display import printable
from verl_like.trainer.run.html_page import table, write_page
from verl_like.trainer.supervised.display import DPO_DISPLAY, ILQL_DISPLAY, RM_DISPLAY, SFT_DISPLAY

GenerationsOfPrompt = dict[tuple[float, str], dict[str, Any]]
"""The rows of `RunFolder.generations` of one prompt, by the step and the name of the run."""
DISPLAYS = (PPO_DISPLAY, SFT_DISPLAY, RM_DISPLAY, DPO_DISPLAY, ILQL_DISPLAY)
"""Describe what the reports of all trainers show. Detached training shows the charts of PPO."""
MOST_PROMPTS = 20
"""The page shows the generations of so many prompts."""
NO_STEP = "<p>No step yet.</p>"
STYLE = """
.legend { position: sticky; top: 0; background: white; padding: .4rem 0; z-index: 1; }
.legend span { margin-right: 1.2rem; white-space: nowrap; }
.legend i { display: inline-block; width: 1rem; height: .7rem; margin-right: .3rem; }
figure { margin: 0; }
figcaption { font-weight: 600; overflow-wrap: anywhere; }
.generation { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 12rem; }
td { overflow-wrap: anywhere; }
"""
BODY = """<div class="legend">{legend}</div>
<h2>Runs</h2>{runs}
<h2>Curves</h2><div class="charts">{charts}</div>
<h2>Timelines</h2>
<p>One step of each run, the last complete one that neither validated nor saved, on one scale of
seconds. Each pool has a lane with a row for each process. Bars above each other ran at the same
time.</p>
{timelines}
<h2>Generations</h2>{generations}
<h2>Configuration</h2>
<p>Keys that all runs have, with different values.</p>
{differing}
<details><summary>Keys that only some of the runs have: {num_partial}</summary>{partial}</details>
"""


def write_comparison(path: Path, runs: Sequence[RunFolder], patterns: Sequence[str]) -> None:
    """Writes the page. `patterns` name metrics that are shown besides those of the reports. Raises
    OSError."""
    colors = _colors(len(runs))
    keys_of_runs = [set(run.settings) for run in runs]
    common = set.intersection(*keys_of_runs)
    partial = _differing(set.union(*keys_of_runs) - common, runs)
    calls = {run.name: run.calls for run in runs}
    rows = [_row_of_run(run) for run in runs]
    body = BODY.format(
        legend=_legend(runs, colors),
        runs=table(rows),
        charts=_charts(runs, colors, patterns) or NO_STEP,
        timelines=timelines(calls) or NO_STEP,
        generations=_generations(runs),
        differing=table(_differing(common, runs)),
        num_partial=len(partial),
        partial=table(partial),
    )
    names = ", ".join(run.name for run in runs)
    write_page(path, f"Comparison of {names}", body, STYLE)


def metrics_of(runs: Sequence[RunFolder]) -> list[str]:
    """The names of all metrics of the runs."""
    names = {}
    for run in runs:
        for row in run.metrics:
            names.update(dict.fromkeys(row))
    names.pop("step", None)
    return list(names)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether a name matches one of the shell patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _colors(num_runs: int) -> list[str]:
    """A color for each run. If matplotlib's cycle has too few, they are taken from a color map."""
    colors = color_sequences["tab10"][:num_runs]
    if len(colors) < num_runs:
        last = num_runs - 1
        shares = [number / last for number in range(num_runs)]
        colors = [colormaps["turbo"](share) for share in shares]
    return [to_hex(color) for color in colors]


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def _legend(runs: Sequence[RunFolder], colors: Sequence[str]) -> str:
    """The color, name and experiment of each run."""
    legend = ""
    for run, color in zip(runs, colors, strict=True):
        swatch = f'<i style="background:{color}"></i>'
        name = _escaped(run.name)
        experiment = f"<small>{_escaped(run.experiment)}</small>"
        legend += f"<span>{swatch}{name} {experiment}</span>"
    return legend


def _row_of_run(run: RunFolder) -> dict[str, str]:
    """The row of a run in the table of runs."""
    return {
        "run": run.name,
        "project": run.project,
        "experiment": run.experiment,
        "steps": run.steps,
        "newest row of metrics": run.newest_row,
        "folder": str(run.path),
    }


def _charts(runs: Sequence[RunFolder], colors: Sequence[str], patterns: Sequence[str]) -> str:
    """A chart for each metric that a report shows or a pattern names."""
    names = metrics_of(runs)
    labels = _labels(names)
    for name in names:
        if matches(name, patterns):
            labels.setdefault(name, "")
    points_of_run = [points_by_metric(run.metrics) for run in runs]
    figures = ""
    for name, label in labels.items():
        curves = []
        for run, color, points in zip(runs, colors, points_of_run, strict=True):
            if name in points:
                by_step = sorted(points[name], key=lambda point: point[0])
                curve = Curve(run.name, by_step, color)
                curves.append(curve)
        drawn = chart(curves, label=label, has_legend=False)
        caption = f"<figcaption>{_escaped(name)}</figcaption>"
        figures += f"<figure>{caption}{drawn}</figure>"
    return figures


def _labels(names: Sequence[str]) -> dict[str, str]:
    """By each metric that a report shows, the label of the y-axis of its chart."""
    labels: dict[str, str] = {}
    for display in DISPLAYS:
        for _, wanted, label in display.charts:
            for name in names_of_chart(wanted, names):
                labels.setdefault(name, label)
    return labels


def _generations(runs: Sequence[RunFolder]) -> str:
    """A table for each prompt. It has a row for each step, with what each run generated.

    Prompts of more runs are first, then those that were shown later. There are at most
    MOST_PROMPTS. If a run has a prompt twice in a step, its last row counts.
    """
    by_prompt: dict[str, GenerationsOfPrompt] = {}
    for run in runs:
        for row in run.generations:
            generations = by_prompt.setdefault(row["prompt"], {})
            generations[row["step"], run.name] = row
    if not by_prompt:
        return "<p>None.</p>"

    def rank(prompt: str) -> tuple[int, float]:
        """Prompts that more runs have come first, and then those of later steps."""
        steps = [step for step, _ in by_prompt[prompt]]
        names = {name for _, name in by_prompt[prompt]}
        return len(names), max(steps)

    prompts = sorted(by_prompt, key=rank, reverse=True)
    tables = ""
    for prompt in prompts[:MOST_PROMPTS]:
        tables += f'<h3 class="generation">{_escaped(prompt)}</h3>'
        tables += _generations_of(by_prompt[prompt], runs)
    num_hidden = len(prompts) - MOST_PROMPTS
    if num_hidden > 0:
        tables += f"<p>{num_hidden} further prompts are in generations.jsonl of the runs.</p>"
    return tables


def _generations_of(generations: GenerationsOfPrompt, runs: Sequence[RunFolder]) -> str:
    """The table of one prompt."""
    names = [f"<th>{_escaped(run.name)}</th>" for run in runs]
    rows = f"<tr><th>step</th>{''.join(names)}</tr>"
    steps = {step for step, _ in generations}
    for step in sorted(steps):
        cells = ""
        for run in runs:
            row = generations.get((step, run.name), {})
            cells += _generation(row)
        rows += f"<tr><td>{step}</td>{cells}</tr>"
    return f"<table>{rows}</table>"


def _generation(row: Mapping[str, Any]) -> str:
    """A cell with all texts of a generation but its prompt."""
    lines = [
        f"<b>{_escaped(name)}</b> {_escaped(str(value))}"
        for name, value in row.items()
        if name not in ("step", "prompt")
    ]
    text = "\n".join(lines)
    return f'<td class="generation">{text}</td>'


def _differing(keys: Iterable[str], runs: Sequence[RunFolder]) -> list[dict[str, str]]:
    """A row for each key whose values differ, with the value of each run."""
    rows = []
    for key in sorted(keys):
        value_of_run = {run.name: _value(run, key) for run in runs}
        different = set(value_of_run.values())
        if len(different) > 1:
            rows.append({"": key, **value_of_run})
    return rows


def _value(run: RunFolder, key: str) -> str:
    """A value of the configuration as text. It is "" if the run does not have the key."""
    value = run.settings.get(key, "")
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)
