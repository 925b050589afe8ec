"""Any order of commands, features, steps and losses: every tree is of its sequence's own pairs.

The model is what a router knows: tokens, features, epochs, rounds. Steps retire late, features come
in any order and twice, streams break, pages suffice for a part of the sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.types import FeatureRows, TreeShape
from draft_service.commands import Attach, Close, Extend, Open, Rollback
from draft_service.events import Closed, Evicted, Failed, GrownTree, StateReport, TreeReady
from draft_service.limits import DraftLimits
from draft_service.machine import DraftMachine
from tests.protocol.draft_toy import PAGE_SIZE, VOCAB, Pair, ToyEngine, digest

NUM_PAGES = 10
MAX_TOKENS = 24
LIMITS = DraftLimits(
    vocab_size=VOCAB,
    feature_size=2,
    max_context_len=MAX_TOKENS,
    tree=TreeShape(max_depth=4, top_k=2, max_nodes=8),
    max_sequences=5,
    page_size=PAGE_SIZE,
    num_pages=NUM_PAGES,
    max_step_sequences=2,
    max_draft_rows=3,
    max_extend_rows=8,
    recent_rows=2,
    ahead=TreeShape(max_depth=6, top_k=8, max_nodes=16),
    grace_seconds=10.0,
)


@dataclass
class Known:
    """One sequence, as its router knows it."""

    sequence_id: bytes
    tokens: list[int]
    features_from: int
    epoch: int = 1
    stream: int = 1
    round: int = -1  # the last one asked for
    waits: bool = False
    rolled_back: bool = False  # since the last token: the root alone may come
    asked: bool = False  # `round`, since the last rollback
    cap: int = 8  # nodes that it asked for
    ahead: bool = False  # `round`'s tree is for rounds to come
    lengths: dict[int, int] = field(default_factory=dict)  # by rounds ahead since the rollback

    def feature(self, position: int) -> tuple[float, float]:
        """Depends on all tokens up to the position, as a target's does."""
        return (
            float(digest([(t, 0.0, 0.0) for t in self.tokens[: position + 1]])),
            float(position),
        )

    @property
    def pairs(self) -> list[Pair]:
        return self.pairs_of(len(self.tokens))

    def pairs_of(self, committed_len: int) -> list[Pair]:
        span = range(self.features_from, committed_len - 1)
        return [(self.tokens[t + 1], *self.feature(t)) for t in span]


class DraftModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.machine = DraftMachine(LIMITS)
        self.engine = ToyEngine(NUM_PAGES)
        self.now = 0.0
        self.known: dict[bytes, Known] = {}
        self.steps: list[tuple[Any, Any]] = []
        self.num_opened = 0
        self.num_trees = 0
        self.last_stream = 1
        self.machine.connect(1)

    # -- what the router does

    @precondition(lambda self: len(self.known) < LIMITS.max_sequences)
    @rule(length=st.integers(1, 12), skip=st.integers(0, 3), seed=st.integers(0, 2))
    def open(self, length: int, skip: int, seed: int) -> None:
        self.num_opened += 1
        sequence_id = self.num_opened.to_bytes(16, "big")
        tokens = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
        known = Known(sequence_id, tokens, min(skip, length - 1), stream=self.last_stream)
        self.known[sequence_id] = known
        self.send(
            known,
            Open(
                sequence_id=sequence_id, epoch=1, tokens=tuple(tokens),
                max_total_tokens=MAX_TOKENS, features_from=known.features_from,
            ),
        )  # fmt: skip
        sequence = self.machine._registry.get(sequence_id)
        if sequence is not None and sequence.kv_len:  # begins with pages of an earlier one
            known.features_from = 0

    @precondition(lambda self: self.known)
    @rule(
        pick=st.integers(0, 99),
        num=st.integers(0, 5),
        cap=st.sampled_from([1, 2, 8]),
        ahead=st.booleans(),
    )
    def extend(self, pick: int, num: int, cap: int, ahead: bool) -> None:
        known = self.pick(pick)
        num = min(num, MAX_TOKENS - len(known.tokens))
        fresh = [digest([(len(known.tokens) + i, float(pick), 0.0)]) for i in range(num)]
        base = len(known.tokens)
        known.tokens += fresh
        known.round, known.asked, known.cap = known.round + 1, True, cap
        known.waits, known.rolled_back = True, known.rolled_back and not num
        known.ahead = ahead
        if ahead:
            known.lengths[known.round] = len(known.tokens)
        self.send(known, self.extend_command(known, base, tuple(fresh), cap))

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 99))
    def repeat_extend(self, pick: int) -> None:
        known = self.pick(pick)
        if not known.asked:
            return
        # Whatever comes with it: the round was asked for before.
        before = self.num_trees
        waited = known.waits
        self.send(known, self.extend_command(known, 7777, (1, 2), 8))
        if sequence_has_tree(self.machine, known) and not waited:
            assert self.num_trees == before + 1

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 99), cut=st.integers(1, 24))
    def rollback(self, pick: int, cut: int) -> None:
        known = self.pick(pick)
        length = min(cut, len(known.tokens))
        known.epoch += 1
        del known.tokens[length:]
        known.waits, known.rolled_back = False, True
        known.asked = False
        known.lengths.clear()
        self.send(
            known,
            Rollback(
                sequence_id=known.sequence_id, epoch=known.epoch, committed_len=length,
                round=known.round + 1,
            ),
        )  # fmt: skip

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 99))
    def close(self, pick: int) -> None:
        known = self.pick(pick)
        del self.known[known.sequence_id]
        command = Close(sequence_id=known.sequence_id, epoch=known.epoch)
        events = self.machine.handle(known.stream, [command], self.now)
        assert [type(event) for event in events] == [Closed]
        again = self.machine.handle(known.stream, [self.extend_command(known, 0, (), 8)], self.now)
        assert [event.code.name for event in again if isinstance(event, Failed)] == ["CLOSED"]

    @precondition(lambda self: not any(len(s.deferred) > 8 for s in self.machine._registry))
    @rule()
    def reconnect(self) -> None:
        """The stream breaks; a new one takes all sequences over."""
        self.machine.disconnect(self.last_stream, self.now)
        self.last_stream += 1
        self.machine.connect(self.last_stream)
        for known in list(self.known.values()):
            known.stream, known.epoch = self.last_stream, known.epoch + 1
            self.send(known, Attach(sequence_id=known.sequence_id, epoch=known.epoch))

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 99))
    def stale_frames_change_nothing(self, pick: int) -> None:
        known = self.pick(pick)
        if known.epoch < 2:
            return
        command = Rollback(
            sequence_id=known.sequence_id, epoch=known.epoch - 1, committed_len=1, round=0
        )
        events = self.machine.handle(known.stream, [command], self.now)
        deferred = not events  # behind a takeover that waits for its step
        assert deferred or [e.code.name for e in events] == ["STALE_EPOCH"]

    # -- what verify sends

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 99), first=st.integers(0, 23), num=st.integers(1, 9))
    def features(self, pick: int, first: int, num: int) -> None:
        known = self.pick(pick)
        first = min(first, len(known.tokens) - 1)
        self.send_features(known, range(first, min(first + num, len(known.tokens))))

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 99))
    def missing_features(self, pick: int) -> None:
        known = self.pick(pick)
        self.send_features(known, range(known.features_from, len(known.tokens)))

    def send_features(self, known: Known, positions: range) -> None:
        if not positions:
            return
        rows = np.array([known.feature(p) for p in positions], np.float32)
        block = FeatureRows(known.sequence_id, known.epoch, positions.start, rows)
        self.take(self.machine.receive(block, self.now))

    # -- what the service does

    @precondition(lambda self: len(self.steps) < 2)
    @rule()
    def plan(self) -> None:
        plan = self.machine.plan(self.now)
        self.take(plan.events)
        if plan.works:
            assert len({work.drafts for work in plan.works}) == 1
            assert len(plan.works) <= LIMITS.max_step_sequences
            rows = [work.num_rows for work in plan.works]
            assert max(rows) <= LIMITS.max_draft_rows or sum(rows) <= LIMITS.max_extend_rows
            self.steps.append((plan.works, self.engine.run(plan.works)))

    @precondition(lambda self: self.steps)
    @rule()
    def retire(self) -> None:
        works, outcomes = self.steps.pop(0)
        self.take(self.machine.retire(works, outcomes, self.now, 0.01))

    @rule(seconds=st.sampled_from([0.1, 1.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.machine.tick(self.now)

    @invariant()
    def pages_balance(self) -> None:
        self.machine.check_balance()

    def teardown(self) -> None:
        """Once everything has come, everyone who waits is answered, and no page stays behind."""
        for _ in range(200):
            for known in list(self.known.values()):
                self.missing_features_of(known)
            while self.steps:
                self.retire()
            self.plan()
            if not self.steps and not any(known.waits for known in self.known.values()):
                break
        assert not any(known.waits for known in self.known.values())
        for known in list(self.known.values()):
            self.send(known, Close(sequence_id=known.sequence_id, epoch=known.epoch))
        assert self.machine.page_counts.available == NUM_PAGES
        assert self.machine.waiting_feature_bytes == 0

    def missing_features_of(self, known: Known) -> None:
        self.send_features(known, range(known.features_from, len(known.tokens)))

    # -- helpers

    def pick(self, number: int) -> Known:
        return list(self.known.values())[number % len(self.known)]

    def extend_command(
        self, known: Known, base: int, tokens: tuple[int, ...], max_nodes: int
    ) -> Extend:
        return Extend(
            sequence_id=known.sequence_id, epoch=known.epoch, round=known.round, base_len=base,
            tokens=tokens, tree=TreeShape(max_depth=4, top_k=2, max_nodes=max_nodes),
            ahead=known.ahead,
        )  # fmt: skip

    def send(self, known: Known, command: Any) -> None:
        self.take(self.machine.handle(known.stream, [command], self.now))

    def take(self, events: list[Any]) -> None:
        for event in events:
            known = self.known.get(event.sequence_id)
            if known is None:
                continue
            match event:
                case TreeReady():
                    self.check_tree(known, event)
                case Evicted():
                    del self.known[event.sequence_id]
                case StateReport():
                    if event.epoch == known.epoch:
                        # Commands that waited behind the takeover are not in it yet.
                        assert event.state.committed_len <= len(known.tokens)
                case Failed():
                    # A stale frame that waited behind a takeover is refused when its turn comes.
                    assert event.epoch < known.epoch, f"{event.code.name}: {event.message}"
                case Closed():
                    pass

    def check_tree(self, known: Known, event: TreeReady) -> None:
        if event.epoch != known.epoch:
            return  # of a life that ended with a takeover on its way
        grown = event.grown
        if grown.round != known.round:
            self.check_late_tree(known, grown)
            return
        self.num_trees += 1
        assert grown.round == known.round
        assert grown.committed_len == len(known.tokens)
        tokens = grown.tree.tokens.tolist()
        assert tokens[0] == known.tokens[-1]
        known.waits = False
        if len(tokens) == 1:
            nearly_full = MAX_TOKENS - len(known.tokens) < 2
            assert not known.pairs or known.rolled_back or nearly_full or known.cap == 1
        else:
            assert tokens[1:] == [digest(known.pairs)]

    def check_late_tree(self, known: Known, grown: GrownTree) -> None:
        """One ahead whose step was under way when a newer wish came; no token of it is gone."""
        assert grown.ahead
        assert grown.committed_len == known.lengths[grown.round]
        tokens = grown.tree.tokens.tolist()
        assert tokens[0] == known.tokens[grown.committed_len - 1]
        assert tokens[1:] in ([], [digest(known.pairs_of(grown.committed_len))])


def sequence_has_tree(machine: DraftMachine, known: Known) -> bool:
    sequence = machine._registry.get(known.sequence_id)
    return sequence is not None and sequence.grown is not None and not sequence.deferred


TestDraftMachine = DraftModel.TestCase
TestDraftMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
