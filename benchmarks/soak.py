"""Is every one of N random requests answered, and is nothing left behind?

    python -m benchmarks.soak --requests 500 --streams 16

Real processes. Requests come with random lengths, text or token ids, every sampling option, with
speculation and without; some clients leave in mid-stream, some set a deadline that will pass, some
ask for what must be refused. Each must end as it should: answered in full, left, past its deadline
or refused. Afterwards verify and draft must hold no page, and nothing may have been compiled while
serving.

- `unanswered`: requests that ended in any other way, with their words in `failures`.
- `pages_leaked`: KV pages in use when all is over. `compiles_after_warm_up`: of both services.
- `step_seconds`: of verify's steps, from its histogram.

The last line is JSON; exit code 0 if nothing is wrong.
"""

from __future__ import annotations

import argparse
import enum
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from benchmarks.scrape import Scrape, quantile, settled
from benchmarks.serving import add_model_arguments, model_and_head, print_report
from canopy.client import Client
from canopy.results import CanopyError, Chunk, Completion, Message, Options
from canopy.stack import Stack, StackSettings
from common.entry import run_program

WORDS = ("the", "river", "bread", "tree", "why", "does", "how", "many", "seven", "rise", "number")
ENOUGH_SECONDS = 600.0


class Fate(enum.Enum):
    """How a request is meant to end, and how it did."""

    ANSWERED = "answered"
    LEFT = "left"
    LATE = "past_deadline"
    REFUSED = "refused"
    LOST = "unanswered"


@dataclass(slots=True)
class Request:
    prompt: Any
    options: Options
    meant: Fate
    leaves_after: int = 0  # chunks
    deadline_seconds: float = ENOUGH_SECONDS
    fate: Fate = Fate.LOST
    failure: str = ""
    num_tokens: int = 0

    def ask(self, client: Client) -> Request:
        """Reads it to its end; returns itself."""
        events = client.stream(self.prompt, self.options, self.deadline_seconds)
        num_chunks = 0
        try:
            with closing(events):  # type: ignore[type-var]  # a generator, which can be closed
                for event in events:
                    if isinstance(event, Completion):
                        self.fate = Fate.ANSWERED
                    elif isinstance(event, Chunk):
                        num_chunks += 1
                        self.num_tokens += len(event.token_ids)
                        if self.meant is Fate.LEFT and num_chunks >= self.leaves_after:
                            self.fate = Fate.LEFT
                            break
        except CanopyError as error:
            self.failure = str(error)
            if error.code == "DEADLINE_EXCEEDED" and self.meant is Fate.LATE:
                self.fate = Fate.LATE
            elif error.code == "INVALID_ARGUMENT" and self.meant is Fate.REFUSED:
                self.fate = Fate.REFUSED
        return self

    @property
    def is_well(self) -> bool:
        """One that was to leave or be late may have been answered before."""
        early = self.fate is Fate.ANSWERED and self.meant in (Fate.LEFT, Fate.LATE)
        return self.fate is self.meant or early


