"""Two verify steps in flight: one promise per test, with the toy target and with a real one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from test_verify_machine import A, B, Bench, result, tree, verify
from verify_toy import AheadToyEngine, continuation

from benchmarks.run_on import Texts
from benchmarks.run_on_loop import generate
from common.types import Drafting, DraftTree, TreeShape
from models.target import init_target
from tests.protocol.test_verify_service import TARGET
from verify_service import commands as c
from verify_service import events as e
from verify_service.draft_gate import FixedWay
from verify_service.engine import DeviceEngine, EngineConfig
from verify_service.following import FollowingRound
from verify_service.machine import VerifyMachine
from verify_service.sequences import AheadTree

PROMPT = (3, 1, 4, 1, 5)
TEXT = continuation(PROMPT, 50)


class AheadBench(Bench):
    """`begin` launches behind what runs, `end` retires the oldest."""

    def __init__(self, way: Drafting = Drafting.AHEAD, **limits: Any) -> None:
        super().__init__(**({"max_ahead_nodes": 16} | limits))
        self.machine = VerifyMachine(self.limits, gate=FixedWay(way))
        for stream in (1, 2):
            self.machine.connect(stream)
        self.ahead = AheadToyEngine(self.limits.num_pages, self.limits.page_size, 16)
        self.running: list[Any] = []

    def open(self, *arguments: Any, **more: Any):
        return super().open(*arguments, **({"runs_on": True, "draft_ahead": True} | more))

    def begin(self) -> list[Any]:
        """The works of the step that was launched, if any was."""
        machine = self.machine
        plan = machine.plan_behind(self.now) if self.running else machine.plan(self.now)
        if plan is None or not plan.works:
            return []
        self.running.append(self.ahead.launch(plan.works))
        self.machine.check_balance()
        return plan.works

    def end(self) -> list[e.Event]:
        launched = self.running.pop(0)
        outcomes = self.ahead.finish(launched)
        events = self.machine.retire(launched.works, outcomes, self.now, 0.01)
        self.machine.check_balance()
        return events


def ahead(kv_len: int, draft: DraftTree, round_: int, acked: int = c.NO_ROUND) -> c.TreeAhead:
    return c.TreeAhead(
        sequence_id=A, epoch=1, acked_round=acked, round=round_, kv_len=kv_len, tree=draft,
        most=TreeShape(max_depth=4, top_k=4, max_nodes=6),
    )  # fmt: skip


def chain(first: int, count: int) -> DraftTree:
    """Along the text, rooted at its token `first`."""
    return tree(TEXT[first], *[(TEXT[first + 1 + i], i) for i in range(count)])


def ack(round_: int) -> c.Acknowledge:
    return c.Acknowledge(sequence_id=A, epoch=1, acked_round=round_)


def test_a_round_is_launched_behind_one_that_runs_and_its_result_is_as_if_planned_after() -> None:
    bench = AheadBench()
    bench.open()
    (first,) = bench.begin()
    (second,) = bench.begin()
    assert (first.follows, second.follows.num_rows) == (None, 1)
    assert bench.begin() == []
    done = result(bench.end())
    assert (done.next_begun, list(done.tokens)) == (True, TEXT[:1])
    wrong = (TEXT[4] + 1) % 7
    # Right for two tokens, then a sibling: what hangs below the first is for the round behind.
    draft = tree(TEXT[0], (TEXT[1], 0), (TEXT[2], 1), (wrong, 2), (TEXT[3], 2), (TEXT[4], 4))
    bench.do(ahead(5, draft, 1, acked=0))
    (third,) = bench.begin()
    assert third.follows.tree.num_nodes == 6
    assert list(result(bench.end()).tokens) == TEXT[1:2]
    done = result(bench.end())
    assert list(done.tokens) == TEXT[2:6]
    assert done.num_nodes == 5
    assert done.ahead.kv_len == 5
    assert done.ahead.tree.tokens.tolist() == [TEXT[1], TEXT[2], wrong, TEXT[3], TEXT[4]]
    assert done.accepted_nodes == (1, 3, 4)
    assert bench.machine.num_ahead == (1, 1)


def test_a_round_behind_a_stop_token_is_thrown_away_and_harms_nothing() -> None:
    bench = AheadBench()
    bench.open(stop_tokens=(TEXT[0],))
    bench.begin()
    bench.begin()
    done = result(bench.end())
    assert not done.next_begun
    again = verify(1, 5, chain(0, 3), acked=0)  # who goes on all the same, is served
    assert bench.do(again) == []
    assert bench.begin() == []
    assert bench.end() == []
    bench.begin()
    assert TEXT[0] not in TEXT[1:5]
    assert list(result(bench.end()).tokens) == TEXT[1:5]
    bench.do(c.Close(sequence_id=A, epoch=1))
    assert bench.machine.page_counts.available == bench.limits.num_pages


def test_a_closed_sequence_keeps_slot_and_pages_until_both_steps_have_retired() -> None:
    bench = AheadBench(max_sequences=1)
    bench.open()
    bench.begin()
    bench.begin()
    bench.do(c.Close(sequence_id=A, epoch=1))
    held = bench.machine.page_counts.available
    assert bench.end() == []
    assert bench.machine.page_counts.available == held < bench.limits.num_pages
    bench.open(B)
    assert bench.begin() == []
    assert bench.end() == []
    bench.begin()
    assert list(result(bench.end()).tokens) == TEXT[:1]


def test_a_rollback_waits_for_both_rounds_and_cuts_what_they_committed() -> None:
    bench = AheadBench(Drafting.NONE)
    bench.open()
    bench.begin()
    bench.begin()
    assert bench.do(c.Rollback(sequence_id=A, epoch=2, committed_len=4, round=7)) == []
    assert list(result(bench.end()).tokens) == TEXT[:1]
    assert bench.begin() == [], "nothing more is begun beside a command that waits"
    done, report = bench.end()
    assert (done.epoch, list(done.result.tokens)) == (1, TEXT[1:2])
    assert (report.state.epoch, report.state.committed_len) == (2, 4)
    bench.do(verify(7, 3, tree(PROMPT[3]), epoch=2))
    bench.begin()
    assert list(result(bench.end()).tokens) == continuation(PROMPT[:4], 1)


def test_a_stream_that_pauses_stops_after_three_rounds() -> None:
    bench = AheadBench(Drafting.NONE)
    bench.open()
    tokens: list[int] = []
    for _ in range(8):
        bench.begin()
        bench.begin()
        if bench.running:
            tokens += result(bench.end()).tokens
    assert tokens == TEXT[:3]
    assert bench.do(ack(2)) == []
    assert bench.begin() == [], "the router knows that the next is its own to begin"
    bench.do(verify(3, 7, tree(TEXT[2]), acked=2))
    bench.begin()
    assert bench.begin()[0].follows is not None
    assert list(result(bench.end()).tokens) == TEXT[3:4]


def test_a_younger_sequence_leaves_off_once_an_older_one_finds_no_room() -> None:
    """What is launched cannot be put out."""
    bench = AheadBench(Drafting.NONE, num_pages=8, max_sequences=2)
    bench.open(max_total_tokens=30)
    bench.open(B, max_total_tokens=30)
    preempted = 0
    rounds = {A: 0, B: 0}
    for _ in range(40):
        bench.begin()
        plan = bench.machine.plan_behind(bench.now) if bench.running else None
        if plan is not None and plan.works:
            bench.running.append(bench.ahead.launch(plan.works))
        preempted += sum(isinstance(x, e.Preempted) for x in (plan.events if plan else []))
        for event in bench.end() if bench.running else []:
            if isinstance(event, e.RoundDone):
                rounds[event.sequence_id] += 1
                bench.do(replace(ack(event.result.round), sequence_id=event.sequence_id))
        if rounds[A] == 25:
            break
    assert rounds[A] == 25
    assert rounds[B] < 25


def test_a_prompt_goes_on_behind_its_own_chunk() -> None:
    bench = AheadBench(Drafting.NONE, max_prefill_tokens=4)
    bench.open(max_total_tokens=60)
    bench.begin()
    bench.begin()
    bench.end()
    bench.open(B, tuple(i % 7 for i in range(20)))
    widths = []
    for round_ in range(6):
        works = bench.begin()
        widths += [work.num_rows for work in works if work.slot != works[0].slot or len(works) == 1]
        bench.end()
        bench.do(ack(round_ + 1))
    assert widths[:5] == [4, 4, 4, 4, 4]


def test_rows_are_worth_what_the_round_before_may_lead_to() -> None:
    """Candidates 1 and 2 below the root, of which 1 is verified; 3 and 4 below 1, 5 below 3."""
    log = np.log(np.array([1.0, 0.6, 0.4, 0.3, 0.3, 0.2, 0.1], np.float32))
    tokens, parents = [0, 1, 2, 3, 4, 5, 6], [-1, 0, 0, 1, 1, 3, 2]
    candidates = DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), log)
    found = FollowingRound.of(
        AheadTree(7, 0, candidates, TreeShape.unbounded()), candidates.prefix(2), 4, 8, 7
    )
    assert found.row_of.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert found.max_rows == 2
    np.testing.assert_allclose(found.row_chances(np.exp(log.astype(np.float64))), [0.3], rtol=1e-6)
    narrow = AheadTree(7, 0, candidates, TreeShape(max_depth=0, top_k=4, max_nodes=8))
    assert FollowingRound.of(narrow, candidates.prefix(2), 4, 8, 7).max_rows == 1


@pytest.fixture(scope="module")
def real_engine() -> DeviceEngine:
    target = replace(TARGET, max_positions=512)
    params = jax.tree.map(lambda x: x * (8.0 if x.ndim > 1 else 1.0), init_target(target, 5))
    config = EngineConfig(
        num_pages=96, page_size=16, max_sequences=3, max_context_len=512, max_tree_nodes=8,
        max_depth=5, max_ahead_nodes=32, max_rows=64, min_rows=8, row_buckets=(),
    )  # fmt: skip
    return DeviceEngine(target, params, config)


async def test_the_loop_gives_the_same_text_with_two_steps_in_flight(
    real_engine: DeviceEngine,
) -> None:
    texts = Texts(real_engine, 3, 50, TARGET.vocab_size)
    said = []
    for is_ahead in (False, True):
        router, machine, _, metrics = await generate(real_engine, texts, 40, ahead=is_ahead)
        said.append(router.tokens)
        assert machine.num_in_flight == machine.num_sequences == 0
        assert machine.page_counts.available == 96
        assert machine.num_ahead[0] > 5
        assert metrics.registry.get_sample_value("canopy_verify_failed_steps_total") == 0.0
    assert said[0] == said[1]
