"""Recorded proposals: what is written is what the head grows, and the simulation follows it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import overlap, overlap_record
from benchmarks.overlap_ahead import AheadPlan, AheadRun
from benchmarks.overlap_built import BuiltRun
from benchmarks.overlap_costs import plain
from benchmarks.overlap_recorded import RecordedText, Recording, walk
from benchmarks.overlap_sync import Scenario, SyncRun
from benchmarks.overlap_text import Head
from benchmarks.tiny_models import write_tiny_pair
from common.errors import StartupError
from common.types import TreeShape
from draft_service.training.replay import make_engine, num_accepted, replay
from draft_service.training.target_states import make_target_states
from models.eagle3 import load_head
from models.target import load_target

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


@pytest.mark.slow  # compiles a target and two draft engines
def test_recorder_writes_the_trees_of_the_draft_engine(tmp_path: Path) -> None:
    target, head = write_tiny_pair(tmp_path)
    random = np.random.default_rng(0)
    row = {
        "prompt_ids": random.integers(0, 256, 9).tolist(),
        "response_ids": random.integers(0, 256, 12).tolist(),
    }
    answers, out = tmp_path / "answers.jsonl", tmp_path / "out.npz"
    answers.write_text(json.dumps(row))
    flags = ["--max-depth", "3", "--top-k", "2", "--max-nodes", "8", "--stems", "2"]
    files = ["--answers", str(answers), "--out", str(out), "--model", str(target)]
    assert overlap_record.main([*files, "--head", str(head), *flags]) == 0
    recording = Recording.load(out)
    assert recording.num_positions == 12 - 3 - 1
    config, params = load_head(head, target)
    model, model_params = load_target(target, boundaries=config.boundaries)
    tokens = [*row["prompt_ids"], *row["response_ids"]]
    features = make_target_states(model, model_params)(np.array([tokens], np.int32))[0][0]
    shape = TreeShape(max_depth=3, top_k=2, max_nodes=8)
    engine = make_engine(config, params, shape, len(tokens) + 4)
    answer = overlap_record.Answer(row["prompt_ids"], row["response_ids"])
    emitted = list(replay(engine, answer, np.ascontiguousarray(features, config.dtype)))
    text, position, walked = RecordedText(recording, 0), 0, list[int]()
    while position < recording.num_positions:
        walked.append(1 + walk(text.tree(position, 3, 8), text, position))
        position += walked[-1]
    assert walked == emitted[: len(walked)]
    for stem in range(3):
        recording.tree(0, stem).validate(260, 8)


def test_positions_and_truth_are_the_answers_own(shipped: Recording) -> None:
    places = shipped.places()
    text = RecordedText(shipped, 0)
    for position in (0, 1, 300, shipped.num_positions - 1):
        behind = shipped.tokens[places[position] + 1 : places[position] + 8].tolist()
        assert [text.token(position, depth) for depth in range(1, 8)] == behind
        tree = text.tree(position, 6, 40)
        assert tree.tokens[0] == shipped.tokens[places[position]]
        assert walk(tree, text, position) == num_accepted(tree, behind)
        tree.validate(shipped.vocab_size, 40)
        assert (np.diff(tree.scores) <= 0).all()


def test_own_states_cost_acceptance(shipped: Recording) -> None:
    whole = shipped.facts()["accepted_of_whole_trees"]
    assert whole == sorted(whole, reverse=True)


def test_synchronous_rounds_are_those_of_a_replay(scenario: Scenario, shipped: Recording) -> None:
    alone = replace(scenario, batch=1, num_steps=400)
    tally = SyncRun(alone, budget=False).run()
    text, emitted = RecordedText(shipped, 0), list[int]()
    position = 0  # of the root behind the prompt: round 0 emits one token
    while len(emitted) < alone.num_steps:
        tree = text.tree(position, alone.depth if position else 0, alone.max_nodes)
        emitted.append(1 + walk(tree, text, position))
        position += emitted[-1]
    warm = alone.num_steps // 4
    assert tally.tokens == sum(emitted[warm : warm + tally.rounds])
    assert tally.step_over_verify(50) == pytest.approx((12 + 5 + 1) / 12)


def test_outcomes_foreseen_are_left_over_of_recorded_trees(scenario: Scenario) -> None:
    alone = replace(scenario, batch=1, num_steps=250)
    assert BuiltRun(replace(alone, depth=3), 12).run().hits > 0
    ahead = AheadRun(alone, AheadPlan(4, 30, waits=False)).run()
    assert 0 < ahead.hits < ahead.rounds


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none.npz").write_text("no")
    with pytest.raises(StartupError, match=r"recorded: .*none\.npz.*overlap_record"):
        Recording.load(tmp_path / "none.npz")
    with pytest.raises(StartupError, match="depth: 9"):
        overlap.report(overlap.parse(["--recorded", str(SHIPPED), "--depth", "9"]))
