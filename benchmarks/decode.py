"""How fast are tokens decoded with speculation, and how fast without it, in one interleaved run?

    python -m benchmarks.decode --prompts FILE.jsonl --limit 10

Each prompt is answered both ways in turn, the order changing from prompt to prompt, so that both
meet the same machine. Rates leave out prefill: tokens after the first over the time after the
first, on the client's clock. The last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.prompts import Conversation, read_conversations
from benchmarks.serving import (
    add_server_arguments,
    one_line_errors,
    print_report,
    prompt_parser,
    router,
)
from canopy.client import Client
from canopy.results import Chunk, Completion, Options
from common.entry import run_program

SHARES = ("draft", "verify", "transport", "router")


@dataclass
class Tally:
    """Sums over the answers of one kind."""

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    first_token_seconds: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SHARES, 0.0))
    total_seconds: float = 0.0
    drafted_per_depth: list[int] = field(default_factory=list)
    accepted_per_depth: list[int] = field(default_factory=list)

    def add(self, completion: Completion, first_seconds: float, rest_seconds: float) -> None:
        """The first token and its round ride on the prefill and are left out."""
        self.tokens += completion.num_completion_tokens - 1
        self.rounds += completion.speculation.num_rounds - 1
        self.seconds += rest_seconds
        speculation = completion.speculation
        _add(self.drafted_per_depth, speculation.num_drafted_per_depth)
        _add(self.accepted_per_depth, speculation.num_accepted_per_depth)
        self.first_token_seconds.append(first_seconds)
        for name in SHARES:
            self.parts[name] += getattr(completion.timings, name)
        self.total_seconds += completion.timings.total

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def _of_rounds(self, counts: Sequence[int]) -> list[float]:
        return [round(count / max(1, self.rounds), 3) for count in counts]

    def as_dict(self) -> dict[str, object]:
        shares = {
            name: round(part / self.total_seconds, 4) if self.total_seconds else 0.0
            for name, part in self.parts.items()
        }
        ordered = sorted(self.first_token_seconds)
        return {
            "tokens": self.tokens,
            "rounds": self.rounds,
            "tokens_per_second": round(self.tokens_per_second, 2),
            "time_to_first_token_p50_seconds": round(ordered[len(ordered) // 2], 4),
            "share_of_wall_time": shares,
            "rounds_with_nodes_per_depth": self._of_rounds(self.drafted_per_depth),
            "rounds_accepted_per_depth": self._of_rounds(self.accepted_per_depth),
        }


def _add(sums: list[int], counts: Sequence[int]) -> None:
    sums += [0] * (len(counts) - len(sums))
    for depth, count in enumerate(counts):
        sums[depth] += count


def time_one(client: Client, conversation: Conversation, options: Options, tally: Tally) -> None:
    """Answers one conversation, on the client's clock."""
    begun = time.monotonic()
    first: float | None = None
    for event in client.stream(conversation.messages, options):
        now = time.monotonic()
        if isinstance(event, Chunk):
            first = first if first is not None else now
        else:
            first = first if first is not None else now
            tally.add(event, first - begun, now - first)


def run(arguments: argparse.Namespace) -> int:
    conversations = read_conversations(arguments.prompts, arguments.limit)
    tallies = {True: Tally(), False: Tally()}
    options = {kind: options_for(arguments, kind) for kind in tallies}
    with router(arguments) as address, Client(address) as client:
        for kind in tallies:  # both kinds once, untimed: caches, connections, the allocator
            client.generate(conversations[0].messages, options[kind])
        for index, conversation in enumerate(conversations):
            for kind in (True, False) if index % 2 == 0 else (False, True):
                time_one(client, conversation, options[kind], tallies[kind])
            rates = [f"{tallies[kind].tokens_per_second:.1f}" for kind in (True, False)]
            print(f"prompt {index}: so far {rates[0]} against {rates[1]} tokens/s", flush=True)
    print_report(figures(tallies[True], tallies[False], len(conversations)), arguments)
    return 0


def figures(speculative: Tally, root_only: Tally, num_prompts: int) -> dict[str, object]:
    base = root_only.tokens_per_second
    rounds = speculative.rounds
    return {
        "prompts": num_prompts,
        "tokens_per_second": round(speculative.tokens_per_second, 2),
        "tokens_per_second_root_only": round(base, 2),
        "ratio": round(speculative.tokens_per_second / base, 4) if base else None,
        "acceptance_length": round(speculative.tokens / rounds, 4) if rounds else None,
        "share_of_wall_time": speculative.as_dict()["share_of_wall_time"],
        "speculative": speculative.as_dict(),
        "root_only": root_only.as_dict(),
    }


def options_for(arguments: argparse.Namespace, speculation: bool) -> Options:
    return Options(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
        speculation=speculation,
        max_depth=arguments.max_depth if speculation else None,
        max_tree_nodes=arguments.max_tree_nodes if speculation else None,
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = prompt_parser(__doc__, limit=None, max_tokens=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="[%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="[%(default)s]")
    add_server_arguments(parser)
    parser.set_defaults(tree_budget="auto")  # as `canopy serve` goes
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Raises StartupError."""
    with one_line_errors():
        return run(parse(argv))


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.decode", main))
