"""Trees of fewer levels than the engine can grow: what was asked for, what is worth reaching."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.types import DraftTree, TreeShape
from draft_service.engine import AheadShape, DeviceEngine
from draft_service.step import SequenceWork
from tests.parity.draft_reference import ReferenceHead, reference_tree
from tests.parity.draft_tiny import VOCAB, random_history, tiny_engine, tiny_head, work
from tests.parity.test_draft_trees import PAGES, assert_same_tree, reference_of

SHAPE = TreeShape(max_depth=5, top_k=3, max_nodes=12)
AHEAD = AheadShape(max_depth=6, max_nodes=30, top_k=3, max_rows=16)
HISTORY = random_history(2, 5)


@pytest.fixture(scope="module")
def tiny() -> tuple[ReferenceHead, DeviceEngine]:
    head, params = tiny_head(5)
    return reference_of(head, params), tiny_engine(head, params, tree=SHAPE, ahead=AHEAD)


def drafting(**changes: Any) -> SequenceWork:
    return replace(work(*HISTORY, 0, len(HISTORY[0]) - 1, PAGES, True), **changes)


def reference(head: ReferenceHead, num_levels: int) -> list[tuple[int, int, float]]:
    return reference_tree(head, *HISTORY, num_levels, SHAPE.top_k, SHAPE.max_nodes)


def only(engine: DeviceEngine, *works: SequenceWork) -> list[DraftTree]:
    trees: list[DraftTree] = []
    for outcome in engine.run(works):
        assert outcome.tree is not None
        outcome.tree.validate(VOCAB, AHEAD.max_nodes)
        trees.append(outcome.tree)
    return trees


@pytest.mark.parametrize("num_levels", [1, 2, 4, 9])
def test_as_many_levels_as_are_wanted(tiny: Any, num_levels: int) -> None:
    head, engine = tiny
    (tree,) = only(engine, drafting(max_levels=num_levels))
    assert_same_tree(tree, reference(head, min(num_levels, SHAPE.max_depth)))


def reach(head: ReferenceHead, num_levels: int) -> float:
    """Of the best K nodes of the deepest level."""
    whole = reference_tree(head, *HISTORY, num_levels, SHAPE.top_k, 200)
    depths = np.zeros(len(whole), int)
    for node, (_, parent, _) in enumerate(whole[1:], start=1):
        depths[node] = depths[parent] + 1
    deepest = [s for (_, _, s), depth in zip(whole, depths, strict=True) if depth == num_levels]
    return float(np.exp(sorted(deepest)[-SHAPE.top_k :]).sum())


def test_a_level_that_is_not_worth_reaching_is_not_grown(tiny: Any) -> None:
    head, engine = tiny
    for num_levels in range(1, SHAPE.max_depth):
        here = reach(head, num_levels)
        (stopped,) = only(engine, drafting(least_reach=here * 1.01))
        assert_same_tree(stopped, reference(head, num_levels))
        (further,) = only(engine, drafting(least_reach=here * 0.99))
        depths = further.depths()
        assert depths.max() > num_levels or further.num_nodes == SHAPE.max_nodes


def test_the_mean_of_a_step_decides_and_empty_slots_do_not(tiny: Any) -> None:
    """Two sequences, one of which asks for more than there is: three slots' room is unused."""
    head, engine = tiny
    here = reach(head, 1)
    other = {"sequence_id": b"2", "page_ids": np.array([20, 21, 22, 23, 24, 25], np.int32)}
    for spare, num_levels in ((-0.01, 1), (0.01, SHAPE.max_depth)):
        works = [drafting(least_reach=0.0), drafting(least_reach=2 * here - spare, **other)]
        trees = only(engine, *works)
        assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
        if num_levels == 1:
            assert_same_tree(trees[0], reference(head, 1))
        else:
            assert trees[0].num_nodes > len(reference(head, 1))


@pytest.mark.parametrize("num_levels", [1, 3])
def test_trees_ahead_have_as_many_levels_as_are_wanted(tiny: Any, num_levels: int) -> None:
    head, engine = tiny
    (tree,) = only(engine, drafting(ahead=True, max_levels=num_levels))
    assert_same_tree(tree, reference_tree(head, *HISTORY, num_levels, 3, 30, width=16))


def test_measuring_levels_changes_no_later_tree(tiny: Any) -> None:
    head, engine = tiny
    for ahead in (False, True):
        found = engine.measure_levels(ahead)
        assert [size for size, _ in found] == [1, 2]
        assert all(seconds >= 0 for _, seconds in found)
        assert found[-1][1] > 0
    (tree,) = only(engine, drafting())
    assert_same_tree(tree, reference(head, SHAPE.max_depth))
