"""The services' own figures, as Prometheus would scrape them, before and after something."""

from __future__ import annotations

import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping

from prometheus_client.parser import text_string_to_metric_families

SETTLE_SECONDS = 60.0


class Scrape:
    """All samples of several services; replicas of a service add up."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        """`addresses`: of the metrics, HOST:PORT, by name of the service's process."""
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for address in addresses.values():
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as page:
                for family in text_string_to_metric_families(page.read().decode()):
                    for sample in family.samples:
                        self._samples[sample.name].append((sample.labels, sample.value))

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series that have these labels; 0 if there are none."""
        return sum(
            value
            for found, value in self._samples[name]
            if all(found.get(key) == wanted for key, wanted in labels.items())
        )

    @property
    def pages_in_use(self) -> int:
        """KV pages that a sequence holds, of verify and draft."""
        return int(
            sum(
                self.total(f"canopy_{service}_kv_pages", state=state)
                for service in ("verify", "draft")
                for state in ("live", "reserved")
            )
        )

    def buckets(self, histogram: str) -> dict[float, float]:
        """Observations up to each bound."""
        cumulative: dict[float, float] = defaultdict(float)
        for labels, value in self._samples[f"{histogram}_bucket"]:
            cumulative[float(labels["le"])] += value
        return dict(cumulative)


def quantile(before: Scrape, after: Scrape, histogram: str, q: float) -> float | None:
    """Of what was observed between the two; interpolated within its bucket. None: nothing was."""
    old, new = before.buckets(histogram), after.buckets(histogram)
    counts = {bound: new[bound] - old.get(bound, 0.0) for bound in sorted(new)}
    total = max(counts.values(), default=0.0)
    if not total:
        return None
    low, below = 0.0, 0.0
    for bound, count in counts.items():
        if count >= q * total:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (q * total - below) / (count - below)
        low, below = bound, count
    return low


def settled(scrape: Callable[[], Scrape]) -> Scrape:
    """The figures once no page is in use any more, or after a minute."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (figures := scrape()).pages_in_use and time.monotonic() < deadline:
        time.sleep(0.5)
    return figures
