"""Draws charts of metrics and timelines of worker calls as SVG that is part of a page."""

import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

from verl_like.trainer.run.display import printable

pyplot.rcParams["text.parse_math"] = False  # a data source's name may have dollar signs

Calls = Sequence[Mapping[str, Any]]
"""Rows of a timeline."""
Points = list[tuple[float, float]]
"""The step and the value of each point."""
SHORTEST_CALL_S = 1e-3
"""Shorter calls are left out of a timeline."""
FEW_POINTS = 30
"""A curve of fewer points has a marker at each of them."""
METHODS_OF_A_LINE = 8
"""The most methods that a line of a timeline's legend has."""


@dataclass(frozen=True)
class Curve:
    """A metric over the steps."""

    name: str
    """The name in the legend."""
    points: Points
    color: Any = None
    """A color of matplotlib. None means the next one of its cycle."""


def chart(curves: Sequence[Curve], *, title: str = "", label: str, has_legend: bool = True) -> str:
    """A chart with several curves. `label` is that of the y-axis. It is "" if there are no
    curves."""
    if not curves:
        return ""
    figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
    for curve in curves:
        steps = [step for step, _value in curve.points]
        values = [value for _step, value in curve.points]
        axes.plot(
            steps,
            values,
            label=printable(curve.name),
            color=curve.color,
            linewidth=1.4,
            marker="o" if len(curve.points) < FEW_POINTS else "",
            markersize=3,
        )
    axes.set(title=title, xlabel="step", ylabel=label)
    axes.grid(alpha=0.3)
    if has_legend:
        axes.legend(fontsize="x-small")
    return _svg(figure)


def points_by_metric(metrics: Sequence[Mapping[str, float]]) -> dict[str, Points]:
    """The points of each metric. `metrics` has a row for each step, with "step"."""
    points: dict[str, Points] = {}
    for row in metrics:
        for name, value in row.items():
            points.setdefault(name, []).append((row["step"], value))
    return points


def names_of_chart(wanted: Sequence[str], names: Iterable[str]) -> list[str]:
    """Returns the names that a chart shows. A wanted name that ends in "/" stands for all names
    that begin with it."""
    prefixes = tuple(name for name in wanted if name.endswith("/"))
    return [name for name in names if name in wanted or name.startswith(prefixes)]


def histogram(
    values: Sequence[float], weights: Sequence[float], bins: Any, title: str, label: str
) -> str:
    """A histogram of weighted values, as shares of the total weight. `label` is that of the
    x-axis."""
    total = sum(weights)
    shares = [weight / total for weight in weights]
    figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
    axes.hist(values, bins=bins, weights=shares)
    axes.set(title=title, xlabel=label, ylabel="share")
    axes.grid(alpha=0.3)
    return _svg(figure)


def heat_map(values: Sequence[Sequence[float]]) -> str:
    """A picture of the load of experts, as multiples of the mean of their layer. The layers go
    downwards. 0 is white."""
    num_rows = len(values)
    height = 1.2 + min(0.2 * num_rows, 8.0)
    figure, axes = pyplot.subplots(figsize=(10, height), layout="constrained")
    image = axes.imshow(values, cmap="Blues", vmin=0, aspect="auto", interpolation="nearest")
    axes.set(xlabel="expert", ylabel="layer with a router")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, label="tokens / mean")
    return _svg(figure)


def timelines(calls_of_part: Mapping[str, Calls]) -> str:
    """Timelines below each other with one scale of seconds. Each of them begins with its first
    call.

    Every pool has a lane with a row for each of its processes. The result is "" if there are no
    calls.

    Args:
        calls_of_part: the rows of each timeline, by its title.
    """
    shown = {}
    names = set()
    for title, calls in calls_of_part.items():
        long_enough = []
        for call in calls:
            seconds = call["finished"] - call["started"]
            if seconds > SHORTEST_CALL_S:
                long_enough.append(call)
                names.add(call["method"])
        if long_enough:
            shown[title] = long_enough
    if not shown:
        return ""
    methods = sorted(names)
    colors = {method: f"C{number}" for number, method in enumerate(methods)}
    num_lanes = [len(_lanes(calls)) for calls in shown.values()]
    height = 0.45 * sum(num_lanes) + 0.6 * len(shown) + 1.0
    figure, axes_of_part = pyplot.subplots(
        len(shown),
        sharex=True,
        squeeze=False,
        figsize=(13, height),
        height_ratios=num_lanes,
        layout="constrained",
    )
    bars: dict[str, Any] = {}
    column = axes_of_part[:, 0]
    for axes, (title, calls) in zip(column, shown.items(), strict=True):
        bars |= _draw_timeline(axes, calls, colors)
        axes.set_title(printable(title), fontsize="small", loc="left")
    column[-1].set_xlabel("seconds")
    figure.legend(
        [bars[method] for method in methods],
        [printable(method) for method in methods],
        ncols=min(len(methods), METHODS_OF_A_LINE),
        fontsize="x-small",
        loc="outside lower center",
    )
    return _svg(figure)


def _lanes(calls: Calls) -> list[tuple[str, str]]:
    """The pool and the process of each row of a timeline."""
    lanes = {(call["pool"], call["process"]) for call in calls}
    return sorted(lanes)


def _draw_timeline(axes: Any, calls: Calls, colors: Mapping[str, str]) -> dict[str, Any]:
    """Draws the calls of a timeline. Returns the bars by method."""
    lanes = _lanes(calls)
    origin = min(call["started"] for call in calls)
    bars = {}
    for method, color in colors.items():
        rows = []
        starts = []
        seconds = []
        for call in calls:
            if call["method"] == method:
                lane = (call["pool"], call["process"])
                rows.append(lanes.index(lane))
                starts.append(call["started"] - origin)
                seconds.append(call["finished"] - call["started"])
        if rows:
            bars[method] = axes.barh(
                rows, seconds, left=starts, height=0.7, linewidth=0, color=color
            )
    pools = [pool for pool, _process in lanes]
    for number, (above, below) in enumerate(itertools.pairwise(pools)):
        if above != below:
            axes.axhline(number + 0.5, color="black", linewidth=0.8)
    steps = {call["step"] for call in calls}
    for step in sorted(steps):
        times = [call["started"] for call in calls if call["step"] == step]
        start = min(times) - origin
        axes.axvline(start, color="grey", linestyle=":", linewidth=0.8)
        axes.text(start, -0.62, f" step {step}", fontsize="x-small", va="bottom")
    names = [printable(f"{pool}\n{process}") for pool, process in lanes]
    axes.set_yticks(range(len(lanes)), names, fontsize="small")
    axes.invert_yaxis()
    return bars


def _svg(figure: Any) -> str:
    """Turns a figure into an element of SVG, and closes it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
