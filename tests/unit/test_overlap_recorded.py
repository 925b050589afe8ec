"""The simulation follows recorded proposals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import overlap
from benchmarks.overlap_costs import plain
from benchmarks.overlap_recorded import RecordedText, Recording, walk
from benchmarks.overlap_run import Run
from benchmarks.overlap_scenario import Scenario
from benchmarks.overlap_text import Head
from common.errors import StartupError
from common.types import Drafting

SHIPPED = Path(overlap.__file__).parent / "results" / "smollm2_proposals.npz"


@pytest.fixture(scope="module")
def shipped() -> Recording:
    return Recording.load(SHIPPED)


@pytest.fixture(scope="module")
def scenario(shipped: Recording) -> Scenario:
    return Scenario(
        costs=plain(12, 1, 240), head=Head((0.0,)), batch=2, depth=5, max_nodes=28, num_steps=200,
        seed=0, rtt=1e-3, recorded=shipped,
    )  # fmt: skip


def test_synchronous_rounds_are_those_of_a_replay(scenario: Scenario, shipped: Recording) -> None:
    cheap = plain(12, 1e-3, 240)  # so that every level is grown
    alone = replace(scenario, batch=1, num_steps=400, costs=cheap)
    tally = Run(alone, Drafting.SYNCHRONOUS, budget=False, ahead=False).run()
    text, emitted = RecordedText(shipped, 0), list[int]()
    position = 0  # of the root behind the prompt: round 0 emits one token
    while len(emitted) < alone.num_steps:
        tree = text.tree(position, alone.depth if position else 0, alone.max_nodes)
        emitted.append(1 + walk(tree, text, position))
        position += emitted[-1]
    warm = alone.num_steps // 4
    assert tally.tokens == sum(emitted[warm : warm + tally.rounds])
    assert tally.step_over_verify(50) == pytest.approx((12 + 5e-3 + 1) / 12)


def test_trees_ahead_are_of_use_while_tokens_stay_in_them(scenario: Scenario) -> None:
    ahead = Run(scenario, Drafting.AHEAD).run()
    assert 0 < sum(ahead.behind.values()) < ahead.rounds
    assert ahead.tokens > 1.1 * ahead.rounds
    assert ahead.step_over_verify(99) == pytest.approx(1.0)


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.npz").write_text("no")
    with pytest.raises(StartupError, match=r"recorded: .*none\.npz.*overlap_record"):
        Recording.load(tmp_path / "none.npz")
    for flag in ("depth", "ahead-depth"):
        with pytest.raises(StartupError, match=f"{flag}: 19"):
            overlap.report(overlap.parse(["--recorded", str(SHIPPED), f"--{flag}", "19"]))
