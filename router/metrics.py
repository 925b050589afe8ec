"""What the router counts of requests and links; rounds are in round_metrics.py.

Requests are counted once, at their end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.metrics import SECONDS_BUCKETS, Metrics
from router.actions import Failed, Finished
from router.draft_link import DraftLink
from router.errors import ErrorKind, Failure
from router.fleet import Fleet
from router.machine import GenerationMachine
from router.round_metrics import RoundMetrics
from router.tenants import TENANT_LIMITS
from router.verify_link import VerifyLink

TURNAROUND_BUCKETS = tuple(
    edge * scale for edge in (0.00025, *SECONDS_BUCKETS[:11]) for scale in (1.0, 1.25, 1.5, 1.75)
)
"""Fine enough for the median of a millisecond or two to be read."""

OUTCOMES = ("stop", "length", "aborted", "cancelled", "failed")


class Followed(Protocol):
    """What is read when Prometheus asks; the router's core."""

    fleet: Fleet

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...


class RouterMetrics:
    """All names begin with `canopy_router_`."""

    def __init__(self, metrics: Metrics) -> None:
        self._add_requests(metrics)
        self._add_seconds(metrics)
        self.rounds = RoundMetrics(metrics)
        self._live = _LiveFigures(metrics)

    def follow(self, core: Followed) -> None:
        """Gives the figures that are read rather than counted their source."""
        self._live.core = core

    def _add_requests(self, metrics: Metrics) -> None:
        self.requests = metrics.counter(
            "requests",
            f"Generations ended, by how: {', '.join(OUTCOMES)}",
            ["outcome"],
            values=OUTCOMES,
        )
        self.rejected = metrics.counter(
            "rejected_requests",
            "Requests refused or failed, by gRPC status",
            ["reason"],
            values=[kind.value for kind in ErrorKind],
        )
        self.tenant_refusals = metrics.counter(
            "tenant_refusals",
            f"Requests refused by a limit of their caller's own: {', '.join(TENANT_LIMITS)}",
            ["limit"],
            values=TENANT_LIMITS,
        )
        self.prompt_tokens = metrics.counter("prompt_tokens", "Prompt tokens of ended generations")
        self.completion_tokens = metrics.counter(
            "completion_tokens", "Tokens emitted by ended generations"
        )
        self.reopened = metrics.counter(
            "fail_overs", "Sequences opened anew after a verify had lost them"
        )
        self.rollbacks = metrics.counter(
            "rollbacks", "Sequences cut back, by reason", ["reason"], values=["verify_ahead"]
        )
        self.preemptions = metrics.counter(
            "preemptions", "Sequences that verify put out for want of pages"
        )
        self.draft_misses = metrics.counter(
            "draft_misses", "Rounds whose tree did not come before its deadline"
        )
        self.ahead_rounds = metrics.counter(
            "ahead_rounds", "Rounds that verify began with nodes of a tree grown ahead"
        )
        self.undrafted_rounds = metrics.counter(
            "undrafted_rounds", "Rounds that asked for no tree: verify found roots alone faster"
        )

    def _add_seconds(self, metrics: Metrics) -> None:
        self.time_to_first_token = metrics.histogram(
            "time_to_first_token_seconds", "From request to first token"
        )
        self.time_per_output_token = metrics.histogram(
            "time_per_output_token_seconds", "Decode time over tokens, per generation"
        )
        self.end_to_end = metrics.histogram("request_seconds", "From request to completion")
        self.queue_seconds = metrics.histogram("queue_seconds", "Wait for verify's first step")
        self.turnaround = metrics.histogram(
            "turnaround_seconds",
            "From a frame's arrival to the frame that answers it, by the answered role",
            TURNAROUND_BUCKETS,
            label="role",
            values=("verify", "draft"),
        )

    def count_rejected(self, failure: Failure) -> None:
        """A request that was refused before it ran."""
        self.rejected.labels(failure.kind.value).inc()

    def count_generation(
        self, machine: GenerationMachine, ending: Finished | Failed | None, now: float
    ) -> None:
        """`ending` None: the client went away."""
        if isinstance(ending, Finished):
            outcome = ending.reason.name.lower()
        elif isinstance(ending, Failed):
            outcome = "failed"
            self.count_rejected(ending.failure)
        else:
            outcome = "cancelled"
        self.requests.labels(outcome).inc()
        if machine.generation.choice_index == 0:
            self.prompt_tokens.inc(len(machine.generation.prompt_tokens))
        self.completion_tokens.inc(machine.num_emitted)
        self.reopened.inc(machine.num_reopened)
        self.preemptions.inc(machine.num_preemptions)
        self.draft_misses.inc(machine.num_draft_misses)
        self.ahead_rounds.inc(machine.num_ahead_rounds)
        self.undrafted_rounds.inc(machine.num_undrafted_rounds)
        self.rollbacks.labels("verify_ahead").inc(machine.statistics.num_rollbacks)
        self._count_seconds(machine, now)

    def _count_seconds(self, machine: GenerationMachine, now: float) -> None:
        clock = machine.clock
        if clock.first_token is not None:
            self.time_to_first_token.observe(clock.time_to_first_token_seconds)
            self.queue_seconds.observe(clock.queue_seconds)
        if machine.num_emitted > 1:
            self.time_per_output_token.observe(clock.decode_seconds / (machine.num_emitted - 1))
        self.end_to_end.observe(now - clock.started)


