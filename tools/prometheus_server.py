"""A real Prometheus server on a free port, which scrapes the services of a running stack.

Needs the programs of Debian's package `prometheus`. Used by `make check-deploy`, the fault drill
and the picture of the dashboards.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from common.errors import StartupError

RULES = Path(__file__).resolve().parent.parent / "deploy/helm/canopy/files/rules/canopy.yaml"
NAMESPACE = "canopy"
"""The label that Kubernetes' discovery would add."""

Sample = tuple[dict[str, str], float]


def shortened(rules: Path, factor: float) -> dict[str, Any]:
    """The rules with every `for` made `factor` times as long: 0.1 for a drill in seconds."""
    content: dict[str, Any] = yaml.safe_load(rules.read_text(encoding="utf-8"))
    for group in content["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                number, unit = re.fullmatch(r"(\d+)(s|m)", rule["for"]).groups()  # type: ignore[union-attr]
                seconds = int(number) * (60 if unit == "m" else 1) * factor
                rule["for"] = f"{max(1, round(seconds))}s"
    return content


def filled_in(expr: str, window: str = "60s") -> str:
    """A dashboard's query with Grafana's variables replaced as Grafana would."""
    return expr.replace("$__rate_interval", window).replace("$namespace", ".*")


class PrometheusServer:
    """Scrapes and evaluates every second. A context manager that ends the server.

    `targets`: by name, HOST:PORT of a metrics endpoint.
    """

    def __init__(self, targets: Mapping[str, str], rules: dict[str, Any] | None = None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="canopy-prometheus-")
        directory = Path(self._directory.name)
        content = rules or yaml.safe_load(RULES.read_text(encoding="utf-8"))
        (directory / "rules.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
        config = {
            "global": {
                "scrape_interval": "1s",
                "scrape_timeout": "1s",
                "evaluation_interval": "1s",
            },
            "rule_files": ["rules.yaml"],
            "scrape_configs": [
                {
                    "job_name": name,
                    "static_configs": [{"targets": [target], "labels": {"namespace": NAMESPACE}}],
                }
                for name, target in targets.items()
            ],
        }
        (directory / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        program = shutil.which("prometheus")
        if program is None:
            raise StartupError("prometheus is missing; install Debian's package prometheus")
        directory = Path(self._directory.name)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.url = f"http://{address}"
        self._log = (directory / "log").open("wb")
        self._process = subprocess.Popen(
            [
                program,
                f"--config.file={directory / 'prometheus.yaml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=self._log,
            stderr=self._log,
        )
        deadline = time.monotonic() + 60
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise StartupError("prometheus did not start")
            time.sleep(0.2)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)
            self._process = None
            self._log.close()
        self._directory.cleanup()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _ask(self, path: str, **parameters: object) -> Any:
        """Raises ValueError with the server's words for a query that it does not take."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(json.load(error)["error"]) from None

    def query(self, expr: str) -> list[Sample]:
        """An instant vector: labels and value of each sample."""
        data = self._ask("query", query=expr)
        return [(item["metric"], float(item["value"][1])) for item in data["result"]]

    def query_range(
        self, expr: str, start: float, end: float, step: float
    ) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Series with their (unix time, value) pairs."""
        data = self._ask("query_range", query=expr, start=start, end=end, step=step)
        return [
            (item["metric"], [(float(t), float(v)) for t, v in item["values"]])
            for item in data["result"]
        ]

    def alerts(self) -> dict[str, str]:
        """Names of alerts that are pending or firing, with their state."""
        found = self._ask("alerts")["alerts"]
        return {alert["labels"]["alertname"]: alert["state"] for alert in found}
