"""What the router counts in every round: values put down, turned into metrics when asked for.

At 64 sequences there are tens of thousands of rounds a second; so a round costs half a microsecond
here, and what follows from the distribution of emitted tokens is derived at the scrape.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from common.metrics import Metrics, integer_buckets

MAX_EMITTED = 33
"""Largest bucket of tokens per round; so 32 depths have a counter of their own."""

COUNTERS = {
    "spec_decode_num_drafts": "Rounds that verified a tree",
    "spec_decode_num_draft_tokens": "Tree nodes verified, roots not counted",
    "spec_decode_num_accepted_tokens": "Tree nodes accepted",
    "root_only_rounds": "Rounds without a tree although speculation was on",
}
_ROUNDS_UNTIL_BOUND = 256
"""A round puts down six values at most; so few rounds pass before a long list is noticed."""

PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


class RoundMetrics(Collector):
    """Implements `router.statistics.RoundObserver`; all calls come from the event loop's thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._accept_length = metrics.histogram(
            "spec_accept_length", "Tokens emitted by a round", integer_buckets(MAX_EMITTED)
        ).alone
        waits = metrics.histogram(
            "round_seconds",
            "A round's time, by where it went: draft, verify (queue and step), transport",
            label="where",
            values=("draft", "verify", "transport"),
        )
        self._draft, self._verify = waits.labels("draft"), waits.labels("verify")
        self._transport = waits.labels("transport")
        self._gaps = metrics.histogram(
            "inter_token_seconds",
            "From one round's tokens to the next's; tokens come in bursts, so see"
            " time_per_output_token_seconds beside it",
        ).alone
        self.series = (self._accept_length, self._draft, self._verify, self._transport, self._gaps)
        self._until_bound = _ROUNDS_UNTIL_BOUND
        self.token_gap = self._gaps.defer
        self._num_trees = self._num_nodes = self._num_root_only = 0
        for name, help_text in COUNTERS.items():
            metrics.declare("counter", name, help_text)
        self._per_position_help = "Tree nodes accepted, by depth below the root, from 0"
        metrics.declare("counter", PER_POSITION, self._per_position_help, ["position"])
        metrics.registry.register(self)

    # -- RoundObserver

    def emitted(self, num_emitted: int, num_drafted: int, root_only: bool) -> None:
        self._accept_length.defer(num_emitted)
        if num_drafted:
            self._num_trees += 1
            self._num_nodes += num_drafted
        elif root_only:
            self._num_root_only += 1
        self._until_bound -= 1
        if not self._until_bound:
            self._until_bound = _ROUNDS_UNTIL_BOUND
            for series in self.series:
                series.bound()

    def waited_for_draft(self, draft_seconds: float, transport_seconds: float) -> None:
        self._draft.defer(draft_seconds)
        self._transport.defer(transport_seconds)

    def waited_for_verify(self, verify_seconds: float, transport_seconds: float) -> None:
        self._verify.defer(verify_seconds)
        self._transport.defer(transport_seconds)

    # -- Collector

    def collect(self) -> Iterable[Metric]:
        # A round of n tokens accepted the nodes at depths 0 to n-2.
        counts, _ = self._accept_length.snapshot()  # [n]: rounds of n tokens
        at_least = [sum(counts[n:]) for n in range(len(counts))]
        figures = {
            "spec_decode_num_drafts": self._num_trees,
            "spec_decode_num_draft_tokens": self._num_nodes,
            "spec_decode_num_accepted_tokens": sum(at_least[2:]),
            "root_only_rounds": self._num_root_only,
        }
        for name, value in figures.items():
            family = CounterMetricFamily(self._metrics.full_name(name), COUNTERS[name])
            family.add_metric([], value)
            yield family
        positions = CounterMetricFamily(
            self._metrics.full_name(PER_POSITION), self._per_position_help, labels=["position"]
        )
        deepest = max((n for n, number in enumerate(at_least) if number), default=0)
        for depth in range(max(1, deepest - 1)):
            positions.add_metric([str(depth)], at_least[depth + 2])
        yield positions

    def describe(self) -> Iterable[Metric]:
        for name in (*COUNTERS, PER_POSITION):
            yield CounterMetricFamily(self._metrics.full_name(name), "")
