"""Is speculation lossless? Each prompt with it and without it, token by token; then the goldens.

    python -m benchmarks.lossless --prompts FILE.jsonl --limit 20 --max-tokens 128
    python -m benchmarks.lossless --prompts FILE.jsonl --limit 20 --temperature 0.8 --seed 7

The last line is JSON. A divergence is the first place where two answers to a prompt differ; what
follows it differs for that reason and is not counted. Its margin is by how much the pick was won,
the smaller of the two runs' figures; below 1e-3 floating point may decide (docs/architecture.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.prompts import GOLDENS, Conversation, read_conversations
from benchmarks.serving import (
    add_server_arguments,
    one_line_errors,
    print_report,
    prompt_parser,
    router,
)
from canopy.client import Client
from canopy.results import Generation, Options
from common.entry import run_program

MARGIN = 1e-3


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two answers part. `place`: index of the generated token."""

    prompt: int
    against: str  # "root_only" or "golden"
    place: int
    margin: float

    def as_dict(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("prompt", "against", "place", "margin")}


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first index at which two token lists differ, ends included; None: they are equal."""
    for place, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))


def margin_at(place: int, *margins: Sequence[float]) -> float:
    """The smallest margin that any run has at `place`; infinite if none has one."""
    return min((m[place] for m in margins if place < len(m)), default=float("inf"))


def compare(
    prompt: int,
    against: str,
    answer: Generation,
    tokens: Sequence[int],
    margins: Sequence[float],
) -> Divergence | None:
    place = first_difference(answer.token_ids, tokens)
    if place is None:
        return None
    return Divergence(prompt, against, place, margin_at(place, answer.pick_margins, margins))


def options_for(arguments: argparse.Namespace, index: int, speculation: bool) -> Options:
    return Options(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed + index,
        speculation=speculation,
        max_depth=arguments.max_depth if speculation else None,
        max_tree_nodes=arguments.max_tree_nodes if speculation else None,
        token_ids=True,
        pick_margins=True,
    )


def against_root_only(
    client: Client, conversations: Sequence[Conversation], arguments: argparse.Namespace
) -> tuple[int, list[Divergence]]:
    """(tokens generated with speculation, divergences)."""
    num_tokens, divergences = 0, []
    for index, conversation in enumerate(conversations):
        speculative, root_only = (
            client.generate(conversation.messages, options_for(arguments, index, speculation))
            for speculation in (True, False)
        )
        num_tokens += len(speculative.token_ids)
        found = compare(
            index, "root_only", speculative, root_only.token_ids, root_only.pick_margins
        )
        divergences += [found] if found else []
        num_answered = len(speculative.token_ids)
        verdict = f"differs at {found.place}, margin {found.margin:.2g}" if found else "identical"
        length = speculative.completion.speculation.acceptance_length
        print(
            f"prompt {index}: {num_answered} tokens, acceptance {length:.2f}, {verdict}",
            flush=True,
        )
    return num_tokens, divergences


def against_goldens(client: Client, arguments: argparse.Namespace) -> tuple[int, list[Divergence]]:
    """(goldens compared, divergences); greedy, speculation on."""
    goldens = read_conversations(GOLDENS, arguments.goldens)
    divergences = []
    for index, golden in enumerate(goldens):
        options = Options(
            max_tokens=len(golden.golden), temperature=0.0, token_ids=True, pick_margins=True
        )
        answer = client.generate(golden.messages, options)
        found = compare(index, "golden", answer, golden.golden, golden.golden_margins)
        divergences += [found] if found else []
    return len(goldens), divergences


def run(arguments: argparse.Namespace) -> int:
    conversations = read_conversations(arguments.prompts, arguments.limit)
    with router(arguments) as address, Client(address) as client:
        num_tokens, divergences = against_root_only(client, conversations, arguments)
        identical = len(conversations) - len(divergences)
        num_goldens, golden_divergences = against_goldens(client, arguments)
    divergences += golden_divergences
    above = [divergence for divergence in divergences if divergence.margin > MARGIN]
    result = {
        "prompts": len(conversations),
        "tokens": num_tokens,
        "identical_to_root_only": identical,
        "goldens": num_goldens,
        "identical_to_golden": num_goldens - len(golden_divergences),
        "divergences": [divergence.as_dict() for divergence in divergences],
        "divergences_above_margin": len(above),
        "margin": MARGIN,
    }
    print_report(result, arguments)
    return 1 if above else 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = prompt_parser(__doc__, limit=None, max_tokens=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="[%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt; then one more")
    parser.add_argument("--goldens", type=int, help="goldens to compare [all]")
    add_server_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if nothing diverges above the margin. Raises StartupError."""
    with one_line_errors():
        return run(parse(argv))


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.lossless", main))
