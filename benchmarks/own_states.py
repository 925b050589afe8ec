"""What does drafting ahead of the true features cost in acceptance, and how often is it right?

    python -m benchmarks.own_states --answers FILE.jsonl --limit 20

Known answers of the target are replayed, as by `canopy head check`: the real head and draft engine
grow a tree for every round. With a lag of n rounds the head has true features only up to where the
sequence was n rounds ago, and reads the tokens since then on its own states, as it must when a tree
is grown before their result is here. Lag 0 is the synchronous path, lag 1 draft-ahead, lag 2
draft-ahead whose last features are late as well.

At lag 0 and 1 the outcomes that the tree's own leftovers name as likeliest are compared with what
the round came to: the hit rate, by how many are named. Rows of `--answers` have prompt_ids and
response_ids, as `canopy head generate-data` writes them. The last line is JSON.
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
from draft_service.engine import DeviceEngine, EngineConfig
from draft_service.foresight import likeliest_outcomes
from draft_service.step import NONE_GUESSED, SequenceWork
from draft_service.stepper import cut_to
from draft_service.training.replay import (
    PAGE_SIZE,
    Answer,
    acceptance_length,
    num_accepted,
    per_depth,
)
from draft_service.training.target_states import make_target_states
from models.eagle3 import load_head
from models.target import load_target

MAX_LAG = 2
NAMED = (1, 2, 4, 8, 16, 32)
SPARE_NODES = 96  # grown beyond those sent: whence the outcomes are


@dataclass
class Tally:
    """`emitted` of each round; `hits[n]`: rounds whose outcome was among the n likeliest."""

    emitted: list[int] = field(default_factory=list)
    hits: dict[int, int] = field(default_factory=lambda: dict.fromkeys(NAMED, 0))
    hits_by_length: dict[int, list[int]] = field(default_factory=dict)  # emitted: hits of 8, rounds

    def as_dict(self, depth: int) -> dict[str, Any]:
        rounds = max(1, len(self.emitted))
        return {
            "rounds": len(self.emitted),
            "acceptance_length": acceptance_length(self.emitted),
            "per_depth": per_depth(self.emitted, depth),
            "hit_rate": {n: round(hits / rounds, 4) for n, hits in self.hits.items()},
            "hit_rate_of_8_by_emitted": {
                length: [round(hits / count, 4), count]
                for length, (hits, count) in sorted(self.hits_by_length.items())
            },
        }


class Replay:
    """One answer at one lag: where true features end, and what was emitted since."""

    def __init__(self, engine: DeviceEngine, sent: TreeShape, answer: Answer, rows: Any) -> None:
        self._engine, self._sent, self._rows = engine, sent, rows
        self._tokens = answer.tokens
        self._start = len(answer.prompt) + 1
        self._pages = np.arange(engine.config.pages_per_sequence, dtype=np.int32)
        self._fed = 0

    def run(self, lag: int, tally: Tally) -> None:
        self._fed = 0
        lengths = [self._start]
        while lengths[-1] < len(self._tokens):
            length, base = lengths[-1], lengths[max(0, len(lengths) - 1 - lag)]
            grown = self._grow(base, length)
            sent = cut_to(grown, self._sent)
            num_emitted = num_accepted(sent, self._tokens[length:]) + 1
            if length + num_emitted <= len(self._tokens):
                outcome = tuple(self._tokens[length : length + num_emitted])
                named = likeliest_outcomes(grown, sent, max(NAMED))
                for n in NAMED:
                    tally.hits[n] += outcome in named[:n]
                by_length = tally.hits_by_length.setdefault(num_emitted, [0, 0])
                by_length[0] += outcome in named[:8]
                by_length[1] += 1
                tally.emitted.append(num_emitted)
            lengths.append(length + num_emitted)

    def _grow(self, base: int, length: int) -> DraftTree:
        """On true features for `base` committed tokens; those up to `length` are guessed."""
        pairs = base - 1
        while pairs - self._fed > self._engine.config.max_draft_rows:
            until = min(self._fed + self._engine.config.max_extend_rows, pairs - 1)
            self._engine.run([self._work(self._fed, until, False, NONE_GUESSED)])
            self._fed = until
        guessed = np.array(self._tokens[base:length], np.int32)
        work = self._work(min(self._fed, pairs - 1), pairs, True, guessed)
        (outcome,) = self._engine.run([work])
        self._fed = pairs
        assert outcome.tree is not None
        return outcome.tree

    def _work(self, first: int, until: int, drafts: bool, guessed: Any) -> SequenceWork:
        return SequenceWork(
            sequence_id=b"",
            tokens=np.array(self._tokens[first + 1 : until + 1], np.int32),
            features=self._rows[first:until],
            kv_len=first,
            page_ids=self._pages,
            drafts=drafts,
            guessed=guessed,
        )


def run(arguments: argparse.Namespace) -> int:
    model, head_path = model_with_head(arguments)
    answers = read_answers(arguments.answers, arguments.limit)
    sent = tree_of(arguments)
    head, params = load_head(head_path, model)
    target, target_params = load_target(model, boundaries=head.boundaries)
    context = max(len(answer.tokens) for answer in answers) + sent.max_depth + 2
    pool = sent.top_k + sent.max_depth * sent.top_k**2 + 1
    grown = TreeShape(
        max_depth=sent.max_depth + 1, top_k=sent.top_k,
        max_nodes=min(sent.max_nodes + SPARE_NODES, pool),
    )  # fmt: skip
    config = EngineConfig(
        num_pages=-(-context // PAGE_SIZE), page_size=PAGE_SIZE, max_context_len=context,
        tree=grown, max_guessed=MAX_LAG * (sent.max_depth + 1), max_sequences=1,
        max_draft_rows=sent.max_depth + 2,
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
    return answers_parser(__doc__, max_depth=5, max_nodes=16).parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Raises StartupError."""
    return run(parse(argv))


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.own_states", main))
