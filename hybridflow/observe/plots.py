"""Curves of a run as curves.png and curves.html.

    python -m hybridflow.observe.plots RUN_FOLDER [RUN_FOLDER ...]
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hybridflow.errors import DataError, HybridFlowError
from hybridflow.observe.metrics import read_metrics
from hybridflow.observe.panels import Panel, Series, moving_mean, panels
from hybridflow.observe.run_folder import RunFolder

if TYPE_CHECKING:
    import plotly.graph_objects

COLORS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#db2777")
OTHER_COLOR = "#9ca3af"
SMOOTH_FROM = 40  # points; longer curves get a moving mean on top of the raw values
BARS_UP_TO = 60  # steps; longer runs show seconds by phase as areas


def write_curves(run: RunFolder, title: str | None = None) -> list[Path]:
    """Draws curves.png and curves.html from metrics.jsonl and returns their paths. Raises DataError if no step is done."""
    shown = panels(read_metrics(run.metrics))
    if not shown:
        raise DataError(f"{run.metrics} has no metric to draw; the run has done no step")
    title = title or run.root.resolve().name
    _replace(run.curves_png, draw_png(shown, title))
    _replace(run.curves_html, draw_html(shown, title).encode())
    return [run.curves_png, run.curves_html]


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(content)
    temporary.replace(path)


def figure(shown: list[Panel], title: str) -> Figure:
    """Two panels a row; every horizontal axis is the step."""
    rows = math.ceil(len(shown) / 2)
    drawing = Figure(figsize=(12, 2.9 * rows + 0.6), dpi=110, layout="constrained")
    FigureCanvasAgg(drawing)
    drawing.suptitle(title, fontsize=14, fontweight="bold")
    grid = drawing.add_gridspec(rows, 2)
    last = max(x for panel in shown for series in panel.series for x in series.x)
    for index, panel in enumerate(shown):
        wide = index == len(shown) - 1 and index % 2 == 0  # a last panel alone takes the row
        axes = drawing.add_subplot(grid[index // 2, :] if wide else grid[index // 2, index % 2])
        _draw_panel(axes, panel, last)
    return drawing


def draw_png(shown: list[Panel], title: str) -> bytes:
    import io

    buffer = io.BytesIO()
    figure(shown, title).savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_panel(axes: Axes, panel: Panel, last: float) -> None:
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
    axes.set_ylabel(panel.unit, fontsize=9)
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    stacks = [series for series in panel.series if series.style == "stack"]
    if stacks:
        _draw_stack(axes, stacks)
    for series, color in zip(panel.series, COLORS, strict=False):
        if series.style != "stack":
            _draw_series(axes, series, color)
    if panel.log:
        axes.set_yscale("log")
    axes.set_xlim(-0.02 * last - 0.5, last * 1.02 + 0.5)
    if len(panel.series) > 1:
        beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if stacks else {"loc": "best"}
        axes.legend(fontsize=8, frameon=False, **beside)


def _draw_series(axes: Axes, series: Series, color: str) -> None:
    if series.style == "markers":
        axes.plot(series.x, series.y, color=color, marker="o", markersize=5, linewidth=1.4, label=series.label, zorder=3)
    elif len(series.x) < SMOOTH_FROM:
        axes.plot(series.x, series.y, color=color, marker="o", markersize=2.5, linewidth=1.6, label=series.label)
    else:
        axes.plot(series.x, series.y, color=color, linewidth=0.8, alpha=0.3)
        axes.plot(series.x, moving_mean(series.y, _window(series)), color=color, linewidth=1.8, label=series.label)


def _window(series: Series) -> int:
    return max(5, len(series.x) // 25)


def _stack_color(label: str, index: int) -> str:
    return OTHER_COLOR if label == "other" else COLORS[index % len(COLORS)]


def _draw_stack(axes: Axes, stacks: list[Series]) -> None:
    colors = [_stack_color(series.label, index) for index, series in enumerate(stacks)]
    steps = stacks[0].x
    if len(steps) > BARS_UP_TO:
        axes.stackplot(steps, [s.y for s in stacks], labels=[s.label for s in stacks], colors=colors, alpha=0.85)
        return
    base = [0.0] * len(steps)
    for series, color in zip(stacks, colors, strict=True):
        axes.bar(steps, series.y, bottom=base, width=0.85, color=color, alpha=0.85, label=series.label)
        base = [low + high for low, high in zip(base, series.y, strict=True)]


def draw_html(shown: list[Panel], title: str) -> str:
    """One page that needs nothing else: plotly's script is inside it (about 5 MB), so it opens without a network."""
    import html

    import plotly.io
    from plotly.subplots import make_subplots

    rows = math.ceil(len(shown) / 2)
    drawing = make_subplots(rows=rows, cols=2, subplot_titles=[panel.title for panel in shown], vertical_spacing=0.28 / rows)
    for index, panel in enumerate(shown):
        row, column = index // 2 + 1, index % 2 + 1
        for number, series in enumerate(panel.series):
            drawing.add_trace(_trace(series, number, panel.title), row=row, col=column)
        drawing.update_yaxes(title_text=panel.unit, type="log" if panel.log else "linear", row=row, col=column)
        drawing.update_xaxes(title_text="step", row=row, col=column)
    drawing.update_layout(
        title=html.escape(title), template="plotly_white", height=320 * rows + 120, barmode="stack", bargap=0.15,
        hovermode="x unified", legend={"font": {"size": 11}, "tracegroupgap": 12},
    )
    return plotly.io.to_html(drawing, include_plotlyjs=True, full_html=True, config={"displaylogo": False, "responsive": True})


def _trace(series: Series, number: int, group: str) -> plotly.graph_objects.BaseTraceType:
    import plotly.graph_objects as go

    common = {
        "x": series.x, "y": [None if math.isnan(value) else value for value in series.y], "name": series.label,
        "legendgroup": group, "legendgrouptitle": {"text": group},
    }
    if series.style == "stack":
        return go.Bar(**common, marker_color=_stack_color(series.label, number))
    mode = "lines+markers" if series.style == "markers" or len(series.x) < SMOOTH_FROM else "lines"
    return go.Scatter(**common, mode=mode, line={"color": COLORS[number % len(COLORS)], "width": 1.8})


def main(arguments: list[str]) -> int:
    """Draws the curves of each run folder; the exit code is 2 where one could not be drawn."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stderr.write("usage: python -m hybridflow.observe.plots RUN_FOLDER [RUN_FOLDER ...]\n")
        return 0 if arguments else 2
    try:
        for folder in arguments:
            for path in write_curves(RunFolder.open(folder)):
                sys.stdout.write(f"{path}\n")
    except HybridFlowError as error:
        sys.stderr.write(f"{error}\n")
        return error.EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
