"""From sequences with features and wishes, a step; from its outcome, trees.

A step either drafts for all its sequences or only extends. Drafting goes first, trees for rounds to
come where no tree that is waited for can be grown; between two drafting steps there is one that
extends, if any has rows to feed, so that a long prompt enters while others draft and neither
starves. A sequence is in at most one launched step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from common.fencing import Registry
from common.types import DraftTree
from draft_service.commands import Extend
from draft_service.events import Event, Evicted, GrownTree, TreeReady
from draft_service.levels import LevelRule
from draft_service.limits import DraftLimits
from draft_service.residency import Residency, eviction_order
from draft_service.sequences import DraftSequence, PendingTree
from draft_service.step import ALL_LEVELS, SequenceOutcome, SequenceWork, as_tokens

PIECE_BYTES = 1 << 20
"""The largest piece of features that a sender may have on the way."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, empty if there is nothing to run, and what planning it made known."""

    works: list[SequenceWork]
    events: list[Event]

    @property
    def num_rows(self) -> int:
        return sum(work.num_rows for work in self.works)

    @property
    def drafts(self) -> bool:
        return any(work.drafts for work in self.works)

    @property
    def ahead(self) -> bool:
        return any(work.ahead for work in self.works)


@dataclass(frozen=True, slots=True)
class _Launched:
    sequence: DraftSequence
    wish: PendingTree | None
    committed_len: int
    at: float


