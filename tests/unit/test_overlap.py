"""The simulated slices keep to what their costs say."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import overlap
from benchmarks.overlap_ahead import AheadPlan, AheadRun, run_ahead
from benchmarks.overlap_costs import PRESETS, plain
from benchmarks.overlap_sync import Scenario, SyncRun
from benchmarks.overlap_text import WIDTH, Head, Text, grow, likeliest_outcomes

HEAD = Head((0.8, 0.75, 0.7))
SCENARIO = Scenario(
    costs=plain(12, 1, 240), head=HEAD, batch=2, depth=3, max_nodes=20, num_steps=40, seed=1,
    rtt=4e-3,
)  # fmt: skip


def test_trees_are_what_drafts_send() -> None:
    grown = grow(HEAD, (False, True, False), 30)
    grown.tree.validate(WIDTH + 1, 30)
    assert (grown.tree.scores[1:] <= grown.tree.scores[:-1]).all()
    assert (grown.tree.depths() == [len(path) for path in grown.paths]).all()


def test_truth_comes_with_the_given_chances() -> None:
    text, found = Text(0, 0), [0, 0]
    for position in range(8000):
        for ahead in (False, True):
            head = replace(HEAD, own_states=0.5)
            found[ahead] += text.truth(head, position, 2, ahead=ahead) < WIDTH
    assert found[0] / 8000 == pytest.approx(0.75, abs=0.02)
    assert found[1] / 8000 == pytest.approx(0.375, abs=0.02)


def test_outcomes_end_where_the_target_can_stop() -> None:
    levels = (False, False, True, False)
    outcomes = likeliest_outcomes(HEAD, levels, 6, 3, 10, 20)
    kept = grow(HEAD, levels[:3], 20).paths[:6]
    assert len(outcomes) == 10
    assert all(path[:-1] in kept and path not in kept for path in outcomes)


def test_synchronous_step_takes_verify_draft_and_network() -> None:
    tally = SyncRun(SCENARIO, budget=True).run()
    assert tally.step_over_verify(50) == pytest.approx((12 + 3 * 1 + 4) / 12)
    assert tally.hidden == pytest.approx(0.0, abs=1e-9)
    assert 1 < tally.tokens / tally.rounds <= 4


def test_draft_ahead_hides_what_fits_and_waits_for_what_does_not() -> None:
    fits = AheadRun(SCENARIO, AheadPlan(3, 4, waits=False)).run()
    assert fits.intervals == pytest.approx(fits.step_seconds)
    assert fits.hidden == pytest.approx(1.0)
    assert 0 < fits.hits < fits.rounds
    far = AheadRun(replace(SCENARIO, rtt=20e-3), AheadPlan(3, 4, waits=False)).run()
    assert far.intervals == pytest.approx([23e-3] * len(far.intervals))


def test_waiting_without_outcomes_is_the_synchronous_path() -> None:
    few = replace(SCENARIO, num_steps=400)
    waiting = AheadRun(few, AheadPlan(0, 0, waits=True)).run()
    assert waiting.rate == pytest.approx(SyncRun(few, budget=True).run().rate, rel=0.02)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_draft_ahead_never_loses_to_plain_decoding(name: str) -> None:
    for batch in (1, 16):
        scenario = replace(SCENARIO, costs=PRESETS[name], batch=batch, rtt=30e-3, depth=4)
        root_only = batch / scenario.costs.verify_seconds(batch, batch)
        assert run_ahead(scenario)[0].rate >= 0.98 * root_only


def test_last_line_is_json_and_says_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert overlap.main(["--rtt-ms", "0", "--batch", "2", "--rounds", "80", "--depth", "2"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["simulated"] is True
    assert result["cells"][0]["ahead"]["over_root_only"] >= 0.98
