"""Recorded proposals: what is written is what the head grows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import overlap_record
from benchmarks.overlap_recorded import RecordedText, Recording, narrowed, walk
from benchmarks.tiny_models import write_tiny_pair
from common.types import DraftTree, TreeShape
from draft_service.training.replay import make_engine, num_accepted, replay
from draft_service.training.target_states import make_target_states
from models.eagle3 import load_head
from models.target import load_target

SHIPPED = Path(overlap_record.__file__).parent / "results" / "smollm2_proposals.npz"


@pytest.fixture(scope="module")
def shipped() -> Recording:
    return Recording.load(SHIPPED)


@pytest.mark.slow  # compiles a target and three draft engines
def test_recorder_writes_the_trees_of_the_draft_engine(tmp_path: Path) -> None:
    target, head = write_tiny_pair(tmp_path)
    random = np.random.default_rng(0)
    row = {
        "prompt_ids": random.integers(0, 256, 9).tolist(),
        "response_ids": random.integers(0, 256, 12).tolist(),
    }
    answers, out = tmp_path / "answers.jsonl", tmp_path / "out.npz"
    answers.write_text(json.dumps(row))
    flags = ["--max-depth", "3", "--top-k", "2", "--max-nodes", "8"]
    flags += ["--ahead-depth", "5", "--ahead-top-k", "3", "--ahead-nodes", "30"]
    files = ["--answers", str(answers), "--out", str(out), "--model", str(target)]
    flags += ["--ahead-width", "8"]
    assert overlap_record.main([*files, "--head", str(head), *flags]) == 0
    recording = Recording.load(out)
    assert recording.num_positions == 12 - 5 - 1
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
    ahead = recording.ahead.of(0)
    ahead.validate(260, 30)
    assert (ahead.parents == 0).sum() <= 8
    # Its best two children are the other's: one head, one place.
    assert (
        ahead.tokens[ahead.parents == 0][:2].tolist()
        == recording.ordinary.of(0).tokens[recording.ordinary.of(0).parents == 0].tolist()
    )


def test_positions_and_truth_are_the_answers_own(shipped: Recording) -> None:
    places = shipped.places()
    text = RecordedText(shipped, 0)
    for position in (0, 1, 300, shipped.num_positions - 1):
        behind = shipped.tokens[places[position] + 1 : places[position] + 12].tolist()
        assert [text.token(position, depth) for depth in range(1, 12)] == behind
        for tree in (text.tree(position, 6, 40), text.tree_ahead(position, 32, 10, 128)):
            assert tree.tokens[0] == shipped.tokens[places[position]]
            assert walk(tree, text, position) == num_accepted(tree, behind)
            tree.validate(shipped.vocab_size, 128)
            assert (np.diff(tree.scores) <= 0).all()


def test_a_tree_is_worth_less_the_further_the_sequence_has_come(shipped: Recording) -> None:
    accepted = shipped.facts()["accepted_of_trees_ahead_by_tokens_behind"]
    assert accepted[0] > shipped.facts()["accepted_of_whole_trees"], "it is wider and deeper"
    assert accepted == sorted(accepted, reverse=True)
    assert accepted[2] > 0


def test_a_narrower_frontier_is_read_off_a_wider_tree(shipped: Recording) -> None:
    #   9 ─ 1 ─ 4 ─ 7      width 2: 3 is no child, of the second level 4 and 5 are expanded
    #   │   └ 6 ─ 8
    #   ├ 2 ─ 5 ─ 0
    #   └ 3
    parents = np.array([-1, 0, 0, 0, 1, 2, 1, 4, 6, 5], np.int32)
    tree = DraftTree(
        np.array([9, 1, 2, 3, 4, 5, 6, 7, 8, 0], np.int32),
        parents,
        -np.arange(10, dtype=np.float32),
    )
    cut = narrowed(tree, 2)
    assert cut.tokens.tolist() == [9, 1, 2, 4, 5, 6, 7, 0]
    assert cut.parents.tolist() == [-1, 0, 0, 1, 2, 1, 3, 4]
    whole = shipped.ahead.of(5)
    assert narrowed(whole, 32).tokens.tolist() == whole.tokens.tolist()
