"""The simulated slices keep to what their costs say."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import overlap
from benchmarks.overlap_ahead import AheadPlan, AheadRun, run_ahead
from benchmarks.overlap_built import BuiltRun
from benchmarks.overlap_costs import PRESETS, Costs, plain
from benchmarks.overlap_sync import Scenario, SyncRun
from benchmarks.overlap_text import WIDTH, Head, Text, grow, likeliest_outcomes
from verify_service.budget import TreeBudget
from verify_service.scheduling import share_nodes
from verify_service.sequences import PendingRound

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
    tally = SyncRun(SCENARIO, budget=False).run()
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


def test_draft_ahead_as_built_begins_rounds_where_trees_come_in_time() -> None:
    few = replace(SCENARIO, batch=1, num_steps=300, depth=5)
    built = BuiltRun(few, 6).run()
    assert built.hits > 10
    assert built.rate > SyncRun(few, budget=True).run().rate
    late = BuiltRun(replace(few, rtt=20e-3), 6).run()
    assert late.hits == 0


def test_waiting_without_outcomes_is_the_synchronous_path() -> None:
    few = replace(SCENARIO, num_steps=400)
    waiting = AheadRun(few, AheadPlan(0, 0, waits=True)).run()
    assert waiting.rate == pytest.approx(SyncRun(few, budget=True).run().rate, rel=0.04)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_draft_ahead_never_loses_to_plain_decoding(name: str) -> None:
    for batch in (1, 16):
        scenario = replace(SCENARIO, costs=PRESETS[name], batch=batch, rtt=30e-3, depth=4)
        root_only = batch / scenario.costs.verify_seconds(batch, batch)
        assert run_ahead(scenario)[0].rate >= 0.98 * root_only


@pytest.mark.parametrize(
    ("costs", "batch", "rtt"),
    [
        (plain(12, 1, 240), 1, 0.0),
        (plain(12, 1, 240), 4, 20e-3),
        (plain(12, 1, 240), 16, 10e-3),
        (PRESETS["8b-v5e"], 16, 5e-3),
        (PRESETS["8b-v5e-int8"], 1, 10e-3),
    ],
)
def test_synchronous_speculation_never_loses_to_plain_decoding(
    costs: Costs, batch: int, rtt: float
) -> None:
    scenario = replace(
        SCENARIO, costs=costs, batch=batch, rtt=rtt, depth=6, max_nodes=40,
        num_steps=max(320, 1600 // batch),
    )  # fmt: skip
    root_only = batch / costs.verify_seconds(batch, batch)
    assert SyncRun(scenario, budget=True).run().rate >= 0.98 * root_only


def test_last_line_is_json_and_says_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        overlap.main(
            [
                "--rtt-ms",
                "0",
                "--batch",
                "2",
                "--rounds",
                "80",
                "--least-steps",
                "60",
                "--depth",
                "2",
            ]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["simulated"] is True
    assert result["cells"][0]["ahead"]["over_root_only"] >= 0.98


def verify_rate(scenario: Scenario, how: str) -> float:
    """Tokens per second of verify alone, a tree always at hand: `how` auto, full or root."""
    costs, head = scenario.costs, scenario.head
    budget = TreeBudget(costs.curve(), scenario.depth)
    texts = [Text(i, scenario.seed) for i in range(scenario.batch)]
    positions, tokens, seconds = [0] * scenario.batch, 0, 0.0
    for step in range(scenario.num_steps):
        rounds = [
            PendingRound.of(
                0, grow(head, t.levels(p, scenario.depth), scenario.max_nodes).tree, 64, 0
            )
            for t, p in zip(texts, positions, strict=True)
        ]
        if how == "auto":
            counts = budget.share(rounds, num_causal=scenario.batch, max_rows=1024, num_kv_tokens=0)
        else:
            most = 0 if how == "root" else 1024 - scenario.batch
            counts = share_nodes([r.tree.scores for r in rounds], most)
        verified = []
        for i, (text, round_, count) in enumerate(zip(texts, rounds, counts, strict=True)):
            cut, node, path = round_.prefix(count), 0, list[int]()
            while True:
                pick = text.truth(head, positions[i], len(path) + 1, ahead=False)
                below = (cut.tree.parents == node) & (cut.tree.tokens == pick)
                if not below.any():
                    break
                node = int(below.argmax())
                path.append(node)
            positions[i] += len(path) + 1
            tokens += (len(path) + 1) * (step >= scenario.num_steps // 4)
            verified.append((cut, np.array(path, np.int32)))
        budget.learn(verified)
        if step >= scenario.num_steps // 4:
            seconds += costs.verify_seconds(sum(counts), scenario.batch)
    return tokens / seconds


@pytest.mark.parametrize("chances", [(0.9, 0.85), (0.6, 0.5), (0.05, 0.02)])
@pytest.mark.parametrize("batch", [1, 24])
@pytest.mark.parametrize("costs", [plain(12, 1, 240), plain(12, 1, 20)])
def test_budget_is_never_behind_roots_alone_nor_whole_trees(
    costs: Costs, batch: int, chances: tuple[float, ...]
) -> None:
    scenario = replace(
        SCENARIO, costs=costs, batch=batch, depth=4, max_nodes=24, num_steps=max(40, 400 // batch),
        head=Head(chances, surety=1.3),
    )  # fmt: skip
    auto = verify_rate(scenario, "auto")
    assert auto >= 0.97 * max(verify_rate(scenario, "root"), verify_rate(scenario, "full"))