class Stepper:
    def __init__(
        self, limits: DraftLimits, registry: Registry[DraftSequence], residency: Residency
    ) -> None:
        self._limits = limits
        self._registry = registry
        self._residency = residency
        self._launched: dict[bytes, list[_Launched]] = {}
        self._level_rule = LevelRule(limits.level_seconds, limits.ahead_level_seconds)
        self._extend_is_due = False

    @property
    def num_in_flight(self) -> int:
        return sum(map(len, self._launched.values()))

    @property
    def closed_in_flight(self) -> list[DraftSequence]:
        """Sequences that are forgotten but hold pages until their step retires."""
        launched = (entry.sequence for entries in self._launched.values() for entry in entries)
        return list({id(sequence): sequence for sequence in launched if sequence.closed}.values())

    def note_wish(self, sequence: DraftSequence, wish: Extend, now: float) -> None:
        """Learns from the round that has come to `wish`, which is not performed yet."""
        last = sequence.last_wish
        if last is None:
            return
        self._level_rule.note_round(now - last.since, len(wish.tokens), ahead=last.ahead)
        if last.ahead and wish.round == last.round + 1:
            self._level_rule.note_way(*sequence.sent_ahead.way(last.since, wish.verified_ahead))

    def plan(self, now: float) -> Plan:
        """Answers what needs no device, reserves pages, marks the chosen sequences as in flight."""
        events: list[Event] = []
        self._answer_without_step(now, events)
        drafting, ahead = self._drafting(ahead=False), self._drafting(ahead=True)
        extending = self._extending([*drafting, *ahead])
        if (drafting or ahead) and not (extending and self._extend_is_due):
            works = self._draft(drafting or ahead, now, events)
            self._extend_is_due = True
        else:
            works = self._extend(extending, bool(drafting), now, events)
            self._extend_is_due = False
        if not works and not drafting and not self._launched:
            self._relieve(events)
        return Plan(works, events)

    def retire(
        self, works: Sequence[SequenceWork], outcomes: Sequence[SequenceOutcome],
        now: float, step_seconds: float,
    ) -> tuple[list[DraftSequence], list[Event]]:  # fmt: skip
        """Commits what a step gave. Returns the sequences that it held and their trees."""
        sequences, events = [], list[Event]()
        for work, outcome in zip(works, outcomes, strict=True):
            launched = self._take(work)
            sequence = launched.sequence
            sequences.append(sequence)
            if sequence.closed:
                self._residency.put_out(sequence)
                continue
            sequence.kv_len = work.kv_len + work.num_rows
            sequence.features.fed(sequence.features_from + sequence.kv_len)
            self._residency.settle(sequence)
            sequence.used_at = now
            if launched.wish is None:
                continue
            if outcome.tree is None:
                raise AssertionError("the engine gave no tree for a work that drafts")
            if launched.wish.ahead:
                self._send_ahead(launched, works, outcome.tree, now, step_seconds, events)
            elif launched.wish is sequence.pending:
                self._finish(sequence, outcome.tree, launched.at, step_seconds, events)
        return sequences, events

    def abandon(self, works: Sequence[SequenceWork]) -> list[DraftSequence]:
        """After a step that failed: its sequences, no longer in flight."""
        return [self._take(work).sequence for work in works]

    # -- which

    def _answer_without_step(self, now: float, events: list[Event]) -> None:
        """The root alone: where no more was asked for, or nothing can be known of what follows
        it.
        """
        for sequence in self._registry:
            wish = sequence.pending
            if wish is None or sequence.in_flight:
                continue
            blind = sequence.num_missing == 0 and not sequence.can_redo_last
            if wish.is_root_only or blind:
                self._finish(sequence, sequence.root_only(), now, 0.0, events)

    def _drafting(self, *, ahead: bool) -> list[DraftSequence]:
        """Sequences whose tree can be grown in one step, those that wait longest first."""
        ready = [
            (sequence.pending.since, sequence.arrival, sequence)
            for sequence in self._registry
            if sequence.pending is not None
            and sequence.pending.ahead == ahead
            and not sequence.in_flight
            and sequence.can_draft
            and sequence.num_missing <= self._limits.max_draft_rows
        ]
        return [sequence for _, _, sequence in sorted(ready, key=lambda entry: entry[:2])]

    def _extending(self, drafting: list[DraftSequence]) -> list[DraftSequence]:
        """Sequences with rows to feed, those with a wish first, then the oldest."""
        ready = [
            sequence
            for sequence in self._registry
            if sequence.num_feedable and not sequence.in_flight and sequence not in drafting
        ]
        return sorted(ready, key=lambda s: (not s.waits, s.pending is None, s.arrival))

    # -- how

    def _draft(
        self, ready: list[DraftSequence], now: float, events: list[Event]
    ) -> list[SequenceWork]:
        works: list[SequenceWork] = []
        for sequence in ready:
            if len(works) == self._limits.max_step_sequences:
                break
            if sequence.closed:
                continue
            if not sequence.num_missing:  # the last pair is fed again, for its output
                self._residency.cut(sequence, sequence.num_pairs - 1)
                sequence.features.feed_again(sequence.features_from + sequence.num_pairs - 1)
            if self._reserve(sequence, sequence.num_pairs, events):
                works.append(self._launch(sequence, sequence.kv_len, sequence.num_pairs, True, now))
        if any(work.ahead for work in works):
            levels = self._level_rule.levels_ahead(len(works)) or ALL_LEVELS
            return [replace(work, max_levels=min(work.max_levels, levels)) for work in works]
        least_reach = self._level_rule.least_reach(len(works))
        return [replace(work, least_reach=least_reach) for work in works]

    def _extend(
        self, ready: list[DraftSequence], others_draft: bool, now: float, events: list[Event]
    ) -> list[SequenceWork]:
        works: list[SequenceWork] = []
        left = self._limits.max_extend_rows
        if others_draft:  # bounds the time that a tree waits behind this step
            left = max(1, left // 4)
        for sequence in ready:
            rows = min(left, sequence.num_feedable)
            if not rows or len(works) == self._limits.max_step_sequences:
                break
            until = sequence.kv_len + rows
            if not sequence.closed and self._reserve(sequence, until, events):
                works.append(self._launch(sequence, sequence.kv_len, until, False, now))
                left -= rows
        return works

    def _reserve(self, sequence: DraftSequence, num_pairs: int, events: list[Event]) -> bool:
        """Pages up to `num_pairs`, putting others out if it must, itself if that does not help."""
        victims = self._residency.grow(sequence, num_pairs, self._registry)
        if victims is None:
            # With a step under way its sequences may become idle: wait for them.
            if not self._launched:
                self._evict(sequence, events)
            return False
        for victim in victims:
            self._evict(victim, events)
        if victims:
            self._residency.grow(sequence, num_pairs, ())
        return True

    def _evict(self, sequence: DraftSequence, events: list[Event]) -> None:
        events.append(
            Evicted(stream=sequence.stream, sequence_id=sequence.sequence_id, epoch=sequence.epoch)
        )
        self._registry.forget(sequence)

    def _relieve(self, events: list[Event]) -> None:
        """When features fill the memory and none can be fed, puts out whoever holds most of them.

        Without this, rows behind a gap that never closes would use up the credit for good.
        """
        waiting = sum(sequence.features.num_waiting_bytes for sequence in self._registry)
        if waiting + PIECE_BYTES <= self._limits.max_waiting_bytes:
            return
        most = max(
            self._registry,
            key=lambda s: (s.features.num_waiting_bytes, [-x for x in eviction_order(s)]),
        )
        self._evict(most, events)

    def _launch(
        self, sequence: DraftSequence, first: int, until: int, drafts: bool, now: float
    ) -> SequenceWork:
        position = sequence.features_from + first
        wish = sequence.pending if drafts else None
        work = SequenceWork(
            sequence_id=sequence.sequence_id,
            tokens=as_tokens(sequence.tokens[position + 1 : position + 1 + until - first]),
            features=sequence.features.take(position, until - first),
            kv_len=first,
            page_ids=np.array(sequence.pages, np.int32),
            page_copy=sequence.copy,
            drafts=drafts,
            ahead=wish is not None and wish.ahead,
            noise=sequence.noise if drafts else None,
            max_levels=ALL_LEVELS if wish is None else wish.shape.max_depth,
        )
        launched = _Launched(sequence, wish, sequence.committed_len, now)
        self._launched.setdefault(sequence.sequence_id, []).append(launched)
        sequence.in_flight = True
        return work

    def _take(self, work: SequenceWork) -> _Launched:
        # A closed and re-opened id may have a second life in flight behind the first.
        launched = self._launched[work.sequence_id].pop(0)
        if not self._launched[work.sequence_id]:
            del self._launched[work.sequence_id]
        launched.sequence.in_flight = False
        return launched

    def _finish(
        self, sequence: DraftSequence, tree: DraftTree, at: float, step_seconds: float,
        events: list[Event],
    ) -> None:  # fmt: skip
        wish = sequence.pending
        if wish is None:
            raise AssertionError("a tree was grown that nobody wished for")
        sequence.pending = None
        sequence.grown = _grown(wish, sequence.committed_len, tree, at, step_seconds)
        events.append(tree_ready(sequence, sequence.grown))

    def _send_ahead(
        self, launched: _Launched, works: Sequence[SequenceWork], tree: DraftTree, now: float,
        step_seconds: float, events: list[Event],
    ) -> None:  # fmt: skip
        """Also where a newer wish has come: the tree is good from where the sequence is now."""
        sequence, wish = launched.sequence, launched.wish
        assert wish is not None
        grown = _grown(wish, launched.committed_len, tree, launched.at, step_seconds)
        if wish is sequence.pending:
            sequence.pending, sequence.grown = None, grown
        events.append(tree_ready(sequence, grown))
        since = sequence.tokens[launched.committed_len :]
        sequence.sent_ahead.note(grown.tree, launched.committed_len - 1, since, now)
        levels = max(work.max_levels for work in works)  # the step grows what any wants
        self._level_rule.note_grown_ahead(now - wish.since, levels, len(works))


def _grown(
    wish: PendingTree, committed_len: int, tree: DraftTree, at: float, step_seconds: float
) -> GrownTree:
    return GrownTree(
        round=wish.round,
        committed_len=committed_len,
        tree=tree.within(wish.shape),
        step_seconds=step_seconds,
        queue_seconds=max(0.0, at - wish.since),
        ahead=wish.ahead,
    )


def tree_ready(sequence: DraftSequence, grown: GrownTree) -> TreeReady:
    return TreeReady(
        stream=sequence.stream, sequence_id=sequence.sequence_id, epoch=sequence.epoch, grown=grown
    )
