"""Writes `report.html`, a page with the run's curves, a timeline of the last steps, and tables. It
needs no other file."""

import html
import itertools
from pathlib import Path
from typing import Any

from verl_like.trainer.run.charts import (
    Curve,
    Points,
    chart,
    heat_map,
    histogram,
    names_of_chart,
    points_by_metric,
    timelines,
)
from verl_like.trainer.run.display import Display, TableRows
from verl_like.trainer.run.episodes import DRAWN, FAILURES, EpisodeRecord
from verl_like.trainer.run.html_page import table, write_page
from verl_like.trainer.run.router_load import Load
from verl_like.trainer.run.tracking import Row

BODY = """<p>{summary}</p>
<h2>Curves</h2><div class="charts">{charts}</div>
<h2>Timeline of the last steps</h2>
<p>Steps that validated or saved are left out. Each pool has a lane with a row for each process.
Bars above each other ran at the same time.</p>
{timeline}
{router_load}
<h2>Speed</h2>{speed}
<h2>Placement</h2>{placement}
<h2>Generations</h2>{generations}
{episodes}
<h2>Configuration</h2><pre>{config}</pre>"""
ROUTER_LOAD = """<h2>Load of the experts in the last step</h2>
<p>1 is the mean of a layer. White is an expert that computed no token.</p>
{picture}"""
EPISODES = """<h2>Episodes</h2>
<p>Some of the last step and of the last validation. <mark>&gt; stands before what the policy
drew</mark>: of a step that is what was trained. | stands before the rest of a row, = before a call
of a tool and its result, ! before what failed.</p>
{failures}<pre>{episodes}</pre>"""
STYLE = """
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
mark { background: #fff3bf; }
"""


def write_report(
    path: Path,
    *,
    title: str,
    summary: str,
    metrics: list[Row],
    steps: list[list[dict[str, Any]]],
    placement: TableRows,
    router_load: Load,
    generations: list[dict[str, Any]],
    episodes: list[EpisodeRecord],
    config: str,
    display: Display,
) -> None:
    """Writes the report. `metrics` has a row for each step, with "step". `steps` has the rows of
    some steps of the timeline."""
    points = points_by_metric(metrics)
    charts = []
    for heading, wanted, label in display.charts:
        names = names_of_chart(wanted, points)
        curves = [Curve(name, points[name]) for name in names]
        charts.append(chart(curves, title=heading, label=label))
    for heading, name, label in display.histograms:
        charts.append(_histogram(heading, name, label, metrics))
    calls = list(itertools.chain.from_iterable(steps))
    body = BODY.format(
        summary=html.escape(summary),
        charts="".join(charts),
        timeline=timelines({"": calls}) or "<p>No step was finished.</p>",
        router_load=_router_load(router_load) if router_load else "",
        speed=_speed(metrics),
        placement=table(placement),
        generations=table(generations),
        episodes=_episodes(episodes, points) if episodes else "",
        config=html.escape(config),
    )
    write_page(path, title, body, STYLE)


def _router_load(load: Load) -> str:
    """The section of the load of the experts."""
    relative = []
    for of_layer in load:
        mean = sum(of_layer) / len(of_layer)
        relative.append([count / mean if mean else 0.0 for count in of_layer])
    return ROUTER_LOAD.format(picture=heat_map(relative))


def _episodes(episodes: list[EpisodeRecord], points: dict[str, Points]) -> str:
    """The section of the episodes, with a table of what failed how often in the run."""
    shown = ""
    for record in episodes:
        for line in record.lines():
            escaped = html.escape(line)
            shown += f"<mark>{escaped}</mark>\n" if line.startswith(DRAWN) else f"{escaped}\n"
        shown += "\n"
    failures = []
    for heading, wanted, _label in FAILURES:
        for name in names_of_chart(wanted, points):
            total = sum(value for _step, value in points[name])
            failures.append({"class": heading, "metric": name, "in the run": f"{total:g}"})
    return EPISODES.format(episodes=shown, failures=table(failures))


def _histogram(title: str, name: str, label: str, metrics: list[Row]) -> str:
    """A histogram of `Display.histograms`, or "" if the run does not have its metric."""
    bins: Any = 20
    is_prefix = name.endswith("_")
    values = []
    weights = []
    for row in metrics:
        if is_prefix:
            for key, share in row.items():
                if key.startswith(name):
                    number = key.removeprefix(name)
                    values.append(float(number))
                    weights.append(share)
        elif name in row:
            values.append(row[name])
            weights.append(1.0)
    if not values:
        return ""
    if is_prefix:
        greatest = int(max(values))
        bins = [number - 0.5 for number in range(greatest + 2)]
    return histogram(values, weights, bins, title, label)


def _speed(metrics: list[Row]) -> str:
    """A table of the speed and the times of the steps. The first step, which warms up, is left out
    if there are others."""
    steps = [row for row in metrics if "timing_s/step" in row]
    counted = steps[1:] or steps
    rows = []
    for name, points in sorted(points_by_metric(counted).items()):
        if not name.startswith(("perf/", "timing_s/")):
            continue
        values = sorted(value for _step, value in points)
        median = values[len(values) // 2]
        rows.append(
            {
                "metric": name,
                "median": f"{median:,.4g}",
                "least": f"{values[0]:,.4g}",
                "greatest": f"{values[-1]:,.4g}",
            }
        )
    return table(rows)
