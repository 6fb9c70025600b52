"""Draws `report.html`, one file that needs no other: curves of the run and a timeline with one lane
a pool."""

import html
import io
import itertools
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from verl_like.trainer.run.display import Display, printable

pyplot.rcParams["text.parse_math"] = False  # a data source's name may have dollar signs

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; }}
body {{ max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1rem; }}
svg {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; }}
td, th {{ text-align: left; vertical-align: top; }}
td, th {{ padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #ddd; }}
pre {{ background: #f6f8fa; padding: 1rem; overflow-x: auto; }}
</style></head><body>
<h1>{title}</h1><p>{summary}</p>
<h2>Curves</h2><div class="charts">{charts}</div>
<h2>Timeline of the last steps</h2>
<p>Steps that validated or saved are left out. Each pool has a lane with a row for each process.
Bars above each other ran at the same time.</p>
{timeline}
<h2>Speed</h2>{speed}
<h2>Placement</h2>{placement}
<h2>Generations</h2>{generations}
<h2>Configuration</h2><pre>{config}</pre>
</body></html>
"""


def write_report(
    path: Path,
    *,
    title: str,
    summary: str,
    metrics: list[dict[str, float]],
    steps: list[list[dict[str, Any]]],
    placement: list[dict[str, str]],
    generations: list[dict[str, Any]],
    config: str,
    display: Display,
) -> None:
    """Writes the report. `metrics` has one row a step (with "step"), `steps` the rows of some steps
    of the timeline."""
    text = {
        "title": html.escape(title),
        "summary": html.escape(summary),
        "config": html.escape(config),
    }
    figures = [_chart(*chart, metrics) for chart in display.charts]
    figures += [_histogram(*histogram, metrics) for histogram in display.histograms]
    drawn = {"charts": "".join(figures), "timeline": _timeline(steps)}
    tables = {
        "speed": _speed(metrics),
        "placement": _table(placement),
        "generations": _table(generations),
    }
    # A lone surrogate has no bytes in UTF-8: its code is written.
    path.write_text(
        PAGE.format(**text, **drawn, **tables), encoding="utf-8", errors="backslashreplace"
    )


def _chart(title: str, names: tuple[str, ...], label: str, metrics: list[dict[str, float]]) -> str:
    series = {
        name: [(row["step"], row[name]) for row in metrics if name in row]
        for name in dict.fromkeys(key for row in metrics for key in row)
        if any(
            name.startswith(wanted) if wanted.endswith("/") else name == wanted for wanted in names
        )
    }
    if not series:
        return ""
    figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
    for name, points in series.items():
        steps, values = zip(*points, strict=True)
        marker = "o" if len(points) < 30 else ""
        axes.plot(steps, values, label=printable(name), linewidth=1.4, marker=marker, markersize=3)
    axes.set(title=title, xlabel="step", ylabel=label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
    return _svg(figure)


def _histogram(title: str, name: str, label: str, metrics: list[dict[str, float]]) -> str:
    if name.endswith("_"):
        found = [
            (float(key.removeprefix(name)), row[key])
            for row in metrics
            for key in row
            if key.startswith(name)
        ]
        bins: Any = [number - 0.5 for number in range(int(max(found, default=(0, 0))[0]) + 2)]
    else:
        found = [(row[name], 1.0) for row in metrics if name in row]
        bins = 20
    if not found:
        return ""
    values, weights = zip(*found, strict=True)
    total = sum(weights)
    figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
    axes.hist(values, bins=bins, weights=[weight / total for weight in weights])
    axes.set(title=title, xlabel=label, ylabel="share")
    axes.grid(alpha=0.3)
    return _svg(figure)


def _timeline(steps: list[list[dict[str, Any]]]) -> str:
    shown = [e for events in steps for e in events if e["finished"] - e["started"] > 1e-3]
    if not shown:
        return "<p>No step was finished.</p>"
    lanes = sorted({(e["pool"], e["process"]) for e in shown})
    methods = sorted({e["method"] for e in shown})
    origin = min(e["started"] for e in shown)
    figure, axes = pyplot.subplots(figsize=(13, 0.45 * len(lanes) + 1.6), layout="constrained")
    for method in methods:
        calls = [e for e in shown if e["method"] == method]
        rows = [lanes.index((e["pool"], e["process"])) for e in calls]
        starts = [e["started"] - origin for e in calls]
        seconds = [e["finished"] - e["started"] for e in calls]
        axes.barh(rows, seconds, left=starts, height=0.7, linewidth=0, label=printable(method))
    for lane, (above, below) in enumerate(itertools.pairwise(lanes)):
        if above[0] != below[0]:  # another pool
            axes.axhline(lane + 0.5, color="black", linewidth=0.8)
    for step in sorted({e["step"] for e in shown}):
        start = min(e["started"] for e in shown if e["step"] == step) - origin
        axes.axvline(start, color="grey", linestyle=":", linewidth=0.8)
        axes.text(start, -0.62, f" step {step}", fontsize="x-small", va="bottom")
    names = [printable(f"{pool}\n{process}") for pool, process in lanes]
    axes.set_yticks(range(len(lanes)), names, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(
        ncols=len(methods), fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.25)
    )
    return _svg(figure)


def _speed(metrics: list[dict[str, float]]) -> str:
    """Speed and time of the steps, without the first one, which warms up, where there are
    others."""
    steps = [row for row in metrics if "timing_s/step" in row]
    names = sorted(
        {name for row in steps for name in row if name.startswith(("perf/", "timing_s/"))}
    )
    rows = []
    for name in names:
        if values := sorted(row[name] for row in steps[min(1, len(steps) - 1) :] if name in row):
            shown = {"median": values[len(values) // 2], "least": values[0], "greatest": values[-1]}
            rows.append({"metric": name, **{key: f"{value:,.4g}" for key, value in shown.items()}})
    return _table(rows)


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "<p>None.</p>"
    head = "".join(f"<th>{html.escape(key)}</th>" for key in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(value))}</td>" for value in row.values()) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
