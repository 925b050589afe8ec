"""Generates Grafana's dashboards, deploy/helm/canopy/files/dashboards/*.json.

Usage: python -m tools.dashboards [--out DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

from tools.dashboard_panels import BOARDS, Board, Panel

OUT = Path(__file__).resolve().parent.parent / "deploy/helm/canopy/files/dashboards"
SOURCE = models.DataSourceRef(type_val="prometheus", uid="$datasource")
GREEN, RED = "green", "red"


def thresholds(panel: Panel) -> Any:
    """Green up to the limit, or from the floor on."""
    first, edge, second = GREEN, panel.limit, RED
    if panel.floor is not None:
        first, edge, second = RED, panel.floor, GREEN
    steps = [models.Threshold(value=None, color=first if edge is not None else GREEN)]
    if edge is not None:
        steps.append(models.Threshold(value=edge, color=second))
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def panel_builder(panel: Panel) -> Any:
    built: Any
    match panel.kind:
        case "number":
            built = stat.Panel().height(5)
        case "bars":
            built = bargauge.Panel().height(8).min(0).max(1)
        case _:
            built = timeseries.Panel().height(8).min(0).line_width(1)
            built = built.fill_opacity(25 if panel.kind == "stacked" else 0)
            if panel.kind == "stacked":
                stacking = common.StackingConfig().mode(common_models.StackingMode.NORMAL)
                built = built.stacking(stacking)
            if panel.limit is not None or panel.floor is not None:
                style = common.GraphThresholdsStyleConfig()
                built = built.thresholds_style(
                    style.mode(common_models.GraphTresholdsStyleMode.DASHED)
                )
    built = built.title(panel.question).span(panel.width).unit(panel.unit)
    built = built.datasource(SOURCE).thresholds(thresholds(panel))
    if panel.note:
        built = built.description(panel.note)
    for index, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expr).ref_id(chr(ord("A") + index))
        if query.legend:
            target = target.legend_format(query.legend)
        if panel.kind in ("number", "bars"):
            target = target.instant()
        built = built.with_target(target)
    return built


def board_json(board: Board) -> str:
    source = dashboard.DatasourceVariable("datasource").label("Source").type("prometheus")
    namespace = (
        dashboard.QueryVariable("namespace")
        .label("Namespace")
        .query("label_values(canopy_build_info, namespace)")
        .datasource(SOURCE)
        .include_all(True)
        .all_value(".*")
        .multi(True)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    )
    built = (
        dashboard.Dashboard(board.title)
        .uid(f"canopy-{board.name}")
        .description(board.description)
        .tags(["canopy"])
        .refresh("15s")
        .time("now-1h", "now")
        .timezone("browser")
        .editable()
        .with_variable(source)
        .with_variable(namespace)
        .link(
            dashboard.DashboardLink("Canopy")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["canopy"])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
    )
    for panel in board.panels:
        built = built.with_panel(panel_builder(panel))
    return json.dumps(built.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    for board in BOARDS:
        (out / f"{board.name}.json").write_text(board_json(board), encoding="utf-8")


if __name__ == "__main__":
    main()
