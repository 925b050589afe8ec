"""How much does a long prompt disturb those who are reading?

    python -m benchmarks.interference --prompt-tokens 8000 --streams 4

Real processes on the demo's model. `streams` answers run root-only; then one request with a long
prompt is sent among them. The time between two tokens of the running answers is taken before it
came (`quiet`) and while it is prefilled (`prefill`), on the client's clock. Prefill goes in chunks
of at most `--max-prefill-tokens` beside others, so that a step stays short. Also the long prompt's
own time to first token, beside others and alone. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing

from benchmarks.serving import print_report
from canopy import library
from canopy.client import Client
from canopy.results import Chunk, Options
from canopy.stack import Stack, StackSettings
from common.entry import run_program
from common.errors import StartupError

ENDLESS = Options(max_tokens=1_500, temperature=0.0, ignore_eos=True, speculation=False)


class Reader(threading.Thread):
    """One running answer; `times`: when its chunks came."""

    def __init__(self, client: Client, prompt: list[int], stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self._client, self._prompt, self._stopping = client, prompt, stop
        self.start()

    def run(self) -> None:
        events = self._client.stream(self._prompt, ENDLESS)
        with closing(events):  # type: ignore[type-var]  # a generator, which can be closed
            for event in events:
                if isinstance(event, Chunk):
                    self.times.append(time.perf_counter())
                if self._stopping.is_set():
                    return

    def gaps(self, begin: float, end: float) -> list[float]:
        """Between tokens, the later of which came within [begin, end)."""
        pairs = itertools.pairwise(list(self.times))
        return [after - before for before, after in pairs if begin <= after < end]


def seconds_to_first_token(client: Client, prompt: list[int]) -> float:
    begun = time.perf_counter()
    options = Options(max_tokens=1, temperature=0.0, speculation=False)
    events = client.stream(prompt, options, timeout_seconds=3600)
    next(iter(events))
    seconds = time.perf_counter() - begun
    for _ in events:
        pass
    return seconds


def run(client: Client, arguments: argparse.Namespace) -> dict[str, object]:
    chance = random.Random(arguments.seed)

    def prompt(length: int) -> list[int]:
        return [chance.randint(100, 40_000) for _ in range(length)]

    alone = seconds_to_first_token(client, prompt(arguments.prompt_tokens))
    print(f"alone: first token after {alone:.2f} s", flush=True)
    stop = threading.Event()
    readers = [Reader(client, prompt(32), stop) for _ in range(arguments.streams)]
    while min(len(reader.times) for reader in readers) < 3:
        if not all(reader.is_alive() for reader in readers):
            raise StartupError("a running answer ended before it began; look at the logs")
        time.sleep(0.05)
    quiet_from = time.perf_counter()
    time.sleep(arguments.quiet_seconds)
    sent = time.perf_counter()
    beside = seconds_to_first_token(client, prompt(arguments.prompt_tokens))
    over = time.perf_counter()
    stop.set()
    for reader in readers:  # each ends its call at its next chunk
        reader.join(60)
    quiet = [gap for reader in readers for gap in reader.gaps(quiet_from, sent)]
    disturbed = [gap for reader in readers for gap in reader.gaps(sent, over)]
    if not quiet or not disturbed:
        raise StartupError("the running answers ended too early; ask for a shorter prompt")
    return {
        "benchmark": "interference",
        "quiet_seconds": summary(quiet),
        "prefill_seconds": summary(disturbed),
        "p50_ratio": round(quantile(disturbed, 0.5) / quantile(quiet, 0.5), 2),
        "p99_ratio": round(quantile(disturbed, 0.99) / quantile(quiet, 0.99), 2),
        "long_prompt_first_token_seconds": {"alone": round(alone, 3), "beside": round(beside, 3)},
    }


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def summary(values: Sequence[float]) -> dict[str, float]:
    found = {f"p{int(100 * q)}": quantile(values, q) for q in (0.5, 0.9, 0.99)}
    found["max"] = max(values)
    return {"tokens": len(values), **{name: round(v, 4) for name, v in found.items()}}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=8000, help="[%(default)s]")
    parser.add_argument("--streams", type=int, default=4, help="running answers [%(default)s]")
    parser.add_argument("--quiet-seconds", type=float, default=10.0, help="[%(default)s]")
    parser.add_argument("--max-prefill-tokens", type=int, default=48, help="[%(default)s]")
    parser.add_argument("--max-step-tokens", type=int, default=64, help="[%(default)s]")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts [%(default)s]")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Raises StartupError."""
    arguments = parse(argv)
    context = str(arguments.prompt_tokens + 8)
    pool = str(2 * arguments.prompt_tokens + 2048 * arguments.streams)
    flags = (
        *("--max-context-tokens", context, "--kv-pool-tokens", pool),
        *("--max-prefill-tokens", str(arguments.max_prefill_tokens)),
        *("--max-step-tokens", str(arguments.max_step_tokens)),
    )
    model = library.fetch_model(library.DEMO_MODEL)
    settings = StackSettings(model=model, flags={"verify": flags}, show_logs=False)
    with Stack(settings) as stack, Client(stack.address) as client:
        result = run(client, arguments)
    print_report(result, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.interference", main))
