"""The verify machine: every rule of the verify protocol, without I/O.

Commands of routers come in with the stream they came on, events go out with the stream they go to;
time is an argument. Between them stand steps: `plan` says what the device should run next, `retire`
takes what came of it. The machine never blocks, never raises for what a router sent, and knows
neither protobuf nor jax. One thread at a time.

Epochs, per sequence: Open, Attach and Rollback with a greater epoch are performed, after any
running step that holds the sequence; with an equal one the present state is returned and nothing
done; with a smaller one refused. Rounds: each is run once; asked again, the stored answer is
returned whatever tree came with the question.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from common.page_keys import PageKeys
from common.pages import PageCounts
from common.types import Drafting, ErrorCode, FeatureRows, SequenceFailure, SequenceState, TreeShape
from verify_service import checks
from verify_service.budget import TreeBudget
from verify_service.commands import (
    NO_ROUND,
    Acknowledge,
    Attach,
    Close,
    Command,
    Open,
    ReplayFeatures,
    Rollback,
    TreeAhead,
    VerifyTree,
)
from verify_service.draft_gate import DraftGate, FixedWay
from verify_service.events import Closed, Event, Failed, RoundDone, StateReport
from verify_service.features import FeatureWindow
from verify_service.gathering import Away, Gathering
from verify_service.limits import VerifyLimits
from verify_service.prefill_pace import PrefillPace
from verify_service.prefix_cache import PrefixCounts
from verify_service.registry import VerifyRegistry
from verify_service.residency import Residency
from verify_service.sequences import AheadTree, PendingRound, VerifySequence
from verify_service.step import SequenceOutcome, SequenceWork, TokenHistory
from verify_service.stepper import Plan, Stepper

MAX_DEFERRED = 16
"""Commands of one sequence that may wait behind a running step."""
NO_PICK = "the logits give no pick: not a number, infinite, or every token excluded"


class VerifyMachine:
    """`budget` chooses how much of each tree is verified; None: as much as a step holds. `gate`:
    how rounds should be drafted; None: they wait for their trees. `pace` bounds what prefill costs
    those who decode; None: by rows alone.
    """

    def __init__(
        self,
        limits: VerifyLimits,
        budget: TreeBudget | None = None,
        gate: DraftGate | FixedWay | None = None,
        pace: PrefillPace | None = None,
    ) -> None:
        self._limits = limits
        self._gate = FixedWay() if gate is None else gate
        self._residency = Residency(limits)
        self._registry = VerifyRegistry(limits, self._residency)
        self._stepper = Stepper(limits, self._registry, self._residency, budget, self._gate, pace)
        self._with_features: dict[bytes, None] = {}  # sequences with rows to send, in turn
        self._draining = False
        self._gathering = None if budget is None else Gathering(budget)
        self._pace = pace

    # -- what the service sees of it

    @property
    def num_sequences(self) -> int:
        return len(self._registry)

    @property
    def num_residents(self) -> int:
        return len(self._residency)

    @property
    def num_waiting(self) -> int:
        """Sequences with a round to run and no room yet."""
        return len(self._registry.waiting())

    @property
    def num_in_flight(self) -> int:
        return self._stepper.num_in_flight

    @property
    def runs_ahead(self) -> bool:
        """Whether rounds may be launched behind those that run, by an engine that can."""
        return self._limits.max_ahead_nodes > 0

    @property
    def drafting(self) -> Drafting:
        """How rounds should be drafted."""
        return self._gate.drafting

    @property
    def num_draft_probes(self) -> int:
        """Times that another way was tried."""
        return self._gate.num_probes

    @property
    def num_ahead(self) -> tuple[int, int]:
        """Rounds that were begun here while trees were grown ahead: with nodes of one, and with the
        root alone.
        """
        return self._stepper.num_ahead, self._stepper.num_without

    @property
    def num_followed(self) -> tuple[int, int]:
        """Rounds that were launched while the one before ran: those that count, and those that were
        thrown away because the one before ended the sequence.
        """
        return self._stepper.num_followed, self._stepper.num_void

    @property
    def has_ready(self) -> bool:
        """Whether a round waits for a step, be there room for it or not."""
        return self._registry.has_ready

    @property
    def num_ready(self) -> int:
        """Sequences on the device whose rounds the next step could take."""
        return sum(sequence.is_ready for sequence in self._residency)

    def wait_until(self, now: float, deadline: float) -> float:
        """Until when the next step should wait for sequences on their way back; `now`: not at all.

        As long as pays; without a budget, which knows, for those that ended a round lately until
        the `deadline`.
        """
        away = [
            sequence
            for sequence in self._residency
            if sequence.pending is None and sequence.orphaned_since is None
        ]
        if self._gathering is None:
            lately = any(sequence.is_briefly_away(now) for sequence in away)
            return max(now, deadline) if lately else now
        ready = [sequence for sequence in self._residency if sequence.is_ready]
        if not away:
            return now
        missing = [sequence for sequence in ready if sequence.num_missing]
        if missing:
            return now if len(missing) < len(ready) else self._company_until(missing, away, now)
        return self._gathering.wait_until(
            [sequence.pending for sequence in ready if sequence.pending is not None],
            [_away(sequence) for sequence in away if sequence.turn is not None],
            now,
            max_rows=self._limits.max_step_tokens,
            num_kv_tokens=sum(sequence.kv_len for sequence in ready),
        )

    @property
    def page_counts(self) -> PageCounts:
        return self._residency.counts

    @property
    def prefix_counts(self) -> PrefixCounts:
        return self._residency.prefix_counts

    @property
    def num_evicted_pages(self) -> int:
        """Cached pages that were given to somebody else, since the start."""
        return self._residency.num_evicted_pages

    def check_balance(self) -> None:
        """Raises AssertionError unless pages, references and slots all add up."""
        self._residency.check()

    # -- streams and time

    def connect(self, stream: int) -> None:
        self._registry.connect(stream)

    def disconnect(self, stream: int, now: float) -> None:
        """Its sequences are kept for the grace time."""
        self._registry.disconnect(stream, now)

    def tick(self, now: float) -> None:
        """Frees what nobody came back for."""
        for sequence in self._registry.expire(now):
            self._with_features.pop(sequence.sequence_id, None)

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

    def with_state(self, failed: Failed) -> Failed:
        """An error that was found before the command reached the machine, completed."""
        sequence = self._registry.get(failed.sequence_id)
        return failed if sequence is None else replace(failed, state=sequence.state)

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
            case VerifyTree():
                self._verify_tree(stream, command, now, events)
            case TreeAhead():
                self._tree_ahead(stream, command)
            case Acknowledge():
                self._acknowledge(self._owned(stream, command), command)
            case Rollback():
                self._rollback(stream, command, now, events)
            case ReplayFeatures():
                self._replay_features(stream, command)
            case Close():
                self._close(stream, command, now, events)

    def _open(self, stream: int, command: Open, now: float, events: list[Event]) -> None:
        sequence = self._registry.get(command.sequence_id)
        if sequence is not None and not self._is_new_epoch(sequence, command):
            events.append(_state_report(stream, sequence))
            return
        buried = self._registry.tombstone(command.sequence_id)
        if buried is not None and command.epoch <= buried:
            self._registry.need(command.sequence_id, command.round)
        if self._draining:
            message = "the service drains; open the sequence on another one"
            raise SequenceFailure(ErrorCode.NOT_SERVING, message, round_=command.round)
        checks.check_open(command, self._limits)
        most = self._limits.max_open_sequences
        replaces_own = sequence is not None and sequence.orphaned_since is None
        if self._registry.num_owned - replaces_own >= most:
            message = f"the waiting queue is full: {most} sequences are open; try again later"
            raise SequenceFailure(ErrorCode.OVERLOADED, message, round_=command.round)
        if sequence is not None:
            self._registry.forget(sequence)
        fresh = self._new_sequence(stream, command, now)
        self._registry.add(fresh)
        events.append(_state_report(stream, fresh))

    def _new_sequence(self, stream: int, command: Open, now: float) -> VerifySequence:
        tokens = list(command.tokens)
        sequence = VerifySequence(
            sequence_id=command.sequence_id,
            epoch=command.epoch,
            stream=stream,
            arrival=self._registry.next_arrival(),
            tokens=tokens,
            num_prompt_tokens=command.num_prompt_tokens,
            sampling=command.sampling,
            stop_tokens=command.stop_tokens,
            max_total_tokens=command.max_total_tokens,
            wants_features=command.wants_features,
            trace=command.trace,
            fork_of=command.fork_of,
            runs_on=command.runs_on,
            draft_ahead=command.draft_ahead,
            next_round=command.round,
            window=FeatureWindow(self._limits.feature_window_tokens),
            history=TokenHistory(tokens, command.num_prompt_tokens),
            page_keys=PageKeys(self._limits.page_size, command.cache_salt),
            pending=PendingRound.root_only(command.round, command.tokens[-1], now),
        )
        self._registry.hand_over(sequence, stream, command.epoch, now)
        return sequence

    def _attach(self, stream: int, command: Attach, now: float, events: list[Event]) -> None:
        sequence = self._registry.need(command.sequence_id)
        if not self._is_new_epoch(sequence, command):
            events.append(_state_report(stream, sequence))
            return
        self._acknowledge(sequence, command)
        self._registry.hand_over(sequence, stream, command.epoch, now)
        sequence.turn = sequence.ahead = None
        events.append(_state_report(stream, sequence))
        events += [_round_done(sequence, round_) for round_ in sorted(sequence.results)]
        replayed_from = min((r.kv_len for r in sequence.results.values()), default=None)
        wanted = replayed_from if command.features_from is None else command.features_from
        if wanted is not None:
            sequence.window.rewind(min(wanted, sequence.window.next_position))
        self._offer_features(sequence)

    def _verify_tree(
        self, stream: int, command: VerifyTree, now: float, events: list[Event]
    ) -> None:
        sequence = self._owned(stream, command, command.round)
        self._acknowledge(sequence, command, command.round)
        if command.round in sequence.results:
            events.append(_round_done(sequence, command.round))
            return
        if sequence.pending is not None and command.round == sequence.pending.round:
            return  # its answer is on the way
        checks.check_round(command, sequence, self._limits)
        room = sequence.max_total_tokens - sequence.committed_len - 1
        max_depth = min(room, self._limits.max_tree_depth)
        sequence.pending = PendingRound.of(command.round, command.tree, max_depth, now)
        if self._gathering is not None and sequence.turn is not None:
            self._gathering.note_return(_away(sequence), now)

    def _company_until(
        self, prompts: Sequence[VerifySequence], away: Sequence[VerifySequence], now: float
    ) -> float:
        """When to begin a step that only computes prompts."""
        if self._pace is None or self._gathering is None:
            return now
        rows = min(self._limits.max_prefill_tokens, sum(s.num_missing for s in prompts))
        seconds = self._pace.step_seconds(rows, max(s.kv_len for s in prompts))
        back = [_away(s) for s in away if s.turn is not None and s.is_briefly_away(now)]
        return self._gathering.company_until(back, now, seconds)

    def _tree_ahead(self, stream: int, command: TreeAhead) -> None:
        """Keeps what hangs below the tokens that were committed since its root: the newest."""
        sequence = self._owned(stream, command, command.round)
        self._acknowledge(sequence, command, command.round)
        checks.check_ahead(command, sequence, self._limits)
        known = sequence.ahead
        if known is not None and known.kv_len > command.kv_len:
            return
        most = TreeShape.unbounded() if command.most is None else command.most
        since = sequence.tokens[command.kv_len + 1 :]
        found = AheadTree(command.kv_len, 0, command.tree, most).after(since)
        if found is not None:
            sequence.ahead = found

    def _rollback(self, stream: int, command: Rollback, now: float, events: list[Event]) -> None:
        sequence = self._registry.need(command.sequence_id, command.round)
        if self._is_new_epoch(sequence, command):
            checks.check_rollback(command, sequence)
            self._registry.hand_over(sequence, stream, command.epoch, now)
            del sequence.tokens[command.committed_len :]
            sequence.page_keys.cut(command.committed_len)
            sequence.num_prompt_tokens = min(sequence.num_prompt_tokens, command.committed_len)
            sequence.history = TokenHistory(sequence.tokens, sequence.num_prompt_tokens)
            sequence.next_round = command.round
            sequence.pending, sequence.paused_since, sequence.turn = None, now, None
            sequence.ahead = None
            sequence.results.clear()
            # The new last token is the next root: its row is computed again, for its logits.
            self._residency.cut(sequence, command.committed_len - 1)
            sequence.window.cut(command.committed_len - 1)
        events.append(_state_report(stream, sequence))

    def _replay_features(self, stream: int, command: ReplayFeatures) -> None:
        sequence = self._owned(stream, command)
        self._acknowledge(sequence, command)
        if not sequence.wants_features:
            message = "position: the sequence was opened without wants_features; it has none"
            raise SequenceFailure(ErrorCode.INVALID, message, sequence.state)
        sequence.window.rewind(command.position)
        self._offer_features(sequence)

    def _close(self, stream: int, command: Close, now: float, events: list[Event]) -> None:
        sequence = self._registry.get(command.sequence_id)
        epoch = max(command.epoch, self._registry.tombstone(command.sequence_id) or 0)
        if sequence is not None:
            # A takeover that waits behind the running step fences off closes of earlier lives, too.
            newest = max([sequence.epoch, *(c.epoch for _, c in sequence.deferred)])
            if command.epoch < newest:
                raise _stale(sequence, command, 0)
            sequence.deferred.clear()
            self._registry.forget(sequence)
            self._with_features.pop(command.sequence_id, None)
        self._registry.bury(command.sequence_id, epoch, now)
        events.append(Closed(stream=stream, sequence_id=command.sequence_id, epoch=command.epoch))

    # -- steps

    def plan(self, now: float) -> Plan:
        """The next step; its works are empty when there is nothing to run."""
        return self._stepper.plan(now)

    @property
    def may_plan_behind(self) -> bool:
        """Whether a round may be launched behind one that runs in the only step in flight."""
        return self._stepper.may_follow

    def plan_behind(self, now: float) -> Plan | None:
        """A step to be launched behind the one that runs, which must be the only one. None where
        none of its rounds may be followed: then the next step is best planned when it has ended.
        """
        return self._stepper.plan(now) if self._stepper.may_follow else None

    def retire(
        self,
        works: Sequence[SequenceWork],
        outcomes: Sequence[SequenceOutcome],
        now: float,
        step_seconds: float = 0.0,
    ) -> list[Event]:
        """Commits a finished step, then performs what waited behind it.

        A sequence whose logits gave no pick is lost, and said to be; its neighbours go on.
        """
        sequences, events, unpicked = self._stepper.retire(works, outcomes, now, step_seconds)
        for sequence in sequences:
            if not sequence.closed:
                self._offer_features(sequence)
            self._perform_deferred(sequence, now, events)
        return events + self._lose(unpicked, NO_PICK, now)

    def fail(self, works: Sequence[SequenceWork], message: str, now: float) -> list[Event]:
        """After a step that failed: its sequences are gone, and said to be."""
        self._residency.forget_cached()  # what the device holds is not sure any more
        return self._lose(self._stepper.abandon(works), message, now)

    def _lose(self, sequences: Sequence[VerifySequence], message: str, now: float) -> list[Event]:
        events: list[Event] = []
        for sequence in sequences:
            if not sequence.closed:
                events.append(
                    Failed(
                        stream=sequence.stream,
                        sequence_id=sequence.sequence_id,
                        epoch=sequence.epoch,
                        code=ErrorCode.INTERNAL,
                        message=message,
                        round=sequence.next_round,
                        state=SequenceState(epoch=sequence.epoch),
                    )
                )
                self._with_features.pop(sequence.sequence_id, None)
            self._registry.forget(sequence)
            self._perform_deferred(sequence, now, events)
        return events

    # -- features

    def next_features(self, stream: int, max_bytes: int) -> FeatureRows | None:
        """The next rows for the receiver of `stream`'s sequences, within `max_bytes`; in turn.

        None when no rows wait, or when not even one row fits.
        """
        for sequence_id in list(self._with_features):
            sequence = self._registry.get(sequence_id)
            if sequence is None or not sequence.window.num_waiting:
                del self._with_features[sequence_id]
                continue
            if sequence.stream != stream:
                continue
            taken = sequence.window.take(max_bytes // max(1, sequence.window.row_bytes))
            if taken is None:
                continue
            del self._with_features[sequence_id]
            self._offer_features(sequence)
            return FeatureRows(sequence_id, sequence.epoch, taken[0], taken[1])
        return None

    # -- rules shared by several commands

    def _is_new_epoch(self, sequence: VerifySequence, command: Open | Attach | Rollback) -> bool:
        """Greater: True. Equal: False, nothing is to be done. Smaller: STALE_EPOCH."""
        if command.epoch < sequence.epoch:
            raise _stale(sequence, command, getattr(command, "round", 0))
        return command.epoch > sequence.epoch

    def _owned(
        self,
        stream: int,
        command: VerifyTree | TreeAhead | Acknowledge | ReplayFeatures,
        round_: int = 0,
    ) -> VerifySequence:
        sequence = self._registry.need(command.sequence_id, round_)
        if command.epoch > sequence.epoch:
            message = f"epoch: {command.epoch} was never attached here; attach first"
            raise SequenceFailure(ErrorCode.WRONG_ROUND, message, sequence.state, round_)
        if command.epoch < sequence.epoch or stream != sequence.stream:
            raise _stale(sequence, command, round_)
        return sequence

    def _acknowledge(self, sequence: VerifySequence, command: Command, round_: int = 0) -> None:
        if command.acked_round == NO_ROUND:
            return
        if command.acked_round >= sequence.next_round:
            message = (
                f"acked_round: {command.acked_round} was not run; {sequence.next_round} is next"
            )
            raise SequenceFailure(ErrorCode.WRONG_ROUND, message, sequence.state, round_)
        sequence.acknowledge(command.acked_round)

    def _offer_features(self, sequence: VerifySequence) -> None:
        if sequence.window.num_waiting:
            self._with_features[sequence.sequence_id] = None

    def _perform_deferred(self, sequence: VerifySequence, now: float, events: list[Event]) -> None:
        # Taken out first: the first of them may replace the sequence, and the rest is for the new
        # one.
        waiting, sequence.deferred = list(sequence.deferred), deque()
        for stream, command in waiting:
            self._take(stream, command, now, events)


def _must_wait(sequence: VerifySequence, command: Command) -> bool:
    if isinstance(command, Close):
        return False
    if sequence.deferred:
        return True
    takes_over = isinstance(command, Open | Attach | Rollback) and command.epoch > sequence.epoch
    return takes_over and sequence.in_flight


def _away(sequence: VerifySequence) -> Away:
    """A sequence that had a result."""
    turn = sequence.turn
    assert turn is not None
    return Away(turn.since, turn.asked is Drafting.SYNCHRONOUS and turn.drafted)


def _stale(sequence: VerifySequence, command: Command, round_: int) -> SequenceFailure:
    message = (
        f"epoch: {command.epoch} is of an earlier life of the link, or of another stream;"
        f" the sequence is at {sequence.epoch}"
    )
    return SequenceFailure(ErrorCode.STALE_EPOCH, message, sequence.state, round_)


def _state_report(stream: int, sequence: VerifySequence) -> Event:
    return StateReport(
        stream=stream,
        sequence_id=sequence.sequence_id,
        epoch=sequence.epoch,
        state=sequence.state,
    )


def _round_done(sequence: VerifySequence, round_: int) -> Event:
    return RoundDone(
        stream=sequence.stream,
        sequence_id=sequence.sequence_id,
        epoch=sequence.epoch,
        result=sequence.results[round_],
    )
