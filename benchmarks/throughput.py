"""Tokens per second on this machine: root-only, with trees, and transformers' generate beside them.

    python -m benchmarks.throughput --transformers-python /path/to/python --batches 1,4,16

Real processes on the demo's model, float32, greedy, prompts of random tokens that nobody has seen.
All ways take turns, `--repeats` times, so that they meet the same machine; the best of each is
compared, the median is printed beside it. `prefill`: prompt tokens of one sequence over the time to
its first token. `decode`: tokens after the first of all sequences of a batch, over the time from
the last one's first token on. Without `--transformers-python` that way is left out, and said so.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.serving import print_report
from canopy import library
from canopy.client import Client
from canopy.results import Chunk, Options
from canopy.stack import Stack, StackSettings
from common.entry import run_program
from common.errors import StartupError

Prompts = list[list[int]]
Timed = tuple[float, float]
"""Seconds to the last sequence's first token, and to the last token of all."""
Way = Callable[[Prompts, int], Timed]

LOWEST_TOKEN, HIGHEST_TOKEN = 100, 40_000


def ours(client: Client, speculation: bool) -> Way:
    def run(prompts: Prompts, max_tokens: int) -> Timed:
        options = Options(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, speculation=speculation
        )

        def ask(prompt: list[int]) -> Timed:
            first = 0.0
            for event in client.stream(prompt, options, timeout_seconds=3600):
                if isinstance(event, Chunk):
                    first = first or time.perf_counter()
            return first, time.perf_counter()

        begun = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as threads:
            times = list(threads.map(ask, prompts))
        return max(f for f, _ in times) - begun, max(end for _, end in times) - begun

    return run


@contextmanager
def peer(python: Path | None, model: Path) -> Iterator[tuple[Way | None, dict[str, Any]]]:
    """transformers in a process of its own, and what runs there. Raises StartupError."""
    if python is None:
        print("transformers: left out; give --transformers-python to have it beside ours")
        yield None, {}
        return
    script = Path(__file__).with_name("transformers_peer.py")
    with subprocess.Popen(
        [python, script, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def answer() -> dict[str, Any]:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise StartupError(f"transformers-python: {python} ended; its words are above")
            return dict(json.loads(line))

        def run(prompts: Prompts, max_tokens: int) -> Timed:
            assert process.stdin is not None
            print(json.dumps({"prompts": prompts, "max_tokens": max_tokens}), file=process.stdin)
            process.stdin.flush()
            timed = answer()
            return timed["first_seconds"], timed["seconds"]

        try:
            yield run, answer()
        finally:
            process.stdin.close()


def measure(ways: dict[str, Way], arguments: argparse.Namespace) -> dict[str, Any]:
    """Rates by batch and way; `prefill` under its own name."""
    chance = random.Random(arguments.seed)
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def prompts(batch: int, length: int) -> Prompts:
        return [
            [chance.randint(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(length)]
            for _ in range(batch)
        ]

    for way in ways.values():
        way(prompts(1, 8), 4)  # what the first one alone pays
    for repeat in range(arguments.repeats):
        for name, way in turned(ways, repeat):
            first, _ = way(prompts(1, arguments.prefill_tokens), 1)
            rates["prefill"][name].append(arguments.prefill_tokens / first)
        for batch in arguments.batches:
            for name, way in turned(ways, repeat):
                first, last = way(prompts(batch, arguments.prompt_tokens), arguments.max_tokens)
                tokens = batch * (arguments.max_tokens - 1)
                rates[f"decode_{batch}"][name].append(tokens / (last - first))
                print(f"batch {batch}, {name}: {rates[f'decode_{batch}'][name][-1]:.1f} tokens/s")
                sys.stdout.flush()
    return {what: compared(by_way) for what, by_way in rates.items()}


def turned(ways: dict[str, Way], by: int) -> list[tuple[str, Way]]:
    """The ways, another of them first each time."""
    items = list(ways.items())
    by %= len(items)
    return items[by:] + items[:by]


def compared(by_way: dict[str, list[float]]) -> dict[str, Any]:
    best = {name: max(rates) for name, rates in by_way.items()}
    result: dict[str, Any] = {
        "tokens_per_second": {name: round(rate, 2) for name, rate in best.items()},
        "median": {name: round(statistics.median(rates), 2) for name, rates in by_way.items()},
    }
    if "transformers" in best:
        result["root_only_over_transformers"] = round(best["root_only"] / best["transformers"], 3)
    if "trees" in best:
        result["trees_over_root_only"] = round(best["trees"] / best["root_only"], 3)
    return result


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", default="1,4,16", help="sequences at a time [%(default)s]")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="[%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=48, help="of an answer [%(default)s]")
    parser.add_argument("--prefill-tokens", type=int, default=512, help="[%(default)s]")
    parser.add_argument("--repeats", type=int, default=3, help="[%(default)s]")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts [%(default)s]")
    parser.add_argument("--no-trees", action="store_true", help="root-only alone")
    parser.add_argument("--verify-flags", default="", help="further flags of verify, by spaces")
    parser.add_argument(
        "--transformers-python", type=Path, help="a Python that has torch and transformers"
    )
    arguments = parser.parse_args(argv)
    arguments.batches = [int(part) for part in arguments.batches.split(",")]
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Raises StartupError."""
    arguments = parse(argv)
    model = library.fetch_model(library.DEMO_MODEL)
    settings = StackSettings(
        model=model,
        head=None if arguments.no_trees else library.demo_head(model),
        flags={"verify": arguments.verify_flags.split()},
        show_logs=False,
    )
    with (
        peer(arguments.transformers_python, model) as (theirs, described),
        Stack(settings) as stack,
        Client(stack.address) as client,
    ):
        ways = {"root_only": ours(client, False)}
        if not arguments.no_trees:
            ways["trees"] = ours(client, True)
        if theirs is not None:
            ways["transformers"] = theirs
        result = measure(ways, arguments)
    print_report({"benchmark": "throughput", "peer": described, **result}, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.throughput", main))
