"""What sequences with a common beginning share in verify, with the toy target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_verify_machine import A, B, Bench, C, tree, verify
from verify_toy import continuation

from verify_service import commands as c
from verify_service import events as e

LONG = tuple(continuation([3], 13))  # three full pages of four, the last row of them row 11


def results(events: list[e.Event]) -> list[tuple[int, ...]]:
    return [event.result.tokens for event in events if isinstance(event, e.RoundDone)]


def rows_run(bench: Bench) -> int:
    """Runs until nothing is left to run; the rows that the steps had."""
    rows = 0
    while (plan := bench.launch()).works:
        rows += plan.num_rows
        bench.land(plan)
    return rows


def features(bench: Bench, stream: int = 1) -> dict[bytes, list[tuple[int, int]]]:
    """(position, token) rows by sequence, as they were sent."""
    sent: dict[bytes, list[tuple[int, int]]] = {}
    while (block := bench.machine.next_features(stream, 1 << 20)) is not None:
        rows = sent.setdefault(block.sequence_id, [])
        assert block.rows[0, 0] == block.position
        rows += [(int(position), int(token)) for position, token in block.rows.tolist()]
    return sent


def test_second_sequence_computes_what_the_first_did_not() -> None:
    bench = Bench()
    bench.open(A, LONG)
    assert rows_run(bench) == 13
    bench.open(B, (*LONG, 6, 6))
    assert rows_run(bench) == 3
    assert bench.machine.page_counts.live == 5  # three shared, and the last of each
    counts = bench.machine.prefix_counts
    assert (counts.looked_up, counts.found) == (28, 12)


def test_row_of_the_root_is_always_computed() -> None:
    bench = Bench()
    bench.open(A, LONG)
    rows_run(bench)
    bench.open(B, LONG[:12])
    events = bench.steps()
    assert results(events) == [tuple(continuation(LONG[:12], 1))]
    assert bench.machine.prefix_counts.found == 8


def test_answer_is_shared_as_well_and_outlives_its_sequence() -> None:
    bench = Bench()
    bench.open(A)
    tokens = [3, 1, 4, 1, 5, *results(bench.steps())[0]]
    for round_ in range(1, 6):
        bench.do(verify(round_, len(tokens) - 1, tree(tokens[-1]), acked=round_ - 1))
        tokens += results(bench.steps())[0]
    bench.do(c.Close(sequence_id=A, epoch=1))
    assert bench.machine.page_counts.cached == 2
    bench.open(B, tuple(tokens))
    assert rows_run(bench) == len(tokens) - 8


@pytest.mark.parametrize("salts", [(b"", b"tenant"), (b"x", b"y")])
def test_salts_keep_tenants_apart(salts: tuple[bytes, bytes]) -> None:
    bench = Bench()
    bench.open(A, LONG, cache_salt=salts[0])
    rows_run(bench)
    bench.open(B, LONG, cache_salt=salts[1])
    assert rows_run(bench) == 13
    bench.open(C, LONG, cache_salt=salts[1])
    assert rows_run(bench) == 1


def test_cache_that_is_off_keeps_nothing() -> None:
    bench = Bench(prefix_cache=False)
    bench.open(A, LONG)
    bench.steps()
    bench.do(c.Close(sequence_id=A, epoch=1))
    assert bench.machine.page_counts.free == 32
    bench.open(B, LONG)
    assert rows_run(bench) == 13


def test_features_of_shared_rows_come_as_if_they_were_computed() -> None:
    bench = Bench()
    bench.open(A, LONG, wants_features=True)
    bench.steps()
    bench.open(B, LONG, wants_features=True)
    assert rows_run(bench) == 1
    assert features(bench)[B] == list(enumerate(LONG))


@pytest.mark.parametrize("cached_feature_tokens", [0, 4, 64])
def test_rows_without_features_are_computed_once_more(cached_feature_tokens: int) -> None:
    bench = Bench(cached_feature_tokens=cached_feature_tokens)
    bench.open(A, LONG)
    bench.steps()
    bench.open(B, LONG, wants_features=True)
    assert rows_run(bench) == 13
    assert features(bench)[B] == list(enumerate(LONG))
    bench.open(C, LONG, wants_features=True)
    # The least recently used page's features are the first page's.
    assert rows_run(bench) == (1 if cached_feature_tokens == 64 else 13)
    assert features(bench)[C] == list(enumerate(LONG))


def test_shared_features_do_not_fall_out_of_the_window_before_they_are_sent() -> None:
    bench = Bench(feature_window_tokens=8, max_step_tokens=8, max_prefill_tokens=4)
    bench.open(A, LONG, wants_features=True)
    bench.steps()
    bench.open(B, LONG, wants_features=True)
    bench.steps()
    assert features(bench)[B] == list(enumerate(LONG))


def test_sequence_in_prefill_takes_what_another_has_computed_meanwhile() -> None:
    bench = Bench(max_step_tokens=8, max_prefill_tokens=4)
    bench.open(A, LONG)
    bench.open(B, LONG)
    # A's first chunk has the whole step; B begins behind it.
    assert rows_run(bench) == 13 + 13 - 8
    assert bench.machine.prefix_counts.found == 8


def test_rollback_into_a_shared_page_leaves_it_as_it_was() -> None:
    bench = Bench()
    bench.open(A, LONG)
    bench.steps()
    bench.open(B, LONG)
    bench.steps()
    bench.do(c.Rollback(sequence_id=B, epoch=2, committed_len=7, round=5))
    bench.do(replace(verify(5, 6, tree(LONG[6]), epoch=2), sequence_id=B))
    assert results(bench.steps()) == [tuple(continuation(LONG[:7], 1))]
    bench.do(verify(1, 13, tree(continuation(LONG, 1)[0]), acked=0))
    assert results(bench.steps()) == [tuple(continuation(LONG, 2)[1:])]
    bench.open(C, (*LONG, 1))
    events = bench.steps()
    assert results(events) == [tuple(continuation((*LONG, 1), 1))]


def test_rollback_of_the_only_holder_needs_no_page_where_none_is_free() -> None:
    bench = Bench(num_pages=4)
    bench.open(A, LONG, max_total_tokens=16)
    bench.steps()
    bench.do(c.Rollback(sequence_id=A, epoch=2, committed_len=7, round=5))
    bench.do(verify(5, 6, tree(LONG[6]), epoch=2))
    assert results(bench.steps()) == [tuple(continuation(LONG[:7], 1))]


def test_least_recently_used_pages_make_room_from_the_end_of_their_sequence() -> None:
    bench = Bench(num_pages=6)
    bench.open(A, LONG, max_total_tokens=16)
    bench.steps()
    bench.do(c.Close(sequence_id=A, epoch=1))
    assert bench.machine.page_counts.cached == 3
    other: Any = tuple(6 - token for token in LONG)
    bench.open(B, other[:13], max_total_tokens=16)
    bench.steps()
    assert bench.machine.num_evicted_pages == 1
    bench.do(c.Close(sequence_id=B, epoch=1))
    bench.open(C, LONG, max_total_tokens=16)
    assert rows_run(bench) == 13 - 8


def test_failed_step_leaves_nothing_to_find() -> None:
    bench = Bench()
    bench.open(A, LONG)
    plan = bench.launch()
    bench.land(plan)
    bench.open(B, (1, 2, 3))
    bench.machine.fail(bench.launch().works, "gone", 0.0)
    bench.machine.check_balance()
    bench.open(C, LONG)
    assert rows_run(bench) == 13
