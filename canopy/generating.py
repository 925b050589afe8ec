"""`canopy generate`: one prompt to a running router, the answer to the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from canopy.client import DEFAULT_ADDRESS, Client
from canopy.results import Chunk, Completion, Message, Options, Prompt
from canopy.trees import draw_round
from common.entry import stoppable
from common.errors import StartupError
from common.security import CallerSecurity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text that the model continues")
    prompt.add_argument("--chat", help="a message that the model answers")
    parser.add_argument("--system", help="system message; only with --chat")
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="the router's [%(default)s]")
    parser.add_argument("--tls-ca", type=Path, help="PEM file of the router's authority: TLS")
    parser.add_argument("--tls-cert", type=Path, help="PEM file with a certificate to show")
    parser.add_argument("--tls-key", type=Path, help="PEM file with that certificate's key")
    parser.add_argument("--token-file", type=Path, help="file with the bearer token to send")
    parser.add_argument("--max-tokens", type=int, help="most tokens to generate")
    parser.add_argument("-n", type=int, help="choices, each a text of its own [1]")
    parser.add_argument("--temperature", type=float, help="0 (the default): always the likeliest")
    parser.add_argument("--top-k", type=int, help="only the likeliest so many; 0: all")
    parser.add_argument("--top-p", type=float, help="only the likeliest, up to this chance in all")
    parser.add_argument("--min-p", type=float, help="only those with this part of the best chance")
    parser.add_argument("--presence-penalty", type=float, help="for tokens generated before")
    parser.add_argument("--frequency-penalty", type=float, help="for each time they were")
    parser.add_argument("--repetition-penalty", type=float, help="for them and the prompt's tokens")
    parser.add_argument("--min-tokens", type=int, help="no stop within so many tokens")
    parser.add_argument("--seed", type=int, help="same seed, same text; unset: a random one")
    parser.add_argument("--stop", action="append", default=[], help="end before this string")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past stop tokens")
    parser.add_argument("--no-speculation", action="store_true", help="one token per round")
    parser.add_argument("--max-depth", type=int, help="depth of the draft tree")
    parser.add_argument("--tree-top-k", type=int, help="children considered per node")
    parser.add_argument("--max-tree-nodes", type=int, help="nodes of the tree, root included")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after this long")
    parser.add_argument("--show-trees", action="store_true", help="draw every round's draft tree")
    parser.add_argument("--stats", action="store_true", help="print figures at the end")


def to_options(arguments: argparse.Namespace) -> Options:
    return Options(
        n=arguments.n,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        repetition_penalty=arguments.repetition_penalty,
        min_tokens=arguments.min_tokens,
        seed=arguments.seed,
        ignore_eos=True if arguments.ignore_eos else None,
        stop=tuple(arguments.stop),
        speculation=False if arguments.no_speculation else None,
        max_depth=arguments.max_depth,
        tree_top_k=arguments.tree_top_k,
        max_tree_nodes=arguments.max_tree_nodes,
        trace=arguments.show_trees,
    )


def to_prompt(arguments: argparse.Namespace) -> Prompt:
    if arguments.chat is None:
        return str(arguments.prompt)
    system = [Message("system", arguments.system)] if arguments.system else []
    return [*system, Message("user", arguments.chat)]


def generate(arguments: argparse.Namespace) -> int:
    """Streams the answer; returns the exit code. Raises CanopyError."""
    _check(arguments)
    console = Console(highlight=False, soft_wrap=True)
    security = CallerSecurity(
        ca=arguments.tls_ca,
        cert=arguments.tls_cert,
        key=arguments.tls_key,
        token_file=arguments.token_file,
    )
    security.check("tls_")
    with stoppable(), Client(arguments.address, security=security) as client:
        stream = client.stream(to_prompt(arguments), to_options(arguments), arguments.timeout)
        if (arguments.n or 1) > 1:
            completions = show_choices(stream, console)
        else:
            completions = [show_stream(stream, console, show_trees=arguments.show_trees)]
    for completion in completions if arguments.stats else ():
        console.print(stats_table(completion))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raises StartupError for what no router can be asked."""
    if arguments.system and arguments.chat is None:
        raise StartupError("system: given without --chat; a plain --prompt has no system message")
    if arguments.show_trees and (arguments.n or 1) > 1:
        raise StartupError("show_trees: draws one choice's trees; leave out -n")
    if arguments.timeout is not None and not arguments.timeout > 0:
        raise StartupError(f"timeout: {arguments.timeout:g} s is over at once; give more than 0")
    host, _, port = arguments.address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise StartupError(
            f"address: {arguments.address!r} is no HOST:PORT; give the router's, as"
            f" {DEFAULT_ADDRESS}"
        )


def show_stream(
    stream: Iterator[Chunk | Completion], console: Console, show_trees: bool = False
) -> Completion:
    """Prints text as it comes, or each round's tree and then the text; returns the completion."""
    text = ""
    for event in stream:
        if isinstance(event, Completion):
            console.print(text if show_trees else "", markup=False)
            return event
        text += event.text
        if show_trees and event.round is not None:
            console.print(draw_round(event.round))
        elif not show_trees:
            console.print(event.text, end="", markup=False)
    raise AssertionError("the client raises when a stream has no completion")


def show_choices(stream: Iterator[Chunk | Completion], console: Console) -> list[Completion]:
    """Prints each choice when it is whole; returns the completions in the order of their ends."""
    texts: dict[int, str] = {}
    completions = []
    for event in stream:
        index = event.choice_index
        if isinstance(event, Chunk):
            texts[index] = texts.get(index, "") + event.text
            continue
        console.print(f"--- choice {index} ({event.finish_reason.value})", markup=False)
        console.print(texts.get(index, ""), markup=False)
        completions.append(event)
    return completions


def stats_table(completion: Completion) -> Table:
    """Tokens, rounds and where the time went."""
    stats, timings = completion.speculation, completion.timings
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    decoded = max(completion.num_completion_tokens - 1, 0)
    rate = decoded / timings.decode if timings.decode else 0.0
    for name, value in (
        ("finish reason", completion.finish_reason.value),
        (
            "tokens",
            f"{completion.num_prompt_tokens} in ({completion.num_cached_prompt_tokens} cached),"
            f" {completion.num_completion_tokens} out",
        ),
        ("seed", str(completion.seed)),
        ("tokens/s after the first", f"{rate:.1f}"),
        ("time to first token", f"{timings.time_to_first_token:.3f} s"),
        ("rounds", f"{stats.num_rounds} ({stats.num_root_only_rounds} missed their tree)"),
        ("drafted, accepted", f"{stats.num_drafted}, {stats.num_accepted}"),
        ("acceptance length", f"{stats.acceptance_length:.2f}"),
        ("draft", f"{timings.draft:.3f} s"),
        ("verify", f"{timings.verify:.3f} s"),
        ("transport", f"{timings.transport:.3f} s"),
        ("router", f"{timings.router:.3f} s"),
    ):
        table.add_row(name, value)
    return table
