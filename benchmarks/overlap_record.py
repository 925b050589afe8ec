"""Records what a head proposes at every position of texts that the target wrote.

    python -m benchmarks.overlap_record --out FILE.npz

For `benchmarks.overlap --recorded FILE`: the real head and draft engine grow a tree at every
position of the answers, once with true features of all that stands before (stem 0), and for each of
1 to `--stems` tokens once with those last tokens read on the head's own states, as draft-ahead does
one round behind. A tree depends on nothing else, so whatever round a simulation comes to, this is
the tree that the head grows there; and what the target picks off its own text is never needed,
because a node off the text is never accepted. Greedy. Written are, by position and stem:

    tokens   int32 [answers' tokens]     starts  int32 [answers + 1]     firsts  int32 [answers]
    nodes    uint16 [P, 1 + stems, N]    parents uint8, scores float16   (scores of unused: -inf)

`firsts`: the first position of each answer that a round may be rooted at; row p of the others is
the p-th of all positions from `firsts` on, up to `depth` + 2 tokens before each answer's end. The
text is the answers' own, so keep files of others' texts to yourself. The last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.answers import (
    answers_parser,
    features_of,
    model_with_head,
    read_answers,
    tree_of,
)
from benchmarks.overlap_recorded import NO_SCORE, Recording
from benchmarks.serving import print_report
from common.entry import run_program
from common.types import DraftTree, TreeShape
from draft_service.engine import DeviceEngine, EngineConfig
from draft_service.step import NONE_GUESSED, FeatureArray, SequenceWork
from draft_service.training.replay import PAGE_SIZE, Answer
from draft_service.training.target_states import make_target_states
from models.eagle3 import load_head
from models.target import load_target

BATCH = 8  # trees of one dispatch


class Recorder:
    """One answer at a time: all its pairs into pages, then a tree for each position and stem."""

    def __init__(self, engine: DeviceEngine, num_stems: int) -> None:
        self._engine, self._num_stems = engine, num_stems
        self._pages = np.arange(engine.config.pages_per_sequence, dtype=np.int32)

    def record(self, answer: Answer, rows: FeatureArray) -> list[list[DraftTree]]:
        """Trees [positions][1 + stems]."""
        tokens, depth = answer.tokens, self._engine.config.tree.max_depth
        most = self._engine.config.max_extend_rows
        for first in range(0, len(tokens) - 1, most):
            until = min(first + most, len(tokens) - 1)
            self._engine.run([self._work(tokens, rows, first, until, False, 0)])
        roots = range(len(answer.prompt), len(tokens) - depth - 1)
        trees: list[list[DraftTree]] = [[] for _ in roots]
        for stems in ((0,), tuple(range(1, self._num_stems + 1))):
            wanted = [(root, stem) for root in roots for stem in stems]
            for start in range(0, len(wanted), BATCH):
                works = [
                    self._work(tokens, rows, root - stem - 1, root - stem, True, stem)
                    for root, stem in wanted[start : start + BATCH]
                ]
                for (root, _), outcome in zip(
                    wanted[start : start + BATCH], self._engine.run(works), strict=True
                ):
                    assert outcome.tree is not None
                    trees[root - roots[0]].append(outcome.tree)
        return trees

    def _work(
        self, tokens: list[int], rows: Any, first: int, until: int, drafts: bool, stem: int
    ) -> SequenceWork:
        """Pairs [first, until), the last of which is fed again if it drafts, then a stem."""
        guessed = np.array(tokens[until + 1 : until + 1 + stem], np.int32)
        return SequenceWork(
            sequence_id=b"",
            tokens=np.array(tokens[first + 1 : until + 1], np.int32),
            features=rows[first:until],
            kv_len=first,
            page_ids=self._pages,
            drafts=drafts,
            guessed=guessed if stem else NONE_GUESSED,
        )


def recording_of(
    answers: Sequence[Answer], trees: Sequence[list[list[DraftTree]]], shape: TreeShape
) -> Recording:
    num_nodes = shape.max_nodes
    flat = [row for answer in trees for row in answer]
    size = (len(flat), len(flat[0]), num_nodes)
    nodes, parents = np.zeros(size, np.uint16), np.zeros(size, np.uint8)
    scores = np.full(size, NO_SCORE, np.float16)
    for place, row in enumerate(flat):
        for stem, tree in enumerate(row):
            count = tree.num_nodes
            nodes[place, stem, :count] = tree.tokens
            parents[place, stem, 1:count] = tree.parents[1:]
            scores[place, stem, :count] = tree.scores
    return Recording(
        depth=shape.max_depth,
        tokens=np.concatenate([np.array(answer.tokens, np.int32) for answer in answers]),
        starts=np.cumsum([0, *(len(answer.tokens) for answer in answers)]).astype(np.int32),
        firsts=np.array([len(answer.prompt) for answer in answers], np.int32),
        nodes=nodes, parents=parents, scores=scores,
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    model, head_path = model_with_head(arguments)
    shape = tree_of(arguments)
    answers = [
        answer
        for answer in read_answers(arguments.answers, arguments.limit)
        if len(answer.response) > shape.max_depth + 1
    ]
    head, params = load_head(head_path, model)
    target, target_params = load_target(model, boundaries=head.boundaries)
    context = max(len(answer.tokens) for answer in answers) + shape.max_depth + 2
    config = EngineConfig(
        num_pages=-(-context // PAGE_SIZE), page_size=PAGE_SIZE, max_context_len=context,
        tree=shape, max_guessed=arguments.stems, max_outcomes=BATCH, max_sequences=BATCH,
        max_draft_rows=1,
    )  # fmt: skip
    engine = DeviceEngine(head, params, config)
    states, recorder = make_target_states(target, target_params), Recorder(engine, arguments.stems)
    trees, begun = [], time.monotonic()
    for number, answer in enumerate(answers, 1):
        trees.append(recorder.record(answer, features_of(states, answer, head.dtype)))
        seconds = time.monotonic() - begun
        print(
            f"{number} of {len(answers)}: {len(trees[-1])} positions, {seconds:.0f} s", flush=True
        )
    recording = recording_of(answers, trees, shape)
    recording.save(arguments.out)
    result = {
        "benchmark": "overlap_record",
        "bytes": arguments.out.stat().st_size,
    } | recording.facts()
    print_report(result, arguments)
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = answers_parser(__doc__, max_depth=6, max_nodes=48)
    parser.add_argument("--out", type=Path, required=True, help="the .npz to write")
    parser.add_argument("--stems", type=int, default=4, help="longest stem [%(default)s]")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Raises StartupError."""
    return run(parse(argv))


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.overlap_record", main))
