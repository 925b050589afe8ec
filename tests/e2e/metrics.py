"""A figure as Prometheus would scrape it."""

from __future__ import annotations

import urllib.request


def read_metric(address: str, name: str) -> float:
    """`name` with its labels, as `canopy_verify_kv_pages{state="live"}`."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    (value,) = (line.rsplit(" ", 1)[1] for line in lines if line.rsplit(" ", 1)[0] == name)
    return float(value)
