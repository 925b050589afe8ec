"""How much of a head's trees does the target accept?

    python -m benchmarks.acceptance --suite mt_bench=FILE --suite qa=FILE --limit 20 --temperature 0

Every prompt is answered by the real services, once with trees and once with a chain of the same
head. Acceptance length is emitted tokens per round, round 0 left out (it rides on the prefill,
without a tree). Beside it stands a prompt-lookup drafter on the same texts, which searches prompt
and answer: because emitted tokens do not depend on the drafter, what verification would accept of
its chain follows from the text alone. Answers that repeat themselves are easy to draft, and are
counted apart. The last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.prompts import read_conversations
from benchmarks.serving import add_server_arguments, one_line_errors, print_report, router
from canopy import library
from canopy.client import Client
from canopy.results import Generation, Message, Options, Round
from common.entry import run_program
from common.errors import StartupError
from router.tokenizer import ModelTokenizer

REPEAT_TOKENS = 8
REPETITIVE_SHARE = 0.2
"""An answer is repetitive if more than this share of its 8-token windows occurred before in it."""
LOOKUP_TOKENS = 3
"""Prompt lookup continues after the latest earlier occurrence of the last 3, else 2, else 1
tokens."""


@dataclass
class Counts:
    """Sums over the rounds of some answers; `reached[d]`: rounds that came to depth d + 1 of a tree
    which was that deep, `accepted[d]` those that found their token there."""

    answers: int = 0
    rounds: int = 0
    emitted: int = 0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add_round(self, num_accepted: int, depth: int) -> None:
        self.rounds += 1
        self.emitted += num_accepted + 1
        while len(self.reached) < depth:
            self.reached.append(0)
            self.accepted.append(0)
        for level in range(min(depth, num_accepted + 1)):
            self.reached[level] += 1
            self.accepted[level] += level < num_accepted

    def as_dict(self) -> dict[str, object]:
        per_depth = [
            round(hit / reached, 4)
            for hit, reached in zip(self.accepted, self.reached, strict=True)
            if reached
        ]
        return {
            "answers": self.answers,
            "rounds": self.rounds,
            "acceptance_length": round(self.emitted / self.rounds, 4) if self.rounds else None,
            "per_depth": per_depth,
        }


class Tally:
    """All answers of one drafter, and those that do not repeat themselves."""

    def __init__(self) -> None:
        self.overall, self.plain = Counts(), Counts()

    def add(self, rounds: Sequence[tuple[int, int]], repetitive: bool) -> None:
        """`rounds`: (accepted nodes, depth of the tree) of each."""
        for counts in (self.overall,) if repetitive else (self.overall, self.plain):
            counts.answers += 1
            for num_accepted, depth in rounds:
                counts.add_round(num_accepted, depth)

    def as_dict(self) -> dict[str, object]:
        return {**self.overall.as_dict(), "without_repetitive": self.plain.as_dict()}


def is_repetitive(tokens: Sequence[int]) -> bool:
    """Whether more than a fifth of the 8-token windows occurred earlier in `tokens`."""
    windows = [tuple(tokens[i : i + REPEAT_TOKENS]) for i in range(len(tokens) - REPEAT_TOKENS + 1)]
    if not windows:
        return False
    return 1.0 - len(set(windows)) / len(windows) > REPETITIVE_SHARE


def traced_rounds(rounds: Sequence[Round]) -> list[tuple[int, int]]:
    """(accepted nodes, depth of the tree) of the rounds after round 0."""
    return [
        (len(found.accepted_nodes), tree_depth(found.parents))
        for found in rounds
        if found.number > 0
    ]


def tree_depth(parents: Sequence[int]) -> int:
    """0 for a root alone."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def lookup_rounds(
    tokens: Sequence[int], max_draft: int, prompt: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """(accepted, drafted) of a prompt-lookup drafter, had it drafted while `tokens` came out."""
    rounds, position = [], 1  # the first token comes with the prefill
    text = [*prompt, *tokens]
    while position < len(tokens):
        draft = look_up(text[: len(prompt) + position], max_draft)
        actual = tokens[position : position + len(draft)]
        num_accepted = 0
        while num_accepted < len(actual) and draft[num_accepted] == actual[num_accepted]:
            num_accepted += 1
        # as in a real round the bonus is part of the answer: it cannot reach beyond its end
        num_accepted = min(num_accepted, len(tokens) - position - 1)
        rounds.append((num_accepted, len(draft)))
        position += num_accepted + 1
    return rounds


