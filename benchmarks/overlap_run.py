"""Slices in virtual time: the three real state machines, simulated devices, clock and network.

Router, verify and draft machine are those of the services, and what they say to each other goes
through both sides' codecs; budget, gate and level rule are theirs. Made up are the devices
(`overlap_devices`), their times, and the way between router and draft, half a round trip either
way. The router is beside verify.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.overlap_devices import FEATURES, SimulatedHead, SimulatedTarget
from benchmarks.overlap_scenario import MAX_CONTEXT, Scenario, Tally
from canopy.v1 import draft_pb2, verify_pb2
from common.types import Drafting, FeatureRows, SamplingParams, TreeShape
from draft_service import codec as draft_codec
from draft_service.limits import DraftLimits
from draft_service.machine import DraftMachine
from draft_service.step import SequenceWork as DraftWork
from router import codec
from router.actions import Action, Failed, Finished, ReleaseFeatures, ToDraft, ToVerify
from router.drafting import DraftSettings, FeatureRoute
from router.generation import Generation
from router.machine import GenerationMachine, MachineSettings
from router.output_text import OutputText
from router.stops import StopStrings
from verify_service import codec as verify_codec
from verify_service.budget import TreeBudget
from verify_service.draft_gate import DraftGate, FixedWay
from verify_service.events import RoundDone
from verify_service.limits import VerifyLimits
from verify_service.machine import VerifyMachine
from verify_service.step import SequenceWork

STREAM = 1
PAGE_SIZE = 128
MAX_TREE_NODES = 128
_MANY = 1 << 20


def verify_limits(scenario: Scenario, vocab_size: int, page_size: int = PAGE_SIZE) -> VerifyLimits:
    return VerifyLimits(
        vocab_size=vocab_size, max_context_len=MAX_CONTEXT, max_tree_nodes=MAX_TREE_NODES,
        max_tree_depth=16, max_sequences=scenario.batch, max_waiting_sequences=0,
        page_size=page_size, num_pages=scenario.batch * (MAX_CONTEXT // page_size + 1),
        max_step_tokens=1024, max_prefill_tokens=64,
    )  # fmt: skip


def draft_limits(
    scenario: Scenario, vocab_size: int, page_size: int = PAGE_SIZE, *, ahead: bool
) -> DraftLimits:
    """With `ahead`, trees ahead are grown."""
    s = scenario
    return DraftLimits(
        vocab_size=vocab_size, feature_size=FEATURES, max_context_len=MAX_CONTEXT, tree=s.tree,
        max_sequences=s.batch, page_size=page_size,
        num_pages=s.batch * (MAX_CONTEXT // page_size + 1), max_step_sequences=s.batch,
        # What a round can emit, and the round before it, on the way together.
        max_draft_rows=2 * (s.depth + 1), max_extend_rows=512, prefix_cache=False,
        level_seconds=s.level_seconds(ahead=False),
        ahead=replace(
            TreeShape.unbounded(), max_depth=s.ahead_depth, max_nodes=s.ahead_nodes
        ) if ahead else None,
        ahead_level_seconds=s.level_seconds(ahead=True) if ahead else (),
    )  # fmt: skip


class _NoText:
    """A detokenizer: what is generated is not looked at."""

    def push(self, token_id: int) -> str:
        return ""

    def push_all(self, token_ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class _Step(NamedTuple):
    """Of verify: when it began, its seconds, what its rounds gave, and what the draft's device
    had spent by then.
    """

    begun: float
    seconds: float
    done: list[RoundDone]
    draft_seconds: float


class Run:
    """`way`: in which all rounds go; None: the gate chooses among all. Without `budget` whole trees
    are verified; without `ahead` no trees ahead are to be had.
    """

    def __init__(
        self, scenario: Scenario, way: Drafting | None = None, *,
        budget: bool = True, ahead: bool = True,
    ) -> None:  # fmt: skip
        self._s = scenario
        self._target, self._head = SimulatedTarget(scenario), SimulatedHead(scenario)
        vocab_size = self._target.vocab_size
        trees = TreeBudget(scenario.costs.curve(), scenario.depth) if budget else None
        gate = DraftGate() if way is None else FixedWay(way)
        self._verify = VerifyMachine(verify_limits(scenario, vocab_size), trees, gate)
        self._draft = DraftMachine(draft_limits(scenario, vocab_size, ahead=ahead))
        self._routers = [self._router(i, ahead=ahead) for i in range(scenario.batch)]
        self._held: dict[bytes, list[FeatureRows]] = {}
        self._random = np.random.default_rng(scenario.seed)
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._verify_busy = self._draft_busy = False
        self._draft_seconds = 0.0
        self._steps: list[_Step] = []
        self._to_verify: list[verify_pb2.VerifyCommand] = []
        self._to_draft: list[draft_pb2.DraftCommand | FeatureRows] = []

    def _router(self, index: int, *, ahead: bool) -> GenerationMachine:
        generation = Generation(
            request_id=str(index),
            prompt_tokens=(0,),
            sampling=SamplingParams(seed=index),
            max_total_tokens=MAX_CONTEXT - 64,
            tree=self._s.tree,
        )
        settings = MachineSettings(
            draft=DraftSettings(deadline_seconds=1e9, draft_ahead=ahead),
            max_tree_nodes=MAX_TREE_NODES,
        )
        text = OutputText(_NoText(), StopStrings(()))
        return GenerationMachine(generation, index.to_bytes(16, "big"), text, settings, 0.0)

    def run(self) -> Tally:
        self._verify.connect(STREAM)
        self._draft.connect(STREAM)
        gap = self._s.open_gap
        self._start(self._routers[:1] if gap else self._routers, 0.0)
        if gap:
            self._at(gap, lambda later: self._start(self._routers[1:], later))
        while self._agenda and len(self._steps) <= self._s.num_steps:
            now, _, act = heapq.heappop(self._agenda)
            act(now)
        return self._tally()

    def _at(self, time: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._agenda, (time, next(self._order), act))

    def _way(self) -> float:
        return 0.5 * (self._s.rtt + self._s.jitter * float(self._random.random()))

    # -- the router

    def _start(self, routers: Sequence[GenerationMachine], now: float) -> None:
        for router in routers:
            self._perform(router, router.start(now, draft_up=True))
        self._send(now)

    def _perform(self, router: GenerationMachine, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case ToVerify():
                    self._to_verify.append(codec.encode_verify(action.command))
                case ToDraft():
                    self._to_draft.append(codec.encode_draft(action.command))
                case ReleaseFeatures():
                    held = self._held.pop(router.sequence_id, [])
                    self._to_draft += [replace(block, epoch=action.epoch) for block in held]
                case Finished() | Failed():
                    raise AssertionError(action)

    def _send(self, now: float) -> None:
        """What the router has to say."""
        to_verify, self._to_verify = self._to_verify, []
        to_draft, self._to_draft = self._to_draft, []
        if to_verify:
            self._verify_hears(to_verify, now)
        if to_draft:
            turn = max(0.0, self._s.tree_turn - self._s.root_turn)
            self._at(now + turn + self._way(), lambda later: self._draft_hears(to_draft, later))

    def _router_hears_verify(
        self, said: Sequence[verify_pb2.VerifyEvent], rows: Sequence[FeatureRows], now: float
    ) -> None:
        for message in said:
            event = codec.decode_verify(message)
            if event is not None:
                router = self._router_of(message.sequence_id)
                self._perform(router, router.on_verify(event, now))
        for block in rows:
            self._route(block)
        self._send(now)

    def _route(self, block: FeatureRows) -> None:
        router = self._router_of(block.sequence_id)
        route, epoch, actions = router.route_features(
            block.epoch, block.position, block.rows.shape[0]
        )
        self._perform(router, actions)
        if route is FeatureRoute.FORWARD:
            self._to_draft.append(replace(block, epoch=epoch))
        elif route is FeatureRoute.HOLD:
            self._held.setdefault(block.sequence_id, []).append(block)

    def _router_hears_draft(self, said: Sequence[draft_pb2.DraftEvent], now: float) -> None:
        for message in said:
            event = codec.decode_draft(message)
            if event is not None:
                router = self._router_of(message.sequence_id)
                self._perform(router, router.on_draft(event, now))
        self._send(now)

    def _router_of(self, sequence_id: bytes) -> GenerationMachine:
        return self._routers[int.from_bytes(sequence_id, "big")]

    # -- verify

    def _verify_hears(self, messages: Sequence[verify_pb2.VerifyCommand], now: float) -> None:
        request = verify_pb2.VerifyRequest(commands=messages)
        commands, errors = verify_codec.decode_request(STREAM, request)
        assert not errors, errors
        self._verify_says(self._verify.handle(STREAM, commands, now), now)
        self._verify_steps(now)

    def _verify_says(self, events: Sequence[Any], now: float) -> None:
        said = list(verify_codec.encode_events(events).events)
        rows = list(iter(lambda: self._verify.next_features(STREAM, _MANY), None))
        if self._s.root_turn:
            later = now + self._s.root_turn
            self._at(later, lambda then: self._router_hears_verify(said, rows, then))
        elif said or rows:
            self._router_hears_verify(said, rows, now)

    def _verify_steps(self, now: float) -> None:
        if self._s.one_device:
            self._at(now, self._share_device)
        elif not self._verify_busy:
            self._verify_step(now)

    def _share_device(self, now: float) -> None:
        """One device: when all that is said now has been heard, drafts go first, so that sequences
        that came apart are verified together.
        """
        if not (self._verify_busy or self._draft_busy):
            self._draft_step(now)
            if not self._draft_busy:
                self._verify_step(now)

    def _verify_step(self, now: float) -> None:
        if not self._verify.has_ready:
            return
        until = self._verify.wait_until(now, now)
        if until > now:
            self._at(until, self._verify_steps)  # frames look again before
            return
        plan = self._verify.plan(now)
        if not plan.works:
            return
        self._verify_busy = True
        outcomes, seconds = self._target.run(plan.works)

        def retire(end: float) -> None:
            self._retire(plan.works, outcomes, now, end)

        self._at(now + seconds, retire)

    def _retire(
        self, works: Sequence[SequenceWork], outcomes: Sequence[Any], begun: float, now: float
    ) -> None:
        self._verify_busy = False
        said = self._verify.retire(works, outcomes, now, now - begun)
        done = [event for event in said if isinstance(event, RoundDone)]
        self._steps.append(_Step(begun, now - begun, done, self._draft_seconds))
        self._verify_says(said, now)
        self._verify_steps(now)

    # -- the draft

    def _draft_hears(
        self, messages: Sequence[draft_pb2.DraftCommand | FeatureRows], now: float
    ) -> None:
        for message in messages:
            if isinstance(message, FeatureRows):
                self._draft_says(self._draft.receive(message, now), now)
                continue
            request = draft_pb2.DraftRequest(commands=[message])
            commands, errors = draft_codec.decode_request(STREAM, request, self._s.tree)
            assert not errors, errors
            self._draft_says(self._draft.handle(STREAM, commands, now), now)
        self._draft_steps(now)

    def _draft_says(self, events: Sequence[Any], now: float) -> None:
        if events:
            said = list(draft_codec.encode_events(events).events)
            self._at(now + self._way(), lambda later: self._router_hears_draft(said, later))

    def _draft_steps(self, now: float) -> None:
        if self._s.one_device:
            self._at(now, self._share_device)
        elif not self._draft_busy:
            self._draft_step(now)

    def _draft_step(self, now: float) -> None:
        plan = self._draft.plan(now)
        self._draft_says(plan.events, now)
        if not plan.works:
            return
        self._draft_busy = True
        outcomes, seconds = self._head.run(plan.works)
        self._draft_seconds += seconds

        def retire(end: float) -> None:
            self._drafted(plan.works, outcomes, seconds, end)

        self._at(now + seconds, retire)

    def _drafted(
        self, works: Sequence[DraftWork], outcomes: Sequence[Any], seconds: float, now: float
    ) -> None:
        self._draft_busy = False
        self._draft_says(self._draft.retire(works, outcomes, now, seconds), now)
        self._draft_steps(now)

    def _tally(self) -> Tally:
        tally, warm = Tally(), self._s.num_steps // 4
        for step, later in list(itertools.pairwise(self._steps))[warm:]:
            results = [event.result for event in step.done]
            trees = sum(result.num_nodes > 1 for result in results)
            spent = later.draft_seconds - step.draft_seconds
            tally.add(
                later.begun - step.begun, step.seconds, spent + (self._s.rtt if trees else 0.0)
            )
            tally.tokens += sum(len(result.tokens) for result in results)
            tally.rounds += len(results)
            tally.nodes += sum(result.num_nodes for result in results)
            tally.trees += trees
            for result in results:
                if result.ahead is not None:
                    behind = result.kv_len - result.ahead.kv_len
                    tally.behind[behind] = tally.behind.get(behind, 0) + 1
        return tally
