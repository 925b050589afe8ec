"""The plain HTTP port beside gRPC, and when a certificate ends."""

from __future__ import annotations

import math
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from common.certificates import not_after
from common.http_endpoint import serve_http
from common.metrics import Metrics


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_probes_and_metrics_share_a_port() -> None:
    metrics = Metrics("x")
    metrics.counter("steps", "S").inc()
    ready = False
    server = serve_http("127.0.0.1", 0, metrics.registry, lambda: ready)
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        assert get(f"{url}/alive")[0] == 200
        assert get(f"{url}/ready")[0] == 503
        ready = True
        assert get(f"{url}/ready")[0] == 200
        assert "canopy_x_steps_total 1.0" in get(f"{url}/metrics")[1]
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("days", "kind"), [(3, "rsa:2048"), (20000, "rsa:2048")])
def test_end_of_a_certificate(tmp_path: Path, days: int, kind: str) -> None:
    """Both of the standard's forms of time: before 2050 and after."""
    cert = tmp_path / "tls.crt"
    command = ["openssl", "req", "-x509", "-newkey", kind, "-nodes", "-subj", "/CN=x"]
    command += ["-keyout", str(tmp_path / "tls.key"), "-out", str(cert), "-days", str(days)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert not_after(cert) == pytest.approx(time.time() + days * 86400, abs=60)
    metrics = Metrics("x")
    metrics.add_certificate(cert)
    line = generate_latest(metrics.registry).decode().splitlines()[-1]
    assert float(line.split()[1]) == not_after(cert)


def test_no_certificate_never_ends_and_a_broken_one_is_no_number(tmp_path: Path) -> None:
    metrics = Metrics("x")
    metrics.add_certificate(None)
    assert (
        "canopy_x_certificate_not_after_seconds +Inf" in generate_latest(metrics.registry).decode()
    )
    broken = tmp_path / "tls.crt"
    for text in ("", "x", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"):
        broken.write_text(text)
        assert math.isnan(not_after(broken))
    assert math.isnan(not_after(tmp_path / "none"))
