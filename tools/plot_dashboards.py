"""Draws a dashboard as Grafana would lay it out, from the same queries; for the documentation.

Needs matplotlib (the extra `plot`) and a running Prometheus; `benchmarks.fault_drill` calls it.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.gridspec import GridSpec
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tools.dashboard_panels import Board, Panel, Query
from tools.prometheus_server import PrometheusServer, filled_in

COLUMNS = 24
STEP_SECONDS = 1.0
WINDOW = "20s"
COLOURS = ["#3f7fb5", "#e08a2e", "#4f9d56", "#c44e52", "#8067a8", "#8c6d5a", "#d377ae", "#777777"]
PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float, unit: str) -> str:
    """As Grafana would write it: 12 ms, 3.4 %, 1.2 MB."""
    if math.isnan(value):
        return "–"
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        return f"{1000 * value:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
    suffix = {"bytes": "B", "Bps": "B/s", "ops": "/s", "reqps": "/s"}.get(unit, "")
    for factor, prefix in PREFIXES:
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{suffix}"
    return f"{value:.3g}{' ' if suffix else ''}{suffix}"


def legend(query: Query, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), query.legend)


def rows_of(board: Board) -> list[list[Panel]]:
    """Panels in rows of 24 columns, filled as Grafana fills them."""
    rows: list[list[Panel]] = [[]]
    for panel in board.panels:
        if sum(p.width for p in rows[-1]) + panel.width > COLUMNS:
            rows.append([])
        rows[-1].append(panel)
    return rows


def draw(board: Board, server: PrometheusServer, start: float, end: float, file: Path) -> None:
    """Writes a PNG of the board over [start, end], unix seconds."""
    rows = rows_of(board)
    heights = [0.8 if all(p.kind == "number" for p in row) else 2.0 for row in rows]
    figure = plt.figure(figsize=(16, 1.05 + 1.6 * sum(heights)), dpi=72)
    grid = GridSpec(len(rows), COLUMNS, figure=figure, height_ratios=heights)
    grid.update(
        left=0.045,
        right=0.985,
        top=1 - 0.75 / figure.get_figheight(),
        bottom=0.55 / figure.get_figheight(),
    )
    grid.update(hspace=0.55, wspace=6.0)
    figure.text(0.012, 1 - 0.3 / figure.get_figheight(), board.title, size=15, weight="bold")
    figure.text(0.2, 1 - 0.3 / figure.get_figheight(), board.description, size=11, color="#555555")
    for index, row in enumerate(rows):
        column = 0
        for panel in row:
            axes = figure.add_subplot(grid[index, column : column + panel.width])
            column += panel.width
            axes.set_title(panel.question, size=10, loc="left", weight="bold")
            match panel.kind:
                case "number":
                    _numbers(axes, panel, server, end)
                case "bars":
                    _bars(axes, panel, server, start, end)
                case _:
                    _lines(axes, panel, server, start, end)
    figure.savefig(file, pil_kwargs={"optimize": True})
    plt.close(figure)


def with_gaps(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Times and values; where steps are missing, a value that is none, so that no line is drawn."""
    times: list[float] = []
    values: list[float] = []
    for time, value in points:
        if times and time - times[-1] > 1.5 * STEP_SECONDS:
            times.append(times[-1] + STEP_SECONDS)
            values.append(math.nan)
        times.append(time)
        values.append(value)
    return times, values


def _last(server: PrometheusServer, panel: Panel, end: float) -> list[tuple[str, float]]:
    found = []
    for query in panel.queries:
        expr = filled_in(query.expr, WINDOW)
        for labels, points in server.query_range(expr, end - 1, end, 1.0):
            found.append((legend(query, labels), points[-1][1]))
    return found


