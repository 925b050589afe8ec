"""A tree ahead is of use from where its sequence is by then."""

from __future__ import annotations

from typing import Any

import pytest
from verify_toy import VOCAB

from common.types import Drafting, DraftTree, TreeShape
from tests.protocol.test_verify_machine import PROMPT, REFERENCE, A, Bench, result, tree, verify
from tests.protocol.test_verify_runs_on import acknowledge, opened
from verify_service import commands as c
from verify_service import events as e

ALL = [*PROMPT, *REFERENCE]


def chain(kv_len: int, num_tokens: int) -> DraftTree:
    """The target's own tokens from position `kv_len` on, the root's first."""
    return tree(ALL[kv_len], *((ALL[kv_len + 1 + i], i) for i in range(num_tokens - 1)))


def ahead(kv_len: int, grown: DraftTree, round_: int = 0, **more: Any) -> c.TreeAhead:
    fields: dict[str, Any] = {"sequence_id": A, "epoch": 1}
    return c.TreeAhead(**(fields | more), round=round_, kv_len=kv_len, tree=grown)


def took(bench: Bench) -> e.RoundResult:
    """The next round, acknowledged."""
    done = result(bench.land(bench.launch()))
    bench.do(acknowledge(done.round))
    return done


def test_a_tree_that_is_there_in_time_is_the_next_rounds() -> None:
    bench = opened(Drafting.AHEAD)
    plan = bench.launch()
    assert bench.do(ahead(4, chain(4, 4))) == []  # while round 0 runs from that very root
    bench.land(plan)
    bench.do(acknowledge(0))
    done = took(bench)
    assert list(done.tokens) == REFERENCE[1:4]
    assert (done.num_nodes, done.accepted_nodes) == (3, (1, 2))
    assert done.ahead is not None
    assert done.ahead.kv_len == 4
    assert done.ahead.tree.tokens.tolist() == REFERENCE[:3]
    assert bench.machine.num_ahead == (1, 0)


def test_a_late_tree_is_taken_from_where_the_sequence_is() -> None:
    """Its root may even stand in the prompt."""
    bench = opened(Drafting.AHEAD)
    for _ in range(3):
        took(bench)
    bench.do(ahead(2, chain(2, 8)))  # 2 more of the prompt, 3 emitted, 2 below the last of these
    done = took(bench)
    assert list(done.tokens) == REFERENCE[3:6]
    assert done.ahead is not None
    assert (done.ahead.kv_len, done.ahead.tree.tokens.tolist()) == (2, REFERENCE[2:5])
    assert bench.machine.num_ahead == (1, 2)


def test_one_tree_serves_rounds_until_nothing_hangs_below() -> None:
    bench = opened(Drafting.AHEAD)
    took(bench)
    wrong = (REFERENCE[1] + 1) % VOCAB
    grown = tree(REFERENCE[0], (wrong, 0), (REFERENCE[1], 0), (REFERENCE[2], 2),
                 (wrong, 1), (REFERENCE[3], 3), (REFERENCE[4], 5))  # fmt: skip
    bench.do(ahead(5, grown, round_=1, most=TreeShape(max_depth=1, top_k=2, max_nodes=8)))
    first, second, third = took(bench), took(bench), took(bench)
    assert list(first.tokens) == REFERENCE[1:3]
    assert first.accepted_nodes == (2,)
    assert list(second.tokens) == REFERENCE[3:5]
    assert second.ahead is not None
    assert second.ahead.kv_len == 5
    assert second.ahead.tree.tokens.tolist() == [REFERENCE[2], REFERENCE[3]]
    assert second.ahead.tree.scores.tolist() == [0.0, -2.0], "counted from the round's own root"
    assert third.ahead is None
    assert list(third.tokens) == REFERENCE[5:6]


