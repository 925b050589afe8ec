"""Rules and dashboards: checked by their own tools, and by a real server over real services."""

from __future__ import annotations

import json
import math
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from canopy.client import Client
from canopy.results import CanopyError, Message, Options
from canopy.stack import Child, Stack, StackSettings
from tests.deploy.conftest import CHART, ROOT, tool
from tools.dashboard_panels import BOARDS
from tools.dashboards import board_json
from tools.prometheus_server import RULES, PrometheusServer, filled_in, shortened

DASHBOARDS = sorted((CHART / "files/dashboards").glob("*.json"))
RULES_TEST = Path(__file__).with_name("rules_test.yaml")
LOAD_SECONDS = 8.0
ACCEPTED = "rate(canopy_router_spec_decode_num_accepted_tokens_total[60s]) > 0"
"""Until then more load: a busy machine answers little in a few seconds."""
SLOW_MACHINE = {"CanopyFirstTokenSlow", "CanopyQueueGrows", "CanopyTreesMissing"}
"""Alerts that a busy machine may raise with good reason."""
DRILL = 0.1
"""Alerts wait a tenth of their time here; `python -m benchmarks.fault_drill` waits it out."""


def rules(kind: str) -> dict[str, str]:
    """Name and expression of every `record` or `alert`."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule[kind]: rule["expr"] for g in groups for rule in g["rules"] if kind in rule}


def panels(board: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for panel in board["panels"]:
        yield f"{board['title']} / {panel['title']}", panel


def boards() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in DASHBOARDS]


# -- files alone


def test_rules_pass_their_check_and_their_tests() -> None:
    for arguments in (("check", "rules", str(RULES)), ("test", "rules", str(RULES_TEST))):
        result = subprocess.run(
            [tool("promtool"), *arguments], capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_is_tested_both_ways_and_has_a_runbook() -> None:
    cases = [c for t in yaml.safe_load(RULES_TEST.read_text())["tests"]
             for c in t.get("alert_rule_test", [])]  # fmt: skip
    fires = {case["alertname"] for case in cases if case.get("exp_alerts")}
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs/operating.md").read_text(), re.M)
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                assert rule["alert"] in fires, "no test in which it fires"
                assert rule["alert"] in headings, "no runbook in docs/operating.md"
                anchor = f"docs/operating.md#{rule['alert'].lower()}"
                assert rule["annotations"]["runbook"] == anchor
                assert rule["labels"]["severity"] in ("page", "ticket")


def test_committed_dashboards_are_current() -> None:
    assert [path.stem for path in DASHBOARDS] == sorted(board.name for board in BOARDS)
    for board in BOARDS:
        text = (CHART / f"files/dashboards/{board.name}.json").read_text()
        assert text == board_json(board), "run `make deploy-files`"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_grafanas_own_model_keeps_every_field(path: Path) -> None:
    board = json.loads(path.read_text())
    parsed = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
    assert parsed == board
    for name, panel in panels(board):
        assert panel["title"].endswith("?"), f"{name}: a panel answers a question"
        assert panel["targets"], name


# -- a real server over the three real processes


def load(client: Client, number: int, until: float) -> None:
    """Requests of several kinds, one after the other."""
    prompts = ["Why does bread rise?", "Name three rivers.", "What is a prime number?"]
    count = number
    while time.monotonic() < until:
        options = Options(max_tokens=24, speculation=count % 4 != 3, seed=count)
        client.generate([Message("user", prompts[count % 3])], options)
        count += 1
    with pytest.raises(CanopyError):
        client.generate("x", Options(max_tokens=1 << 30))


def run_load(address: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    with Client(address) as client:
        threads = [threading.Thread(target=load, args=(client, n, until)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def prometheus(stack: Stack) -> Iterator[PrometheusServer]:
    targets = {name: child.metrics_address for name, child in stack.children.items()}
    with PrometheusServer(targets, shortened(RULES, DRILL)) as server:
        deadline = time.monotonic() + 180
        while True:
            run_load(stack.address, LOAD_SECONDS)
            time.sleep(2.0)  # the last scrape and evaluation
            if server.query(ACCEPTED) or time.monotonic() > deadline:
                break
        yield server


def as_values(expr: str) -> str:
    """An alert's expression in which comparisons answer 0 or 1 instead of dropping samples."""
    parts = re.split(r"(\{[^}]*\})", expr)  # braces hold label matchers, no comparisons
    compare = re.compile(r"(==|!=|>=|<=|>|<)(?!\s*bool)")
    return "".join(p if p.startswith("{") else compare.sub(r"\1 bool", p) for p in parts)


