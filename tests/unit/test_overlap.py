"""The simulated slices keep to what their costs say."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import overlap
from benchmarks.overlap_costs import PRESETS, Costs, plain
from benchmarks.overlap_run import Run
from benchmarks.overlap_scenario import Scenario
from benchmarks.overlap_text import TRUTH, WIDTH, Head, MadeUpText, Text, grow
from common.types import Drafting
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
    text, found = Text(0, 0), 0
    for position in range(8000):
        found += text.truth(HEAD, position, 2) < WIDTH
    assert found / 8000 == pytest.approx(0.75, abs=0.02)


def test_a_tree_from_before_names_the_same_truth() -> None:
    text, hits = MadeUpText(HEAD, Text(3, 0)), 0
    for position in range(200):
        left = text.tree_ahead(position, 32, 5, 100).below([TRUTH])
        if left is None:
            continue
        now = text.tree(position + 1, 4, 100)
        left.validate(text.vocab_size, 100)
        both = [TRUTH in tree.tokens[tree.parents == 0] for tree in (left, now)]
        hits += both == [True, True]
        assert both[1] or not both[0]  # what is deeper in a tree is no likelier found
    assert hits > 40


def test_synchronous_step_takes_verify_draft_and_network() -> None:
    tally = Run(SCENARIO, Drafting.SYNCHRONOUS, budget=False, ahead=False).run()
    assert tally.step_over_verify(50) == pytest.approx((12 + 3 * 1 + 4) / 12)
    assert tally.hidden == pytest.approx(0.0, abs=1e-9)
    assert 1 < tally.tokens / tally.rounds <= 4


def test_one_device_drafts_and_verifies_in_turn() -> None:
    alone = replace(SCENARIO, rtt=0.0, one_device=True)
    tally = Run(alone, Drafting.SYNCHRONOUS, budget=False, ahead=False).run()
    assert tally.step_over_verify(50) == pytest.approx((12 + 3) / 12)
    apart = replace(alone, batch=8, open_gap=1e-3, num_steps=200)
    together = Run(apart, ahead=False).run()
    assert together.rounds / len(together.intervals) > 7, "one device has no use for groups"


def test_draft_ahead_never_waits_and_finds_trees_that_come_in_time() -> None:
    few = replace(SCENARIO, num_steps=200)
    near = Run(few, Drafting.AHEAD).run()
    assert near.intervals == pytest.approx(near.step_seconds)
    assert near.hidden == pytest.approx(1.0)
    assert 0.3 < near.trees / near.rounds < 1.0
    assert sum(near.behind.values()) == near.trees
    far = Run(replace(few, rtt=40e-3), Drafting.AHEAD).run()
    assert far.intervals == pytest.approx(far.step_seconds)
    assert 0 < far.trees < near.trees
    assert min(far.behind) > min(near.behind)  # trees come when more tokens are there


def test_the_gate_takes_the_best_way_at_each_distance() -> None:
    few = replace(SCENARIO, batch=1, depth=6, num_steps=1000)
    for rtt, best in ((0.0, Drafting.SYNCHRONOUS), (8e-3, Drafting.AHEAD)):
        there = replace(few, rtt=rtt)
        assert Run(there).run().rate > 0.95 * Run(there, best).run().rate


def test_a_batch_stays_together_when_the_gate_changes_its_mind() -> None:
    run = Run(replace(SCENARIO, batch=16, num_steps=120), ahead=True)
    tally = run.run()
    advice = [{event.result.drafting for event in step.done} for step in run._steps if step.done]
    assert {*Drafting} == set.union(*advice), "it has tried all ways"
    assert max(map(len, advice)) == 1, "one advice for all of a step"
    assert tally.rounds / len(tally.intervals) > 15


@pytest.mark.parametrize(
    ("costs", "batch", "rtt", "ahead"),
    [
        (plain(12, 1, 240), 1, 0.0, True),
        (plain(12, 1, 240), 4, 20e-3, False),
        (plain(12, 1, 240), 16, 10e-3, False),
        (PRESETS["8b-v5e"], 16, 5e-3, True),
        (PRESETS["8b-v5e-int8"], 1, 10e-3, True),
    ],
)
def test_speculation_never_loses_to_plain_decoding(
    costs: Costs, batch: int, rtt: float, ahead: bool
) -> None:
    scenario = replace(
        SCENARIO, costs=costs, batch=batch, rtt=rtt, depth=6, max_nodes=40,
        num_steps=max(400, 2400 // batch),
    )  # fmt: skip
    root_only = batch / costs.verify_seconds(batch, batch)
    assert Run(scenario, ahead=ahead).run().rate >= 0.98 * root_only


def test_last_line_is_json_and_says_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--rtt-ms 0 --batch 2 --rounds 80 --least-steps 60 --depth 2"
    assert overlap.main(flags.split()) == 0
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
                pick = text.truth(head, positions[i], len(path) + 1)
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
