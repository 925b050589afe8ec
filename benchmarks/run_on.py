"""A step launched before the last has ended, against steps one at a time: milliseconds per step.

    python -m benchmarks.run_on --target DIR --batch 1,4 --host-ms 0,3

The engine alone, without services: rounds of the same trees, in turns within one run. `run`: each
step ends before the next is packed. `ahead`: two are in flight, each round chosen on the device
from candidates. `plain`: as `run`, by an engine whose programs know no candidates; what it saves
is what choosing costs. `--host-ms`: work on the host between steps, as of a service (slept, so
that a device of its own would be free meanwhile). Where candidates are missed, `run` has fewer
rows, for `ahead` has set them aside. The last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.serving import print_report
from common.types import DraftTree, SamplingParams
from models.target import load_target
from verify_service.assembly import LAYERS_PER_PROGRAM
from verify_service.engine import DeviceEngine, EngineConfig
from verify_service.follow_up import FollowUp
from verify_service.step import Launched, SequenceOutcome, SequenceWork

PAGE_SIZE = 16
CONTEXT = 512
PROMPT = 64
DEPTH = 5  # of the trees
AHEAD_DEPTH = 8  # of the candidates
RIGHT = 0.75  # of the tokens in them
MAX_AHEAD_NODES = 128


class Texts:
    """What each sequence of the batch will say, and trees along it."""

    def __init__(self, engine: DeviceEngine, batch: int, length: int, vocab_size: int) -> None:
        random = np.random.default_rng(1)
        self._vocab_size = vocab_size
        self.prompts = random.integers(0, vocab_size, (batch, PROMPT))
        self.tokens = [prompt.tolist() for prompt in self.prompts]
        for slot, tokens in enumerate(self.tokens):
            while len(tokens) < PROMPT + length:
                first = 0 if len(tokens) == PROMPT else len(tokens) - 1
                [outcome] = engine.run([block(slot, tokens[first:], first)])
                tokens += outcome.tokens.tolist()

    def candidates(self, slot: int, root: int) -> DraftTree:
        """Rooted at position `root`: a chain, three in four of whose tokens are right, and a
        sibling of each; the same whenever it is asked for."""
        random = np.random.default_rng((slot, root))
        truth = self.tokens[slot]
        nodes, parents, above = [truth[root]], [-1], 0
        for token in truth[root + 1 : root + 1 + AHEAD_DEPTH]:
            wrong = random.integers(0, self._vocab_size, 2).tolist()
            nodes += [token if random.random() < RIGHT else wrong[0], wrong[1]]
            parents += [above, above]
            above = len(nodes) - 2
        scores = -np.arange(len(nodes), dtype=np.float32)
        return DraftTree(np.array(nodes, np.int32), np.array(parents, np.int32), scores)


def block(slot: int, tokens: Sequence[int], kv_len: int) -> SequenceWork:
    """Causal rows, the last one the root."""
    pages = CONTEXT // PAGE_SIZE
    return SequenceWork(
        slot=slot,
        tokens=np.array(tokens, np.int32),
        parents=np.arange(-1, len(tokens) - 1, dtype=np.int32),
        num_causal=len(tokens),
        samples=True,
        kv_len=kv_len,
        page_ids=np.arange(slot * pages, (slot + 1) * pages, dtype=np.int32),
        sampling=SamplingParams(),
    )


class Rounds:
    """`num_rounds` of every sequence from the end of its prompt, over and over: what a round puts
    into pages is the same each time."""

    def __init__(self, texts: Texts, batch: int, num_nodes: int, num_rounds: int) -> None:
        self._texts, self._batch = texts, batch
        self._num_nodes, self._num_rounds = num_nodes, num_rounds

    def _first(self) -> list[SequenceWork]:
        return [block(i, [self._texts.tokens[i][PROMPT]], PROMPT) for i in range(self._batch)]

    def _follow_up(self, slot: int, root: int) -> FollowUp:
        return FollowUp(self._texts.candidates(slot, root), self._num_nodes, DEPTH)

    def one_at_a_time(self, engine: DeviceEngine, host_seconds: float) -> int:
        """Tokens emitted."""
        works, total = self._first(), 0
        for _ in range(self._num_rounds):
            outcomes = engine.run(works)
            time.sleep(host_seconds)
            total += sum(outcome.num_emitted for outcome in outcomes)
            works = [self._known(*pair) for pair in zip(works, outcomes, strict=True)]
        return total

    def _known(self, work: SequenceWork, outcome: SequenceOutcome) -> SequenceWork:
        chosen = self._follow_up(work.slot, work.kv_len).choose(outcome.tokens.tolist())
        return dataclasses.replace(
            work,
            tokens=chosen.tree.tokens,
            parents=chosen.tree.parents,
            kv_len=work.kv_len + outcome.num_emitted,
        )

    def ahead(self, engine: DeviceEngine, host_seconds: float) -> int:
        """Tokens emitted. The host knows the roots of the step in flight, never its outcome."""
        roots = [PROMPT] * self._batch
        in_flight = deque[Launched]([engine.launch(self._first())])
        total = 0
        for number in range(self._num_rounds):
            if number + 1 < self._num_rounds:
                works = [
                    work.followed_by(self._follow_up(work.slot, root), root, work.page_ids)
                    for work, root in zip(in_flight[-1].works, roots, strict=True)
                ]
                in_flight.append(engine.launch(works))
            outcomes = engine.finish(in_flight.popleft())
            roots = [root + o.num_emitted for root, o in zip(roots, outcomes, strict=True)]
            time.sleep(host_seconds)
            total += sum(outcome.num_emitted for outcome in outcomes)
        return total


def compare(
    engines: dict[str, DeviceEngine], batch: int, host_ms: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Least and median milliseconds per step of each way, and the medians' ratios in turns."""
    num_rounds: int = arguments.rounds
    length = 2 + (num_rounds + 1) * (DEPTH + 1) + AHEAD_DEPTH
    texts = {name: Texts(e, batch, length, e.target.vocab_size) for name, e in engines.items()}
    rounds = Rounds(texts["ahead"], batch, arguments.nodes, num_rounds)
    ways: dict[str, Callable[[], int]] = {
        "plain": lambda: rounds.one_at_a_time(engines["plain"], host_ms / 1e3),
        "run": lambda: rounds.one_at_a_time(engines["ahead"], host_ms / 1e3),
        "ahead": lambda: rounds.ahead(engines["ahead"], host_ms / 1e3),
    }
    totals = {name: way() for name, way in ways.items()}
    if len({*totals.values()}) != 1:
        raise AssertionError(f"the ways emitted different numbers of tokens: {totals}")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.turns):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            times[name].append(1e3 * (time.perf_counter() - begun) / num_rounds)
    result: dict[str, Any] = {
        "batch": batch,
        "host_ms": host_ms,
        "emitted_per_round": round(totals["run"] / num_rounds / batch, 2),
    }
    for name, found in times.items():
        result[f"{name}_ms_least"] = round(min(found), 3)
        result[f"{name}_ms_p50"] = round(statistics.median(found), 3)
    for name, base in (("ahead", "run"), ("run", "plain")):
        ratios = [a / b for a, b in zip(times[name], times[base], strict=True)]
        result[f"{name}_over_{base}"] = round(statistics.median(ratios), 3)
    print("  ".join(f"{key} {value}" for key, value in result.items()), flush=True)
    return result


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """That knows no candidates."""
    most = max(arguments.batch)
    return EngineConfig(
        num_pages=most * CONTEXT // PAGE_SIZE,
        page_size=PAGE_SIZE,
        max_sequences=most,
        max_context_len=CONTEXT,
        max_tree_nodes=arguments.nodes,
        max_depth=DEPTH,
        max_rows=max(64, most * arguments.nodes),
        min_rows=8,  # as on TPU: else a round that missed would run one row, one set aside eight
        layers_per_program=LAYERS_PER_PROGRAM if jax.default_backend() == "cpu" else None,
    )


def with_candidates(config: EngineConfig) -> EngineConfig:
    return dataclasses.replace(config, max_ahead_nodes=MAX_AHEAD_NODES)


def main() -> None:
    arguments = _arguments()
    target, params = load_target(arguments.target, dtype=np.dtype(np.float32))
    config = engine_config(arguments)
    engines = {
        "plain": DeviceEngine(target, params, config),
        "ahead": DeviceEngine(target, params, with_candidates(config)),
    }
    found = [
        compare(engines, batch, host_ms, arguments)
        for batch in arguments.batch
        for host_ms in arguments.host_ms
    ]
    print_report({"benchmark": "run_on", "found": found}, arguments)


def counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """With what both ways of running on are asked."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="target's directory")
    parser.add_argument("--batch", type=counts, default=[1, 4], help="sequences in a step")
    parser.add_argument("--nodes", type=int, default=8, help="rows of a round, root included")
    return parser


def _arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    parser = parser_of(__doc__)
    parser.add_argument("--host-ms", type=numbers, default=[0.0, 3.0], help="between steps")
    parser.add_argument("--rounds", type=int, default=12, help="of a turn")
    parser.add_argument("--turns", type=int, default=9)
    return parser.parse_args()


if __name__ == "__main__":
    main()
