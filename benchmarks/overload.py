"""What is left of the goodput when ten times as many ask as can be served?

    python -m benchmarks.overload --capacity 4 --factor 10 --seconds 40

Real processes; the router takes `capacity` generations at a time. First as many clients as that ask
one question after the other (`peak`), then `factor` times as many (`overload`): a client that is
refused waits as long as RetryInfo says and asks again. Goodput is tokens of finished answers per
second. Refusals must be immediate and say when to come again; who is let in must not wait longer
than before.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.serving import print_report
from canopy import library
from canopy.client import Client, Retry
from canopy.results import CanopyError, Chunk, Completion, Message, Options
from canopy.stack import Stack, StackSettings
from common.entry import run_program

PROMPT = [Message("user", "Why does bread rise?")]
UNTOLD_PAUSE_SECONDS = 1.0


@dataclass(slots=True)
class Tally:
    """Of one phase; seconds. `num_untold`: refusals without RetryInfo."""

    num_tokens: int = 0
    answers: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    num_untold: int = 0
    others: list[str] = field(default_factory=list)
    seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def goodput(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--capacity", type=int, default=4, help="generations at once [%(default)s]")
    parser.add_argument("--factor", type=int, default=10, help="times the capacity [%(default)s]")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each phase [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=32, help="of an answer [%(default)s]")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Raises StartupError."""
    arguments = parse(argv)
    model = library.fetch_model(library.DEMO_MODEL)
    limit = ("--max-running", str(arguments.capacity))
    settings = StackSettings(
        model=model,
        head=library.demo_head(model),
        flags={"router": limit},
        show_logs=False,
    )
    with Stack(settings) as stack, Client(stack.address, Retry(max_attempts=1)) as client:
        run_phase(client, arguments.capacity, 2.0, arguments.max_tokens)  # to be warm
        peak = run_phase(client, arguments.capacity, arguments.seconds, arguments.max_tokens)
        num_clients = arguments.capacity * arguments.factor
        overload = run_phase(client, num_clients, arguments.seconds, arguments.max_tokens)
    print_report(report(peak, overload), arguments)
    return 0


def run_phase(client: Client, num_clients: int, seconds: float, max_tokens: int) -> Tally:
    """Closed loop; an answer that has begun is read to its end, and counts."""
    tally = Tally()
    begun = time.monotonic()
    end = begun + seconds
    options = Options(max_tokens=max_tokens, ignore_eos=True, token_ids=True)

    def ask_again_and_again() -> None:
        while time.monotonic() < end:
            pause = ask(client, options, tally)
            time.sleep(min(pause, max(0.0, end - time.monotonic())))

    threads = [threading.Thread(target=ask_again_and_again) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tally.seconds = time.monotonic() - begun
    return tally


def ask(client: Client, options: Options, tally: Tally) -> float:
    """One question; returns how long to wait before the next."""
    begun = time.monotonic()
    first = 0.0
    try:
        for event in client.stream(PROMPT, options):
            if isinstance(event, Chunk) and event.token_ids and not first:
                first = time.monotonic() - begun
            if isinstance(event, Completion):
                with tally.lock:
                    tally.num_tokens += event.num_completion_tokens
                    tally.answers.append(time.monotonic() - begun)
                    tally.first_tokens.append(first)
    except CanopyError as error:
        with tally.lock:
            if error.code != "RESOURCE_EXHAUSTED":
                tally.others.append(str(error))
            tally.refusals.append(time.monotonic() - begun)
            tally.num_untold += error.retry_seconds is None
        return error.retry_seconds or UNTOLD_PAUSE_SECONDS
    return 0.0


def report(peak: Tally, overload: Tally) -> dict[str, object]:
    return {
        "benchmark": "overload",
        "peak_tokens_per_second": round(peak.goodput, 2),
        "overload_tokens_per_second": round(overload.goodput, 2),
        "goodput_ratio": round(overload.goodput / peak.goodput, 3) if peak.goodput else None,
        "answers": {"peak": len(peak.answers), "overload": len(overload.answers)},
        "answer_seconds": {
            "peak": quantiles(peak.answers),
            "overload": quantiles(overload.answers),
        },
        "first_token_seconds": {
            "peak": quantiles(peak.first_tokens),
            "overload": quantiles(overload.first_tokens),
        },
        "refusals": len(overload.refusals),
        "refusal_seconds": quantiles(overload.refusals),
        "refusals_without_retry_info": overload.num_untold,
        "other_failures": sorted(set(peak.others + overload.others)),
    }


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    return {name: round(ordered[round(q * last)], 4) for name, q in (("p50", 0.5), ("p99", 0.99))}


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.overload", main))
