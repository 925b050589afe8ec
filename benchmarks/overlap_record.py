"""Records what a head proposes at every position of texts that the target wrote.

    python -m benchmarks.overlap_record --out FILE.npz

For `benchmarks.overlap --recorded FILE`: the real head and draft engine grow two trees at every
position of the answers, from true features of all that stands before: the one of a round that
waits for it, and the wider and deeper one that is grown ahead of its round. A tree depends on
nothing else, so whatever round a simulation comes to, this is the tree that the head grows there;
and what the target picks off its own text is never needed, because a node off the text is never
accepted. Greedy. Written are, by position:

    tokens       int32 [answers' tokens]  starts int32 [answers + 1]  firsts int32 [answers]
    nodes        uint16 [P, N]            parents uint8, scores float16  (scores of unused: -inf)
    ahead_nodes  uint16 [P, M]            ahead_parents uint8, ahead_scores float16

`firsts`: the first position of each answer that a round may be rooted at; row p of the others is
the p-th of all positions from `firsts` on, up to the deeper tree's depth + 2 tokens before each
answer's end. The text is the answers' own, so keep files of others' texts to yourself. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.answers import (
    answers_parser,
    features_of,
    model_with_head,
    read_answers,
    tree_of,
)
from benchmarks.overlap_recorded import NO_SCORE, Recording, Trees
from benchmarks.serving import print_report
from common.entry import run_program
from common.types import DraftTree, TreeShape
from draft_service.engine import AheadShape, DeviceEngine, EngineConfig
from draft_service.step import FeatureArray
from draft_service.training.replay import PAGE_SIZE, Answer, pairs_work
from draft_service.training.target_states import make_target_states
from models.eagle3 import load_head
from models.target import load_target


class Recorder:
    """One answer at a time: all its pairs into pages, then both trees for each position."""

    def __init__(self, ordinary: DeviceEngine, ahead: DeviceEngine) -> None:
        self._engines = ordinary, ahead

    def record(self, answer: Answer, rows: FeatureArray, roots: range) -> list[list[DraftTree]]:
        """[ordinary and ahead][roots]."""
        return [
            self._grown(engine, bool(which), answer.tokens, rows, roots)
            for which, engine in enumerate(self._engines)
        ]

    def _grown(
        self, engine: DeviceEngine, ahead: bool, tokens: list[int], rows: FeatureArray, roots: range
    ) -> list[DraftTree]:
        most, trees = engine.config.max_extend_rows, list[DraftTree]()
        pages = np.arange(engine.config.pages_per_sequence, dtype=np.int32)
        for first in range(0, len(tokens) - 1, most):
            until = min(first + most, len(tokens) - 1)
            engine.run([pairs_work(tokens, rows, first, until, pages, drafts=False)])
        size = engine.config.max_sequences
        for start in range(0, len(roots), size):
            works = [
                # The last pair is fed again, for its output.
                pairs_work(tokens, rows, root - 1, root, pages, drafts=True, ahead=ahead)
                for root in roots[start : start + size]
            ]
            for outcome in engine.run(works):
                assert outcome.tree is not None
                trees.append(outcome.tree)
        return trees


def packed(trees: Iterable[DraftTree], num_nodes: int) -> Trees:
    trees = list(trees)
    size = (len(trees), num_nodes)
    nodes, parents = np.zeros(size, np.uint16), np.zeros(size, np.uint8)
    scores = np.full(size, NO_SCORE, np.float16)
    for place, tree in enumerate(trees):
        count = tree.num_nodes
        nodes[place, :count] = tree.tokens
        parents[place, 1:count] = tree.parents[1:]
        scores[place, :count] = tree.scores
    return Trees(nodes, parents, scores)


def recording_of(
    answers: Sequence[Answer], trees: Sequence[list[list[DraftTree]]], shapes: Sequence[TreeShape]
) -> Recording:
    """`trees` [answers][ordinary and ahead][positions], `shapes` of both."""
    ordinary, ahead = (
        packed((tree for answer in trees for tree in answer[which]), shape.max_nodes)
        for which, shape in enumerate(shapes)
    )
    return Recording(
        depth=shapes[0].max_depth,
        ahead_depth=shapes[1].max_depth,
        tokens=np.concatenate([np.array(answer.tokens, np.int32) for answer in answers]),
        starts=np.cumsum([0, *(len(answer.tokens) for answer in answers)]).astype(np.int32),
        firsts=np.array([len(answer.prompt) for answer in answers], np.int32),
        ordinary=ordinary,
        ahead=ahead,
    )


def run(arguments: argparse.Namespace) -> int:
    model, head_path = model_with_head(arguments)
    shape = tree_of(arguments)
    deep = TreeShape(
        max_depth=arguments.ahead_depth, top_k=arguments.ahead_top_k,
        max_nodes=arguments.ahead_nodes,
    )  # fmt: skip
    beyond = max(shape.max_depth, deep.max_depth) + 1
    answers = [
        answer
        for answer in read_answers(arguments.answers, arguments.limit)
        if len(answer.response) > beyond
    ]
    head, params = load_head(head_path, model)
    target, target_params = load_target(model, boundaries=head.boundaries)
    context = max(len(answer.tokens) for answer in answers) + beyond
    config = EngineConfig(
        num_pages=-(-context // PAGE_SIZE), page_size=PAGE_SIZE, max_context_len=context,
        tree=shape, max_sequences=8, max_draft_rows=1,
    )  # fmt: skip
    ahead = AheadShape(
        max_depth=deep.max_depth,
        max_nodes=deep.max_nodes,
        top_k=deep.top_k,
        max_rows=2 * arguments.ahead_width,
    )
    wide = replace(config, ahead=ahead, max_sequences=2)
    recorder = Recorder(DeviceEngine(head, params, config), DeviceEngine(head, params, wide))
    states = make_target_states(target, target_params)
    trees, begun = [], time.monotonic()
    for number, answer in enumerate(answers, 1):
        roots = range(len(answer.prompt), len(answer.tokens) - beyond)
        trees.append(recorder.record(answer, features_of(states, answer, head.dtype), roots))
        seconds = time.monotonic() - begun
        print(f"{number} of {len(answers)}: {len(roots)} positions, {seconds:.0f} s", flush=True)
    recording = recording_of(answers, trees, (shape, deep))
    recording.save(arguments.out)
    result = {
        "benchmark": "overlap_record",
        "bytes": arguments.out.stat().st_size,
    } | recording.facts()
    print_report(result, arguments)
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = answers_parser(__doc__, max_depth=6, max_nodes=40)
    parser.add_argument("--out", type=Path, required=True, help="the .npz to write")
    for name, value, what in (
        ("width", 32, "nodes of a level that the head runs on, of a tree ahead"),
        ("depth", 10, "of a tree ahead"),
        ("top-k", 8, "children of its nodes below the root"),
        ("nodes", 128, "of a tree ahead"),
    ):
        parser.add_argument(
            f"--ahead-{name}", type=int, default=value, help=f"{what} [%(default)s]"
        )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Raises StartupError."""
    return run(parse(argv))


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.overlap_record", main))