def look_up(context: Sequence[int], max_draft: int) -> Sequence[int]:
    """What followed the latest earlier occurrence of the context's end; empty if there is none."""
    for size in range(LOOKUP_TOKENS, 0, -1):
        tail = list(context[-size:])
        if len(context) <= size:
            continue
        for start in range(len(context) - size - 1, -1, -1):
            if list(context[start : start + size]) == tail:
                return context[start + size : start + size + max_draft]
    return ()


def prompt_ids(
    tokenizer: ModelTokenizer | None, messages: Sequence[Message], answer: Generation
) -> list[int]:
    """The prompt as the server saw it; empty without a tokenizer. Raises StartupError where the
    server counts otherwise."""
    if tokenizer is None:
        return []
    ids = tokenizer.encode_chat([{"role": m.role, "content": m.content} for m in messages])
    if len(ids) != answer.completion.num_prompt_tokens:
        raise StartupError(
            f"model: its template gives a prompt of {len(ids)} tokens, the server counted"
            f" {answer.completion.num_prompt_tokens}; name the model that the server runs"
        )
    return ids


def measure_suite(
    client: Client,
    path: Path,
    arguments: argparse.Namespace,
    tokenizer: ModelTokenizer | None,
    totals: dict[str, Tally],
) -> dict[str, Any]:
    """Answers a suite with each drafter; adds to `totals` and returns the suite's own figures."""
    nodes = arguments.max_tree_nodes or 16
    depth = arguments.max_depth or 5
    shapes = {"tree": nodes, "chain": depth + 1}
    own = {name: Tally() for name in totals}
    for index, conversation in enumerate(read_conversations(path, arguments.limit)):
        texts: dict[str, Generation] = {}
        for name, shape in shapes.items():
            options = Options(
                max_tokens=arguments.max_tokens,
                temperature=arguments.temperature,
                seed=index,
                max_depth=depth,
                max_tree_nodes=shape,
                tree_top_k=1 if name == "chain" else None,
                token_ids=True,
                trace=True,
            )
            texts[name] = client.generate(conversation.messages, options)
        tokens = texts["tree"].token_ids
        repetitive = is_repetitive(tokens)
        rounds = {name: traced_rounds(text.rounds) for name, text in texts.items()}
        prompt = prompt_ids(tokenizer, conversation.messages, texts["tree"])
        rounds["prompt_lookup"] = lookup_rounds(tokens, nodes - 1, prompt)
        for name, found in rounds.items():
            for tally in (totals[name], own[name]):
                tally.add(found, repetitive)
    return {name: tally.as_dict() for name, tally in own.items()}


def table_lines(suite: str, figures: dict[str, Any]) -> list[str]:
    """A line per drafter: acceptance length, the same without repetitive answers, depth by
    depth."""
    return [
        f"{suite:12} {name:14} {found['acceptance_length']!s:>7}"
        f"  not repetitive {found['without_repetitive']['acceptance_length']!s:>7}"
        f"  by depth {' '.join(f'{share:.2f}' for share in found['per_depth'])}"
        for name, found in figures.items()
    ]


def run(arguments: argparse.Namespace) -> int:
    totals = {name: Tally() for name in ("tree", "chain", "prompt_lookup")}
    suites: dict[str, dict[str, Any]] = {}
    if arguments.model is None and arguments.address is None:
        arguments.model = library.fetch_model(library.DEMO_MODEL)
        arguments.head = arguments.head or library.demo_head(arguments.model)
    tokenizer = None if arguments.model is None else ModelTokenizer(arguments.model)
    with router(arguments) as address, Client(address) as client:
        for suite in arguments.suite:
            name, equals, path = suite.partition("=")
            if not equals:
                raise StartupError(f"suite: {suite!r} must be NAME=FILE")
            suites[name] = measure_suite(client, Path(path), arguments, tokenizer, totals)
    drafters = {name: tally.as_dict() for name, tally in totals.items()}
    if not arguments.json:
        for name, figures in {**suites, "all": drafters}.items():
            print("\n".join(table_lines(name, figures)))
    print_report(
        {
            "benchmark": "acceptance",
            "acceptance_length": totals["tree"].as_dict()["acceptance_length"],
            "drafters": drafters,
            "lookup_searches": "answer" if tokenizer is None else "prompt and answer",
            "suites": suites,
        },
        arguments,
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.acceptance", description=__doc__)
    add_server_arguments(parser)
    parser.add_argument("--suite", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--limit", type=int, help="prompts of each suite")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", action="store_true", help="the figures as JSON alone, no table")
    with one_line_errors():
        return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.acceptance", main))
