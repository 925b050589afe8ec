"""Prometheus metrics: one registry per process, one prefix, shared bucket edges.

Names are `canopy_<service>_<what>_<unit>`; counters end in `_total`; no request ids as labels.
docs/metrics.md lists them all; it is generated from `Metrics.definitions`.
"""

from __future__ import annotations

import math
import platform
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from common.certificates import not_after

SECONDS_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512),
    *(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0),
)
"""For steps, transport, queues and whole requests alike: each edge twice the one before."""

MAX_PENDING = 1024
"""Values that wait to be counted: some 40 KiB, counted in some 30 microseconds."""

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for every counter, which nothing reads


def integer_buckets(largest: int) -> tuple[float, ...]:
    """One bucket per whole number 0..largest: exact for lengths, nodes and batch sizes."""
    return tuple(float(edge) for edge in range(largest + 1))


def power_buckets(largest: int) -> tuple[float, ...]:
    """1, 2, 4 … up to the first power of two that holds `largest`."""
    edges = [1.0]
    while edges[-1] < largest:
        edges.append(edges[-1] * 2)
    return tuple(edges)


@dataclass(frozen=True, slots=True)
class Definition:
    """What there is to know of a metric before it has a value. `name` as it is scraped."""

    name: str
    kind: str  # counter, gauge, histogram
    help_text: str
    labels: tuple[str, ...] = ()


class Distribution:
    """Counts per bucket of one series; written and read by any threads.

    A value is appended to a list, and counted when somebody asks or the list is long: many at one
    time cost a fourth of what each costs alone. Nothing is lost or counted twice: whoever settles
    takes values off the list's front under a lock, while others append behind.
    """

    __slots__ = ("_counts", "_edges", "_lock", "_pending", "_total", "defer")

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = np.array(edges, np.float64)
        self._counts = np.zeros(len(edges) + 1, np.int64)  # the last: beyond every edge
        self._total = 0.0
        self._lock = threading.Lock()
        self._pending: list[float] = []
        self.defer = self._pending.append
        """`observe` for where every nanosecond counts: who uses it calls `bound` now and then."""

    def observe(self, value: float) -> None:
        self._pending.append(value)
        self.bound()

    def observe_all(self, values: Sequence[float]) -> None:
        self._pending += values
        self.bound()

    def bound(self) -> None:
        """Keeps the list short: counts its values if they are many."""
        if len(self._pending) >= MAX_PENDING:
            self._settle()

    def snapshot(self) -> tuple[list[int], float]:
        """How many values lie in each bucket, and the sum of all."""
        with self._lock:
            self._count_pending()
            return self._counts.tolist(), self._total

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """(le, count at or below it) for each edge, and the sum of all values."""
        counts, total = self.snapshot()
        names = [*map(floatToGoString, self._edges.tolist()), "+Inf"]
        return list(zip(names, map(float, accumulate(counts)), strict=True)), total

    def _settle(self) -> None:
        with self._lock:
            self._count_pending()

    def _count_pending(self) -> None:
        pending = self._pending
        taken = pending[:]  # one step for other threads, and so is the deletion
        del pending[: len(taken)]
        if not taken:
            return
        values = np.array(taken, np.float64)
        places = self._edges.searchsorted(values)
        self._counts += np.bincount(places, minlength=len(self._counts))
        values[0] += self._total  # then one after the other, as if added when they came
        self._total = float(values.cumsum()[-1])


