"""The adversary of `test_verify_adversary` against sequences that run on with two steps in flight:
rounds launched before the root of any of them is known, trees ahead that come when they like, stop
tokens, streams that pause, steps that fail or are refused by the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from test_verify_adversary import CURVE, Adversary, RouterSequence, grow_tree
from test_verify_adversary import LIMITS as ONE_STEP
from verify_toy import AheadToyEngine, continuation

from common.types import Drafting, TreeShape
from verify_service.budget import TreeBudget
from verify_service.commands import Acknowledge, Command, TreeAhead
from verify_service.draft_gate import FixedWay
from verify_service.events import Event, Failed, RoundDone
from verify_service.machine import VerifyMachine
from verify_service.step import Launched, SequenceWork

LIMITS = replace(
    ONE_STEP, max_context_len=48, num_pages=20, max_step_tokens=16, max_ahead_nodes=12,
)  # fmt: skip


FAR_FETCHED = ("tree_ahead:", "position:", "max_total_tokens:")
"""A tree ahead, or an Open, of what has gone on since; features where there are none."""
likely = st.sampled_from([True, True, True, False])


@dataclass
class RunningSequence(RouterSequence):
    """Verify begins its rounds itself. `stops`: at such tokens. `fork_of`: another choice."""

    stops: tuple[int, ...] = ()
    fork_of: bytes = b""

    @property
    def is_complete(self) -> bool:
        emitted = self.tokens[len(self.prompt) :]
        stopped = bool(emitted) and emitted[-1] in self.stops
        return stopped or super().is_complete

    def open(self) -> Command:
        base = super().open()
        return replace(
            base, runs_on=True, draft_ahead=True, stop_tokens=self.stops, fork_of=self.fork_of
        )

    def take(self, event: Event, stream: int) -> None:
        if isinstance(event, Failed) and event.message.startswith(FAR_FETCHED):
            return  # nothing depends on it
        if isinstance(event, RoundDone):
            result = event.result
            assert len(result.accepted_nodes) == len(result.tokens) - 1
            if result.ahead is not None:
                nodes = result.ahead.tree.tokens[list(result.accepted_nodes)]
                assert tuple(nodes.tolist()) == result.tokens[:-1]
        super().take(event, stream)


@dataclass
class Step:
    works: list[SequenceWork]
    launched: Launched | None  # None: the engine refused it


class AheadAdversary(Adversary):
    def __init__(self) -> None:
        super().__init__()
        self.gate = FixedWay(Drafting.AHEAD)
        self.begin(has_budget=False)
        self.ahead_engine = AheadToyEngine(LIMITS.num_pages, LIMITS.page_size, 12)
        self.steps: list[Step] = []

    @initialize(has_budget=st.booleans())
    def begin(self, has_budget: bool) -> None:
        """Without a budget, as many nodes as a step has rows for."""
        budget = TreeBudget(CURVE, LIMITS.max_tree_depth) if has_budget else None
        self.machine = VerifyMachine(LIMITS, budget, self.gate)
        for stream in self.streams:
            self.machine.connect(stream)

    @initialize(data=st.data())
    def open_some(self, data: st.DataObject) -> None:
        self.open(data, 2, 0)
        self.open(data, 5, 1)

    # -- routers

    @rule(data=st.data(), length=st.integers(1, 8), seed=st.integers(0, 1))
    def open(self, data: st.DataObject, length: int, seed: int) -> None:
        if len(self.live()) >= 5:
            return
        prompt = continuation([seed], length)
        sequence = RunningSequence(
            sequence_id=len(self.sequences).to_bytes(16, "big"), prompt=prompt, seed=seed,
            max_total=length + data.draw(st.sampled_from([40, 20, 10, 3, 1])),
            stream=self.streams[-1],
            tokens=list(prompt), salt=data.draw(st.sampled_from([b"", b"", b"a"])),
            wants_features=data.draw(st.sampled_from([True, True, False])),
            stops=data.draw(st.sampled_from([(), (), (2,)])),
        )  # fmt: skip
        self.sequences.append(sequence)
        self.send(sequence, sequence.open())

    @precondition(lambda self: self.live())
    @rule(data=st.data(), seed=st.integers(0, 1), more=st.sampled_from([1, 10, 20]))
    def fork(self, data: st.DataObject, seed: int, more: int) -> None:
        """A further choice: its rows are those of a sequence that goes on meanwhile."""
        first = self.pick(data)
        if len(self.live()) >= 5:
            return
        choice = replace(
            first, sequence_id=len(self.sequences).to_bytes(16, "big"), seed=seed, epoch=1, round=0,
            tokens=list(first.prompt), max_total=min(48, len(first.prompt) + more), must_open=True,
            rolling=False, features={}, fork_of=first.sequence_id,
        )  # fmt: skip
        self.sequences.append(choice)
        self.send(choice, choice.open())

    @precondition(lambda self: self.live())
    @rule(data=st.data(), back=st.integers(0, 3))
    def tree_ahead(self, data: st.DataObject, back: int) -> None:
        """Rooted in the newest token that the router knows, or before it."""
        self.draft_ahead(data, self.pick(data), back)

    def draft_ahead(self, data: st.DataObject, sequence: RouterSequence, back: int) -> None:
        root = max(1, len(sequence.tokens) - back)
        num = data.draw(st.integers(1, 9), label="nodes")
        correct = data.draw(st.lists(likely, min_size=num, max_size=num), label="correct")
        parents = [data.draw(st.integers(max(0, i - 2), i), label="parent") for i in range(num)]
        tree = grow_tree(sequence.tokens[:root], sequence.seed, correct, parents)
        most = TreeShape(max_depth=3, top_k=data.draw(st.integers(1, 2)), max_nodes=5)
        command = TreeAhead(
            sequence_id=sequence.sequence_id, epoch=sequence.epoch, acked_round=sequence.acked,
            round=sequence.round, kv_len=root - 1, tree=tree, most=most,
        )  # fmt: skip
        self.send(sequence, command)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.send(sequence, self.acknowledgement(sequence))

    def acknowledgement(self, sequence: RouterSequence) -> Command:
        return Acknowledge(
            sequence_id=sequence.sequence_id, epoch=sequence.epoch, acked_round=sequence.acked
        )

    @rule(data=st.data(), num_turns=st.integers(2, 12))
    def all_is_well(self, data: st.DataObject, num_turns: int) -> None:
        self._turns(data, num_turns)

    def _turns(self, data: st.DataObject, num_turns: int) -> None:
        """Frames arrive in order while steps follow each other."""
        for _ in range(num_turns):
            self.launch()
            self.launch()
            commands, self.to_service = self.to_service, []
            for stream, command in commands:
                if stream in self.streams:
                    self.emit(self.machine.handle(stream, [command], self.now))
            events, self.to_router = self.to_router, []
            for event in events:
                self.arrive(event)
            for sequence in self.live():
                if data.draw(st.booleans(), label="draft"):
                    self.draft_ahead(data, sequence, 0)
                self.send(sequence, self.acknowledgement(sequence))
            if self.steps:
                self.retire()

    # Hypothesis takes each rule as often: thrice, so that most of what happens is what should.
    all_is_still_well = rule(data=st.data(), num_turns=st.integers(2, 12))(_turns)
    all_goes_on_well = rule(data=st.data(), num_turns=st.integers(2, 12))(_turns)

    # -- verify

    @rule(way=st.sampled_from([*Drafting, Drafting.AHEAD]))
    def change_way(self, way: Drafting) -> None:
        self.gate.drafting = way

    @rule()
    def launch(self) -> None:
        self._launch(is_refused=False)

    @rule()
    def launch_is_refused(self) -> None:
        self._launch(is_refused=True)

    def _launch(self, *, is_refused: bool) -> None:
        """As the loop does: a second one behind the first, if that one was not refused."""
        if not self.steps:
            plan = self.machine.plan(self.now)
        elif len(self.steps) == 1 and self.steps[0].launched is not None:
            behind = self.machine.plan_behind(self.now)
            if behind is None:
                return
            plan = behind
        else:
            return
        assert plan.num_rows <= LIMITS.max_step_tokens
        self.emit(plan.events)
        if plan.works:
            launched = None if is_refused else self.ahead_engine.launch(plan.works)
            self.steps.append(Step(plan.works, launched))

    @precondition(lambda self: self.steps)
    @rule()
    def retire(self) -> None:
        step = self.steps.pop(0)
        if step.launched is None:
            self.emit(self.machine.fail(step.works, "refused", self.now))
        else:
            outcomes = self.ahead_engine.finish(step.launched)
            self.emit(self.machine.retire(step.works, outcomes, self.now))

    @precondition(lambda self: self.steps)
    @rule()
    def step_fails(self) -> None:
        for step in self.steps:
            self.emit(self.machine.fail(step.works, "the device is gone", self.now))
        self.steps.clear()
        self.ahead_engine.lose()

    # -- what must hold

    @invariant()
    def pages_of_launched_steps_are_their_sequences(self) -> None:
        assert self.machine.num_in_flight == len({w.slot for s in self.steps for w in s.works})
        for launched in self.machine._stepper._in_flight:
            assert launched.sequence.slot == launched.work.slot
            assert set(launched.work.page_ids.tolist()) <= set(launched.sequence.pages)

    @invariant()
    def no_more_results_are_kept_than_may_be(self) -> None:
        for sequence in self.machine._registry:
            assert len(sequence.results) <= LIMITS.max_unacknowledged

    def run_calmly(self) -> None:
        commands, self.to_service = self.to_service, []
        for stream, command in commands:
            self.emit(self.machine.handle(stream, [command], self.now))
        self.now += 0.6
        self.machine.tick(self.now)
        self.launch()
        self.launch()
        while self.steps:
            self.retire()
        events, self.to_router = self.to_router, []
        for event in events:
            self.arrive(event)


AheadAdversary.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_every_token_is_the_targets_with_two_steps_in_flight = AheadAdversary.TestCase