class _LiveFigures(Collector):
    """Gauges of the moment, and the links' own counts."""

    FAMILIES: tuple[tuple[str, str, str, list[str]], ...] = (
        ("gauge", "running_requests", "Generations in progress", []),
        ("gauge", "waiting_requests", "Of them, those without a token yet", []),
        ("gauge", "peer_ready", "1 while a peer is linked and serving", ["role", "peer"]),
        ("counter", "peer_losses", "Links to peers that broke", ["role", "peer"]),
        ("counter", "wire_bytes", "Bytes of command frames", ["role", "peer", "direction"]),
        ("counter", "wire_frames", "Command frames", ["role", "peer", "direction"]),
        ("counter", "feature_bytes", "Feature bytes: from verify, to the draft", ["role", "peer"]),
    )

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.core: Followed | None = None
        for kind, name, help_text, labels in self.FAMILIES:
            metrics.declare(kind, name, help_text, labels)
        metrics.registry.register(self)

    def _families(self) -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
        makers = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        return {
            name: makers[kind](self._metrics.full_name(name), help_text, labels=labels)
            for kind, name, help_text, labels in self.FAMILIES
        }

    def collect(self) -> Iterable[Metric]:
        families, core = self._families(), self.core
        if core is not None:
            families["running_requests"].add_metric([], core.num_running)
            families["waiting_requests"].add_metric([], core.num_waiting)
            for link in core.fleet.links:
                self._add_link(families, link)
        return families.values()

    def _add_link(
        self,
        families: dict[str, GaugeMetricFamily | CounterMetricFamily],
        link: VerifyLink | DraftLink,
    ) -> None:
        peer, counts = [link.role, link.peer.address], link.counts
        families["peer_ready"].add_metric(peer, float(link.peer.ready))
        families["peer_losses"].add_metric(peer, counts.num_losses)
        families["wire_bytes"].add_metric([*peer, "sent"], counts.num_bytes_sent)
        families["wire_bytes"].add_metric([*peer, "received"], counts.num_bytes_received)
        families["wire_frames"].add_metric([*peer, "sent"], counts.num_frames_sent)
        families["wire_frames"].add_metric([*peer, "received"], counts.num_frames_received)
        families["feature_bytes"].add_metric(peer, link.num_feature_bytes)

    def describe(self) -> Iterable[Metric]:
        return self._families().values()
