"""What is left of a tree that was grown rounds ago, beside one grown on true features?

    python -m benchmarks.own_states --answers FILE.jsonl --limit 20

Known answers of the target are replayed, as by `canopy head check`. At lag 0 the real head and
draft engine grow a tree for every round on true features, as a round that waits has it. At a lag of
n rounds they grow one ahead, wider and deeper, for where the sequence was n rounds ago; the tokens
since then are followed in it, and the round takes the best of what hangs below, as much as a tree
of lag 0 has; where the tokens have left the tree, the round is its root alone. So all behind the
tree's root was read on the head's own states. Lag 1: draft and network fit into a round.

Rows of `--answers` have prompt_ids and response_ids, as `canopy head generate-data` writes them.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
from common.types import DraftTree, TreeShape
from draft_service.engine import AheadShape, DeviceEngine, EngineConfig
from draft_service.step import SequenceWork
from draft_service.training.replay import (
    PAGE_SIZE,
    Answer,
    acceptance_length,
    num_accepted,
    pairs_work,
    per_depth,
)
from draft_service.training.target_states import make_target_states
from models.eagle3 import load_head
from models.target import load_target

MAX_LAG = 3


@dataclass
class Tally:
    """Of each round: `emitted` tokens and `nodes` of its tree."""

    emitted: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)

    def as_dict(self, depth: int) -> dict[str, Any]:
        return {
            "rounds": len(self.emitted),
            "acceptance_length": acceptance_length(self.emitted),
            "per_depth": per_depth(self.emitted, depth),
            "nodes": round(float(np.mean(self.nodes)), 2) if self.nodes else None,
            "rounds_with_nodes": round(float(np.mean(np.array(self.nodes) > 1)), 4)
            if self.nodes
            else None,
        }


class Replay:
    """One answer at one lag."""

    def __init__(self, engine: DeviceEngine, sent: TreeShape, answer: Answer, rows: Any) -> None:
        self._engine, self._sent, self._rows = engine, sent, rows
        self._tokens, self._start = answer.tokens, len(answer.prompt) + 1
        self._pages = np.arange(engine.config.pages_per_sequence, dtype=np.int32)
        self._fed = 0

    def run(self, lag: int, tally: Tally) -> None:
        tokens = self._tokens
        grown: list[tuple[int, DraftTree]] = []  # where it is rooted
        length = self._start
        while length < len(tokens):
            grown.append((length, self._grow(length, ahead=lag > 0)))
            base, whole = grown[max(0, len(grown) - 1 - lag)]
            below = whole.below(tokens[base:length])
            tree = DraftTree.root_only(0) if below is None else below.within(self._sent)
            num_emitted = num_accepted(tree, tokens[length:]) + 1
            # The first rounds have trees of fewer rounds ago.
            if len(grown) > lag and length + num_emitted <= len(tokens):
                tally.emitted.append(num_emitted)
                tally.nodes.append(tree.num_nodes)
            length += num_emitted

    def _grow(self, length: int, *, ahead: bool) -> DraftTree:
        """Below `length` committed tokens, on true features of all but the last."""
        pairs = length - 1
        while pairs - self._fed > self._engine.config.max_draft_rows:
            until = min(self._fed + self._engine.config.max_extend_rows, pairs - 1)
            self._engine.run([self._work(until, drafts=False, ahead=False)])
            self._fed = until
        (outcome,) = self._engine.run([self._work(pairs, drafts=True, ahead=ahead)])
        self._fed = pairs
        assert outcome.tree is not None
        return outcome.tree

    def _work(self, until: int, *, drafts: bool, ahead: bool) -> SequenceWork:
        return pairs_work(
            self._tokens, self._rows, self._fed, until, self._pages, drafts=drafts, ahead=ahead
        )


def run(arguments: argparse.Namespace) -> int:
    model, head_path = model_with_head(arguments)
    answers = read_answers(arguments.answers, arguments.limit)
    sent = tree_of(arguments)
    head, params = load_head(head_path, model)
    target, target_params = load_target(model, boundaries=head.boundaries)
    context = max(len(answer.tokens) for answer in answers) + arguments.ahead_depth + 2
    ahead = AheadShape(
        max_depth=arguments.ahead_depth, max_nodes=arguments.ahead_nodes,
        top_k=arguments.ahead_top_k, max_rows=arguments.ahead_rows,
    )  # fmt: skip
    config = EngineConfig(
        num_pages=-(-context // PAGE_SIZE), page_size=PAGE_SIZE, max_context_len=context, tree=sent,
        ahead=ahead, max_sequences=1, max_draft_rows=sent.max_depth + 2,
    )  # fmt: skip
    engine = DeviceEngine(head, params, config)
    states = make_target_states(target, target_params)
    tallies = [Tally() for _ in range(MAX_LAG + 1)]
    for number, answer in enumerate(answers, 1):
        rows = features_of(states, answer, head.dtype)
        for lag, tally in enumerate(tallies):
            Replay(engine, sent, answer, rows).run(lag, tally)
        so_far = [acceptance_length(tally.emitted) for tally in tallies]
        print(f"{number} of {len(answers)}: acceptance length by lag {so_far}", flush=True)
    base = acceptance_length(tallies[0].emitted) or 1.0
    result = {
        "benchmark": "own_states",
        "answers": len(answers),
        "lags": [
            {
                **tally.as_dict(sent.max_depth),
                "of_lag_0": round((acceptance_length(tally.emitted) or 0.0) / base, 4),
            }
            for tally in tallies
        ],
    }
    print_report(result, arguments)
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = answers_parser(__doc__, max_depth=5, max_nodes=16)
    shape = AheadShape()
    for name, value in (
        ("depth", shape.max_depth), ("nodes", shape.max_nodes), ("top-k", shape.top_k),
        ("rows", shape.max_rows),
    ):  # fmt: skip
        what = "as the draft's setting of this name [%(default)s]"
        parser.add_argument(f"--ahead-{name}", type=int, default=value, help=what)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Raises StartupError."""
    return run(parse(argv))


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.own_states", main))
