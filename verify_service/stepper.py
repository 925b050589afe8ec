"""From sequences with rounds to run, a step; from its outcome, committed tokens and results.

Several steps may be planned before the first retires: a sequence is in at most one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from common.types import Drafting, Int32Array, TreeShape
from verify_service import forks
from verify_service.budget import TreeBudget
from verify_service.draft_gate import DraftGate, FixedWay
from verify_service.events import Event, Preempted, RoundDone, RoundResult, VerifiedAhead
from verify_service.limits import VerifyLimits
from verify_service.prefill_pace import PrefillPace
from verify_service.registry import VerifyRegistry
from verify_service.residency import Residency
from verify_service.scheduling import share_nodes, share_prefill
from verify_service.sequences import NOT_AHEAD, PendingRound, RoundTurn, VerifySequence
from verify_service.step import SequenceOutcome, SequenceWork


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, empty if there is nothing to run, and what planning it made known."""

    works: list[SequenceWork]
    events: list[Event]
    num_offered: int = 0  # nodes of the trees before they were cut, roots included

    @property
    def num_rows(self) -> int:
        return sum(work.num_rows for work in self.works)


@dataclass(frozen=True, slots=True)
class _Launched:
    sequence: VerifySequence
    work: SequenceWork
    round: PendingRound | None  # as cut for this step; None: a prefill chunk that is not the last
    at: float


