"""Where no tree is to be waited for, verify begins the next round itself: as long as the router
takes results, and never beyond the sequence's end.
"""

from __future__ import annotations

from typing import Any

import pytest
from verify_toy import continuation

from common.types import Drafting
from tests.protocol.test_verify_machine import PROMPT, REFERENCE, A, Bench, result, tree, verify
from verify_service import commands as c
from verify_service import events as e
from verify_service.draft_gate import FixedWay
from verify_service.machine import VerifyMachine

BY_ITSELF = pytest.mark.parametrize("way", [Drafting.NONE, Drafting.AHEAD])


def opened(way: Drafting, **more: Any) -> Bench:
    """A sequence that runs on, its round 0 not begun."""
    bench = Bench()
    bench.machine = VerifyMachine(bench.limits, gate=FixedWay(way))
    bench.machine.connect(1)
    bench.machine.connect(2)
    bench.open(**({"runs_on": True, "draft_ahead": True} | more))
    return bench


def acknowledge(round_: int, epoch: int = 1) -> c.Acknowledge:
    return c.Acknowledge(sequence_id=A, epoch=epoch, acked_round=round_)


def run_on(bench: Bench, most_rounds: int = 50) -> list[e.RoundResult]:
    """Takes and acknowledges results until no further round begins by itself."""
    results = []
    for _ in range(most_rounds):
        done = result(bench.land(bench.launch()))
        results.append(done)
        assert bench.do(acknowledge(done.round)) == []
        if not done.next_begun:
            break
    return results


@BY_ITSELF
def test_rounds_follow_each_other_without_a_router_turn_between(way: Drafting) -> None:
    bench = opened(way)
    results = run_on(bench)
    assert [done.round for done in results] == list(range(35))
    assert [done.kv_len for done in results] == list(range(4, 39))
    assert [token for done in results for token in done.tokens] == continuation(PROMPT, 35)
    assert [done.next_begun for done in results] == [True] * 34 + [False], "to max_total_tokens"
    assert {done.drafting for done in results} == {way}
    assert bench.steps() == []


@BY_ITSELF
def test_it_stops_while_the_result_before_the_last_is_not_acknowledged(way: Drafting) -> None:
    """So a router that holds its client back holds verify back, one round later."""
    bench = opened(way)
    first, second = [x.result for x in bench.steps() if isinstance(x, e.RoundDone)]
    assert (first.next_begun, second.next_begun) == (True, False)
    assert bench.steps() == []
    bench.do(acknowledge(0))
    bench.do(acknowledge(1))
    assert bench.steps() == [], "the router was told that it is its turn"
    bench.do(verify(2, 6, tree(REFERENCE[1]), acked=1))
    assert [done.next_begun for done in run_on(bench)][:3] == [True] * 3


@BY_ITSELF
def test_an_acknowledgement_counts_while_the_next_step_runs(way: Drafting) -> None:
    bench = opened(way)
    bench.land(bench.launch())
    plan = bench.launch()
    bench.do(acknowledge(0))
    assert result(bench.land(plan)).next_begun


@pytest.mark.parametrize(
    ("way", "runs_on"),
    [(Drafting.SYNCHRONOUS, True), (Drafting.NONE, False), (Drafting.AHEAD, False)],
)
def test_a_round_that_waits_for_its_tree_or_its_router_is_not_begun(
    way: Drafting, runs_on: bool
) -> None:
    bench = opened(way, runs_on=runs_on)
    done = result(bench.steps())
    assert (done.next_begun, done.drafting) == (False, way)


@BY_ITSELF
def test_no_round_is_begun_behind_a_stop_token(way: Drafting) -> None:
    stop = REFERENCE[4]
    length = REFERENCE.index(stop) + 1
    results = run_on(opened(way, stop_tokens=(stop,)))
    assert [token for done in results for token in done.tokens] == REFERENCE[:length]
    assert not results[-1].next_begun


@BY_ITSELF
def test_no_round_is_begun_for_a_stream_that_is_gone(way: Drafting) -> None:
    bench = opened(way)
    plan = bench.launch()
    bench.machine.disconnect(1, bench.now)
    assert not result(bench.land(plan)).next_begun
    assert bench.steps() == []


@BY_ITSELF
def test_no_round_is_begun_beside_a_takeover_that_waits(way: Drafting) -> None:
    bench = opened(way)
    plan = bench.launch()
    cut = c.Rollback(sequence_id=A, epoch=2, committed_len=5, round=0)
    assert bench.do(cut, stream=2) == []
    done, report = bench.land(plan)
    assert isinstance(done, e.RoundDone)
    assert not done.result.next_begun
    assert isinstance(report, e.StateReport)
    assert (report.state.committed_len, report.state.next_round) == (5, 0)
    assert bench.steps() == []


@BY_ITSELF
def test_a_round_that_runs_by_itself_is_asked_for_again_without_harm(way: Drafting) -> None:
    """As after a reconnect, when the router cannot know whether it was heard."""
    bench = opened(way)
    bench.land(bench.launch())
    bench.do(c.Attach(sequence_id=A, epoch=2), stream=2)
    asked = verify(1, 5, tree(REFERENCE[0], ((REFERENCE[1] + 1) % 7, 0)), epoch=2, acked=0)
    assert bench.do(asked, stream=2) == []
    done = result(bench.land(bench.launch()))
    assert (done.round, done.num_nodes, list(done.tokens)) == (1, 1, REFERENCE[1:2])
    assert result(bench.do(asked, stream=2)) == done


@BY_ITSELF
def test_what_was_begun_is_said_again_with_the_result(way: Drafting) -> None:
    bench = opened(way)
    first = result(bench.land(bench.launch()))
    _, again = bench.do(c.Attach(sequence_id=A, epoch=2), stream=2)
    assert isinstance(again, e.RoundDone)
    assert again.result == first
    assert again.result.next_begun


def test_acknowledgement_of_a_round_that_was_not_run_is_refused_and_costs_nothing() -> None:
    bench = opened(Drafting.NONE)
    bench.land(bench.launch())
    (refused,) = bench.do(acknowledge(7))
    assert isinstance(refused, e.Failed)
    assert "acked_round: 7 was not run; 1 is next" in refused.message
    bench.do(acknowledge(0))
    rest = [token for done in run_on(bench) for token in done.tokens]
    assert rest == continuation(PROMPT, 35)[1:]


def test_acknowledgements_of_another_epoch_or_stream_are_refused() -> None:
    bench = opened(Drafting.NONE)
    bench.land(bench.launch())
    for command, stream in ((acknowledge(0, epoch=9), 1), (acknowledge(0), 2)):
        (refused,) = bench.do(command, stream=stream)
        assert isinstance(refused, e.Failed)
        assert "epoch" in refused.message
    assert not result(bench.land(bench.launch())).next_begun