class Histogram(Collector):
    """The library's own takes a lock and walks its edges for every value, which costs ten times as
    much; with dozens of sequences in a step of a few ms that shows (`benchmarks.metrics_cost`).
    """

    def __init__(
        self, name: str, help_text: str, buckets: Sequence[float], label: str | None
    ) -> None:
        self._name, self._help, self._buckets, self._label = name, help_text, buckets, label
        self._series: dict[str, Distribution] = {}
        if label is None:
            self.alone = self.labels("")
            self.observe = self.alone.observe

    def labels(self, value: str) -> Distribution:
        """The series of one label value, made when first asked for."""
        series = self._series.get(value)
        if series is None:
            series = self._series[value] = Distribution(self._buckets)
        return series

    def collect(self) -> Iterable[Metric]:
        labels = [self._label] if self._label is not None else []
        family = HistogramMetricFamily(self._name, self._help, labels=labels)
        for value, series in list(self._series.items()):
            buckets, total = series.cumulative()
            family.add_metric([value] if labels else [], buckets, total)
        yield family

    def describe(self) -> Iterable[Metric]:
        yield HistogramMetricFamily(self._name, self._help)


@dataclass(frozen=True)
class Metrics:
    """A process's registry and the makers of its metrics, all named `canopy_<service>_*`.

    Label values that are known beforehand are given to the makers: their series exist from the
    start, so that a rate over them is 0 and not absent.
    """

    service: str
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    definitions: list[Definition] = field(default_factory=list)

    def counter(
        self, name: str, help_text: str, labels: Sequence[str] = (), values: Iterable[str] = ()
    ) -> Counter:
        """`name` without `_total`, which the library adds. `values`: of its one label."""
        self.declare("counter", name, help_text, labels)
        counter = Counter(self.full_name(name), help_text, labels, registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def gauge(
        self, name: str, help_text: str, labels: Sequence[str] = (), values: Iterable[str] = ()
    ) -> Gauge:
        self.declare("gauge", name, help_text, labels)
        gauge = Gauge(self.full_name(name), help_text, labels, registry=self.registry)
        for value in values:
            gauge.labels(value)
        return gauge

    def histogram(
        self,
        name: str,
        help_text: str,
        buckets: Sequence[float] = SECONDS_BUCKETS,
        label: str | None = None,
        values: Iterable[str] = (),
    ) -> Histogram:
        """At most one label."""
        self.declare("histogram", name, help_text, (label,) if label else ())
        histogram = Histogram(self.full_name(name), help_text, buckets, label)
        for value in values:
            histogram.labels(value)
        self.registry.register(histogram)
        return histogram

    def declare(self, kind: str, name: str, help_text: str, labels: Sequence[str] = ()) -> None:
        """Notes a metric for the documentation; the makers do so themselves."""
        scraped = self.full_name(name) + ("_total" if kind == "counter" else "")
        self.definitions.append(Definition(scraped, kind, help_text, tuple(labels)))

    def add_process_metrics(self, version: str) -> None:
        """Resident memory, CPU time, open files, Python and Canopy versions."""
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        labels = ["service", "version", "python"]
        help_text = "1; the labels say what runs"
        self.definitions.append(Definition("canopy_build_info", "gauge", help_text, tuple(labels)))
        build = Gauge("canopy_build_info", help_text, labels, registry=self.registry)
        build.labels(self.service, version, platform.python_version()).set(1)

    def add_event_loop(self, num_tasks: Callable[[], int]) -> None:
        """`num_tasks` is asked at each scrape."""
        gauge = self.gauge("event_loop_tasks", "Tasks of the process's event loop, calls included")
        gauge.set_function(num_tasks)

    def add_certificate(self, cert: Path | None) -> None:
        """When the server's certificate ends, looked up at each scrape; +Inf without TLS."""
        gauge = self.gauge(
            "certificate_not_after_seconds",
            "Unix time at which the server's certificate ends; +Inf without TLS",
        )
        gauge.set_function(lambda: math.inf if cert is None else not_after(cert))

    def full_name(self, name: str) -> str:
        return f"canopy_{self.service}_{name}"


class RisingCounter:
    """A counter fed with totals that somebody else keeps, as an engine's compiles."""

    def __init__(self, counter: Counter) -> None:
        self._counter, self._seen = counter, 0

    def set_total(self, total: int) -> None:
        """Totals never fall."""
        self._counter.inc(total - self._seen)
        self._seen = total