@dataclass(slots=True)
class _Block:
    """A sequence's part of a step while it is planned."""

    sequence: VerifySequence
    num_causal: int
    round: PendingRound | None = field(default=None)


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
        self._launched: dict[int, _Launched] = {}  # by slot
        self.num_ahead = 0  # rounds begun here in the way AHEAD, with nodes of a tree ahead
        self.num_without = 0  # and with the root alone
        self._retired_at: float | None = None  # when the last step ended

    @property
    def num_in_flight(self) -> int:
        return len(self._launched)

    def plan(self, now: float) -> Plan:
        """Admits, reserves, shares the rows out, and marks the chosen sequences as in flight."""
        events: list[Event] = []
        self._admit(now, events)
        decoding, prefilling = self._ready(now, events)
        if decoding:
            self._note_idle(now)
        for sequence in decoding:
            self._take_ahead(sequence)
        blocks = [_Block(s, 1, s.pending) for s in decoding]
        # Those whose next round is on its way wait for this step's end: they count, too.
        others = decoding or [s for s in self._residency if s.is_briefly_away(now)]
        chunks = share_prefill(
            [self._rows_wanted(s) for s in prefilling],
            len(others),
            self._most_prefill(others, prefilling),
            self._limits.max_step_tokens,
        )
        for sequence, rows in zip(prefilling, chunks, strict=True):
            if rows:
                is_last = rows == sequence.num_missing + 1
                blocks.append(_Block(sequence, rows, sequence.pending if is_last else None))
        num_offered = sum(b.round.tree.num_nodes for b in blocks if b.round is not None)
        self._share_nodes(blocks)
        return Plan([self._launch(block, now) for block in blocks], events, num_offered)

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
    ) -> tuple[list[VerifySequence], list[Event]]:
        """Commits what a step gave. Returns the sequences that it held and their results."""
        sequences, events = [], list[Event]()
        verified: list[tuple[PendingRound, Int32Array]] = []
        self._retired_at = now
        # One advice for all of a step: sequences that go together go on together.
        self._gate.offer_ahead(any(sequence.draft_ahead for sequence in self._residency))
        drafting = self._gate.drafting
        for work, outcome in zip(works, outcomes, strict=True):
            launched = self._launched.pop(work.slot)
            sequence = launched.sequence
            sequences.append(sequence)
            sequence.in_flight = False
            if sequence.closed:
                self._residency.put_out(sequence)
                continue
            if sequence.wants_features and outcome.features is not None:
                sequence.window.append(work.kv_len, outcome.features)
            if work.num_scored:
                sequence.prompt_logprobs[work.kv_len :] = outcome.prompt_logprobs
                sequence.prompt_top_logprobs[work.kv_len :] = outcome.prompt_top_logprobs
            sequence.kv_len += outcome.num_committed
            if launched.round is not None:
                verified.append((launched.round, outcome.accepted_nodes))
                result = _result(launched, launched.round, outcome, step_seconds, drafting)
                self._judge(sequence, result, now)
                begins = self._may_begin(sequence, result)
                result = replace(result, next_begun=begins)
                if sequence.ahead is not None:
                    sequence.ahead = sequence.ahead.after(result.tokens)
                events.append(self._finish_round(sequence, result, now))
                if begins:
                    own = PendingRound.root_only(result.round + 1, result.tokens[-1], now)
                    sequence.pending = replace(own, is_own=True)
            self._residency.settle(sequence)
        if self._budget is not None:
            self._budget.learn(verified)
        return sequences, events

    def abandon(self, works: Sequence[SequenceWork]) -> list[VerifySequence]:
        """After a step that failed: its sequences, no longer in flight."""
        sequences = []
        for work in works:
            sequence = self._launched.pop(work.slot).sequence
            sequence.in_flight = False
            sequences.append(sequence)
        return sequences

    def _admit(self, now: float, events: list[Event]) -> None:
        for sequence in self._registry.waiting():
            source = forks.source_of(sequence, self._registry)
            if source is not None and forks.must_wait(source):
                continue  # its rows are being computed: not a second time
            if source is not None and (rows := forks.num_common_rows(source, sequence)):
                put_out = self._residency.fork(source, sequence, now, rows)
            else:
                source, put_out = None, self._residency.admit(sequence, now)
            if put_out is None:
                return  # strictly by age: a small newcomer must not starve a large old one
            if source is not None:
                forks.take_features(source, sequence)
            sequence.fork_of = b""
            events += map(_preempted, put_out)

    def _ready(
        self, now: float, events: list[Event]
    ) -> tuple[list[VerifySequence], list[VerifySequence]]:
        """Sequences to decode and to prefill, their pages up to the root reserved; both oldest
        first.
        """
        decoding, prefilling = list[VerifySequence](), list[VerifySequence]()
        for sequence in sorted(self._residency, key=lambda s: s.arrival):
            if not sequence.is_ready or not sequence.is_resident:
                continue  # the last: put out by an older one in this very loop
            if sequence.num_missing:
                self._residency.catch_up(sequence)
            put_out = self._residency.grow(sequence, sequence.committed_len, now)
            if put_out is None:
                continue  # stalls until an older one gives pages back
            events += map(_preempted, put_out)
            (prefilling if sequence.num_missing else decoding).append(sequence)
        # Orphans and the long paused may be put out after they were taken up above.
        return [s for s in decoding if s.is_resident], [s for s in prefilling if s.is_resident]

    def _rows_wanted(self, sequence: VerifySequence) -> int:
        """Prefill rows that it could use; where each is a node, as many as a tree may have."""
        rows = sequence.num_missing + 1
        return min(rows, self._limits.max_tree_nodes) if sequence.scores_prompt else rows

    def _share_nodes(self, blocks: list[_Block]) -> None:
        """Cuts the trees to the rows left over, then to the pages that can be had."""
        sampling = [(block, block.round) for block in blocks if block.round is not None]
        counts = self._num_nodes(blocks, [round_ for _, round_ in sampling])
        for (block, round_), num_nodes in zip(sampling, counts, strict=True):
            cut = round_ if num_nodes == round_.tree.num_nodes else round_.prefix(num_nodes)
            sequence, depth = block.sequence, cut.depth
            spare = self._residency.room_rows(sequence) - sequence.committed_len
            if depth > spare:
                cut, depth = cut.within_depth(spare), spare
            self._residency.grow(sequence, sequence.committed_len + depth, 0.0)
            block.round = cut

    def _num_nodes(self, blocks: list[_Block], rounds: list[PendingRound]) -> list[int]:
        num_causal, max_rows = sum(b.num_causal for b in blocks), self._limits.max_step_tokens
        if self._budget is None:
            return share_nodes([round_.tree.scores for round_ in rounds], max_rows - num_causal)
        return self._budget.share(
            rounds,
            num_causal=num_causal,
            max_rows=max_rows,
            num_kv_tokens=sum(block.sequence.kv_len for block in blocks),
        )

    def _note_idle(self, now: float) -> None:
        if self._budget is not None and self._retired_at is not None and not self._launched:
            self._budget.note_idle(now - self._retired_at)

    def _launch(self, block: _Block, now: float) -> SequenceWork:
        sequence = block.sequence
        work = _work(block)
        sequence.in_flight = True
        self._launched[sequence.slot] = _Launched(sequence, work, block.round, now)
        return work

    def _take_ahead(self, sequence: VerifySequence) -> None:
        """Gives a round that was begun here what has come for it by now."""
        round_, ahead = sequence.pending, sequence.ahead
        if round_ is None or not round_.is_own:
            return
        if self._gate.drafting is not Drafting.AHEAD or not sequence.draft_ahead:
            return
        if ahead is None:
            self.num_without += 1
            return
        self.num_ahead += 1
        room = sequence.max_total_tokens - sequence.committed_len - 1
        most = min(room, self._limits.max_tree_depth, ahead.most.max_depth)
        shape = TreeShape(
            max_depth=most,
            top_k=ahead.most.top_k,
            max_nodes=min(ahead.most.max_nodes, self._limits.max_tree_nodes),
        )
        taken = PendingRound.of(round_.round, ahead.tree.within(shape), most, round_.since)
        sequence.pending = replace(taken, is_own=True, ahead_from=ahead.kv_len, stem=ahead.stem)

    def _judge(self, sequence: VerifySequence, result: RoundResult, now: float) -> None:
        """Tells the gate of the round."""
        had_tree = sequence.pending is not None and sequence.pending.tree.num_nodes > 1
        turn, drafted = sequence.turn, had_tree
        if turn is not None:
            drafted = had_tree or turn.drafted
            if _went_as_asked(turn, had_tree=had_tree, can_ahead=sequence.draft_ahead):
                num_sequences = len(self._residency)
                seconds = now - turn.since
                self._gate.note_round(turn.asked, len(result.tokens), seconds, num_sequences)
        sequence.turn = RoundTurn(now, result.drafting, drafted)

    def _may_begin(self, sequence: VerifySequence, result: RoundResult) -> bool:
        """Whether the next round begins at once, here.

        Not where a tree is to be waited for, not past the sequence's end, nor beside commands that
        wait, nor for a stream that is gone; and with it no more results may come to be
        unacknowledged than are kept.
        """
        stopped = not sequence.sampling.ignore_eos and result.tokens[-1] in sequence.stop_tokens
        room = sequence.max_total_tokens - sequence.committed_len - len(result.tokens)
        waiting = bool(sequence.deferred) or sequence.orphaned_since is not None
        full = len(sequence.results) + 1 >= self._limits.max_unacknowledged
        waits = not sequence.runs_on or result.drafting is Drafting.SYNCHRONOUS
        return not (waits or stopped or room <= 0 or waiting or full)

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


