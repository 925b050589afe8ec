"""Synchronous slices in virtual time: the real verify machine and budget, simulated time and head.

The machine of `verify_service` gets Opens and trees, plans steps, cuts trees and retires, as in the
service; only device and clock are made up. The draft is a server that takes all waiting sequences
at once, one dispatch a depth. Results and trees travel half a round trip each.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.overlap_costs import Costs
from benchmarks.overlap_recorded import RecordedText, Recording
from benchmarks.overlap_text import WIDTH, Head, MadeUpText, SimulatedText, Text
from common.types import DraftTree, SamplingParams
from verify_service import commands, events
from verify_service.budget import TreeBudget
from verify_service.draft_gate import DraftGate
from verify_service.limits import VerifyLimits
from verify_service.machine import VerifyMachine
from verify_service.step import SequenceOutcome, SequenceWork

STREAM = 1
MAX_CONTEXT = 1 << 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    costs: Costs
    head: Head
    batch: int
    depth: int
    max_nodes: int
    num_steps: int
    seed: int
    rtt: float  # seconds; verify → draft → verify
    jitter: float = 0.0  # seconds; each way adds up to half of it
    root_turn: float = 0.0  # seconds that router and hosts take of a round without a tree
    tree_turn: float = 0.0  # the same of one with a tree
    open_gap: float = 0.0  # seconds from the first sequence's Open to the others'
    recorded: Recording | None = None  # text and proposals, instead of made-up ones

    def text(self, sequence: int) -> SimulatedText:
        if self.recorded is not None:
            return RecordedText(self.recorded, sequence)
        return MadeUpText(self.head, Text(sequence, self.seed))


@dataclass(slots=True)
class Tally:
    """What a run gave once it was warm. Seconds; one entry a step."""

    tokens: int = 0
    seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    intervals: list[float] = field(default_factory=list)
    rounds: int = 0
    nodes: int = 0
    hits: int = 0
    wished: int = 0  # rounds followed by one with a tree wanted
    spent: float = 0.0  # by draft and network for these steps, hidden or not

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def step_over_verify(self, percent: float) -> float:
        ratios = np.array(self.intervals) / np.array(self.step_seconds)
        return float(np.percentile(ratios, percent))

    @property
    def hidden(self) -> float | None:
        """Share of draft and network time that verify did not wait for; None without a draft."""
        waited = sum(self.intervals) - sum(self.step_seconds)
        return 1.0 - waited / self.spent if self.spent else None

    def add(self, interval: float, step_seconds: float, spent: float) -> None:
        self.seconds += interval
        self.spent += spent
        self.intervals.append(interval)
        self.step_seconds.append(step_seconds)


class SimulatedDevice:
    """Picks what the text says; commits what the walk accepted. `stems`, by sequence: tokens that
    its tree was grown on with the head's own states.
    """

    def __init__(self, texts: Sequence[SimulatedText]) -> None:
        self._texts = texts
        self.stems = [0] * len(texts)

    def run(self, works: Sequence[SequenceWork]) -> list[SequenceOutcome]:
        return [self._run_one(work) for work in works]

    def _run_one(self, work: SequenceWork) -> SequenceOutcome:
        children = {
            (int(parent), int(token)): row
            for row, (parent, token) in enumerate(zip(work.parents, work.tokens, strict=True))
            if row >= work.num_causal
        }
        sequence = work.sampling.seed
        text, position = self._texts[sequence], work.kv_len + work.num_causal - 1
        stem = self.stems[sequence]
        row, rows, emitted = work.num_causal - 1, list[int](), list[int]()
        while True:
            pick = text.token(position, len(rows) + 1, stem)
            emitted.append(pick)
            if (row, pick) not in children:
                break
            row = children[row, pick]
            rows.append(row)
        return SequenceOutcome(
            tokens=np.array(emitted, np.int32),
            margins=np.ones(len(emitted), np.float32),
            logprobs=np.zeros(len(emitted), np.float32),
            accepted_nodes=np.array(rows, np.int32) - work.num_causal + 1,
            num_nodes=work.num_nodes,
            num_committed=work.num_causal + len(rows),
            features=None,
        )


class SyncRun:
    def __init__(self, scenario: Scenario, *, budget: bool) -> None:
        self._s = scenario
        self._levels = scenario.depth  # that a tree takes
        self._texts = [scenario.text(i) for i in range(scenario.batch)]
        limits = VerifyLimits(
            vocab_size=self._texts[0].vocab_size, max_context_len=MAX_CONTEXT, max_tree_nodes=128,
            max_tree_depth=16, max_sequences=scenario.batch, max_waiting_sequences=0,
            page_size=128, num_pages=scenario.batch * (MAX_CONTEXT // 128 + 1),
            max_step_tokens=1024, max_prefill_tokens=64,
        )  # fmt: skip
        trees = TreeBudget(scenario.costs.curve(), scenario.depth) if budget else None
        self._machine = VerifyMachine(limits, trees, DraftGate() if budget else None)
        self._device = SimulatedDevice(self._texts)
        self._random = np.random.default_rng(scenario.seed)
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._drafts: list[tuple[int, events.RoundResult]] = []
        self._verify_busy = self._draft_busy = False
        self._started: list[tuple[float, float]] = []  # step begun, its seconds
        self._done: list[tuple[int, int, int, int]] = []  # tokens, rounds, nodes, trees wished

    def run(self) -> Tally:
        self._machine.connect(STREAM)
        opens = [
            commands.Open(
                sequence_id=i.to_bytes(16, "big"), epoch=1, tokens=(0,), num_prompt_tokens=1,
                sampling=SamplingParams(seed=i), max_total_tokens=MAX_CONTEXT - 64,
            )
            for i in range(self._s.batch)
        ]  # fmt: skip
        if self._s.open_gap:
            self._at(self._s.open_gap, lambda later: self._open(opens[1:], later))
            self._open(opens[:1], 0.0)
        else:
            self._open(opens, 0.0)
        while self._agenda and len(self._started) <= self._s.num_steps:
            now, _, act = heapq.heappop(self._agenda)
            act(now)
        return self._tally()

    def _open(self, opens: list[commands.Open], now: float) -> None:
        self._machine.handle(STREAM, opens, now)
        self._verify(now)

    def _at(self, time: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._agenda, (time, next(self._order), act))

    def _way(self) -> float:
        return 0.5 * (self._s.rtt + self._s.jitter * float(self._random.random()))

    def _verify(self, now: float) -> None:
        if self._verify_busy or not self._machine.has_ready:
            return
        until = self._machine.wait_until(now, now)
        if until > now:
            self._at(until, self._verify)  # frames look again before
            return
        plan = self._machine.plan(now)
        if not plan.works:
            return
        self._verify_busy = True
        seconds = self._s.costs.verify_seconds(plan.num_rows, len(plan.works))
        self._started.append((now, seconds))
        self._at(now + seconds, lambda end: self._retire(plan.works, end, seconds))

    def _retire(self, works: list[SequenceWork], now: float, seconds: float) -> None:
        self._verify_busy = False
        done = [
            event
            for event in self._machine.retire(works, self._device.run(works), now, seconds)
            if isinstance(event, events.RoundDone)
        ]
        emitted = sum(len(event.result.tokens) for event in done)
        nodes = sum(event.result.num_nodes for event in done)
        results = [(int.from_bytes(event.sequence_id, "big"), event.result) for event in done]
        wished = sum(result.wants_tree for _, result in results)
        self._done.append((emitted, len(done), nodes, wished))
        self._after(results, now)
        self._verify(now)

    def _after(self, results: list[tuple[int, events.RoundResult]], now: float) -> None:
        """What the router, beside verify, makes of results."""
        roots = [(i, r) for i, r in results if not r.wants_tree]
        if roots and self._s.root_turn:
            self._at(now + self._s.root_turn, lambda later: self._roots(roots, later))
        else:
            self._roots(roots, now)
        wanted = [(i, r) for i, r in results if r.wants_tree]
        if wanted:
            there = now + self._s.tree_turn + self._way()
            self._at(there, lambda later: self._to_draft(wanted, later))

    def _roots(self, results: list[tuple[int, events.RoundResult]], now: float) -> None:
        self._send([(index, result, None) for index, result in results], now)
        self._verify(now)

    def _to_draft(self, results: list[tuple[int, events.RoundResult]], now: float) -> None:
        self._drafts += results
        self._draft(now)

    def _draft(self, now: float) -> None:
        if self._draft_busy or not self._drafts:
            return
        self._draft_busy = True
        taken, self._drafts = self._drafts, []
        each = self._s.costs.draft_seconds(WIDTH * len(taken))
        self._at(now + self._levels * each, lambda end: self._drafted(taken, end))

    def _drafted(self, taken: list[tuple[int, events.RoundResult]], now: float) -> None:
        self._draft_busy = False
        self._at(now + self._way(), lambda later: self._to_verify(taken, later))
        self._draft(now)

    def _to_verify(self, taken: list[tuple[int, events.RoundResult]], now: float) -> None:
        self._send([(index, result, self._tree(index, result)) for index, result in taken], now)
        self._verify(now)

    def _tree(self, index: int, result: events.RoundResult) -> DraftTree:
        kv_len = result.kv_len + len(result.tokens)
        grown = self._texts[index].tree(kv_len, self._s.depth, self._s.max_nodes)
        tokens = np.concatenate([np.array(result.tokens[-1:], np.int32), grown.tokens[1:]])
        return DraftTree(tokens, grown.parents, grown.scores)

    def _send(
        self, rounds: list[tuple[int, events.RoundResult, DraftTree | None]], now: float
    ) -> None:
        """The next rounds, to verify; None: the root alone."""
        frame = []
        for index, result, grown in rounds:
            kv_len = result.kv_len + len(result.tokens)
            tree = DraftTree.root_only(result.tokens[-1]) if grown is None else grown
            frame.append(
                commands.VerifyTree(
                    sequence_id=index.to_bytes(16, "big"), epoch=1, acked_round=result.round,
                    round=result.round + 1, kv_len=kv_len, tree=tree,
                )
            )  # fmt: skip
        for event in self._machine.handle(STREAM, frame, now):
            raise AssertionError(event)

    def _tally(self) -> Tally:
        tally, warm = Tally(), self._s.num_steps // 4
        pairs = list(itertools.pairwise(self._started))
        draft = self._s.depth * self._s.costs.draft_seconds(WIDTH * self._s.batch)
        done = self._done[: len(pairs)]
        steps = list(zip(pairs, done, strict=True))[warm:]
        for ((begun, seconds), (later, _)), (emitted, rounds, nodes, wished) in steps:
            tally.add(later - begun, seconds, draft + self._s.rtt if wished else 0.0)
            tally.tokens += emitted
            tally.rounds += rounds
            tally.nodes += nodes
            tally.wished += wished
        return tally
