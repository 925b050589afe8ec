"""When a further level of a tree pays."""

from __future__ import annotations

import pytest

from draft_service.levels import MAX_MEANS, LevelRule

SECONDS = ((1, 0.001), (4, 0.002))


def test_the_price_of_a_level_in_tokens() -> None:
    rule = LevelRule(SECONDS)
    assert rule.least_reach(1) == 0.0  # nothing was seen: all are grown
    rule.note_round(0.02, 2, 0.008)
    assert rule.least_reach(1) == pytest.approx(0.001 / 0.01)
    assert rule.least_reach(3) == rule.least_reach(4) == pytest.approx(0.002 / 0.01)
    assert rule.least_reach(9) == rule.least_reach(4)


def test_slower_rounds_make_levels_worth_more() -> None:
    rule = LevelRule(SECONDS)
    for _ in range(200):
        rule.note_round(0.02, 2, 0.008)
    for _ in range(200):
        rule.note_round(0.04, 2, 0.008)
    assert rule.least_reach(1) == pytest.approx(0.001 / 0.02, rel=0.02)


def test_a_pause_counts_as_a_few_rounds() -> None:
    rule = LevelRule(SECONDS)
    rule.note_round(0.02, 2, 0.0)
    rule.note_round(3600.0, 2, 0.0)
    rule.note_round(0.02, 0, 0.0)  # nothing came of it: not a round
    assert rule.least_reach(1) > 0.1 / (1 + MAX_MEANS / 32) * 0.99


def test_trees_ahead_have_the_levels_that_fit_beside_verify() -> None:
    rule = LevelRule(SECONDS)
    assert rule.levels_ahead(1, 2) is None
    rule.note_round(0.02, 2, 0.0085)
    assert rule.levels_ahead(1, 2) == 9
    assert rule.levels_ahead(4, 2) == 3
    assert rule.levels_ahead(4, 20) == 1


def test_trees_that_come_too_late_get_fewer_levels() -> None:
    rule = LevelRule(SECONDS)
    rule.note_round(0.02, 2, 0.0085)
    for _ in range(5):
        rule.note_ahead(in_time=False)
    assert rule.levels_ahead(1, 2) == int(11 * 0.62) - 2
    for _ in range(100):
        rule.note_ahead(in_time=True)
    assert rule.levels_ahead(1, 2) == 9
    for _ in range(100):
        rule.note_ahead(in_time=False)
    assert rule.levels_ahead(1, 2) == 1


def test_without_measured_levels_all_are_grown() -> None:
    rule = LevelRule()
    rule.note_round(0.02, 2, 0.01)
    assert rule.least_reach(1) == 0.0
    assert rule.levels_ahead(1, 0) is None
