"""Prefill rows beside running sequences, bounded by what they cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify_service.prefill_pace import PrefillPace
from verify_service.step import StepPoint
from verify_service.step_cost import StepCurve

BASE = {1: 0.04, 8: 0.05, 16: 0.08, 32: 0.13, 64: 0.2}
PER_KV_TOKEN = {rows: 2.5e-6 * rows for rows in BASE}
CURVE = StepCurve.of(
    [StepPoint(rows, 0, 1, seconds) for rows, seconds in BASE.items()]
    + [StepPoint(rows, 1000, 1, BASE[rows] + 1000 * PER_KV_TOKEN[rows]) for rows in BASE]
)


def rows(slowdown: float, prompt_kv_tokens: int, num_roots: int = 4, most: int = 48) -> int:
    return PrefillPace(CURVE, slowdown).rows(
        most, num_roots=num_roots, root_kv_tokens=400, prompt_kv_tokens=prompt_kv_tokens
    )


def test_chunks_shrink_as_the_prompt_grows() -> None:
    chunks = [rows(8.0, kv) for kv in (0, 1000, 4000, 8000, 100_000)]
    assert chunks[0] == 48
    assert chunks == sorted(chunks, reverse=True)
    assert 4 < chunks[3] < 48
    assert chunks[-1] == 4  # what fills the smallest bucket: it still comes in


@given(
    st.floats(1, 20), st.integers(0, 20_000), st.integers(1, 16), st.integers(1, 48),
)  # fmt: skip
def test_what_is_added_is_within_the_bound_or_the_least_there_is(
    slowdown: float, prompt: int, num_roots: int, most: int
) -> None:
    chunk = rows(slowdown, prompt, num_roots, most)
    assert 1 <= chunk <= most
    plain = float(CURVE.seconds(num_roots, 400, num_roots))
    added = float(CURVE.seconds(num_roots + chunk, prompt, 1) - CURVE.seconds(num_roots, 0, 1))
    spare = min((b for b in BASE if b > num_roots), default=1) - num_roots
    assert added <= (slowdown - 1) * plain + 1e-12 or chunk <= spare


def test_a_curve_of_one_bucket_bounds_nothing() -> None:
    pace = PrefillPace(StepCurve.of([StepPoint(64, 0, 1, 0.2)]), 1.0)
    assert pace.rows(48, num_roots=4, root_kv_tokens=0, prompt_kv_tokens=9000) == 48


@pytest.mark.parametrize("num_roots", [64, 70])
def test_more_roots_than_rows_of_the_curve(num_roots: int) -> None:
    assert rows(1.0, 8000, num_roots) == 48