def answers(prometheus: PrometheusServer, queries: dict[str, str]) -> list[str]:
    """What is wrong with the answers: empty, or numbers that are none."""
    wrong = []
    for name, expr in queries.items():
        try:
            values = [value for _, value in prometheus.query(expr)]
        except ValueError as error:
            wrong.append(f"{name}: {error}: {expr}")
            continue
        if not values or all(math.isnan(value) for value in values):
            wrong.append(f"{name}: {'nan' if values else 'empty'}: {expr}")
    return wrong


def answers_under_load(
    prometheus: PrometheusServer, stack: Stack, queries: dict[str, str]
) -> list[str]:
    """As `answers`; load runs on while a rate has nothing to show, at most two minutes.

    Rates look back a minute, and a machine with other work may have answered nothing in it.
    """
    deadline = time.monotonic() + 120
    while wrong := answers(prometheus, queries):
        if time.monotonic() > deadline:
            break
        run_load(stack.address, LOAD_SECONDS)
        time.sleep(2.0)
    return wrong


def test_every_dashboard_query_has_an_answer(prometheus: PrometheusServer, stack: Stack) -> None:
    queries = {
        f"{name} {target['refId']}": filled_in(target["expr"])
        for board in boards()
        for name, panel in panels(board)
        for target in panel["targets"]
    }
    assert len(queries) > 50
    assert answers_under_load(prometheus, stack, queries) == []


def test_every_rule_has_an_answer_and_none_fires(
    prometheus: PrometheusServer, stack: Stack
) -> None:
    recorded = {name: name for name in rules("record")}
    alerts = {name: as_values(expr) for name, expr in rules("alert").items()}
    assert answers_under_load(prometheus, stack, {**recorded, **alerts}) == []
    firing = {name for name, state in prometheus.alerts().items() if state == "firing"}
    assert firing <= SLOW_MACHINE


def test_a_misspelt_metric_would_be_seen(prometheus: PrometheusServer) -> None:
    assert answers(prometheus, {"x": "rate(canopy_router_request_total[60s])"}) != []
    assert answers(prometheus, {"x": as_values("canopy_router_peer_ready == 7")}) == []


def test_documented_queries_have_an_answer(prometheus: PrometheusServer, stack: Stack) -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    section = text.split("## What they mean")[1].split("## All metrics")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "`" in line]
    queries = {}
    for row in rows:
        (expr,) = re.findall(r"`([^`]*canopy_[^`]*)`", row)
        if "(" not in expr:  # a histogram's bare name
            expr += "_count"
        expr = expr.replace("\\|", "|").replace('"d"', '"0"').replace("[5m]", "[60s]")
        queries[row] = expr
    assert len(queries) >= 7
    assert answers_under_load(prometheus, stack, queries) == []


def await_state(prometheus: PrometheusServer, alert: str, state: str | None, limit: float) -> float:
    """Seconds until an alert is in a state; None: gone."""
    begun = time.monotonic()
    while prometheus.alerts().get(alert) != state:
        assert time.monotonic() - begun < limit, f"{alert} is {prometheus.alerts().get(alert)}"
        time.sleep(0.25)
    return time.monotonic() - begun


def test_a_dead_draft_is_alerted_and_a_new_one_clears_it(
    stack: Stack, settings: StackSettings, prometheus: PrometheusServer
) -> None:
    draft = stack.children["draft"]
    port = draft.address.rpartition(":")[2]
    metrics_port = draft.metrics_address.rpartition(":")[2]
    draft.process.kill()
    draft.process.wait()
    draft.close()
    run_load(stack.address, 1.0)  # answers come, without speculation
    await_state(prometheus, "CanopyDraftUnavailable", "firing", limit=30)
    flags = ("--head", str(settings.head), "--target", str(settings.model))
    flags += ("--port", port, "--metrics-port", metrics_port)
    stack.children["draft"] = Child("draft", flags, show_logs=False)
    stack.children["draft"].await_event("serving", time.monotonic() + 240)
    await_state(prometheus, "CanopyDraftUnavailable", None, limit=30)
