"""The simulated slices agree with router, verify and draft as processes."""

from __future__ import annotations

import pytest

from benchmarks.overlap_costs import plain
from benchmarks.overlap_real import compare
from benchmarks.overlap_scenario import Scenario
from benchmarks.overlap_text import Head
from common.types import Drafting

SCENARIO = Scenario(
    costs=plain(60, 6, 240), head=Head((0.8, 0.78, 0.76, 0.74), surety=1.15), batch=1, depth=4,
    max_nodes=20, num_steps=0, seed=0, rtt=10e-3,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("way", [Drafting.SYNCHRONOUS, Drafting.AHEAD])
def test_simulation_and_processes_agree_on_rate_and_step_time(way: Drafting) -> None:
    """Devices sleep for stated times, so that the cores' load is seen only in router and hosts."""
    ratios = compare(SCENARIO, way, 200)["simulated_over_real"]
    assert ratios["tokens_per_s"] == pytest.approx(1.0, abs=0.15)
    assert ratios["step_over_verify_p50"] == pytest.approx(1.0, abs=0.1)
    assert ratios["acceptance_length"] == pytest.approx(1.0, abs=0.1)
