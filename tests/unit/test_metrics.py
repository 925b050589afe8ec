"""Metrics: the documented names are real, and our histogram counts as the library's does."""

from __future__ import annotations

import re
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as LibraryHistogram

from common.metrics import SECONDS_BUCKETS, Metrics, RisingCounter
from router.metrics import RouterMetrics
from tools import metrics_doc

UNITS = ("_seconds", "_bytes", "_tokens", "_sequences", "_nodes", "_pages", "_requests", "_length")


def scraped(metrics: Metrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_the_committed_page_is_current() -> None:
    page = metrics_doc.PAGE.read_text(encoding="utf-8")
    assert page == metrics_doc.page(page), "run `make deploy-files`"


@pytest.mark.parametrize("service", metrics_doc.SERVICES)
def test_what_is_scraped_is_what_is_documented(service: str) -> None:
    metrics = metrics_doc.service_metrics(service)
    families = {
        (f"{family.name}_total" if family.type == "counter" else family.name, family.type)
        for family in metrics.registry.collect()
        if family.name.startswith("canopy_")
    }
    assert families == {(d.name, d.kind) for d in metrics.definitions}
    for definition in metrics.definitions:
        if definition.kind == "histogram":
            assert definition.name.endswith(UNITS), definition.name
        assert set(definition.labels).isdisjoint({"request_id", "sequence_id", "tenant"})
        assert definition.help_text[0].isupper() or definition.help_text[0].isdigit()


@pytest.mark.parametrize("service", metrics_doc.SERVICES)
def test_known_label_values_exist_before_the_first_event(service: str) -> None:
    metrics = metrics_doc.service_metrics(service)
    names = {re.split(r"[{ ]", name)[0] for name in scraped(metrics)}
    needs_peers = {d.name for d in metrics.definitions} if service == "router" else set()
    live = {name for name in needs_peers if re.search("peer|wire|feature|running|waiting", name)}
    for definition in metrics.definitions:
        name = definition.name + ("_bucket" if definition.kind == "histogram" else "")
        assert name in names or definition.name in live, definition.name


@given(values=st.lists(st.floats(0, 100) | st.sampled_from(SECONDS_BUCKETS), max_size=40))
def test_histogram_counts_as_the_librarys_does(values: list[float]) -> None:
    metrics, registry = Metrics("x"), CollectorRegistry()
    ours = metrics.histogram("wait_seconds", "W", label="where", values=["a"]).labels("a")
    theirs = LibraryHistogram(
        "canopy_x_wait_seconds", "W", ["where"], buckets=SECONDS_BUCKETS, registry=registry
    ).labels("a")
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    assert generate_latest(metrics.registry) == generate_latest(registry)


def test_a_scrape_beside_a_writer_is_consistent() -> None:
    metrics = Metrics("x")
    series = metrics.histogram("n_tokens", "N", (1.0, 2.0)).labels("")
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            series.observe(1.5)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = [scraped(metrics)["canopy_x_n_tokens_count"] for _ in range(200)]
    finally:
        done.set()
        writer.join()
        sys.setswitchinterval(interval)
    assert seen == sorted(seen)  # a count that fell would look like a restart
    assert scraped(metrics)["canopy_x_n_tokens_count"] == series.total / 1.5


def test_speculation_counters_follow_from_the_rounds() -> None:
    metrics = Metrics("router")
    rounds = RouterMetrics(metrics).rounds
    rounds.emitted(1, 0, root_only=False)  # the prefill's
    rounds.emitted(3, 15, root_only=False)
    rounds.emitted(1, 15, root_only=False)
    rounds.emitted(1, 0, root_only=True)
    values = scraped(metrics)
    prefix = "canopy_router_spec_decode_num"
    assert values[f"{prefix}_drafts_total"] == 2
    assert values[f"{prefix}_draft_tokens_total"] == 30
    assert values[f"{prefix}_accepted_tokens_total"] == 2
    assert values[f'{prefix}_accepted_tokens_per_pos_total{{position="0"}}'] == 1
    assert values[f'{prefix}_accepted_tokens_per_pos_total{{position="1"}}'] == 1
    assert values["canopy_router_root_only_rounds_total"] == 1
    assert values["canopy_router_spec_accept_length_sum"] == 6


def test_totals_kept_elsewhere_become_a_counter() -> None:
    metrics = Metrics("x")
    counter = RisingCounter(metrics.counter("compiles", "C"))
    for total in (0, 2, 2, 5):
        counter.set_total(total)
    assert scraped(metrics)["canopy_x_compiles_total"] == 5
