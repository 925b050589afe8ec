"""From sequences with rounds to run, a step; from its outcome, committed tokens and results.

Several steps may be planned before the first retires. A sequence is in one of them, or, by the
rules of `verify_service/followers.py`, in two: behind what still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.types import Drafting, Int32Array, TreeShape
from verify_service import forks
from verify_service.blocks import Block, Launched, result_of
from verify_service.budget import AnyRound, TreeBudget
from verify_service.draft_gate import DraftGate, FixedWay
from verify_service.events import Event, Preempted, RoundDone, RoundResult
from verify_service.followers import Followers, rows_below
from verify_service.following import FollowingRound
from verify_service.in_flight import InFlight
from verify_service.limits import VerifyLimits
from verify_service.prefill_pace import PrefillPace
from verify_service.registry import VerifyRegistry
from verify_service.residency import Residency
from verify_service.scheduling import share_nodes, share_prefill
from verify_service.sequences import PendingRound, RoundTurn, VerifySequence
from verify_service.step import SequenceOutcome, SequenceWork

_NOBODY = float("inf")


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, empty if there is nothing to run, and what planning it made known."""

    works: list[SequenceWork]
    events: list[Event]
    num_offered: int = 0  # nodes of the trees before they were cut, roots included

    @property
    def num_rows(self) -> int:
        return sum(work.num_rows for work in self.works)