def test_where_the_tokens_leave_the_tree_it_is_dropped_and_the_root_goes_alone() -> None:
    bench = opened(Drafting.AHEAD)
    took(bench)
    wrong = (REFERENCE[1] + 1) % VOCAB
    bench.do(ahead(5, tree(REFERENCE[0], (wrong, 0), (REFERENCE[2], 1)), round_=1))
    missed = took(bench)
    assert (missed.num_nodes, list(missed.tokens)) == (3, REFERENCE[1:2])
    alone = took(bench)
    assert (alone.num_nodes, alone.ahead, list(alone.tokens)) == (1, None, REFERENCE[2:3])
    assert bench.machine.num_ahead == (1, 1)


def test_a_tree_that_the_tokens_have_left_already_is_not_kept() -> None:
    bench = opened(Drafting.AHEAD)
    took(bench)
    took(bench)
    bench.do(ahead(5, tree(REFERENCE[0], ((REFERENCE[1] + 1) % VOCAB, 0)), round_=1))
    assert took(bench).ahead is None


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (5, 6, 6),  # the newer one
        (6, 5, 6),  # whichever came first
        (5, 5, 5),
    ],
)
def test_the_newest_is_kept(first: int, second: int, kept: int) -> None:
    bench = opened(Drafting.AHEAD)
    took(bench)
    took(bench)
    bench.do(ahead(first, chain(first, 4), round_=1))
    bench.do(ahead(second, chain(second, 4), round_=1))
    done = took(bench)
    assert done.ahead is not None
    assert done.ahead.kv_len == kept


def test_a_newer_root_alone_does_not_replace_a_tree_with_nodes() -> None:
    """It is what a draft sends that has not read the sequence's features."""
    bench = opened(Drafting.AHEAD)
    took(bench)
    took(bench)
    bench.do(ahead(5, chain(5, 4), round_=1))
    bench.do(ahead(6, chain(6, 1), round_=2))
    done = took(bench)
    assert done.ahead is not None
    assert (done.ahead.kv_len, list(done.tokens)) == (5, REFERENCE[2:5])


def test_another_way_takes_no_tree_ahead_from_the_next_advice_on() -> None:
    bench = opened(Drafting.AHEAD)
    took(bench)
    bench.do(ahead(5, chain(5, 3), round_=1))
    bench.machine._gate.drafting = Drafting.NONE
    done = took(bench)
    assert list(done.tokens) == REFERENCE[1:4], "begun as the former result said"
    assert done.drafting is Drafting.NONE
    bench.do(ahead(8, chain(8, 5), round_=2))
    done = took(bench)
    assert (done.num_nodes, list(done.tokens)) == (1, REFERENCE[4:5])


def test_what_the_router_sends_as_the_round_is_verified_not_the_tree_ahead() -> None:
    bench = opened(Drafting.AHEAD, runs_on=False)
    took(bench)
    bench.do(ahead(5, chain(5, 5), round_=1))
    bench.do(verify(1, 5, chain(5, 2), acked=0))
    done = took(bench)
    assert (done.num_nodes, done.ahead, list(done.tokens)) == (2, None, REFERENCE[1:3])


@pytest.mark.parametrize("how", ["attach", "rollback", "close and open"])
def test_another_life_of_the_sequence_has_no_tree_ahead(how: str) -> None:
    bench = opened(Drafting.AHEAD)
    bench.land(bench.launch())
    bench.do(ahead(5, chain(5, 5), round_=1))
    match how:
        case "attach":
            bench.do(c.Attach(sequence_id=A, epoch=2), stream=2)
        case "rollback":
            bench.do(c.Rollback(sequence_id=A, epoch=2, committed_len=6, round=1), stream=2)
            bench.do(verify(1, 5, chain(5, 1), epoch=2), stream=2)
        case "close and open":
            bench.do(c.Close(sequence_id=A, epoch=1))
            bench.open(tokens=tuple(ALL[:6]), epoch=2, round=1, runs_on=True, draft_ahead=True,
                       stream=2)  # fmt: skip
    for round_ in (1, 2):
        bench.do(acknowledge(round_ - 1, epoch=2), stream=2)
        done = result(bench.land(bench.launch()))
        assert (done.round, done.num_nodes, done.ahead) == (round_, 1, None)
        assert list(done.tokens) == REFERENCE[round_ : round_ + 1]
