"""The draft machine: every rule of the draft protocol, without I/O.

Commands of routers and feature rows come in, events go out with the stream they go to; time is an
argument. Between them stand steps: `plan` says what the device should run next, `retire` takes
what came of it. The machine never blocks, never raises for what a router sent, and knows neither
protobuf nor jax. One thread at a time.

Rounds: each Extend names the round whose tree it wants; rounds may be left out but never go back.
Asked again, the stored tree is returned. An Extend that comes before the former's tree is grown
supersedes it: its tokens are added, the former tree is not sent, unless it is one for rounds to
come and its step is under way: such a tree is good from where the sequence is by then. A sequence
whose features are missing waits and holds up nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from common.fencing import Registry, is_new_epoch, stale
from common.page_keys import PageKeys
from common.pages import PageCounts
from common.types import (
    ErrorCode,
    FeatureRows,
    SequenceFailure,
    SequenceState,
    TreeShape,
)
from draft_service import checks
from draft_service.commands import Attach, Close, Command, Extend, Open, Rollback
from draft_service.events import Closed, Event, Failed, StateReport
from draft_service.features import FeatureStore
from draft_service.limits import DraftLimits
from draft_service.residency import Residency
from draft_service.sequences import DraftSequence, PendingTree, is_root_only
from draft_service.step import SequenceOutcome, SequenceWork
from draft_service.stepper import Plan, Stepper, tree_ready

MAX_DEFERRED = 16
"""Commands of one sequence that may wait behind a running step."""


class DraftMachine:
    def __init__(self, limits: DraftLimits) -> None:
        self._limits = limits
        self._residency = Residency(limits)
        self._registry = Registry[DraftSequence](limits.grace_seconds, self._residency.put_out)
        self._stepper = Stepper(limits, self._registry, self._residency)
        self._draining = False
        self.num_ignored_rows = 0

    # -- what the service sees of it

    @property
    def num_sequences(self) -> int:
        return len(self._registry)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a tree."""
        return sum(sequence.waits for sequence in self._registry)

    @property
    def num_in_flight(self) -> int:
        return self._stepper.num_in_flight

    @property
    def waiting_feature_bytes(self) -> int:
        """Bytes of feature rows that no step has taken yet."""
        return sum(sequence.features.num_waiting_bytes for sequence in self._registry)

    @property
    def page_counts(self) -> PageCounts:
        return self._residency.counts

    @property
    def prefix_counts(self) -> tuple[int, int, int]:
        """Since the start: tokens looked up, tokens found, cached pages given to others."""
        residency = self._residency
        return (
            residency.num_looked_up_tokens,
            residency.num_found_tokens,
            residency.num_evicted_pages,
        )

    def check_balance(self) -> None:
        """Raises AssertionError unless pages and references add up."""
        self._residency.check([*self._registry, *self._stepper.closed_in_flight])

    # -- streams and time

    def connect(self, stream: int) -> None:
        self._registry.connect(stream)

    def disconnect(self, stream: int, now: float) -> None:
        """Its sequences are kept for the grace time."""
        self._registry.disconnect(stream, now)

    def tick(self, now: float) -> None:
        """Frees what nobody came back for."""
        self._registry.expire(now)

    def drain(self) -> None:
        """Takes no new sequences from now on; those that are open go on."""
        self._draining = True

    # -- commands

    def handle(self, stream: int, commands: Iterable[Command], now: float) -> list[Event]:
        """Performs a frame's commands in order; each failure is an event of its own."""
        events: list[Event] = []
        for command in commands:
            self._take(stream, command, now, events)
        return events

    def _take(self, stream: int, command: Command, now: float, events: list[Event]) -> None:
        sequence = self._registry.get(command.sequence_id)
        try:
            if sequence is not None and _must_wait(sequence, command):
                if len(sequence.deferred) >= MAX_DEFERRED:
                    message = f"{MAX_DEFERRED} commands wait behind a running step already"
                    raise SequenceFailure(ErrorCode.OVERLOADED, message, sequence.state)
                sequence.deferred.append((stream, command))
                return
            self._perform(stream, command, now, events)
        except SequenceFailure as failure:
            events.append(Failed.of(stream, command.sequence_id, command.epoch, failure))

    def _perform(self, stream: int, command: Command, now: float, events: list[Event]) -> None:
        match command:
            case Open():
                self._open(stream, command, now, events)
            case Attach():
                self._attach(stream, command, now, events)
            case Extend():
                self._extend(stream, command, now, events)
            case Rollback():
                self._rollback(stream, command, now, events)
            case Close():
                self._close(stream, command, now, events)

    def _open(self, stream: int, command: Open, now: float, events: list[Event]) -> None:
        sequence = self._registry.get(command.sequence_id)
        if sequence is not None and not is_new_epoch(sequence, command.epoch):
            events.append(_state_report(stream, sequence))
            return
        buried = self._registry.tombstone(command.sequence_id)
        if buried is not None and command.epoch <= buried:
            self._registry.need(command.sequence_id)
        if self._draining:
            message = "the service drains; open the sequence on another one"
            raise SequenceFailure(ErrorCode.NOT_SERVING, message)
        checks.check_open(command, self._limits)
        self._make_room(sequence)
        if sequence is not None:
            self._registry.forget(sequence)
        fresh = self._new_sequence(stream, command, now)
        self._registry.add(fresh)
        events.append(_state_report(stream, fresh))

    def _make_room(self, replaced: DraftSequence | None) -> None:
        """Forgets an orphan when the service is full. Raises OVERLOADED when there is none."""
        if replaced is not None or len(self._registry) < self._limits.max_sequences:
            return
        orphans = [(s.orphaned_since, s) for s in self._registry if s.orphaned_since is not None]
        if not orphans:
            message = (
                f"{self._limits.max_sequences} sequences are open, the most that are held;"
                " go on without drafts, or try another service"
            )
            raise SequenceFailure(ErrorCode.OVERLOADED, message)
        self._registry.forget(min(orphans, key=lambda entry: entry[0])[1])

    def _new_sequence(self, stream: int, command: Open, now: float) -> DraftSequence:
        keys = PageKeys(self._limits.page_size, command.cache_salt, lookahead=1)
        found = self._residency.find(
            command.tokens, keys, command.features_from, command.max_total_tokens
        )
        features_from = 0 if found else command.features_from
        sequence = DraftSequence(
            sequence_id=command.sequence_id,
            epoch=command.epoch,
            stream=stream,
            arrival=self._registry.next_arrival(),
            tokens=list(command.tokens),
            features_from=features_from,
            shape=checks.shape_within(command.tree, self._limits.tree),
            max_total_tokens=command.max_total_tokens,
            temperature=command.temperature if self._limits.shared_noise else 0.0,
            seed=command.seed,
            features=FeatureStore(features_from, self._limits.recent_rows),
            page_keys=keys,
            pages=found,
            kv_len=len(found) * self._limits.page_size,
            num_published=len(found),
            used_at=now,
        )
        sequence.features.fed(sequence.kv_len)
        self._registry.hand_over(sequence, stream, command.epoch, now)
        return sequence

    def _attach(self, stream: int, command: Attach, now: float, events: list[Event]) -> None:
        sequence = self._registry.need(command.sequence_id)
        if is_new_epoch(sequence, command.epoch):
            sequence.acknowledge(command.acked_round)
            self._registry.hand_over(sequence, stream, command.epoch, now)
            events.append(_state_report(stream, sequence))
            if sequence.grown is not None:
                events.append(tree_ready(sequence, sequence.grown))
        else:
            events.append(_state_report(stream, sequence))

    def _extend(self, stream: int, command: Extend, now: float, events: list[Event]) -> None:
        sequence = self._registry.need_owned(
            stream, command.sequence_id, command.epoch, command.round
        )
        sequence.acknowledge(command.acked_round)
        if sequence.grown is not None and sequence.grown.round == command.round:
            events.append(tree_ready(sequence, sequence.grown))
            return
        if sequence.pending is not None and sequence.pending.round == command.round:
            return  # its tree is on the way
        checks.check_extend(command, sequence, self._limits)
        self._stepper.note_wish(sequence, command, now)
        sequence.tokens += command.tokens
        sequence.sent_ahead.follow(command.tokens)
        wish = PendingTree(command.round, self._shape(sequence, command), now, command.ahead)
        sequence.pending = sequence.last_wish = wish
        sequence.grown = None
        sequence.next_round = command.round + 1
        sequence.used_at = now

    def _shape(self, sequence: DraftSequence, command: Extend) -> TreeShape:
        """The most that may be sent. What is asked for is cut from a tree ahead by verify, round
        for round.
        """
        shape = checks.shape_within(command.tree, sequence.shape)
        if command.ahead and self._limits.ahead is not None and not is_root_only(shape):
            shape = self._limits.ahead
        # Nodes deeper than this could never be emitted.
        useful = sequence.max_total_tokens - sequence.committed_len - 1
        return replace(shape, max_depth=min(shape.max_depth, useful))

    def _rollback(self, stream: int, command: Rollback, now: float, events: list[Event]) -> None:
        sequence = self._registry.need(command.sequence_id, command.round)
        if is_new_epoch(sequence, command.epoch, command.round):
            checks.check_rollback(command, sequence)
            self._registry.hand_over(sequence, stream, command.epoch, now)
            del sequence.tokens[command.committed_len :]
            sequence.page_keys.cut(command.committed_len)
            sequence.next_round = command.round
            sequence.pending = sequence.grown = None
            sequence.last_wish = None
            sequence.sent_ahead.forget()
            # Pair committed_len - 1 had a token that is gone; verify sends its feature again.
            self._residency.cut(sequence, sequence.num_pairs)
            sequence.features.cut(command.committed_len - 1)
        events.append(_state_report(stream, sequence))

    def _close(self, stream: int, command: Close, now: float, events: list[Event]) -> None:
        sequence = self._registry.get(command.sequence_id)
        epoch = max(command.epoch, self._registry.tombstone(command.sequence_id) or 0)
        if sequence is not None:
            # A takeover that waits behind the running step fences off closes of earlier lives, too.
            newest = max([sequence.epoch, *(c.epoch for _, c in sequence.deferred)])
            if command.epoch < newest:
                raise stale(sequence, command.epoch)
            sequence.deferred.clear()
            self._registry.forget(sequence)
        self._registry.bury(command.sequence_id, epoch, now)
        events.append(Closed(stream=stream, sequence_id=command.sequence_id, epoch=command.epoch))

    # -- features

    def receive(self, block: FeatureRows, now: float) -> list[Event]:
        """Keeps a block's rows for their turn.

        Rows of an unknown sequence or another epoch are ignored and counted: senders send again
        from the `kv_len` of the state that answers Open, Attach and Rollback.
        """
        sequence = self._registry.get(block.sequence_id)
        num_rows = int(block.rows.shape[0])
        if sequence is None or block.epoch != sequence.epoch:
            self.num_ignored_rows += num_rows
            return []
        try:
            checks.check_features(block, sequence, self._limits)
        except SequenceFailure as failure:
            return [Failed.of(sequence.stream, block.sequence_id, block.epoch, failure)]
        self.num_ignored_rows += num_rows - sequence.features.put(block.position, block.rows)
        return []

    def refuse(self, sequence_id: bytes, epoch: int, message: str) -> list[Event]:
        """Tells the owner of a block of features that it could not be read."""
        sequence = self._registry.get(sequence_id)
        if sequence is None or epoch != sequence.epoch:
            return []
        failure = SequenceFailure(ErrorCode.INVALID, message, sequence.state)
        return [Failed.of(sequence.stream, sequence_id, epoch, failure)]

    # -- steps

    def expects_features(self, since: float) -> bool:
        """Whether a tree that was wished for after `since` still lacks features: one that somebody
        waits for, or any where nobody waits.
        """
        wishes = [s for s in self._registry if s.pending is not None and not s.in_flight]
        waiting = [sequence for sequence in wishes if sequence.waits]
        return any(
            sequence.pending is not None
            and sequence.pending.since > since
            and not sequence.can_draft
            for sequence in waiting or wishes
        )

    def plan(self, now: float) -> Plan:
        """The next step; its works are empty when there is nothing to run."""
        return self._stepper.plan(now)

    def retire(
        self, works: Sequence[SequenceWork], outcomes: Sequence[SequenceOutcome],
        now: float, step_seconds: float = 0.0,
    ) -> list[Event]:  # fmt: skip
        """Takes what a finished step gave, then performs what waited behind it."""
        sequences, events = self._stepper.retire(works, outcomes, now, step_seconds)
        for sequence in sequences:
            self._perform_deferred(sequence, now, events)
        return events

    def fail(self, works: Sequence[SequenceWork], message: str, now: float) -> list[Event]:
        """After a step that failed. It had been given the pages, so nobody's rows are sure any
        more: every sequence is gone, and said to be.
        """
        events: list[Event] = []
        self._residency.forget_cached()
        failed = self._stepper.abandon(works)
        for sequence in failed:
            if sequence.closed:
                self._residency.put_out(sequence)
        for sequence in self._registry:
            state = SequenceState(epoch=sequence.epoch)
            failure = SequenceFailure(ErrorCode.INTERNAL, message, state, sequence.next_round)
            events.append(Failed.of(sequence.stream, sequence.sequence_id, sequence.epoch, failure))
            self._registry.forget(sequence)
        for sequence in failed:
            self._perform_deferred(sequence, now, events)
        return events

    def _perform_deferred(self, sequence: DraftSequence, now: float, events: list[Event]) -> None:
        # Taken out first: the first of them may replace the sequence, and the rest is for the new
        # one.
        waiting, sequence.deferred = list(sequence.deferred), deque()
        for stream, command in waiting:
            self._take(stream, command, now, events)


def _must_wait(sequence: DraftSequence, command: Command) -> bool:
    if isinstance(command, Close):
        return False
    if sequence.deferred:
        return True
    takes_over = isinstance(command, Open | Attach | Rollback) and command.epoch > sequence.epoch
    return takes_over and sequence.in_flight


def _state_report(stream: int, sequence: DraftSequence) -> StateReport:
    return StateReport(
        stream=stream,
        sequence_id=sequence.sequence_id,
        epoch=sequence.epoch,
        state=sequence.state,
    )