class Stepper:
    """`budget` None: trees are cut to the rows of a step only."""

    def __init__(
        self,
        limits: VerifyLimits,
        registry: VerifyRegistry,
        residency: Residency,
        budget: TreeBudget | None,
        gate: DraftGate | FixedWay,
        pace: PrefillPace | None,
    ) -> None:
        self._limits = limits
        self._pace = pace
        self._registry = registry
        self._residency = residency
        self._budget, self._gate = budget, gate
        self._advice = gate.drafting  # with the results of the last step
        self._in_flight = InFlight()
        self._followers = Followers(limits, residency, gate, self._in_flight)
        self._num_steps = 0
        self._num_offered = 0  # nodes of trees that were launched before they were known
        self.num_ahead = 0  # rounds begun here in the way AHEAD, with nodes of a tree ahead
        self.num_without = 0  # and with the root alone
        self.num_followed = 0  # rounds that were launched behind one that ran
        self.num_void = 0  # and others, thrown away because that one ended the sequence
        self._retired_at: float | None = None  # when the last step ended

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def may_follow(self) -> bool:
        """Whether a step planned now could go on with what a running one has not ended."""
        return self._followers.are_there

    def plan(self, now: float) -> Plan:
        """Admits, reserves, shares the rows out, and marks the chosen sequences as in flight."""
        events: list[Event] = []
        starved = self._admit(now, events)
        decoding, prefilling, stalled = self._ready(now, events)
        youngest = min(starved, stalled)  # who may be launched without being put out
        following = self._followers.rounds(youngest)
        if decoding or following:
            self._note_idle(now)
        for sequence in decoding:
            self._take_ahead(sequence)
        blocks = [*(Block(s, 1, s.kv_len, s.pending) for s in decoding), *following]
        chunks = [*(Block(s, 0, s.kv_len) for s in prefilling), *self._followers.chunks(youngest)]
        chunks.sort(key=lambda block: block.sequence.arrival)
        blocks += self._share_prefill(blocks, chunks, now)
        num_offered = sum(b.round.tree.num_nodes for b in blocks if b.round is not None)
        num_offered, self._num_offered = num_offered + self._num_offered, 0
        self._share_nodes(blocks)
        self._num_steps += 1
        return Plan([self._launch(block, now) for block in blocks], events, num_offered)

    def _share_prefill(
        self, blocks: Sequence[Block], chunks: Sequence[Block], now: float
    ) -> list[Block]:
        """Those of `chunks` that get rows; `blocks` decode."""
        # Those whose next round is on its way wait for this step's end: they count, too.
        decoding = [block.sequence for block in blocks]
        others = decoding or [s for s in self._residency if s.is_briefly_away(now)]
        shares = share_prefill(
            [self._rows_wanted(block) for block in chunks],
            len(others),
            self._most_prefill(others, [block.sequence for block in chunks]),
            self._limits.max_step_tokens,
        )
        for block, rows in zip(chunks, shares, strict=True):
            block.num_causal = rows
            if block.first + rows == block.sequence.committed_len:
                block.round = block.sequence.pending
        return [block for block in chunks if block.num_causal]

    def _most_prefill(
        self, decoding: Sequence[VerifySequence], prefilling: Sequence[VerifySequence]
    ) -> int:
        """Prefill rows of a step, while others decode."""
        most = self._limits.max_prefill_tokens
        if self._pace is None or not decoding or not prefilling:
            return most
        return self._pace.rows(
            most,
            num_roots=len(decoding),
            root_kv_tokens=sum(s.kv_len for s in decoding),
            prompt_kv_tokens=max(s.kv_len for s in prefilling),
        )

    def retire(
        self,
        works: Sequence[SequenceWork],
        outcomes: Sequence[SequenceOutcome],
        now: float,
        step_seconds: float,
    ) -> tuple[list[VerifySequence], list[Event], list[VerifySequence]]:
        """Commits what a step gave. Returns the sequences that it held, their results, and the
        sequences whose logits gave no pick.
        """
        sequences, events = [], list[Event]()
        unpicked = list[VerifySequence]()
        verified: list[tuple[PendingRound, Int32Array]] = []
        self._retired_at = now
        self._gate.offer_ahead(any(sequence.draft_ahead for sequence in self._residency))
        # For all of a step, though its rounds may change the gate's mind: sequences that go
        # together go on together.
        self._advice = self._gate.drafting
        for work, outcome in zip(works, outcomes, strict=True):
            launched = self._in_flight.land(work)
            sequence = launched.sequence
            if launched.is_void or sequence.closed:
                self._let_go(sequence)
            elif work.samples and not outcome.tokens.size:
                unpicked.append(sequence)
                continue
            else:
                round_ = launched.round
                self._commit(launched, outcome)
                if round_ is not None:
                    verified.append((round_, outcome.accepted_nodes))
                    events.append(self._end_round(launched, round_, outcome, now, step_seconds))
                self._residency.settle(sequence)
            sequences.append(sequence)
        if self._budget is not None:
            self._budget.learn(verified)
        return sequences, events, unpicked

    def _commit(self, launched: Launched, outcome: SequenceOutcome) -> None:
        sequence, work = launched.sequence, launched.work
        if sequence.wants_features and outcome.features is not None:
            sequence.window.append(sequence.kv_len, outcome.features)
        if work.num_scored:
            sequence.prompt_logprobs[work.kv_len :] = outcome.prompt_logprobs
            sequence.prompt_top_logprobs[work.kv_len :] = outcome.prompt_top_logprobs
        sequence.kv_len += outcome.num_committed

    def _end_round(
        self,
        launched: Launched,
        round_: PendingRound,
        outcome: SequenceOutcome,
        now: float,
        step_seconds: float,
    ) -> Event:
        """The round's result. The next one begins, or goes on where it was launched already."""
        sequence = launched.sequence
        result = result_of(launched, round_, outcome, step_seconds, self._advice)
        behind = self._in_flight.behind(sequence)
        if behind is not None:
            begins = not behind.is_void and not self._has_ended(sequence, result)
        else:
            begins = self._may_begin(sequence, result)
        asked = result.drafting
        if behind is not None and behind.following is not None and begins:
            asked = behind.following.way  # whatever is advised for the rounds after that
        self._judge(sequence, result, asked, now)
        result = replace(result, next_begun=begins)
        if sequence.ahead is not None:
            sequence.ahead = sequence.ahead.after(result.tokens)
        event = self._finish_round(sequence, result, now)
        if behind is not None:
            self._follow(behind, result, now)
        elif begins:
            own = PendingRound.root_only(result.round + 1, result.tokens[-1], now)
            sequence.pending = replace(own, is_own=True)
        return event

    def _follow(self, behind: Launched, result: RoundResult, now: float) -> None:
        """The round that was launched behind this one: now it is known what it verifies."""
        if not result.next_begun:
            behind.is_void = True
            self.num_void += 1
            return
        self.num_followed += 1
        following, follow_up, sequence = behind.following, behind.work.follows, behind.sequence
        assert following is not None
        assert follow_up is not None
        found = following.begin(follow_up, result.round + 1, result.tokens, now)
        behind.round, num_offered = found
        sequence.pending = behind.round
        self._num_offered += num_offered
        if following.way is Drafting.AHEAD and sequence.draft_ahead:
            self._count_ahead(num_offered > 1)

    def _let_go(self, sequence: VerifySequence) -> None:
        """Gives back what only a step that ended now has held."""
        if not sequence.closed:
            self._residency.settle(sequence)
        elif not sequence.in_flight:
            self._residency.put_out(sequence)

    def abandon(self, works: Sequence[SequenceWork]) -> list[VerifySequence]:
        """After a step that failed: its sequences, no longer in it."""
        return [self._in_flight.land(work).sequence for work in works]

    def _admit(self, now: float, events: list[Event]) -> float:
        """Returns the arrival of the first that waits for room."""
        for sequence in self._registry.waiting():
            source = forks.source_of(sequence, self._registry)
            if source is not None and forks.must_wait(source):
                continue  # its rows are being computed: not a second time
            if source is not None and (rows := forks.num_common_rows(source, sequence)):
                put_out = self._residency.fork(source, sequence, now, rows)
            else:
                source, put_out = None, self._residency.admit(sequence, now)
            if put_out is None:  # strictly by age: a small newcomer must not starve a large old one
                return _NOBODY if sequence.orphaned_since is not None else sequence.arrival
            if source is not None:
                forks.take_features(source, sequence)
            sequence.fork_of = b""
            events += map(_preempted, put_out)
        return _NOBODY

    def _ready(
        self, now: float, events: list[Event]
    ) -> tuple[list[VerifySequence], list[VerifySequence], float]:
        """Sequences to decode and to prefill, their pages up to the root reserved; both oldest
        first. Then the arrival of the first that waits for pages.
        """
        decoding, prefilling = list[VerifySequence](), list[VerifySequence]()
        stalled = _NOBODY
        for sequence in sorted(self._residency, key=lambda s: s.arrival):
            if not sequence.is_ready or not sequence.is_resident:
                continue  # the last: put out by an older one in this very loop
            if sequence.num_missing:
                self._residency.catch_up(sequence)
            put_out = self._residency.grow(sequence, sequence.committed_len, now)
            if put_out is None:  # until an older one gives pages back
                if sequence.orphaned_since is None:
                    stalled = min(stalled, sequence.arrival)
                continue
            events += map(_preempted, put_out)
            (prefilling if sequence.num_missing else decoding).append(sequence)
        # Orphans and the long paused may be put out after they were taken up above.
        return (
            [s for s in decoding if s.is_resident],
            [s for s in prefilling if s.is_resident],
            stalled,
        )

    def _rows_wanted(self, block: Block) -> int:
        """Prefill rows that it could use; where each is a node, as many as a tree may have."""
        sequence = block.sequence
        rows = sequence.committed_len - block.first
        return min(rows, self._limits.max_tree_nodes) if sequence.scores_prompt else rows

    def _share_nodes(self, blocks: list[Block]) -> None:
        """Cuts the trees to the rows left over, then to the pages that can be had."""
        sampling = [(block, found) for block in blocks if (found := block.following or block.round)]
        counts = self._num_nodes(blocks, [round_ for _, round_ in sampling])
        for (block, round_), num_nodes in zip(sampling, counts, strict=True):
            if isinstance(round_, PendingRound):
                self._cut(block, round_, num_nodes)
            else:
                self._set_aside(block, round_, num_nodes)

    def _cut(self, block: Block, round_: PendingRound, num_nodes: int) -> None:
        sequence = block.sequence
        cut = round_ if num_nodes == round_.tree.num_nodes else round_.prefix(num_nodes)
        depth, spare = cut.depth, self._residency.room_rows(sequence) - sequence.committed_len
        if depth > spare:
            cut, depth = cut.within_depth(spare), spare
        self._residency.grow(sequence, sequence.committed_len + depth, 0.0)
        block.round = cut

    def _set_aside(self, block: Block, round_: FollowingRound, num_rows: int) -> None:
        assert block.before is not None
        first = rows_below(block.before)
        spare = self._residency.room_rows(block.sequence) - first
        block.follow_up = round_.follow_up(num_rows, max(0, spare))
        self._residency.extend(block.sequence, first + block.follow_up.most_depth)

    def _num_nodes(self, blocks: list[Block], rounds: list[AnyRound]) -> list[int]:
        num_causal, max_rows = sum(b.num_causal for b in blocks), self._limits.max_step_tokens
        if self._budget is None:
            return share_nodes([round_.row_scores for round_ in rounds], max_rows - num_causal)
        return self._budget.share(
            rounds,
            num_causal=num_causal,
            max_rows=max_rows,
            num_kv_tokens=sum(block.sequence.kv_len for block in blocks),
        )

    def _note_idle(self, now: float) -> None:
        """What the device waits before the step that is planned; nothing behind one that runs."""
        if self._budget is not None and self._retired_at is not None:
            self._budget.note_idle(0.0 if self._in_flight else now - self._retired_at)

    def _launch(self, block: Block, now: float) -> SequenceWork:
        work = block.work
        launched = Launched(
            block.sequence, work, self._num_steps, now, block.round, block.following
        )
        self._in_flight.add(launched)
        return work

    def _take_ahead(self, sequence: VerifySequence) -> None:
        """Gives a round that was begun here what has come for it by now."""
        round_, ahead = sequence.pending, sequence.ahead
        if round_ is None or not round_.is_own:
            return
        if self._advice is not Drafting.AHEAD or not sequence.draft_ahead:
            return
        self._count_ahead(ahead is not None)
        if ahead is None:
            return
        room = sequence.max_total_tokens - sequence.committed_len - 1
        most = min(room, self._limits.max_tree_depth, ahead.most.max_depth)
        shape = TreeShape(
            max_depth=most,
            top_k=ahead.most.top_k,
            max_nodes=min(ahead.most.max_nodes, self._limits.max_tree_nodes),
        )
        taken = PendingRound.of(round_.round, ahead.tree.within(shape), most, round_.since)
        sequence.pending = replace(taken, is_own=True, ahead_from=ahead.kv_len, stem=ahead.stem)

    def _count_ahead(self, has_tree: bool) -> None:
        self.num_ahead += has_tree
        self.num_without += not has_tree

    def _judge(
        self, sequence: VerifySequence, result: RoundResult, asked: Drafting, now: float
    ) -> None:
        """Tells the gate of the round. `asked`: how the next one is drafted."""
        had_tree = sequence.pending is not None and sequence.pending.tree.num_nodes > 1
        turn, drafted = sequence.turn, had_tree
        if turn is not None:
            drafted = had_tree or turn.drafted
            if _went_as_asked(turn, had_tree=had_tree, can_ahead=sequence.draft_ahead):
                num_sequences = len(self._residency)
                seconds = now - turn.since
                self._gate.note_round(turn.asked, len(result.tokens), seconds, num_sequences)
        sequence.turn = RoundTurn(now, asked, drafted)

    def _may_begin(self, sequence: VerifySequence, result: RoundResult) -> bool:
        """Whether the next round begins at once, here.

        Not where a tree is to be waited for, not past the sequence's end, nor beside commands that
        wait, nor for a stream that is gone; and with it no more results may come to be
        unacknowledged than are kept.
        """
        waiting = bool(sequence.deferred) or sequence.orphaned_since is not None
        full = len(sequence.results) + 1 >= self._limits.max_unacknowledged
        waits = not sequence.runs_on or result.drafting is Drafting.SYNCHRONOUS
        return not (waits or waiting or full or self._has_ended(sequence, result))

    @staticmethod
    def _has_ended(sequence: VerifySequence, result: RoundResult) -> bool:
        """By what verify knows; stop strings are the router's."""
        stopped = not sequence.sampling.ignore_eos and result.tokens[-1] in sequence.stop_tokens
        room = sequence.max_total_tokens - sequence.committed_len - len(result.tokens)
        return stopped or room <= 0

    def _finish_round(self, sequence: VerifySequence, result: RoundResult, now: float) -> Event:
        sequence.tokens += result.tokens
        sequence.pending = None
        sequence.paused_since = now
        sequence.next_round = result.round + 1
        sequence.results[result.round] = result
        sequence.num_found = 0
        sequence.has_told_prompt = True
        if sequence.num_missing:
            raise AssertionError(
                f"the engine committed {sequence.kv_len} rows of a sequence of"
                f" {sequence.committed_len} tokens; it must commit all but the last"
            )
        return RoundDone(
            stream=sequence.stream,
            sequence_id=sequence.sequence_id,
            epoch=sequence.epoch,
            result=result,
            traceparent=sequence.trace.traceparent,
        )


def _went_as_asked(turn: RoundTurn, *, had_tree: bool, can_ahead: bool) -> bool:
    """Whether a round tells of the way that was asked for. A tree that was waited for in vain
    counts; a sequence that never has one does not.
    """
    match turn.asked:
        case Drafting.NONE:
            return not had_tree
        case Drafting.SYNCHRONOUS:
            return had_tree or turn.drafted
        case Drafting.AHEAD:
            return can_ahead


def _preempted(sequence: VerifySequence) -> Event:
    return Preempted(stream=sequence.stream, sequence_id=sequence.sequence_id, epoch=sequence.epoch)
