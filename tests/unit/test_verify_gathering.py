"""A step waits for sequences on their way back where that gives more tokens a second."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.overlap_costs import PRESETS, Costs, plain
from benchmarks.overlap_run import Run
from benchmarks.overlap_scenario import Scenario
from benchmarks.overlap_text import Head
from common.types import DraftTree
from verify_service.budget import TreeBudget
from verify_service.gathering import Away, Gathering
from verify_service.sequences import PendingRound
from verify_service.step import StepPoint
from verify_service.step_cost import StepCurve

GOOD = Head((0.8, 0.78, 0.76, 0.74), surety=1.15)
BAD = Head((0.02, 0.02))
OPENED_APART = Scenario(
    costs=plain(12, 1, 240), head=GOOD, batch=4, depth=4, max_nodes=40, num_steps=300, seed=1,
    rtt=1e-3, root_turn=1e-3, tree_turn=1e-3, open_gap=1e-4,
)  # fmt: skip
LIMITS = {"max_rows": 64, "num_kv_tokens": 0}


def gathering(seconds: float, per_row: float = 0.0) -> Gathering:
    points = [
        StepPoint(rows, 0, n, seconds + per_row * rows) for rows in (8, 16, 32, 64) for n in (1, 8)
    ]
    return Gathering(TreeBudget(StepCurve.of(points), 4))


def roots(count: int) -> list[PendingRound]:
    tree = DraftTree(np.zeros(1, np.int32), np.full(1, -1, np.int32), np.zeros(1, np.float32))
    return [PendingRound.of(1, tree, 4, 0.0)] * count


def learn(which: Gathering, absence: float, asked_tree: bool = False) -> None:
    for start in range(20):
        which.note_return(Away(start, asked_tree), start + absence)


@pytest.mark.parametrize("costs", [plain(12, 1, 240), PRESETS["8b-v5e"]])
def test_sequences_that_came_apart_decode_together(costs: Costs) -> None:
    scenario = replace(OPENED_APART, head=BAD, costs=costs)
    tally = Run(scenario, ahead=False).run()
    assert tally.rounds / len(tally.intervals) > 3.8
    whole = scenario.batch / (costs.verify_seconds(4, 4) + scenario.root_turn)
    assert tally.rate > 0.95 * whole


def test_trees_are_waited_for_where_a_step_is_longer_than_drafting() -> None:
    together = Run(replace(OPENED_APART, open_gap=0.0), ahead=False).run()
    assert Run(OPENED_APART, ahead=False).run().rate > 0.97 * together.rate


def test_nothing_is_lost_by_coming_apart_where_drafting_takes_as_long_as_a_step() -> None:
    apart = replace(OPENED_APART, costs=PRESETS["8b-v5e"])
    together = Run(replace(apart, open_gap=0.0), ahead=False).run()
    assert Run(apart, ahead=False).run().rate > 0.97 * together.rate


def test_nobody_is_waited_for_before_an_absence_was_seen() -> None:
    assert gathering(0.01).wait_until(roots(1), [Away(0.0, False)], 0.0, **LIMITS) == 0.0


def test_waits_no_longer_than_the_absence_lasts() -> None:
    which = gathering(0.01)
    learn(which, 0.002)
    until = which.wait_until(roots(1), [Away(100.0, False)], 100.0, **LIMITS)
    assert 100.002 <= until < 100.003
    assert which.wait_until(roots(1), [Away(100.0, False)], until, **LIMITS) == until


def test_no_wait_as_long_as_a_step_or_for_rows_that_cost_as_much() -> None:
    long = gathering(0.01)
    learn(long, 0.012)
    assert long.wait_until(roots(1), [Away(5.0, False)], 5.0, **LIMITS) == 5.0
    by_row = gathering(0.0, per_row=0.001)
    learn(by_row, 0.002)
    assert by_row.wait_until(roots(8), [Away(5.0, False)] * 8, 5.0, **LIMITS) == 5.0


def test_absences_with_and_without_trees_are_told_apart() -> None:
    which = gathering(0.01)
    learn(which, 0.001)
    learn(which, 0.05, asked_tree=True)
    away = [Away(9.0, True), Away(9.0, False)]
    assert 9.001 <= which.wait_until(roots(2), away, 9.0, **LIMITS) < 9.002


def test_those_who_come_ever_later_are_given_up() -> None:
    which = gathering(0.01)
    learn(which, 0.002)
    for start in range(50, 70):
        which.note_return(Away(start, False), start + 30.0)
    assert which.wait_until(roots(1), [Away(100.0, False)], 100.0, **LIMITS) == 100.0


def test_a_prompts_step_waits_for_those_who_are_back_in_a_moment() -> None:
    which = gathering(0.01)
    learn(which, 0.002)
    away = [Away(100.0, False), Away(100.0005, False)]
    until = which.company_until(away, 100.001, step_seconds=0.3)
    assert 100.002 < until < 100.02
    assert which.company_until(away, 100.001, step_seconds=0.005) == 100.001  # not worth it
    assert which.company_until(away, 101.0, step_seconds=0.3) == 101.0  # overdue
    assert which.company_until([], 100.0, step_seconds=0.3) == 100.0
