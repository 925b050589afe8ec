"""Metrics: the documented names are real, and our histogram counts as the library's does."""

from __future__ import annotations

import re
import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as LibraryHistogram

from common.metrics import MAX_PENDING, SECONDS_BUCKETS, Metrics, RisingCounter
from router.metrics import RouterMetrics
from tools import metrics_doc
from verify_service.metrics import VerifyMetrics

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
    for value in values * 60:  # beyond what is kept uncounted
        ours.observe(value)
        theirs.observe(value)
    assert generate_latest(metrics.registry) == generate_latest(registry)


def test_a_scrape_in_the_midst_of_a_scrape_counts_each_value_once() -> None:
    series = Metrics("x").histogram("n_tokens", "N", (1.0, 2.0)).alone
    others: list[threading.Thread] = []

    class Interrupted(list[float]):
        """Between the copy of its values and their removal another thread has its turn."""

        def __getitem__(self, index: Any) -> Any:
            taken = super().__getitem__(index)
            if not others:
                others.append(threading.Thread(target=write_and_scrape))
                others[0].start()
                others[0].join(0.05)  # it may have to wait for us
            return taken

    def write_and_scrape() -> None:
        series.observe(1.5)
        series.snapshot()

    series._pending = Interrupted([0.5])
    series.snapshot()
    others[0].join()
    assert series.snapshot() == ([1, 1, 0], 2.0)


def test_counts_never_fall_while_several_scrape() -> None:
    series, num_written = Metrics("x").histogram("n_tokens", "N", (1.0, 2.0)).alone, 0
    done = threading.Event()

    def write() -> None:
        nonlocal num_written
        while not done.is_set():
            series.observe(1.5)
            series.defer(1.5)
            series.observe_all([1.5, 1.5])
            num_written += 4

    def scrape(seen: list[int]) -> None:
        seen += [series.snapshot()[0][1] for _ in range(2000)]

    counts: list[list[int]] = [[], []]
    threads = [threading.Thread(target=scrape, args=(seen,)) for seen in counts]
    writer = threading.Thread(target=write)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    writer.start()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        done.set()
        writer.join()
        sys.setswitchinterval(interval)
    assert series.snapshot() == ([0, num_written, 0], num_written * 1.5)
    for seen in counts:
        assert seen == sorted(seen)  # one that fell would look like a restart


def test_without_a_scrape_no_list_grows_for_ever() -> None:
    metrics = Metrics("router")
    rounds = RouterMetrics(metrics).rounds
    num_rounds = 3 * MAX_PENDING
    for _ in range(num_rounds):
        rounds.waited_for_draft(0.02, 0.001)
        rounds.waited_for_verify(0.02, 0.001)
        rounds.emitted(3, 15, root_only=False)
        rounds.token_gap(0.03)
        waiting = [len(series._pending) for series in rounds.series]
        assert max(waiting) < 2 * MAX_PENDING
    assert scraped(metrics)["canopy_router_inter_token_seconds_count"] == num_rounds
    alone = metrics.histogram("other_seconds", "O").alone
    for _ in range(num_rounds):
        alone.observe(0.02)
        assert len(alone._pending) < MAX_PENDING
        alone.observe_all([0.02] * 3)
        assert len(alone._pending) < MAX_PENDING


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


def test_waits_of_steps_count_those_that_came_and_not_those_that_went() -> None:
    metrics = Metrics("verify")
    of_verify = VerifyMetrics(metrics, 16, 32)
    of_verify.note_gathering(0.002, 3)
    of_verify.note_gathering(0.001, -1)
    values = scraped(metrics)
    assert values["canopy_verify_gather_seconds_count"] == 2
    assert values["canopy_verify_gather_seconds_sum"] == pytest.approx(0.003)
    assert values["canopy_verify_gathered_sequences_total"] == 3
