"""The acceptance benchmark counts rounds, depths, repetition and prompt lookup as it says."""

from __future__ import annotations

from benchmarks.acceptance import (
    Counts,
    Tally,
    is_repetitive,
    look_up,
    lookup_rounds,
    tree_depth,
)


def test_depth_rates_count_only_rounds_that_got_there() -> None:
    counts = Counts()
    counts.add_round(num_accepted=0, depth=2)  # missed at depth 1
    counts.add_round(num_accepted=2, depth=2)  # all of a two-deep tree
    counts.add_round(num_accepted=1, depth=3)  # missed at depth 2
    counts.add_round(num_accepted=0, depth=0)  # a root alone: a round, but no depth
    assert counts.as_dict() == {
        "answers": 0,
        "rounds": 4,
        "acceptance_length": (1 + 3 + 2 + 1) / 4,
        "per_depth": [0.6667, 0.5],
    }


def test_repetitive_answers_are_in_the_total_and_not_in_the_rest() -> None:
    tally = Tally()
    tally.add([(3, 3)], repetitive=True)
    tally.add([(0, 3)], repetitive=False)
    figures = tally.as_dict()
    assert figures["acceptance_length"] == 2.5
    assert figures["without_repetitive"] == {
        "answers": 1,
        "rounds": 1,
        "acceptance_length": 1.0,
        "per_depth": [0.0],
    }


def test_repetition_is_a_fifth_of_windows_seen_before() -> None:
    assert not is_repetitive(range(100))
    assert is_repetitive([1, 2, 3, 4] * 20)
    assert not is_repetitive([1, 1, 1])


def test_tree_depth_follows_parents() -> None:
    assert tree_depth([-1]) == 0
    assert tree_depth([-1, 0, 0, 1, 3]) == 3


def test_prompt_lookup_continues_the_latest_longest_match() -> None:
    assert look_up([1, 2, 3, 9, 8, 2, 3, 7, 1, 2, 3], max_draft=2) == [9, 8]
    assert look_up([5, 3, 7, 6, 3], max_draft=4) == [7, 6, 3]
    assert look_up([1, 2, 3], max_draft=4) == ()


def test_prompt_lookup_rounds_emit_the_whole_text_once() -> None:
    text = [4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7]
    rounds = lookup_rounds(text, max_draft=3)
    assert 1 + sum(accepted + 1 for accepted, _ in rounds) == len(text)
    assert rounds[:4] == [(0, 0), (0, 0), (0, 0), (0, 0)]  # nothing seen before yet
    assert rounds[4] == (3, 3)


def test_prompt_lookup_finds_what_only_the_prompt_says() -> None:
    answer = [9, 1, 2, 3, 4, 5]
    alone = lookup_rounds(answer, max_draft=4)
    assert [accepted for accepted, _ in alone] == [0, 0, 0, 0, 0]
    told = lookup_rounds(answer, max_draft=4, prompt=[7, 9, 1, 2, 3, 4, 8])
    assert told == [(4, 4)]
