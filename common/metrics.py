"""Prometheus metrics: one registry per process, one prefix, shared bucket edges.

Names are `canopy_<service>_<what>_<unit>`; counters end in `_total`; no request ids as labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

SECONDS_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512),
    *(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0),
)
"""For steps, transport, queues and whole requests alike: each edge twice the one before."""


def integer_buckets(largest: int) -> tuple[float, ...]:
    """One bucket per whole number 0..largest: exact for lengths, nodes and batch sizes."""
    return tuple(float(edge) for edge in range(largest + 1))


def power_buckets(largest: int) -> tuple[float, ...]:
    """1, 2, 4 … up to the first power of two that holds `largest`."""
    edges = [1.0]
    while edges[-1] < largest:
        edges.append(edges[-1] * 2)
    return tuple(edges)


@dataclass(frozen=True)
class Metrics:
    """A process's registry and the makers of its metrics, all named `canopy_<service>_*`."""

    service: str
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
        """`name` without `_total`, which the library adds."""
        return Counter(self._name(name), help_text, labels, registry=self.registry)

    def gauge(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(self._name(name), help_text, labels, registry=self.registry)

    def histogram(
        self,
        name: str,
        help_text: str,
        buckets: Sequence[float] = SECONDS_BUCKETS,
        labels: Sequence[str] = (),
    ) -> Histogram:
        return Histogram(
            self._name(name), help_text, labels, registry=self.registry, buckets=tuple(buckets)
        )

    def add_process_metrics(self, version: str) -> None:
        """Resident memory, CPU time, open files, Python and Canopy versions."""
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        build = Gauge(
            "canopy_build_info", "1; the labels say what runs", ["version"], registry=self.registry
        )
        build.labels(version).set(1)

    def _name(self, name: str) -> str:
        return f"canopy_{self.service}_{name}"
