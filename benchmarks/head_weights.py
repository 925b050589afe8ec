"""What int8 weights of the head change: the tokens it likes best, acceptance, milliseconds here.

    python -m benchmarks.head_weights

The target's own answers are replayed as by `canopy head check`, with the head's matrices as they
are and in 8 bits (`draft_service/int8.py`). Compared are the best child of each root, the whole
trees' tokens, and the acceptance length over the same answers. Milliseconds are of this machine's
draft step and say nothing of a TPU. The last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.answers import (
    answers_parser,
    features_of,
    model_with_head,
    read_answers,
    tree_of,
)
from benchmarks.serving import print_report
from common.entry import run_program
from common.types import DraftTree
from draft_service.engine import DeviceEngine, EngineConfig
from draft_service.int8 import quantise
from draft_service.step import SequenceOutcome, SequenceWork
from draft_service.training.replay import PAGE_SIZE, acceptance_length, replay
from draft_service.training.target_states import make_target_states
from models.eagle3 import HeadConfig, load_head
from models.layers import Params
from models.target import load_target


class WatchedEngine(DeviceEngine):
    """Keeps trees of steps that draft by their root's place, and their seconds."""

    def __init__(self, head: HeadConfig, params: Params, config: EngineConfig) -> None:
        super().__init__(head, params, config)
        self.trees: dict[int, DraftTree] = {}
        self.seconds: list[float] = []

    def run(self, works: Sequence[SequenceWork]) -> list[SequenceOutcome]:
        """See `DeviceEngine.run`."""
        begun = time.perf_counter()
        outcomes = super().run(works)
        for work, outcome in zip(works, outcomes, strict=True):
            if outcome.tree is not None:
                self.trees[work.kv_len + work.num_rows] = outcome.tree
                self.seconds.append(time.perf_counter() - begun)
        return outcomes


def run(arguments: argparse.Namespace) -> int:
    model, head_path = model_with_head(arguments)
    shape = tree_of(arguments)
    answers = read_answers(arguments.answers, arguments.limit)
    head, native = load_head(head_path, model)
    target, target_params = load_target(model, boundaries=head.boundaries)
    context = max(len(answer.tokens) for answer in answers) + shape.max_depth + 2
    ways = {"native": native, "int8": quantise(native)}
    config = EngineConfig(
        num_pages=-(-context // PAGE_SIZE), page_size=PAGE_SIZE, max_context_len=context,
        tree=shape, max_sequences=1, max_draft_rows=shape.max_depth + 2,
    )  # fmt: skip
    engines = {name: WatchedEngine(head, params, config) for name, params in ways.items()}
    states = make_target_states(target, target_params)
    emitted: dict[str, list[int]] = {name: [] for name in ways}
    best, shared = list[bool](), list[float]()
    for answer in answers:
        rows = features_of(states, answer, head.dtype)
        for name, engine in engines.items():
            engine.trees = {}
            emitted[name] += replay(engine, answer, rows)
        ones, others = engines["native"].trees, engines["int8"].trees
        for place in ones.keys() & others.keys():  # rounds of both that began at one place
            one, other = ones[place].tokens, others[place].tokens
            best.append(bool(one[1] == other[1]))
            shared.append(np.intersect1d(one, other).size / np.unique(one).size)
    result = {
        "benchmark": "head_weights",
        "answers": len(answers),
        "compared_trees": len(best),
        "same_best_child": round(float(np.mean(best)), 4),
        "shared_tokens_of_trees": round(float(np.mean(shared)), 4),
        "rounds": {name: len(each) for name, each in emitted.items()},
        "acceptance_length": {name: acceptance_length(each) for name, each in emitted.items()},
        "step_milliseconds_p50_here": {
            name: round(1e3 * float(np.median(engine.seconds)), 2)
            for name, engine in engines.items()
        },
    }
    print_report(result, arguments)
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return answers_parser(__doc__, max_depth=5, max_nodes=16).parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Raises StartupError."""
    return run(parse(argv))


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.head_weights", main))
