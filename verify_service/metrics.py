"""What verify tells Prometheus. Made once; the loop notes each step, a few microseconds in all."""

from __future__ import annotations

from collections.abc import Sequence

from common.metrics import Metrics, RisingCounter, integer_buckets, power_buckets
from common.types import Drafting, ErrorCode
from verify_service.events import Event, Failed, Preempted, RoundDone
from verify_service.machine import VerifyMachine
from verify_service.stepper import Plan

PAGE_STATES = ("live", "cached", "reserved", "free")
WAYS = tuple(way.name.lower() for way in Drafting)
AHEAD_OUTCOMES = ("tree", "root")
FOLLOWED_OUTCOMES = ("verified", "thrown_away")
SEQUENCE_STATES = ("resident", "waiting", "in_flight", "open")
MAX_NODES_BUCKET = 128


class VerifyMetrics:
    """All names begin with `canopy_verify_`."""

    def __init__(self, metrics: Metrics, max_tree_depth: int, max_step_tokens: int) -> None:
        self._step_seconds = metrics.histogram("step_seconds", "Time of a step on the device")
        self._host_seconds = metrics.histogram(
            "host_seconds", "Host time per step: commands, plan and retirement"
        )
        self._queue_seconds = metrics.histogram("queue_seconds", "Wait of a round for its step")
        self._gather_seconds = metrics.histogram(
            "gather_seconds", "Wait of a step for sequences on their way back, where it waited"
        )
        self._gathered = metrics.counter(
            "gathered_sequences", "Sequences whose rounds came while a step waited for them"
        )
        rows = power_buckets(max_step_tokens)
        self._step_tokens = metrics.histogram("step_tokens", "Rows of a step", rows)
        self._step_sequences = metrics.histogram("step_sequences", "Sequences of a step", rows)
        emitted = integer_buckets(max_tree_depth + 1)
        self._emitted = metrics.histogram("emitted_tokens", "Tokens emitted per round", emitted)
        self._nodes = metrics.histogram(
            "tree_nodes", "Nodes verified per round, root included", power_buckets(MAX_NODES_BUCKET)
        )
        self._offered = metrics.counter(
            "offered_tree_nodes", "Nodes of the trees that steps could have verified, with roots"
        )
        self._preempted = metrics.counter("preemptions", "Sequences put out for want of pages")
        self._errors = metrics.counter(
            "sequence_errors",
            "Error entries sent, by code",
            ["code"],
            values=[code.name.lower() for code in ErrorCode],
        )
        self._failures = metrics.counter("failed_steps", "Steps that the device did not finish")
        self._compiles = RisingCounter(
            metrics.counter("compiles_after_warm_up", "Programs compiled while serving")
        )
        self._sequences = metrics.gauge(
            "sequences", "Sequences by state", ["state"], values=SEQUENCE_STATES
        )
        ahead = metrics.counter(
            "ahead_rounds", "Rounds begun by verify itself while trees were grown ahead, by whether"
            " one reached them", ["outcome"], values=AHEAD_OUTCOMES,
        )  # fmt: skip
        self._ahead = [RisingCounter(ahead.labels(of)) for of in AHEAD_OUTCOMES]
        followed = metrics.counter(
            "rounds_launched_ahead", "Rounds launched while the one before ran, by whether that one"
            " ended the sequence", ["outcome"], values=FOLLOWED_OUTCOMES,
        )  # fmt: skip
        self._followed = [RisingCounter(followed.labels(of)) for of in FOLLOWED_OUTCOMES]
        self._drafting = metrics.gauge(
            "drafting", "1 for the way that rounds are drafted now", ["way"], values=WAYS
        )
        self._draft_probes = RisingCounter(
            metrics.counter("draft_probes", "Times that another way of drafting was tried")
        )
        self._pages = metrics.gauge("kv_pages", "KV pages by state", ["state"], values=PAGE_STATES)

        self._looked_up = RisingCounter(
            metrics.counter("prefix_cache_query_tokens", "Tokens of sequences that were admitted")
        )
        self._found = RisingCounter(
            metrics.counter(
                "prefix_cache_hit_tokens", "Of those, tokens with KV rows there already"
            )
        )
        self._evicted = RisingCounter(
            metrics.counter("prefix_cache_evicted_pages", "Cached pages given to other sequences")
        )

    def note_step(self, plan: Plan, step_seconds: float, host_seconds: float) -> None:
        self._step_seconds.observe(step_seconds)
        self._host_seconds.observe(host_seconds)
        self._step_tokens.observe(plan.num_rows)
        self._step_sequences.observe(len(plan.works))
        self._offered.inc(plan.num_offered)

    def note_gathering(self, seconds: float, num_more: int) -> None:
        """A step has waited, and so many more can take part in it; some may have gone."""
        self._gather_seconds.observe(seconds)
        self._gathered.inc(max(0, num_more))

    def note_failed_step(self) -> None:
        self._failures.inc()

    def note_events(self, events: Sequence[Event]) -> None:
        results = [event.result for event in events if isinstance(event, RoundDone)]
        self._emitted.alone.observe_all([len(result.tokens) for result in results])
        self._nodes.alone.observe_all([result.num_nodes for result in results])
        self._queue_seconds.alone.observe_all([result.queue_seconds for result in results])
        if len(results) == len(events):  # nearly always
            return
        for event in events:
            if isinstance(event, Failed):
                self._errors.labels(event.code.name.lower()).inc()
            elif isinstance(event, Preempted):
                self._preempted.inc()

    def note_compiles(self, num_compiles: int) -> None:
        self._compiles.set_total(num_compiles)

    def note_state(self, machine: VerifyMachine) -> None:
        """Once a tick, not once a step."""
        counts = machine.page_counts
        for state in PAGE_STATES:
            self._pages.labels(state).set(getattr(counts, state))
        residents = machine.num_residents
        self._sequences.labels("resident").set(residents)
        self._sequences.labels("waiting").set(machine.num_waiting)
        self._sequences.labels("in_flight").set(machine.num_in_flight)
        self._sequences.labels("open").set(machine.num_sequences)
        for way in Drafting:
            self._drafting.labels(way.name.lower()).set(way is machine.drafting)
        self._draft_probes.set_total(machine.num_draft_probes)
        for counter, total in zip(self._ahead, machine.num_ahead, strict=True):
            counter.set_total(total)
        for counter, total in zip(self._followed, machine.num_followed, strict=True):
            counter.set_total(total)
        self._looked_up.set_total(machine.prefix_counts.looked_up)
        self._found.set_total(machine.prefix_counts.found)
        self._evicted.set_total(machine.num_evicted_pages)
