"""Routers against the verify machine over a network that drops, duplicates, reorders and delays,
with streams that break, pages for a fraction of the sequences, and steps that retire late.

Whatever happens: every token that a router takes is the reference's, pages balance after every
move, and once the network calms down every sequence can be finished.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from verify_toy import VOCAB, ToyEngine, continuation

from common.types import DraftTree, ErrorCode, SamplingParams
from verify_service.budget import TreeBudget
from verify_service.commands import (
    NO_ROUND,
    Attach,
    Close,
    Command,
    Open,
    ReplayFeatures,
    Rollback,
    VerifyTree,
)  # fmt: skip
from verify_service.events import Event, Failed, RoundDone, StateReport
from verify_service.limits import VerifyLimits
from verify_service.machine import VerifyMachine
from verify_service.step import StepPoint
from verify_service.step_cost import StepCurve

LIMITS = VerifyLimits(
    vocab_size=VOCAB, max_context_len=24, max_tree_nodes=8, max_tree_depth=4, max_sequences=3,
    max_waiting_sequences=3, page_size=3, num_pages=9, max_step_tokens=10, max_prefill_tokens=4,
    feature_window_tokens=64, cached_feature_tokens=9, grace_seconds=30.0, pause_seconds=0.5,
)  # fmt: skip
CURVE = StepCurve.of([StepPoint(rows, 0, 1, 1 + rows / 20) for rows in range(1, 11)])


@dataclass
class RouterSequence:
    """A router's view of one generation, as a careful router would keep it."""

    sequence_id: bytes
    prompt: list[int]
    seed: int
    max_total: int
    stream: int
    salt: bytes = b""
    wants_features: bool = True
    epoch: int = 1
    round: int = 0  # the next round whose result is awaited
    tokens: list[int] = field(default_factory=list)
    must_open: bool = True  # until a state says that the sequence exists
    rolling: bool = False  # until a state says that the cut was made
    done: bool = False
    features: dict[int, tuple[float, float]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.tokens) >= self.max_total

    @property
    def acked(self) -> int:
        return self.round - 1 if self.round else NO_ROUND

    def revive(self, stream: int) -> Command:
        """Under a new epoch on a stream of its own: opens, cuts or attaches, as needed."""
        self.stream, self.epoch = stream, self.epoch + 1
        base = {"sequence_id": self.sequence_id, "epoch": self.epoch}
        if self.must_open:
            return self.open()
        if self.rolling:
            return Rollback(**base, committed_len=len(self.tokens), round=self.round)
        return Attach(**base, acked_round=self.acked, features_from=0)

    def open(self) -> Command:
        return Open(
            sequence_id=self.sequence_id, epoch=self.epoch, tokens=tuple(self.tokens),
            num_prompt_tokens=len(self.prompt), round=self.round,
            sampling=SamplingParams(seed=self.seed), max_total_tokens=self.max_total,
            wants_features=self.wants_features, cache_salt=self.salt,
        )  # fmt: skip

    def tree(self, tree: DraftTree) -> Command:
        return VerifyTree(
            sequence_id=self.sequence_id, epoch=self.epoch, acked_round=self.acked,
            round=self.round, kv_len=len(self.tokens) - 1, tree=tree,
        )  # fmt: skip

    def take(self, event: Event, stream: int) -> None:
        if event.epoch != self.epoch or stream != self.stream or self.done:
            return  # a frame of an earlier life
        match event:
            case StateReport():
                self.must_open = self.rolling = False
            case RoundDone(result=result) if result.round == self.round and not self.rolling:
                assert result.kv_len == len(self.tokens) - 1
                assert len(result.accepted_nodes) == len(result.tokens) - 1
                self.tokens += result.tokens
                self.round += 1
            case Failed(code=ErrorCode.UNKNOWN_SEQUENCE | ErrorCode.CLOSED | ErrorCode.INTERNAL):
                self.must_open = True
            case Failed(code=ErrorCode.NOT_SERVING | ErrorCode.INVALID | ErrorCode.NEVER_FITS):
                raise AssertionError(event)

    def check(self) -> None:
        emitted = self.tokens[len(self.prompt) :]
        assert emitted == continuation(self.prompt, len(emitted), self.seed)
        assert len(self.tokens) <= self.max_total
        for position, (stated, token) in self.features.items():
            assert stated == position
            assert position >= len(self.tokens) or token == self.tokens[position]


