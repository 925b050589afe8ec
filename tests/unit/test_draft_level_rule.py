"""When a further level of a tree pays."""

from __future__ import annotations

import pytest

from draft_service.levels import MAX_MEANS, LevelRule

SECONDS = ((1, 0.001), (4, 0.002))


def test_the_price_of_a_level_in_tokens() -> None:
    rule = LevelRule(SECONDS)
    assert rule.least_reach(1) == 0.0  # nothing was seen: all are grown
    rule.note_round(0.02, 2, ahead=False)
    assert rule.least_reach(1) == pytest.approx(0.001 / 0.01)
    assert rule.least_reach(3) == rule.least_reach(4) == pytest.approx(0.002 / 0.01)
    assert rule.least_reach(9) == rule.least_reach(4)


def test_slower_rounds_make_levels_worth_more() -> None:
    rule = LevelRule(SECONDS)
    for _ in range(200):
        rule.note_round(0.02, 2, ahead=False)
    for _ in range(200):
        rule.note_round(0.04, 2, ahead=False)
    assert rule.least_reach(1) == pytest.approx(0.001 / 0.02, rel=0.02)


def test_a_pause_counts_as_a_few_rounds() -> None:
    rule = LevelRule(SECONDS)
    rule.note_round(0.02, 2, ahead=False)
    rule.note_round(3600.0, 2, ahead=False)
    rule.note_round(0.02, 0, ahead=False)  # nothing came of it: not a round
    assert rule.least_reach(1) > 0.1 / (1 + MAX_MEANS / 32) * 0.99


def ahead(**rounds: float) -> LevelRule:
    """Rounds of 20 ms and 1.6 tokens without a tree waited for; levels ahead of 1 or 2 ms."""
    rule = LevelRule((), SECONDS)
    for _ in range(400):
        rule.note_round(rounds.get("seconds", 0.02), 1, ahead=True)
        rule.note_round(rounds.get("seconds", 0.02), 2, ahead=True)
    return rule


def test_trees_ahead_have_the_levels_that_come_in_time_for_the_next_round() -> None:
    rule = LevelRule((), SECONDS)
    assert rule.levels_ahead(1) is None
    rule.note_round(0.0201, 2, ahead=False)
    assert rule.levels_ahead(1) is None, "of rounds that waited"
    rule.note_round(0.0201, 2, ahead=True)
    assert (rule.levels_ahead(1), rule.levels_ahead(3)) == (20, 10)
    rule.note_grown_ahead(0.0142, 10, 1)  # 4.2 ms beside the levels
    assert (rule.levels_ahead(1), rule.levels_ahead(3)) == (15, 7)


def one_round(rule: LevelRule, way: float) -> int:
    """Verify takes the newest tree that was sent so long before. Rounds that it is behind."""
    levels = rule.levels_ahead(1)
    assert levels is not None
    since = [0.02 * behind - 0.001 * levels for behind in range(1, 9)]
    used = next(behind for behind, seconds in enumerate(since) if seconds >= way)
    rule.note_way(since[used], since[:used])
    return used + 1


@pytest.mark.parametrize("way", [0.0, 0.005, 0.0129])
def test_about_one_tree_in_twenty_is_late(way: float) -> None:
    rule = ahead()
    late = [one_round(rule, way) > 1 for _ in range(3000)][600:]
    assert (0.01 if way else 0) <= sum(late) / len(late) <= 0.08
    assert abs(0.02 - 0.001 * (rule.levels_ahead(1) or 0) - way) < 0.003


def test_a_way_longer_than_a_round_makes_trees_deep_enough_for_a_later_one() -> None:
    rule = ahead()
    behind = [one_round(rule, 0.024) for _ in range(600)][200:]
    assert sum(behind) / len(behind) < 2.1
    assert 13 <= (rule.levels_ahead(1) or 0) <= 16
    behind = [one_round(rule, 0.004) for _ in range(600)][200:]
    assert sum(behind) / len(behind) < 1.1, "the way has become shorter"


def test_what_was_sent_too_shortly_before_says_nothing() -> None:
    rule = ahead()
    for _ in range(20):
        rule.note_way(0.035, [0.011])
    before = rule.levels_ahead(1)
    rule.note_way(0.035, [0.004])
    assert rule.levels_ahead(1) == before


def test_without_measured_levels_all_are_grown() -> None:
    rule = LevelRule()
    rule.note_round(0.02, 2, ahead=False)
    rule.note_round(0.02, 2, ahead=True)
    assert rule.least_reach(1) == 0.0
    assert rule.levels_ahead(1) is None
