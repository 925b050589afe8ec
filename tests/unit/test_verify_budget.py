"""What the tree budget chooses, against brute force, and how it finds its way back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.types import DraftTree
from verify_service.budget import PROBE_SHARE, TreeBudget, best_count
from verify_service.calibration import Calibration
from verify_service.sequences import PendingRound
from verify_service.step import StepPoint
from verify_service.step_cost import StepCurve


def curve(seconds: dict[int, float]) -> StepCurve:
    return StepCurve.of([StepPoint(rows, 0, 1, each) for rows, each in seconds.items()])


def chain(*chances: float) -> PendingRound:
    """A round whose tree is a chain; conditional chances from the root on."""
    n = len(chances) + 1
    scores = np.concatenate([[0.0], np.cumsum(np.log(chances))]).astype(np.float32)
    tree = DraftTree(np.zeros(n, np.int32), np.arange(-1, n - 1, dtype=np.int32), scores)
    return PendingRound.of(0, tree, 64, 0.0)


def share(budget: TreeBudget, rounds: Sequence[PendingRound], max_rows: int = 64) -> list[int]:
    return budget.share(rounds, num_causal=len(rounds), max_rows=max_rows, num_kv_tokens=0)


def learn(budget: TreeBudget, round_: PendingRound, used: int, accepted: int) -> None:
    cut = round_.prefix(used)
    nodes = np.arange(1, min(accepted, used - 1) + 1, dtype=np.int32)
    budget.learn([(cut, nodes)])


@st.composite
def trees(draw: st.DrawFn) -> PendingRound:
    """Random parents; scores fall along paths and with the index, as drafts send them."""
    n = draw(st.integers(1, 4))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, n)]
    falls = [0.0, *draw(st.lists(st.floats(0.01, 3), min_size=n - 1, max_size=n - 1))]
    tree = DraftTree(
        np.zeros(n, np.int32), np.array(parents, np.int32), -np.cumsum(falls).astype(np.float32)
    )
    return PendingRound.of(0, tree, 64, 0.0)


costs = st.lists(st.floats(0.0, 4.0), min_size=16, max_size=16).map(
    lambda steps: {i + 1: 1.0 + sum(steps[: i + 1]) for i in range(16)}
)


@settings(max_examples=150, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=3), costs, st.floats(0, 3), st.integers(3, 16))
def test_choice_is_the_best_of_all_prefixes(
    rounds: list[PendingRound], seconds: dict[int, float], idle: float, max_rows: int
) -> None:
    budget = TreeBudget(curve(seconds), 16)
    for _ in range(100):
        budget.note_idle(idle)
    counts = share(budget, rounds, max_rows)
    idle = budget.idle_seconds

    def rate(prefixes: Sequence[int]) -> float:
        emitted = sum(
            np.exp(r.tree.scores[:n].astype(np.float64)).sum()
            for r, n in zip(rounds, prefixes, strict=True)
        )
        return float(emitted / (seconds[sum(prefixes)] + idle))

    allowed = [
        prefixes
        for prefixes in itertools.product(*(range(1, r.tree.num_nodes + 1) for r in rounds))
        if sum(prefixes) <= max_rows
    ]
    assert tuple(counts) in allowed
    most = max(map(rate, allowed))
    best = [prefixes for prefixes in allowed if rate(prefixes) >= most * (1 - 1e-9)]
    # The first step may already pay for a probe of the next larger bucket, where that is cheap.
    added = [seconds[sum(counts)] - seconds[sum(prefixes)] for prefixes in best]
    affordable = [PROBE_SHARE * (seconds[sum(prefixes)] + idle) + 1e-9 for prefixes in best]
    assert rate(counts) >= most * (1 - 1e-9) or any(
        0 < more <= limit for more, limit in zip(added, affordable, strict=True)
    )


@given(
    st.lists(st.floats(0, 1), max_size=20).map(lambda c: np.array(sorted(c, reverse=True))),
    st.integers(1, 8),
    st.data(),
)
def test_expected_rate_is_never_below_root_only(
    chances: np.ndarray, num_roots: int, data: st.DataObject
) -> None:
    n = chances.size + 1
    steps = data.draw(st.lists(st.floats(0, 9), min_size=n, max_size=n))
    seconds = np.cumsum(np.array(steps)) + 0.5
    best = best_count(chances, num_roots, seconds)
    assert (num_roots + chances[:best].sum()) / seconds[best] >= num_roots / seconds[0] - 1e-9


@given(trees(), st.lists(st.tuples(trees(), st.integers(0, 4)), max_size=8))
def test_chances_never_rise_along_a_path_whatever_was_learnt(
    round_: PendingRound, seen: list[tuple[PendingRound, int]]
) -> None:
    calibration = Calibration(3)
    for other, accepted in seen:
        taken = np.arange(other.tree.num_nodes) < accepted + 1
        calibration.learn(other.tree.scores, other.tree.parents, other.depths, taken)
    parents = round_.tree.parents
    chances = calibration.chances(round_.tree.scores, parents, round_.depths)
    assert chances[0] == 1.0
    assert (chances[1:] <= chances[parents[1:]]).all()
    assert (chances >= 0).all()


def test_calibration_finds_the_chance_of_a_head_that_is_too_sure() -> None:
    calibration, random = Calibration(4), np.random.default_rng(0)
    scores = np.log(np.array([1, 0.9, 0.8, 0.12], np.float32))
    parents, depths = np.array([-1, 0, 1, 0], np.int32), np.array([0, 1, 2, 1], np.int32)
    truth = np.array([1, 0.6, 0.3, 0.1])
    for _ in range(2000):
        taken = random.random(4) < [1, 0.6, 0.5, 0.1]
        taken[2] &= taken[1]
        calibration.learn(scores, parents, depths, taken)
    assert calibration.chances(scores, parents, depths) == pytest.approx(truth, abs=0.08)


def test_rows_that_cost_nothing_are_filled() -> None:
    budget = TreeBudget(curve({8: 1.0, 64: 9.0}), 16)
    assert share(budget, [chain(*[0.5] * 20), chain(*[0.9] * 20)]) == [1 + 0, 8 - 1]


def test_idle_time_makes_larger_trees_pay() -> None:
    seconds, rounds = {1: 1.0, 2: 1.6, 3: 2.2, 4: 2.8}, [chain(0.5, 0.5, 0.5)]
    alone, waiting = TreeBudget(curve(seconds), 16), TreeBudget(curve(seconds), 16)
    for _ in range(50):
        waiting.note_idle(1.0)
    assert share(alone, rounds) == [1]
    assert share(waiting, rounds)[0] > 1


def test_large_batch_verifies_fewer_nodes_of_each_tree() -> None:
    seconds = {rows: max(1.0, rows / 16) for rows in (1, 8, 16, 32, 64, 128, 256, 512, 1024)}
    budget, tree = TreeBudget(curve(seconds), 16), chain(*[0.7] * 15)
    means = [sum(share(budget, [tree] * b, 1024)) / b for b in (1, 4, 16, 64)]
    assert means == sorted(means, reverse=True)
    assert means[0] == 16
    assert means[-1] < 4


def run(budget: TreeBudget, steps: int, accepted: int) -> list[int]:
    """Nodes used by a lone sequence, step by step, while `accepted` nodes are right."""
    round_, used = chain(*[0.8] * 7), []
    for _ in range(steps):
        (n,) = share(budget, [round_])
        learn(budget, round_, n, accepted)
        used.append(n)
    return used


def test_falls_back_to_roots_probes_within_its_share_and_comes_back() -> None:
    seconds = {n: 1.0 + 0.2 * (n - 1) for n in range(1, 9)}
    budget = TreeBudget(curve(seconds), 16)
    assert run(budget, 50, accepted=7)[-1] == 8
    bad = run(budget, 700, accepted=0)[-500:]
    spent = sum(seconds[n] for n in bad)
    assert 1 < len([n for n in bad if n > 1]) < 50
    assert spent <= 500 * seconds[1] * (1 + 1.5 * PROBE_SHARE)
    assert 8 in run(budget, 1000, accepted=7)


@given(st.lists(st.floats(allow_nan=True, width=32), min_size=1, max_size=6))
def test_senseless_scores_cost_speed_only(values: list[float]) -> None:
    n = len(values) + 1
    scores = np.array([0.0, *values], np.float32)
    tree = DraftTree(np.zeros(n, np.int32), np.zeros(n, np.int32) - (np.arange(n) == 0), scores)
    round_ = PendingRound.of(0, tree, 64, 0.0)
    budget = TreeBudget(curve({1: 1.0, 64: 1.1}), 16)
    (used,) = share(budget, [round_])
    assert 1 <= used <= n
    learn(budget, round_, used, 1)


def test_curve_pads_to_buckets_and_never_falls() -> None:
    points = [
        StepPoint(1, 0, 1, 1.0),
        StepPoint(8, 0, 1, 2.0),
        StepPoint(8, 100, 1, 3.0),
        StepPoint(8, 0, 8, 2.7),
        StepPoint(16, 0, 1, 1.5),  # noise: cheaper than 8
    ]
    measured = StepCurve.of(points)
    rows = np.array([1, 2, 8, 9, 16, 99])
    assert measured.seconds(rows, 0, 1).tolist() == [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert measured.seconds(8, 200, 8) == pytest.approx(2.0 + 2.0 + 0.7)
    with pytest.raises(ValueError, match="points: none"):
        StepCurve.of([])