def grow_tree(
    tokens: list[int], seed: int, draw_correct: list[bool], parents: list[int]
) -> DraftTree:
    """A tree on the last token; node i continues its parent rightly or not, as told."""
    nodes, paths = [tokens[-1]], [list(tokens)]
    for correct, parent in zip(draw_correct, parents, strict=True):
        right = continuation(paths[parent], 1, seed)[0]
        token = right if correct else (right + 1) % VOCAB
        nodes.append(token)
        paths.append([*paths[parent], token])
    scores = -np.arange(len(nodes), dtype=np.float32)
    return DraftTree(np.array(nodes, np.int32), np.array([-1, *parents], np.int32), scores)


def draw_tree(data: st.DataObject, sequence: RouterSequence) -> DraftTree:
    num = data.draw(st.integers(0, 6), label="nodes")
    correct = data.draw(st.lists(st.booleans(), min_size=num, max_size=num), label="correct")
    parents = [data.draw(st.integers(max(0, i - 1), i), label="parent") for i in range(num)]
    return grow_tree(sequence.tokens, sequence.seed, correct, parents)


class Adversary(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        # A budget with an opinion: some steps verify whole trees, some prefixes, some roots alone.
        self.machine = VerifyMachine(LIMITS, TreeBudget(CURVE, LIMITS.max_tree_depth))
        self.engine = ToyEngine(LIMITS.num_pages, LIMITS.page_size)
        self.now = 0.0
        self.sequences: list[RouterSequence] = []
        self.to_service: list[tuple[int, Command]] = []
        self.to_router: list[Event] = []
        self.launched: list[list] = []
        self.streams: list[int] = []
        self.num_streams = 0
        self.connect()

    # -- helpers

    def connect(self) -> int:
        self.num_streams += 1
        self.streams.append(self.num_streams)
        self.machine.connect(self.num_streams)
        return self.num_streams

    def send(self, sequence: RouterSequence, command: Command) -> None:
        self.to_service.append((sequence.stream, command))

    def emit(self, events: list[Event]) -> None:
        self.to_router += [e for e in events if e.stream in self.streams]

    def arrive(self, event: Event) -> None:
        for sequence in self.sequences:
            if sequence.sequence_id == event.sequence_id:
                sequence.take(event, event.stream)
                sequence.check()

    def live(self) -> list[RouterSequence]:
        return [s for s in self.sequences if not s.done]

    def pick(self, data: st.DataObject) -> RouterSequence:
        return data.draw(st.sampled_from(self.live()), label="sequence")

    # -- routers

    @rule(data=st.data(), length=st.integers(1, 12), seed=st.integers(0, 1))
    def open(self, data: st.DataObject, length: int, seed: int) -> None:
        if len(self.live()) >= 5:
            return
        prompt = continuation([seed], length)
        sequence = RouterSequence(
            sequence_id=len(self.sequences).to_bytes(16, "big"), prompt=prompt, seed=seed,
            max_total=data.draw(st.integers(length + 1, 24)), stream=self.streams[-1],
            tokens=list(prompt), salt=data.draw(st.sampled_from([b"", b"", b"a"])),
            wants_features=data.draw(st.sampled_from([True, True, False])),
        )  # fmt: skip
        self.sequences.append(sequence)
        self.send(sequence, sequence.open())

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def ask_round(self, data: st.DataObject) -> None:
        """The next round, or the present one again with another tree."""
        sequence = self.pick(data)
        if not sequence.is_complete:
            self.send(sequence, sequence.tree(draw_tree(data, sequence)))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def time_out(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.send(sequence, sequence.revive(data.draw(st.sampled_from(self.streams))))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        if sequence.must_open:
            return
        length = data.draw(st.integers(len(sequence.prompt), len(sequence.tokens)))
        del sequence.tokens[length:]
        sequence.round += data.draw(st.integers(0, 2))
        sequence.rolling = True
        for position in [p for p in sequence.features if p >= length - 1]:
            del sequence.features[position]
        self.send(sequence, sequence.revive(data.draw(st.sampled_from(self.streams))))

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        command = ReplayFeatures(
            sequence_id=sequence.sequence_id, epoch=sequence.epoch,
            position=data.draw(st.integers(0, 30)),
        )  # fmt: skip
        self.send(sequence, command)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        sequence.done = True
        self.send(sequence, Close(sequence_id=sequence.sequence_id, epoch=sequence.epoch))

    # -- network

    @precondition(lambda self: self.to_service)
    @rule(data=st.data(), again=st.booleans())
    def deliver_command(self, data: st.DataObject, again: bool) -> None:
        i = data.draw(st.integers(0, min(3, len(self.to_service) - 1)))
        stream, command = self.to_service[i] if again else self.to_service.pop(i)
        if stream in self.streams:
            self.emit(self.machine.handle(stream, [command], self.now))

    @precondition(lambda self: self.to_router)
    @rule(data=st.data(), again=st.booleans())
    def deliver_event(self, data: st.DataObject, again: bool) -> None:
        i = data.draw(st.integers(0, min(3, len(self.to_router) - 1)))
        self.arrive(self.to_router[i] if again else self.to_router.pop(i))

    @precondition(lambda self: self.to_service)
    @rule()
    def drop_command(self) -> None:
        self.to_service.pop()

    @precondition(lambda self: self.to_router)
    @rule()
    def drop_event(self) -> None:
        self.to_router.pop()

    @rule()
    def break_stream(self) -> None:
        gone = self.streams.pop(0)
        self.machine.disconnect(gone, self.now)
        self.to_router = [e for e in self.to_router if e.stream != gone]
        if not self.streams:
            self.connect()

    @rule()
    def new_stream(self) -> None:
        if len(self.streams) < 3:
            self.connect()

    @rule(seconds=st.sampled_from([0.1, 1.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.machine.tick(self.now)

    @rule(stream=st.integers(0, 2), max_bytes=st.sampled_from([8, 24, 4096]))
    def pull_features(self, stream: int, max_bytes: int) -> None:
        stream = self.streams[stream % len(self.streams)]
        while (rows := self.machine.next_features(stream, max_bytes)) is not None:
            assert rows.rows.nbytes <= max_bytes
            for sequence in self.sequences:
                if (sequence.sequence_id, sequence.epoch) == (rows.sequence_id, rows.epoch):
                    for i, row in enumerate(rows.rows.tolist()):
                        sequence.features[rows.position + i] = tuple(row)

    # -- device

    @rule()
    def launch(self) -> None:
        if len(self.launched) < 2:
            plan = self.machine.plan(self.now)
            assert plan.num_rows <= LIMITS.max_step_tokens
            self.emit(plan.events)
            if plan.works:
                self.launched.append(plan.works)

    @precondition(lambda self: self.launched)
    @rule()
    def retire(self) -> None:
        works = self.launched.pop(0)
        self.emit(self.machine.retire(works, self.engine.run(works), self.now))

    @precondition(lambda self: self.launched)
    @rule()
    def step_fails(self) -> None:
        self.emit(self.machine.fail(self.launched.pop(0), "the device is gone", self.now))

    # -- what must hold

    @invariant()
    def books_balance(self) -> None:
        self.machine.check_balance()

    def teardown(self) -> None:
        """The network calms down: all that are left can be finished, and nothing is held then."""
        self.to_service, self.to_router = [], []
        while self.streams:  # a lost Close means a broken stream: its sequences expire
            self.machine.disconnect(self.streams.pop(), self.now)
        stream = self.connect()
        for _ in range(400):
            self.run_calmly()
            unfinished = [s for s in self.live() if not s.is_complete]
            if not unfinished:
                break
            for sequence in unfinished:
                if sequence.must_open or sequence.rolling or sequence.stream != stream:
                    self.send(sequence, sequence.revive(stream))
                else:
                    tree = grow_tree(sequence.tokens, sequence.seed, [True, False], [0, 0])
                    self.send(sequence, sequence.tree(tree))
        assert all(s.is_complete for s in self.live()), "someone was left waiting for ever"
        for sequence in self.sequences:
            self.send(sequence, Close(sequence_id=sequence.sequence_id, epoch=sequence.epoch))
        self.run_calmly()
        self.now += 60  # orphans whose close was of an older epoch
        self.machine.tick(self.now)
        self.machine.check_balance()
        assert self.machine.num_sequences == 0
        assert self.machine.num_in_flight == 0
        assert self.machine.page_counts.available == self.machine.page_counts.total

    def run_calmly(self) -> None:
        commands, self.to_service = self.to_service, []
        for stream, command in commands:
            self.emit(self.machine.handle(stream, [command], self.now))
        while self.launched:
            self.retire()
        self.now += 0.6
        self.machine.tick(self.now)
        self.launch()
        while self.launched:
            self.retire()
        events, self.to_router = self.to_router, []
        for event in events:
            self.arrive(event)


Adversary.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_every_token_is_the_targets_and_pages_balance = Adversary.TestCase