def _numbers(axes: Any, panel: Panel, server: PrometheusServer, end: float) -> None:
    axes.axis("off")
    found = _last(server, panel, end)
    for index, (label, value) in enumerate(found):
        bad = panel.limit is not None and value >= panel.limit
        bad = bad or (panel.floor is not None and value < panel.floor)
        colour = "#c44e52" if bad else "#2f7d4f"
        place = (index + 0.5) / len(found)
        size = 26 if len(found) == 1 else 14
        axes.text(
            place,
            0.62,
            number(value, panel.unit),
            size=size,
            color=colour,
            ha="center",
            va="center",
        )
        short = label.replace("canopy_", "").replace("_serving", "")
        axes.text(place, 0.1, short, size=8, ha="center", va="center", color="#555555")


def _bars(axes: Any, panel: Panel, server: PrometheusServer, start: float, end: float) -> None:
    """Over the whole span: single seconds hold too few rounds for a distribution."""
    found = []
    for query in panel.queries:
        expr = filled_in(query.expr, f"{round(end - start)}s")
        for labels, points in server.query_range(expr, end - 1, end, 1.0):
            found.append((legend(query, labels), points[-1][1]))
    found = [pair for pair in found if "Inf" not in pair[0]]
    found.sort(key=lambda pair: float(re.findall(r"[\d.]+", pair[0])[0]))
    found = found[:9]
    axes.barh(range(len(found)), [value for _, value in found], color=COLOURS[0], height=0.7)
    axes.set_yticks(range(len(found)), [label.removesuffix(".0") for label, _ in found], size=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.tick_params(axis="x", labelsize=8)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, panel.unit)))
    for index, (_, value) in enumerate(found):
        text = number(value, panel.unit)
        inside = value > 0.85
        axes.text(
            value - 0.01 if inside else value + 0.01, index, text, size=8, va="center",
            ha="right" if inside else "left", color="white" if inside else "black",
        )  # fmt: skip
    _clean(axes)


def _lines(axes: Any, panel: Panel, server: PrometheusServer, start: float, end: float) -> None:
    series: list[tuple[str, list[float], list[float]]] = []
    for query in panel.queries:
        expr = filled_in(query.expr, WINDOW)
        for labels, points in server.query_range(expr, start, end, STEP_SECONDS):
            times, values = with_gaps(points)
            series.append((legend(query, labels), [time - start for time in times], values))
    # Series that are always 0 only crowd the legend, unless there is nothing else.
    telling = [item for item in series if any(v and not math.isnan(v) for v in item[2])]
    series = (telling or series)[: len(COLOURS)]
    if panel.kind == "stacked":
        _stack(axes, series, end - start)
    else:
        for (label, times, values), colour in zip(series, COLOURS, strict=False):
            axes.plot(times, values, lw=1.2, color=colour, label=label)
    edge = panel.limit if panel.limit is not None else panel.floor
    if edge is not None:
        highest = max((v for _, _, vs in series for v in vs if not math.isnan(v)), default=0)
        if highest > edge / 6:  # far below the limit, the limit would flatten the lines
            axes.axhline(edge, color="#c44e52", ls="--", lw=1)
    axes.set_xlim(0, end - start)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, panel.unit)))
    axes.xaxis.set_major_formatter(
        FuncFormatter(
            lambda value, _: datetime.fromtimestamp(start + value, UTC).strftime("%H:%M:%S")
        )
    )
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.legend(
        fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.1), ncol=3, frameon=False,
        borderaxespad=0, columnspacing=1.0, handlelength=1.2,
    )  # fmt: skip
    _clean(axes)


def _stack(axes: Any, series: list[tuple[str, list[float], list[float]]], span: float) -> None:
    steps = [STEP_SECONDS * i for i in range(round(span / STEP_SECONDS) + 1)]
    tables = []
    for _, times, values in series:
        known = {round(t): v for t, v in zip(times, values, strict=True)}
        tables.append([0.0 if math.isnan(v := known.get(round(t), 0.0)) else v for t in steps])
    labels = [label for label, _, _ in series]
    axes.stackplot(steps, *tables, labels=labels, colors=COLOURS, alpha=0.7, lw=0)


def _clean(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
