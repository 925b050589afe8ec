"""What int8 weights of the head change: acceptance, the children it likes best, milliseconds here.

    python -m benchmarks.head_weights --prompts FILE.jsonl --max-tokens 96 --temperature 1

The target's own answers are known: given (`--answers`, greedy), or written first by three services
that are started (`--prompts`). The draft engine grows a tree at **every** position of them, with
the head's matrices as they are and in 8 bits (`draft_service/int8.py`), from the same true
features. So both heads stand at the same places before the same text, and the rounds that either
would have taken follow from its trees. At a temperature candidates are ordered with the noise that
the answer was sampled with, or by the head alone (`--plain`).

Intervals are of 95 %, by resampling answers. Milliseconds are of this machine's draft step and say
nothing of a TPU. The last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.answers import (
    answers_parser,
    features_of,
    model_with_head,
    read_answers,
    tree_of,
)
from benchmarks.prompts import read_conversations
from benchmarks.serving import one_line_errors, print_report
from canopy.client import Client
from canopy.results import Options
from canopy.stack import Stack, StackSettings
from common.entry import run_program
from common.types import DraftTree
from draft_service.engine import DeviceEngine, EngineConfig
from draft_service.int8 import quantise
from draft_service.step import FeatureArray, NoiseKey, SequenceWork
from draft_service.training.generate import Chat
from draft_service.training.replay import PAGE_SIZE, Answer, num_accepted, pairs_work
from draft_service.training.target_states import make_target_states
from models.eagle3 import load_head
from models.target import load_target

BATCH = 8
"""Trees of one dispatch; answers that are written at a time."""

RESAMPLES = 10_000
REPEATS = 30
"""Steps that are timed, of each head in turn."""

Counts = npt.NDArray[np.int64]


class Walker:
    """Grows trees along an answer. All its works share one sequence's pages: a pair that is fed
    again writes what is there."""

    def __init__(self, engine: DeviceEngine, temperature: float) -> None:
        self._engine, self._temperature = engine, temperature
        self._pages = np.arange(engine.config.pages_per_sequence, dtype=np.int32)

    def trees(self, answer: Answer, rows: FeatureArray, seed: int) -> list[DraftTree]:
        """One for each token of the response as root, but for the last."""
        tokens, most = answer.tokens, self._engine.config.max_extend_rows
        for first in range(0, len(tokens) - 1, most):
            until = min(first + most, len(tokens) - 1)
            self._engine.run([self._work(tokens, rows, first, until, drafts=False)])
        found: list[DraftTree] = []
        roots = range(len(answer.prompt), len(tokens) - 1)
        for start in range(0, len(roots), BATCH):
            works = [
                self._work(tokens, rows, root - 1, root, drafts=True, seed=seed)
                for root in roots[start : start + BATCH]
            ]
            found += [outcome.tree for outcome in self._engine.run(works) if outcome.tree]
        return found

    def seconds(self, answer: Answer, rows: FeatureArray, num_sequences: int) -> float:
        """Of one step that drafts for so many."""
        root = len(answer.prompt)
        works = [self._work(answer.tokens, rows, root - 1, root, drafts=True)] * num_sequences
        begun = time.perf_counter()
        self._engine.run(works)
        return time.perf_counter() - begun

    def _work(
        self, tokens: list[int], rows: Any, first: int, until: int, *, drafts: bool, seed: int = 0
    ) -> SequenceWork:
        """Pairs [first, until); the root is token `until`, the pick behind it the next one."""
        noise = NoiseKey(seed, self._temperature, until + 1) if self._temperature > 0 else None
        return pairs_work(tokens, rows, first, until, self._pages, drafts=drafts, noise=noise)


def accepted_along(answer: Answer, trees: Sequence[DraftTree]) -> Counts:
    """Nodes accepted of each tree, had a round begun there."""
    first = len(answer.prompt) + 1
    truths = (answer.tokens[place:] for place in range(first, len(answer.tokens)))
    counts = [num_accepted(tree, truth) for tree, truth in zip(trees, truths, strict=True)]
    return np.array(counts, np.int64)


def rounds_of(accepted: Counts) -> int:
    """Rounds with trees that the answer would have taken, one after the other."""
    rounds = place = 0
    while place < accepted.size:
        place, rounds = place + int(accepted[place]) + 1, rounds + 1
    return rounds


def with_interval(
    numerators: Counts, denominators: Counts, combine: Callable[[Any, Any], Any]
) -> dict[str, Any]:
    """`combine` of the sums over answers, and its 95 % interval by resampling answers."""
    count = numerators.shape[0]
    chosen = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
    drawn = combine(numerators[chosen].sum(1), denominators[chosen].sum(1))
    low, high = np.quantile(drawn, (0.025, 0.975))
    whole = float(combine(numerators.sum(0), denominators.sum(0)))
    return {"mean": round(whole, 4), "interval": [round(float(low), 4), round(float(high), 4)]}


def written_answers(arguments: argparse.Namespace, model: Path, head: Path) -> list[Answer]:
    """By the services, each with its own seed: `arguments.seed` and its number. Raises
    StartupError."""
    conversations = read_conversations(arguments.prompts, arguments.limit)
    chat = Chat(model)
    settings = StackSettings(model=model, head=head, show_logs=False)
    with Stack(settings) as stack, one_line_errors(), Client(stack.address) as client:

        def answer(number: int) -> Answer:
            messages = conversations[number].messages
            options = Options(
                max_tokens=arguments.max_tokens, temperature=arguments.temperature,
                seed=arguments.seed + number, token_ids=True,
            )  # fmt: skip
            written = client.generate(messages, options)
            return Answer(chat.ids(messages[0].content), list(written.token_ids))

        with ThreadPoolExecutor(BATCH) as threads:
            return list(threads.map(answer, range(len(conversations))))


def run(arguments: argparse.Namespace) -> int:
    model, head_path = model_with_head(arguments)
    shape = tree_of(arguments)
    if arguments.prompts:
        answers = written_answers(arguments, model, head_path)
    else:
        answers = read_answers(arguments.answers, arguments.limit)
    answers = [answer for answer in answers if len(answer.response) > 1]
    head, native = load_head(head_path, model)
    target, target_params = load_target(model, boundaries=head.boundaries)
    context = max(len(answer.tokens) for answer in answers) + shape.max_depth + 2
    config = EngineConfig(
        num_pages=-(-context // PAGE_SIZE), page_size=PAGE_SIZE, max_context_len=context,
        tree=shape, max_sequences=BATCH, max_draft_rows=1,
    )  # fmt: skip
    ordered = 0.0 if arguments.plain else arguments.temperature
    ways = {"native": native, "int8": quantise(native)}
    walkers = {
        name: Walker(DeviceEngine(head, params, config), ordered) for name, params in ways.items()
    }
    states = make_target_states(target, target_params)
    accepted: list[list[Counts]] = []
    best, shared = list[bool](), list[float]()
    begun = time.monotonic()
    for number, answer in enumerate(answers):
        rows = features_of(states, answer, head.dtype)
        trees = {
            name: walker.trees(answer, rows, arguments.seed + number)
            for name, walker in walkers.items()
        }
        accepted.append([accepted_along(answer, each) for each in trees.values()])
        for one, other in zip(trees["native"], trees["int8"], strict=True):
            best.append(bool(one.tokens[1] == other.tokens[1]))
            shared.append(
                np.intersect1d(one.tokens, other.tokens).size / np.unique(one.tokens).size
            )
        if number % 10 == 9:
            print(f"{number + 1} answers, {time.monotonic() - begun:.0f} s", flush=True)
    milliseconds = {name: {n: list[float]() for n in (1, BATCH)} for name in walkers}
    for _ in range(REPEATS):
        for name, walker in walkers.items():
            for size, times in milliseconds[name].items():
                times.append(1e3 * walker.seconds(answers[-1], rows, size))
    result = {
        "benchmark": "head_weights",
        **figures(accepted),
        "same_best_child": round(float(np.mean(best)), 4),
        "shared_tokens_of_trees": round(float(np.mean(shared)), 4),
        "step_milliseconds_p50_here": {
            name: {f"batch_{n}": round(float(np.median(t)), 2) for n, t in each.items()}
            for name, each in milliseconds.items()
        },
    }
    print_report(result, arguments)
    return 0


def figures(accepted: Sequence[Sequence[Counts]]) -> dict[str, Any]:
    """Of [answers][native, int8]: acceptance lengths, and what int8 changes."""
    positions = np.array([native.size for native, _ in accepted], np.int64)
    sums = np.array([[each.sum() for each in pair] for pair in accepted], np.int64)
    rounds = np.array([[rounds_of(each) for each in pair] for pair in accepted], np.int64)
    of = positions[:, None]

    def per_position(sums: Any, positions: Any) -> Any:
        return (sums[..., 1] - sums[..., 0]) / positions[..., 0]

    def change(rounds: Any, _: Any) -> Any:
        return rounds[..., 0] / rounds[..., 1] - 1

    natives, int8s = (np.concatenate([pair[way] for pair in accepted]) for way in (0, 1))
    return {
        "answers": len(accepted),
        "positions": int(positions.sum()),
        "rounds": dict(zip(("native", "int8"), rounds.sum(0).tolist(), strict=True)),
        "acceptance_length": {
            name: round(float(positions.sum() / count), 4)
            for name, count in zip(("native", "int8"), rounds.sum(0), strict=True)
        },
        "acceptance_length_change": with_interval(rounds, of, change),
        "accepted_at_a_position": {
            "native": round(float(natives.mean()), 4), "int8": round(float(int8s.mean()), 4),
        },
        "paired_difference_at_a_position": with_interval(sums, of, per_position),
        "positions_that_differ": round(float(np.mean(natives != int8s)), 4),
    }  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = answers_parser(__doc__, max_depth=5, max_nodes=16)
    parser.add_argument("--prompts", type=Path, help="JSON lines with `turns`, to be answered")
    parser.add_argument("--max-tokens", type=int, default=96, help="per prompt [%(default)s]")
    parser.add_argument("--temperature", type=float, default=0.0, help="of --prompts [greedy]")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt; then one more")
    parser.add_argument("--plain", action="store_true", help="candidates ordered without noise")
    arguments = parser.parse_args(argv)
    if arguments.temperature > 0 and not arguments.prompts:
        parser.error("--temperature: needs --prompts, for given answers' noise is not known")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Raises StartupError."""
    return run(parse(argv))


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.head_weights", main))