def _work(block: _Block) -> SequenceWork:
    sequence, num_causal = block.sequence, block.num_causal
    first = sequence.kv_len
    causal = sequence.tokens[first : first + num_causal]
    parents = np.arange(-1, num_causal - 1, dtype=np.int32)
    tokens = np.array(causal, np.int32)
    if block.round is not None and block.round.tree.num_nodes > 1:
        tree = block.round.tree
        tokens = np.concatenate([tokens, tree.tokens[1:]])
        # Node i is row num_causal - 1 + i of the block; the root, node 0, is its last causal row.
        parents = np.concatenate([parents, tree.parents[1:] + np.int32(num_causal - 1)])
    return SequenceWork(
        slot=sequence.slot,
        tokens=tokens,
        parents=parents,
        num_causal=num_causal,
        samples=block.round is not None,
        kv_len=first,
        page_ids=np.array(sequence.pages, np.int32),
        page_copy=sequence.copy,
        sampling=sequence.sampling,
        stop_tokens=() if sequence.sampling.ignore_eos else sequence.stop_tokens,
        wants_features=sequence.wants_features,
        history=sequence.history,
        scored=_scored(sequence, num_causal, block.round is not None),
    )


def _scored(sequence: VerifySequence, num_causal: int, samples: bool) -> Int32Array:
    """The prompt's tokens that follow the block's causal rows below the root."""
    if not sequence.scores_prompt:
        return np.zeros(0, np.int32)
    first = sequence.kv_len + 1
    end = min(first + num_causal - samples, sequence.num_prompt_tokens)
    return np.array(sequence.tokens[first:end], np.int32)


def _result(
    launched: _Launched,
    round_: PendingRound,
    outcome: SequenceOutcome,
    step_seconds: float,
    drafting: Drafting,
) -> RoundResult:
    wants_logprobs = launched.work.sampling.logprobs
    told = launched.sequence.has_told_prompt
    is_ahead = round_.ahead_from != NOT_AHEAD and round_.tree.num_nodes > 1
    return RoundResult(
        round=round_.round,
        kv_len=launched.sequence.committed_len - 1,
        tokens=tuple(outcome.tokens.tolist()),
        margins=tuple(outcome.margins.tolist()),
        logprobs=tuple(outcome.logprobs.tolist()) if wants_logprobs else (),
        top_logprobs=outcome.top_logprobs,
        accepted_nodes=tuple(round_.nodes[outcome.accepted_nodes].tolist()),
        num_nodes=round_.tree.num_nodes,
        step_seconds=step_seconds,
        queue_seconds=max(0.0, launched.at - round_.since),
        drafting=drafting,
        ahead=VerifiedAhead(round_.ahead_from, round_.tree) if is_ahead else None,
        num_cached_tokens=launched.sequence.num_found,
        prompt_logprobs=() if told else tuple(launched.sequence.prompt_logprobs),
        prompt_top_logprobs=() if told else tuple(launched.sequence.prompt_top_logprobs),
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
