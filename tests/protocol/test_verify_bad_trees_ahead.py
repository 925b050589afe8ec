"""Whatever is wrong with a tree ahead costs only itself, and no token changes for any of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verify_toy import VOCAB, continuation

from canopy.v1 import types_pb2, verify_pb2
from common.types import Drafting, DraftTree, ErrorCode, TreeShape
from tests.protocol.test_verify_machine import PROMPT, REFERENCE, A, Bench, code, result, tree
from tests.protocol.test_verify_machine import verify as verify_tree
from tests.protocol.test_verify_runs_on import acknowledge, opened, run_on
from tests.protocol.test_verify_trees_ahead import ALL, ahead, chain, took
from verify_service import codec
from verify_service import commands as c
from verify_service import events as e
from verify_service.checks import MAX_AHEAD_NODES
from verify_service.draft_gate import FixedWay
from verify_service.machine import VerifyMachine

WIDE = 2**32 - 1


def bad_trees() -> dict[str, tuple[c.TreeAhead, str]]:
    """Of a sequence whose next round is 1, rooted at position 5; and what is said of each."""
    root = REFERENCE[0]
    good = chain(5, 3)
    many = tree(root, *((i % VOCAB, i) for i in range(MAX_AHEAD_NODES)))
    loop = DraftTree(good.tokens, np.array([-1, 2, 1], np.int32), good.scores)
    nan = DraftTree(good.tokens, good.parents, np.array([0, np.nan, -1], np.float32))
    return {
        "too many nodes": (ahead(5, many, 1), f"tree has {MAX_AHEAD_NODES + 1} nodes"),
        "a cycle": (ahead(5, loop, 1), "parent"),
        "another root": (ahead(5, tree((root + 1) % VOCAB), 1), "its root is token"),
        "a root elsewhere": (ahead(4, chain(5, 3), 1), "at kv_len stands"),
        "a root to come": (ahead(6, chain(6, 3), 1), "kv_len is 6"),
        "a round to come": (ahead(5, good, 2), "round 2 has not begun, 1 is next"),
        "outside the vocabulary": (ahead(5, tree(root, (VOCAB, 0)), 1), f"outside [0, {VOCAB})"),
        "not finite": (ahead(5, nan, 1), "not finite"),
    }


@pytest.mark.parametrize("what", bad_trees())
def test_a_malformed_tree_ahead_is_refused_and_costs_nothing_else(what: str) -> None:
    command, words = bad_trees()[what]
    bench = opened(Drafting.AHEAD)
    took(bench)
    bench.do(ahead(4, chain(4, 4)))
    (refused,) = bench.do(command)
    assert isinstance(refused, e.Failed)
    assert refused.code is ErrorCode.INVALID
    assert refused.round == command.round
    assert refused.message.startswith("tree_ahead: ")
    assert words in refused.message
    first, *rest = run_on(bench)
    assert first.ahead is not None, "the one from before is still there"
    tokens = [token for done in (first, *rest) for token in done.tokens]
    assert tokens == continuation(PROMPT, 35)[1:]


def test_a_tree_ahead_of_no_sequence_or_another_life_is_refused() -> None:
    bench = opened(Drafting.AHEAD)
    assert code(bench.do(ahead(4, chain(4, 3), sequence_id=b"z" * 16))) is (
        ErrorCode.UNKNOWN_SEQUENCE
    )
    assert code(bench.do(ahead(4, chain(4, 3)), stream=2)) is ErrorCode.STALE_EPOCH
    assert took(bench).num_nodes == took(bench).num_nodes == 1


@pytest.mark.parametrize(
    "most", [TreeShape.unbounded(), TreeShape(max_depth=WIDE, top_k=WIDE, max_nodes=WIDE)]
)
def test_more_than_a_round_can_take_is_cut(most: TreeShape) -> None:
    bench = opened(Drafting.AHEAD)
    took(bench)
    bench.do(ahead(5, chain(5, 20), 1, most=most))
    done = took(bench)
    limit = min(bench.limits.max_tree_nodes, bench.limits.max_tree_depth + 1)
    assert (done.num_nodes, len(done.tokens)) == (limit, limit)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokens": [2**31]}, "2**31"),
        ({"tokens": [5, 2], "parents": [0, 2**32 - 1]}, "2**31"),
        ({"tokens": [REFERENCE[0], 2], "parents": [0]}, "2 tokens, 1 parents"),
        ({"tokens": [], "parents": [], "scores": []}, "0 nodes"),
    ],
)
def test_a_tree_that_cannot_be_read_is_an_error_of_its_round(
    fields: dict[str, list[int]], words: str
) -> None:
    wire = types_pb2.DraftTree(**({"tokens": [1], "parents": [0], "scores": [0.0]} | fields))
    command = verify_pb2.VerifyCommand(sequence_id=A, epoch=1)
    command.tree_ahead.round, command.tree_ahead.kv_len = 1, 5
    command.tree_ahead.tree.CopyFrom(wire)
    bench = opened(Drafting.AHEAD)
    took(bench)
    commands, events = codec.decode_request(1, verify_pb2.VerifyRequest(commands=[command]))
    (failed,) = [*events, *bench.do(*commands)]
    assert isinstance(failed, e.Failed)
    assert (failed.code, failed.round) == (ErrorCode.INVALID, 1)
    assert "tree" in failed.message
    assert words in failed.message


# -- whatever the trees are


@st.composite
def trees(draw: Any, committed_len: int) -> tuple[int, DraftTree, TreeShape]:
    """Rooted anywhere; nodes below follow the target half of the time, where they can."""
    kv_len = draw(st.integers(max(0, committed_len - 5), committed_len - 1))
    tokens, parents, depths = [ALL[kv_len]], [-1], [0]
    follows = [True]
    for right in draw(st.lists(st.booleans(), max_size=12)):
        parent = draw(st.integers(0, len(tokens) - 1))
        truth = ALL[kv_len + depths[parent] + 1]
        token = truth if right and follows[parent] else draw(st.integers(0, VOCAB - 1))
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        follows.append(follows[parent] and token == truth)
    scores = -np.arange(len(tokens), dtype=np.float32)
    most = TreeShape(
        max_depth=draw(st.integers(0, 6)),
        top_k=draw(st.integers(0, 3)),
        max_nodes=draw(st.integers(0, 8)),
    )
    return kv_len, DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), scores), most


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_tokens_are_the_targets_whatever_trees_come_and_when(data: st.DataObject) -> None:
    """On few pages, with acknowledgements that come late or not at all, and a way that changes."""
    bench = Bench(num_pages=12)
    gate = FixedWay(Drafting.AHEAD)
    bench.machine = VerifyMachine(bench.limits, gate=gate)
    bench.machine.connect(1)
    bench.open(runs_on=True, draft_ahead=True, max_total_tokens=25)
    tokens, round_ = list(PROMPT), 0

    def trees_come() -> None:
        for kv_len, grown, most in data.draw(st.lists(trees(len(tokens)), max_size=2)):
            assert bench.do(ahead(kv_len, grown, round_, most=most)) == []

    while len(tokens) < 25:
        gate.drafting = data.draw(st.sampled_from([*Drafting, Drafting.AHEAD, Drafting.AHEAD]))
        trees_come()
        plan = bench.launch()
        trees_come()
        done = result(bench.land(plan))
        assert (done.round, done.kv_len) == (round_, len(tokens) - 1)
        path = [] if done.ahead is None else done.ahead.tree.tokens[[*done.accepted_nodes]].tolist()
        assert done.ahead is None or path == list(done.tokens[:-1])
        tokens += done.tokens
        round_ += 1
        assert tokens == ALL[: len(tokens)]
        if not done.next_begun and len(tokens) < 25:
            bench.do(verify_tree(round_, len(tokens) - 1, tree(tokens[-1]), acked=done.round))
        elif data.draw(st.booleans()):
            bench.do(acknowledge(done.round))
    assert bench.steps() == []
