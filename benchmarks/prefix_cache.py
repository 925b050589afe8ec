"""What a common beginning saves: prompts of one document with the prefix cache and without it.

    python -m benchmarks.prefix_cache --limit 8

Every prompt is a shared document and a question of its own, greedy, answered three ways in turn:
`cold` under a salt that nobody else has, `first` and `again` under one that all share (`first`
finds what another prompt left, `again` all of its own prompt). Tokens must be the same up to near
ties, and the draft must accept as much: the features of shared rows are kept beside them. The last
line is JSON; exit code 1 if tokens differ above the margin.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.lossless import MARGIN, Divergence, compare
from benchmarks.prompts import Conversation, read_conversations
from benchmarks.serving import (
    add_server_arguments,
    one_line_errors,
    print_report,
    prompt_parser,
    router,
)
from canopy.client import Client
from canopy.results import Chunk, Completion, Generation, Message, Options
from common.entry import run_program

WAYS = ("cold", "first", "again")


@dataclass
class Tally:
    """Sums over the answers of one way; the first round of each rides on its prefill."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    first_token_seconds: list[float] = field(default_factory=list)

    def add(self, completion: Completion, first_seconds: float) -> None:
        self.prompt_tokens += completion.num_prompt_tokens
        self.cached_tokens += completion.num_cached_prompt_tokens
        self.tokens += completion.num_completion_tokens - 1
        self.rounds += completion.speculation.num_rounds - 1
        self.first_token_seconds.append(first_seconds)

    def as_dict(self) -> dict[str, object]:
        ordered = sorted(self.first_token_seconds)
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "hit_rate": round(self.cached_tokens / self.prompt_tokens, 4),
            "acceptance_length": round(self.tokens / max(1, self.rounds), 3),
            "time_to_first_token_p50_seconds": round(ordered[len(ordered) // 2], 4),
        }


def documents(conversations: Sequence[Conversation], num_words: int) -> list[list[Message]]:
    """Each conversation's question below one document of about `num_words` words."""
    words = " ".join(m.content for c in conversations for m in c.messages).split()
    text = " ".join((words * (num_words // len(words) + 1))[:num_words])
    document = f"Notes, in no order:\n{text}\nEnd of the notes."
    return [[Message("system", document), *c.messages] for c in conversations]


def ask(
    client: Client, messages: Sequence[Message], salt: str, arguments: argparse.Namespace
) -> tuple[Generation, float]:
    """The answer, and the seconds to its first token on the client's clock."""
    options = Options(
        max_tokens=arguments.max_tokens, temperature=0.0, token_ids=True, pick_margins=True,
        cache_salt=salt, max_depth=arguments.max_depth, max_tree_nodes=arguments.max_tree_nodes,
    )  # fmt: skip
    begun, first = time.monotonic(), 0.0
    tokens: list[int] = []
    margins: list[float] = []
    for event in client.stream(messages, options):
        if isinstance(event, Chunk):
            first = first or time.monotonic() - begun
            tokens += event.token_ids
            margins += event.pick_margins
        else:
            answer = Generation(
                text="", token_ids=tuple(tokens), pick_margins=tuple(margins), completion=event
            )
            return answer, first
    raise AssertionError("the client raises when a stream has no completion")


def run(arguments: argparse.Namespace) -> int:
    prompts = documents(read_conversations(arguments.prompts, arguments.limit), arguments.words)
    tallies = {way: Tally() for way in WAYS}
    divergences: list[Divergence] = []
    with router(arguments) as address, Client(address) as client:
        run_id = f"{time.time_ns():x}"
        ask(client, prompts[0], f"{run_id}-unused", arguments)  # what the first answer alone pays
        for index, messages in enumerate(prompts):
            salts = {"cold": f"{run_id}-{index}", "first": run_id, "again": run_id}
            answers = {}
            for way in WAYS:
                answers[way], seconds = ask(client, messages, salts[way], arguments)
                tallies[way].add(answers[way].completion, seconds)
            cold = answers["cold"]
            for way in WAYS[1:]:
                found = compare(index, way, answers[way], cold.token_ids, cold.pick_margins)
                divergences += [found] if found else []
    above = [divergence for divergence in divergences if divergence.margin > MARGIN]
    result: dict[str, object] = {way: tally.as_dict() for way, tally in tallies.items()}
    result["prompts"] = len(prompts)
    result["divergences"] = [divergence.as_dict() for divergence in divergences]
    result["divergences_above_margin"] = len(above)
    print_report(result, arguments)
    return 1 if above else 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = prompt_parser(__doc__, limit=8, max_tokens=48)
    parser.add_argument("--words", type=int, default=500, help="of the document [%(default)s]")
    add_server_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if nothing diverges above the margin. Raises StartupError."""
    with one_line_errors():
        return run(parse(argv))


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.prefix_cache", main))
