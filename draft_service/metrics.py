"""What draft tells Prometheus. Made once; the loop notes each step, a few microseconds in all."""

from __future__ import annotations

from collections.abc import Sequence

from common.metrics import Metrics, RisingCounter, integer_buckets, power_buckets
from common.types import ErrorCode, TreeShape
from draft_service.events import Event, Evicted, Failed, TreeReady
from draft_service.machine import DraftMachine
from draft_service.stepper import Plan

PAGE_STATES = ("live", "cached", "reserved", "free")
SEQUENCE_STATES = ("waiting", "in_flight", "open")


class DraftMetrics:
    """All names begin with `canopy_draft_`."""

    def __init__(self, metrics: Metrics, tree: TreeShape, max_step_tokens: int) -> None:
        self._step_seconds = metrics.histogram(
            "step_seconds",
            "Time of a step on the device; draft: with trees for the next round, ahead: with trees"
            " for rounds to come, extend: pairs alone",
            label="kind",
            values=("draft", "ahead", "extend"),
        )
        self._host_seconds = metrics.histogram(
            "host_seconds", "Host time per step: commands, plan and retirement"
        )
        self._queue_seconds = metrics.histogram(
            "queue_seconds", "Wait of a round for its features and its step; not of trees ahead"
        )
        rows = power_buckets(max_step_tokens)
        self._step_tokens = metrics.histogram("step_tokens", "Pairs fed in a step", rows)
        self._step_sequences = metrics.histogram("step_sequences", "Sequences of a step", rows)
        self._nodes = metrics.histogram(
            "tree_nodes",
            "Nodes of a tree that a round waited for, root included",
            integer_buckets(tree.max_nodes),
        )
        self._evictions = metrics.counter("evictions", "Sequences put out for want of memory")
        self._errors = metrics.counter(
            "sequence_errors",
            "Error entries sent, by code",
            ["code"],
            values=[code.name.lower() for code in ErrorCode],
        )
        self._failures = metrics.counter("failed_steps", "Steps that the device did not finish")
        self._feature_bytes = metrics.counter("feature_bytes", "Feature bytes received")
        self._bad_blocks = metrics.counter("bad_feature_blocks", "Feature blocks not readable")
        self._compiles = RisingCounter(
            metrics.counter("compiles_after_warm_up", "Programs compiled while serving")
        )
        self._ignored_rows = RisingCounter(
            metrics.counter("ignored_feature_rows", "Feature rows known already, or of nobody")
        )
        self._sequences = metrics.gauge(
            "sequences", "Sequences by state", ["state"], values=SEQUENCE_STATES
        )
        self._pages = metrics.gauge("kv_pages", "KV pages by state", ["state"], values=PAGE_STATES)
        self._waiting_bytes = metrics.gauge(
            "waiting_feature_bytes", "Feature bytes that no step has fed yet"
        )

        self._ahead = metrics.counter("trees_ahead", "Trees sent for rounds to come")
        self._ahead_levels = metrics.counter(
            "trees_ahead_levels", "Levels of trees sent for rounds to come"
        )
        self._looked_up = RisingCounter(
            metrics.counter("prefix_cache_query_tokens", "Tokens of sequences that were opened")
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
        kind = "ahead" if plan.ahead else "draft" if plan.drafts else "extend"
        self._step_seconds.labels(kind).observe(step_seconds)
        self._host_seconds.observe(host_seconds)
        self._step_tokens.observe(plan.num_rows)
        self._step_sequences.observe(len(plan.works))

    def note_failed_step(self) -> None:
        self._failures.inc()

    def note_features(self, num_bytes: int) -> None:
        self._feature_bytes.inc(num_bytes)

    def note_bad_block(self) -> None:
        self._bad_blocks.inc()

    def note_events(self, events: Sequence[Event]) -> None:
        sent = [event.grown for event in events if isinstance(event, TreeReady)]
        grown = [each for each in sent if not each.ahead]
        self._nodes.alone.observe_all([each.tree.num_nodes for each in grown])
        self._queue_seconds.alone.observe_all([each.queue_seconds for each in grown])
        ahead = [each.tree.depths().max() for each in sent if each.ahead]
        self._ahead.inc(len(ahead))
        self._ahead_levels.inc(int(sum(ahead)))
        if len(sent) == len(events):  # nearly always
            return
        for event in events:
            if isinstance(event, Failed):
                self._errors.labels(event.code.name.lower()).inc()
            elif isinstance(event, Evicted):
                self._evictions.inc()

    def note_compiles(self, num_compiles: int) -> None:
        self._compiles.set_total(num_compiles)

    def note_state(self, machine: DraftMachine) -> None:
        """Once a tick, not once a step."""
        counts = machine.page_counts
        for state in PAGE_STATES:
            self._pages.labels(state).set(getattr(counts, state))
        self._sequences.labels("waiting").set(machine.num_waiting)
        self._sequences.labels("in_flight").set(machine.num_in_flight)
        self._sequences.labels("open").set(machine.num_sequences)
        self._waiting_bytes.set(machine.waiting_feature_bytes)
        self._ignored_rows.set_total(machine.num_ignored_rows)
        looked_up, found, evicted = machine.prefix_counts
        self._looked_up.set_total(looked_up)
        self._found.set_total(found)
        self._evicted.set_total(evicted)
