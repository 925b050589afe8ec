"""Settings against each other on the real services, interleaved in one run.

    python -m benchmarks.compare --way full="verify --tree-budget full" \
        --way auto="verify --tree-budget auto" --concurrency 1 --limit 8

One stack of services is started for each way, with its further flags per service (`;` between
services), and stands idle while another answers. Prompts are taken in groups of `--concurrency`
that run side by side; every way answers a group before the next group's turn, in an order that
changes from group to group, so that all meet the same machine. Root-only decoding on the first
way's stack is one more way. Rates leave out prefill, as in `benchmarks.decode`, whose tallies these
are. The texts of all ways must be the same. The last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.decode import Tally
from benchmarks.prompts import GOLDENS, Conversation, read_conversations
from benchmarks.serving import (
    add_model_arguments,
    model_and_head,
    print_report,
    service_flags,
)
from canopy.client import Client
from canopy.results import CanopyError, Chunk, Completion, Options
from canopy.stack import Stack, StackSettings
from common.entry import run_program
from common.errors import StartupError

ROOT_ONLY = "root-only"


def way(text: str) -> tuple[str, dict[str, tuple[str, ...]]]:
    """Name and flags per service of `NAME=SERVICE FLAG…; SERVICE FLAG…`."""
    name, _, rest = text.partition("=")
    return name, service_flags(rest)


@dataclass(frozen=True, slots=True)
class Answer:
    """`first_seconds`: to the first token; `rest_seconds`: from there to the end."""

    tokens: tuple[int, ...]
    completion: Completion
    first_seconds: float
    rest_seconds: float


def answer(client: Client, conversation: Conversation, options: Options) -> Answer:
    begun = time.monotonic()
    first: float | None = None
    tokens: list[int] = []
    for event in client.stream(conversation.messages, options):
        now = time.monotonic()
        first = now if first is None else first
        if not isinstance(event, Chunk):
            return Answer(tuple(tokens), event, first - begun, now - first)
        tokens += event.token_ids
    raise StartupError("a stream ended without its completion")


class Comparison:
    """`clients`: one per way; root-only is answered by the first."""

    def __init__(self, clients: dict[str, Client], options: Options) -> None:
        first = next(iter(clients.values()))
        self._ways = {name: (client, options) for name, client in clients.items()}
        plain = Options(
            max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed,
            speculation=False,
        )  # fmt: skip
        self._ways[ROOT_ONLY] = (first, plain)
        self.tallies = {name: Tally() for name in self._ways}
        self.wall_seconds = dict.fromkeys(self._ways, 0.0)
        self.num_differing = 0

    def warm_up(self, group: Sequence[Conversation]) -> None:
        for client, options in self._ways.values():
            for conversation in group:
                answer(client, conversation, options)

    def run(self, group: Sequence[Conversation], turn: int) -> None:
        """All ways on one group, beginning with another one each turn."""
        names = list(self._ways)
        texts = []
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            client, options = self._ways[name]
            begun = time.monotonic()
            with ThreadPoolExecutor(len(group)) as pool:
                answers = list(pool.map(lambda c, o=options, k=client: answer(k, c, o), group))
            self.wall_seconds[name] += time.monotonic() - begun
            for each in answers:
                tally = self.tallies[name]
                tally.add(each.completion, each.first_seconds, each.rest_seconds)
            texts.append([each.tokens for each in answers])
        self.num_differing += sum(len(set(same)) > 1 for same in zip(*texts, strict=True))

    def figures(self) -> dict[str, object]:
        base = self.tallies[ROOT_ONLY].tokens_per_second
        return {
            name: {
                "over_root_only": round(tally.tokens_per_second / base, 4),
                "acceptance_length": round(tally.tokens / max(1, tally.rounds), 4),
                "wall_seconds": round(self.wall_seconds[name], 2),
                **tally.as_dict(),
            }
            for name, tally in self.tallies.items()
        }


def run(arguments: argparse.Namespace) -> int:
    conversations = read_conversations(arguments.prompts, arguments.limit)
    model, head = model_and_head(arguments)
    options = Options(
        max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=arguments.seed,
        max_depth=arguments.max_depth, max_tree_nodes=arguments.max_tree_nodes,
    )  # fmt: skip
    with ExitStack() as open_things:
        clients = {}
        for name, flags in arguments.way:
            settings = StackSettings(model=model, head=head, flags=flags, show_logs=False)
            stack = open_things.enter_context(Stack(settings))
            clients[name] = open_things.enter_context(Client(stack.address))
        comparison = Comparison(clients, options)
        comparison.warm_up(conversations[:1])
        size = arguments.concurrency
        for repeat in range(arguments.repeats):
            for turn, start in enumerate(range(0, len(conversations), size)):
                comparison.run(conversations[start : start + size], repeat + turn)
                rates = {n: round(t.tokens_per_second, 1) for n, t in comparison.tallies.items()}
                print(f"after {start + size} prompts: {rates} tokens/s of a sequence", flush=True)
    result = {
        "benchmark": "compare",
        "prompts": len(conversations) * arguments.repeats,
        "texts_that_differ": comparison.num_differing,
        "ways": comparison.figures(),
    }
    print_report(result, arguments)
    return 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--way", action="append", required=True, type=way, help="NAME=SERVICE FLAG…; SERVICE FLAG…"
    )
    parser.add_argument("--prompts", type=Path, default=GOLDENS, help="JSON lines with `turns`")
    parser.add_argument("--limit", type=int, help="prompts to use [all]")
    parser.add_argument("--repeats", type=int, default=1, help="of all prompts [%(default)s]")
    parser.add_argument("--concurrency", type=int, default=1, help="side by side [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=128, help="per prompt [%(default)s]")
    parser.add_argument("--temperature", type=float, default=0.0, help="[%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="[%(default)s]")
    add_model_arguments(parser)
    parser.add_argument("--max-tree-nodes", type=int, help="nodes of a tree, root included")
    parser.add_argument("--max-depth", type=int, help="depth of a tree")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Raises StartupError."""
    try:
        return run(parse(argv))
    except (CanopyError, ValueError) as error:
        raise StartupError(str(error)) from None


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.compare", main))
