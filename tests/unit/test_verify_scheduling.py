from __future__ import annotations

import numpy as np

from verify_service.scheduling import share_nodes, share_prefill


def scores(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_long_prompt_gets_a_bounded_chunk_while_others_decode() -> None:
    assert share_prefill([1000, 5], num_roots=3, max_prefill=64, max_rows=256) == [64, 0]
    assert share_prefill([40, 100], num_roots=1, max_prefill=64, max_rows=256) == [40, 24]


def test_prefill_takes_the_whole_step_when_nobody_decodes() -> None:
    assert share_prefill([1000, 5], num_roots=0, max_prefill=64, max_rows=256) == [256, 0]


def test_trees_that_fit_are_whole() -> None:
    assert share_nodes([scores(0, -1, -2), scores(0)], budget=2) == [3, 1]


def test_best_nodes_of_all_trees_win() -> None:
    trees = [scores(0, -0.1, -0.2, -5), scores(0, -1, -6), scores(0, -0.3)]
    assert share_nodes(trees, budget=4) == [3, 2, 2]
    assert share_nodes(trees, budget=0) == [1, 1, 1]


def test_rising_score_cannot_cut_a_node_from_its_parent() -> None:
    # Node 2 claims more than its parent: it counts as much, and the prefix holds both.
    assert share_nodes([scores(0, -9, -0.1), scores(0, -1, -2)], budget=2) == [1, 3]


def test_equal_scores_go_to_the_earlier_sequence() -> None:
    assert share_nodes([scores(0, -1, -1), scores(0, -1, -1)], budget=3) == [3, 2]