@dataclass(slots=True)
class Chance:
    """Random requests; the same seed gives the same ones."""

    seed: int
    max_prompt_tokens: int
    max_tokens: int
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def request(self) -> Request:
        chance = self._random
        meant = chance.choices(list(Fate)[:4], (70, 15, 8, 7))[0]
        request = Request(self._prompt(), self._options(), meant)
        if meant is Fate.LEFT:
            request.leaves_after = chance.randint(1, 8)
        elif meant is Fate.LATE:
            request.deadline_seconds = chance.uniform(0.01, 1.5)
        elif meant is Fate.REFUSED:
            wrong = (Options(temperature=-1.0), Options(top_p=2.0), Options(max_tokens=10**6))
            request.options = chance.choice(wrong)
        return request

    def _prompt(self) -> Any:
        chance = self._random
        length = max(1, int(self.max_prompt_tokens ** chance.uniform(0.1, 1.0)))
        if chance.random() < 0.3:  # with a beginning that others have, too
            return [5 + i % 40 for i in range(length)]
        if chance.random() < 0.5:
            return [chance.randint(3, 200) for _ in range(length)]
        text = " ".join(chance.choice(WORDS) for _ in range(max(1, length // 2)))
        return [Message("user", text)] if chance.random() < 0.5 else text

    def _options(self) -> Options:
        chance = self._random
        chosen: dict[str, Any] = {
            "max_tokens": chance.randint(1, self.max_tokens),
            "token_ids": True,
            "ignore_eos": chance.random() < 0.5,
            "speculation": chance.random() < 0.7,
        }
        more = {
            "temperature": chance.uniform(0.0, 1.5),
            "top_k": chance.randint(1, 100),
            "top_p": chance.uniform(0.3, 1.0),
            "min_p": chance.uniform(0.0, 0.3),
            "seed": chance.getrandbits(63),
            "presence_penalty": chance.uniform(-2, 2),
            "frequency_penalty": chance.uniform(-2, 2),
            "repetition_penalty": chance.uniform(0.5, 2),
            "logit_bias": {chance.randint(0, 200): chance.uniform(-10, 10) for _ in range(3)},
            "min_tokens": chance.randint(1, chosen["max_tokens"]),
            "top_logprobs": chance.randint(1, 20),
            "stop": (chance.choice(WORDS),),
            "max_depth": chance.randint(1, 5),
            "max_tree_nodes": chance.randint(1, 16),
            "cache_salt": chance.choice("ab"),
        }
        chosen |= {name: value for name, value in more.items() if chance.random() < 0.25}
        return Options(**chosen)


def soak(
    client: Client, addresses: dict[str, str], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Asks all requests, `arguments.streams` at a time; the figures. `addresses`: of metrics."""
    chance = Chance(arguments.seed, arguments.max_prompt_tokens, arguments.max_tokens)
    requests = [chance.request() for _ in range(arguments.requests)]
    before = Scrape(addresses)
    begun, done, lock = time.monotonic(), 0, threading.Lock()

    def ask(request: Request) -> None:
        nonlocal done
        request.ask(client)
        with lock:
            done += 1
            if done % max(1, len(requests) // 10) == 0:
                print(f"{done} of {len(requests)} in {time.monotonic() - begun:.0f} s", flush=True)

    with ThreadPoolExecutor(arguments.streams) as threads:
        list(threads.map(ask, requests))
    seconds = time.monotonic() - begun
    after = settled(lambda: Scrape(addresses))
    p50, p99 = (quantile(before, after, "canopy_verify_step_seconds", q) for q in (0.5, 0.99))
    lost = [request for request in requests if not request.is_well]
    fates = Counter(request.fate.value for request in requests)

    def gained(name: str) -> float:
        return after.total(name) - before.total(name)

    return {
        "benchmark": "soak",
        "requests": len(requests),
        **{fate.value: fates[fate.value] for fate in Fate if fate is not Fate.LOST},
        "unanswered": len(lost),
        "failures": sorted({request.failure or request.fate.value for request in lost}),
        "tokens": sum(request.num_tokens for request in requests),
        "seconds": round(seconds, 1),
        "pages_leaked": after.pages_in_use,
        "compiles_after_warm_up": int(
            gained("canopy_verify_compiles_after_warm_up_total")
            + gained("canopy_draft_compiles_after_warm_up_total")
        ),
        "preemptions": int(gained("canopy_verify_preemptions_total")),
        "prefix_cache_hit_tokens": int(gained("canopy_verify_prefix_cache_hit_tokens_total")),
        "step_seconds": {"p50": _rounded(p50), "p99": _rounded(p99)},
        "step_p99_over_p50": _rounded(p99 / p50) if p50 and p99 else None,
    }


def is_well(result: dict[str, Any]) -> bool:
    wrong = ("unanswered", "pages_leaked", "compiles_after_warm_up")
    return not any(result[name] for name in wrong)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=200, help="in all [%(default)s]")
    parser.add_argument("--streams", type=int, default=16, help="at a time [%(default)s]")
    parser.add_argument("--max-prompt-tokens", type=int, default=600, help="[%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer [%(default)s]")
    parser.add_argument("--kv-pool-tokens", type=int, default=4096, help="of verify [%(default)s]")
    parser.add_argument("--seed", type=int, default=1, help="of the requests [%(default)s]")
    add_model_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if nothing is wrong. Raises StartupError."""
    arguments = parse(argv)
    model, head = model_and_head(arguments)
    flags = {"verify": ("--kv-pool-tokens", str(arguments.kv_pool_tokens))}
    settings = StackSettings(model=model, head=head, flags=flags, show_logs=False)
    with Stack(settings) as stack, Client(stack.address) as client:
        addresses = {name: child.metrics_address for name, child in stack.children.items()}
        result = soak(client, addresses, arguments)
    print_report(result, arguments)
    return 0 if is_well(result) else 1


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.soak", main))
