"""What the router counts. Generations are counted once, at their end, so that rounds stay cheap."""

from __future__ import annotations

from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.metrics import SECONDS_BUCKETS, Metrics, integer_buckets
from router.actions import Failed, Finished
from router.errors import Failure
from router.fleet import Fleet
from router.machine import GenerationMachine

MAX_DEPTH_LABEL = 32


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
        self._metrics = metrics
        self._add_requests(metrics)
        self._add_speculation(metrics)
        self._add_seconds(metrics)

    def follow(self, core: Followed) -> None:
        """Adds the figures that are read rather than counted."""
        self._metrics.registry.register(_LiveFigures(core))

    def _add_requests(self, metrics: Metrics) -> None:
        self.requests = metrics.counter(
            "requests",
            "Generations ended, by how: stop, length, aborted, cancelled, failed",
            ["outcome"],
        )
        self.rejected = metrics.counter(
            "rejected_requests", "Requests refused or failed, by status", ["reason"]
        )
        self.prompt_tokens = metrics.counter("prompt_tokens", "Prompt tokens of ended generations")
        self.completion_tokens = metrics.counter(
            "completion_tokens", "Tokens emitted by ended generations"
        )
        self.reopened = metrics.counter(
            "fail_overs", "Sequences opened anew after a verify had lost them"
        )
        self.rollbacks = metrics.counter("rollbacks", "Sequences cut back", ["reason"])
        self.preemptions = metrics.counter(
            "preemptions", "Sequences that verify put out for want of pages"
        )

    def _add_speculation(self, metrics: Metrics) -> None:
        self.spec_num_drafts = metrics.counter(
            "spec_decode_num_drafts", "Rounds that verified a tree"
        )
        self.spec_num_draft_tokens = metrics.counter(
            "spec_decode_num_draft_tokens", "Tree nodes verified, roots not counted"
        )
        self.spec_num_accepted_tokens = metrics.counter(
            "spec_decode_num_accepted_tokens", "Tree nodes accepted"
        )
        self.spec_num_accepted_per_pos = metrics.counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted nodes by depth, from 0",
            ["position"],
        )
        self.root_only_rounds = metrics.counter(
            "root_only_rounds", "Rounds without a tree although speculation was on"
        )
        self.draft_misses = metrics.counter(
            "draft_misses", "Rounds whose tree did not come before its deadline"
        )
        self.accept_length = metrics.histogram(
            "spec_accept_length", "Tokens emitted by a round", integer_buckets(33)
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
            buckets=(0.00025, *SECONDS_BUCKETS[:12]),
            labels=["role"],
        )
        self.round_seconds = metrics.counter(
            "round_seconds", "Time that generations spent, by where", ["where"]
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
        self.prompt_tokens.inc(len(machine.generation.prompt_tokens))
        self.completion_tokens.inc(machine.num_emitted)
        self.reopened.inc(machine.num_reopened)
        self.preemptions.inc(machine.num_preemptions)
        self.draft_misses.inc(machine.num_draft_misses)
        self._count_rounds(machine)
        self._count_seconds(machine, now)

    def _count_rounds(self, machine: GenerationMachine) -> None:
        statistics = machine.statistics
        if statistics.num_rollbacks:
            self.rollbacks.labels("verify_ahead").inc(statistics.num_rollbacks)
        self.spec_num_drafts.inc(next(iter(statistics.num_drafted_per_depth), 0))
        self.spec_num_draft_tokens.inc(statistics.num_drafted)
        self.spec_num_accepted_tokens.inc(statistics.num_accepted)
        for depth, count in enumerate(statistics.num_accepted_per_depth[:MAX_DEPTH_LABEL]):
            self.spec_num_accepted_per_pos.labels(str(depth)).inc(count)
        self.root_only_rounds.inc(statistics.num_root_only_rounds)
        for index, count in enumerate(statistics.num_emitted_histogram):
            for _ in range(count):
                self.accept_length.observe(index + 1)

    def _count_seconds(self, machine: GenerationMachine, now: float) -> None:
        clock = machine.clock
        if clock.first_token is not None:
            self.time_to_first_token.observe(clock.time_to_first_token_seconds)
            self.queue_seconds.observe(clock.queue_seconds)
        if machine.num_emitted > 1:
            self.time_per_output_token.observe(clock.decode_seconds / (machine.num_emitted - 1))
        self.end_to_end.observe(now - clock.started)
        self.round_seconds.labels("draft").inc(clock.draft_seconds)
        self.round_seconds.labels("verify").inc(clock.verify_seconds)
        self.round_seconds.labels("transport").inc(clock.transport_seconds)
        self.round_seconds.labels("router").inc(clock.router_seconds(now))


class _LiveFigures(Collector):
    """Gauges of the moment, and the links' own counts."""

    def __init__(self, core: Followed) -> None:
        self._core = core

    def collect(self) -> list[Metric]:
        core = self._core
        names = ["role", "peer"]
        ready = _gauge("peer_ready", "1 while a peer is linked and serving", names)
        losses = _counter("peer_losses", "Links to peers that broke", names)
        wire = _counter("wire_bytes", "Bytes of command frames", [*names, "direction"])
        frames = _counter("wire_frames", "Command frames", [*names, "direction"])
        features = _counter("feature_bytes", "Feature bytes received and sent", names)
        for link in core.fleet.links:
            peer = [link.role, link.peer.address]
            ready.add_metric(peer, float(link.peer.ready))
            losses.add_metric(peer, link.counts.num_losses)
            wire.add_metric([*peer, "sent"], link.counts.num_bytes_sent)
            wire.add_metric([*peer, "received"], link.counts.num_bytes_received)
            frames.add_metric([*peer, "sent"], link.counts.num_frames_sent)
            frames.add_metric([*peer, "received"], link.counts.num_frames_received)
            features.add_metric(peer, link.num_feature_bytes)
        running = _gauge("running_requests", "Generations in progress", [])
        running.add_metric([], core.num_running)
        waiting = _gauge("waiting_requests", "Of them, those without a token yet", [])
        waiting.add_metric([], core.num_waiting)
        return [ready, losses, wire, frames, features, running, waiting]

    def describe(self) -> list[Metric]:
        return []


def _gauge(name: str, help_text: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"canopy_router_{name}", help_text, labels=labels)


def _counter(name: str, help_text: str, labels: list[str]) -> CounterMetricFamily:
    return CounterMetricFamily(f"canopy_router_{name}", help_text, labels=labels)
