"""Does anything get lost when replicas are killed at random and clients leave at random?

    python -m benchmarks.chaos --minutes 5 --streams 4

Real processes: a router, several verify and draft replicas, of the demo's model or (`--tiny`) of a
random one that costs next to nothing, so that waits are the protocol's own. First every prompt is
answered in peace. Then streams of the same prompts run side by side while replicas get SIGKILL and
are started anew on their ports (only where another of the same service is serving), and some
clients cancel in mid-stream. Some replicas are frozen (SIGSTOP) before they are killed: nobody
tells that they are gone. Every token that came is compared with the quiet answer, up to a pick
within the margin.

- `divergent_streams`: streams with another token than the quiet answer's, above the margin.
- `gap_seconds`: of the streams that ran when a replica was killed, the wait between two chunks
  around that moment, the kill's own streams and all others alike; `quiet` is the longest wait of
  the quiet answers, which ran as many at a time, `first` their longest for a first chunk.
- `gap_limits_seconds`: what must not be exceeded: draft 1 s; verify 2 s and a prefill, for which
  `first` stands; with `silence_seconds` more for silent verifies. A machine that is too slow or
  busy for that even when all is quiet shows it in `quiet`, which is added.
- `links_lost`: as the router counted; one for each kill, unless replicas were too starved to answer
  its pings.
- `recovery_seconds`: from SIGKILL to SERVING of the new process.
- `pages_leaked`: KV pages in use on any replica when all streams are over.

The last line is JSON; exit code 0 if nothing was lost and no gap is beyond its limit.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.chaos_streams import (
    Cause,
    Kill,
    Load,
    Plan,
    Stream,
    first_wait,
    gaps_around,
    longest_wait,
)
from benchmarks.lossless import MARGIN, first_difference, margin_at
from benchmarks.prompts import GOLDENS, read_conversations
from benchmarks.serving import add_flags_argument, one_line_errors, print_report
from benchmarks.tiny_models import write_tiny_pair
from canopy import library
from canopy.client import Client
from canopy.results import Options
from canopy.stack import Stack, StackSettings
from common.entry import run_program

PATIENT = ("--verify-lost-seconds", "600")
SETTLE_SECONDS = 60.0
SILENCE_SECONDS = 6.0
"""The router's default, `silence_seconds`."""

RESTART_SECONDS = 4.0
"""An orchestrator takes as long, and a start takes the processors from those that go on."""

KINDS = ("draft", "draft_silent", "verify", "verify_silent")
TINY_FLAGS = {
    "verify": ("--max-context-tokens", "512", "--kv-pool-tokens", "8192", "--row-buckets", "16,64"),
    "draft": ("--max-context-tokens", "512", "--kv-pool-tokens", "8192", "--max-depth", "3",
              "--max-extend-tokens", "64", "--max-step-sequences", "4"),
}  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="of trouble [%(default)s]")
    parser.add_argument("--streams", type=int, default=4, help="at a time [%(default)s]")
    parser.add_argument("--verify", type=int, default=2, help="verify replicas [%(default)s]")
    parser.add_argument("--draft", type=int, default=2, help="draft replicas [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=128, help="of a stream [%(default)s]")
    parser.add_argument("--prompts", type=Path, default=GOLDENS, help="JSON lines [our own]")
    parser.add_argument("--limit", type=int, default=6, help="prompts used [%(default)s]")
    parser.add_argument("--temperature", type=float, default=0.8, help="of every second prompt")
    parser.add_argument("--cancel-share", type=float, default=0.25, help="of the streams")
    parser.add_argument("--pause", type=float, default=8.0, help="seconds between kills, about")
    parser.add_argument("--silent-share", type=float, default=0.25, help="of the kills")
    add_flags_argument(parser)
    parser.add_argument("--tiny", action="store_true", help="a tiny random model")
    parser.add_argument("--seed", type=int, default=1, help="of the trouble [%(default)s]")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if nothing was lost. Raises StartupError."""
    arguments = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        settings = stack_settings(arguments, Path(folder))
        with one_line_errors(), Stack(settings) as stack, Client(stack.address) as client:
            result = run(stack, client, arguments)
    print_report(result, arguments)
    lost = result["divergent_streams"] or result["failed"] or result["pages_leaked"]
    return 1 if lost or result["gaps_beyond_limit"] else 0


def stack_settings(arguments: argparse.Namespace, folder: Path) -> StackSettings:
    if arguments.tiny:
        model, head = write_tiny_pair(folder)
        flags = {"router": PATIENT, **TINY_FLAGS}
    else:
        model = library.fetch_model(library.DEMO_MODEL)
        head, flags = library.demo_head(model), {"router": PATIENT}
    for service, more in arguments.flags.items():
        flags[service] = (*flags.get(service, ()), *more)
    return StackSettings(
        model=model,
        head=head,
        num_verify=arguments.verify,
        num_draft=arguments.draft,
        flags=flags,
        show_logs=False,
    )


def run(stack: Stack, client: Client, arguments: argparse.Namespace) -> dict[str, object]:
    plans = make_plans(arguments)
    print(f"quiet answers of {len(plans)} prompts", flush=True)
    with ThreadPoolExecutor(arguments.streams) as threads:
        quiet = list(threads.map(lambda plan: Stream(plan).read(client), plans))
    load = Load(client, plans, arguments.cancel_share, random.Random(arguments.seed))
    load.start(arguments.streams)
    try:
        kills = make_trouble(stack, arguments)
    finally:
        streams = load.finish()
    return report(stack, quiet, streams, kills, arguments)


def make_plans(arguments: argparse.Namespace) -> list[Plan]:
    """Every second prompt is sampled, the others are greedy."""
    plans = []
    for index, conversation in enumerate(read_conversations(arguments.prompts, arguments.limit)):
        options = Options(
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature if index % 2 else 0.0,
            seed=index,
            ignore_eos=True,
            token_ids=True,
            pick_margins=True,
        )
        plans.append(Plan(index, conversation.messages, options))
    return plans


def make_trouble(stack: Stack, arguments: argparse.Namespace) -> list[Kill]:
    """Kills and restarts until the time is over; then waits for the last restart."""
    chance = random.Random(arguments.seed + 1)
    end = time.monotonic() + 60 * arguments.minutes
    kills: list[Kill] = []
    while time.monotonic() < end:
        time.sleep(chance.uniform(0.5, 1.5) * arguments.pause)
        away = {kill.name for kill in kills if not kill.is_back()}
        names = [name for name in stack.children if name != "router" and name not in away]
        safe = [n for n in names if sum(m.startswith(n.partition("-")[0]) for m in names) > 1]
        if not safe or time.monotonic() >= end:
            continue
        kill = Kill(chance.choice(safe), time.monotonic())
        kill.silent = chance.random() < arguments.silent_share
        if kill.silent:
            stack.freeze(kill.name)
            time.sleep(2 * SILENCE_SECONDS)
        stack.kill(kill.name)
        time.sleep(RESTART_SECONDS)
        kill.child = stack.restart(kill.name)
        kills.append(kill)
        print(f"killed {kill.name}{' in silence' if kill.silent else ''}", flush=True)
    for kill in kills:
        kill.wait_until_back()
    return kills


def report(
    stack: Stack,
    quiet: Sequence[Stream],
    streams: Sequence[Stream],
    kills: Sequence[Kill],
    arguments: argparse.Namespace,
) -> dict[str, object]:
    near_ties, divergent = 0, []
    for stream in streams:
        expected = quiet[stream.plan.index]
        tokens = expected.tokens[: len(stream.tokens)]
        place = first_difference(tuple(stream.tokens), tuple(tokens))
        if place is None:
            continue
        margin = margin_at(place, stream.margins, expected.margins)
        near_ties += margin <= MARGIN
        if margin > MARGIN:
            divergent.append({"prompt": stream.plan.index, "place": place, "margin": margin})
    causes = Counter(stream.cause for stream in streams)
    gaps = {
        kind: [gap for kill in kills if kill.kind == kind for gap in gaps_around(kill, streams)]
        for kind in KINDS
    }
    quiet_gap, prefill = max(map(longest_wait, quiet)), max(map(first_wait, quiet))
    limits = {
        "draft": 1.0 + quiet_gap,
        "draft_silent": 1.0 + quiet_gap,
        "verify": 2.0 + prefill + quiet_gap,
        "verify_silent": 2.0 + SILENCE_SECONDS + prefill + quiet_gap,
    }
    recovery = {
        service: summary([k.recovery_seconds for k in kills if k.service == service])
        for service in ("draft", "verify")
    }
    return {
        "benchmark": "chaos",
        "minutes": arguments.minutes,
        "streams": len(streams),
        "completed": causes[Cause.COMPLETED],
        "cancelled": causes[Cause.CANCELLED],
        "failed": causes[Cause.FAILED],
        "failures": sorted({stream.failure for stream in streams if stream.failure}),
        "tokens": sum(len(stream.tokens) for stream in streams),
        "kills": dict(Counter(kill.kind for kill in kills)),
        "divergent_streams": len(divergent),
        "divergences": divergent,
        "streams_past_a_near_tie": near_ties,
        "gap_seconds": {
            "quiet": round(quiet_gap, 3),
            "first": round(prefill, 3),
            **{kind: summary(those) for kind, those in gaps.items()},
        },
        "gap_limits_seconds": {kind: round(limit, 3) for kind, limit in limits.items()},
        "gaps_beyond_limit": sum(gap > limits[kind] for kind in KINDS for gap in gaps[kind]),
        "recovery_seconds": recovery,
        "links_lost": links_lost(stack),
        "pages_leaked": pages_in_use(stack),
    }


def summary(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    return {"p50": round(ordered[len(ordered) // 2], 3), "max": round(ordered[-1], 3)}


def links_lost(stack: Stack) -> int:
    """By the router's count; more than kills: replicas too starved to answer a ping in time."""
    address = stack.children["router"].metrics_address
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return int(sum(s.value for s in samples if s.name == "canopy_router_peer_losses_total"))


def pages_in_use(stack: Stack) -> int:
    """Of all replicas, once they have come to rest, or after a minute."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (pages := _pages_in_use(stack)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return pages


def _pages_in_use(stack: Stack) -> int:
    pages = 0.0
    for child in stack.children.values():
        with urllib.request.urlopen(f"http://{child.metrics_address}/metrics", timeout=30) as page:
            for family in text_string_to_metric_families(page.read().decode()):
                pages += sum(
                    sample.value
                    for sample in family.samples
                    if family.name.endswith("_kv_pages")
                    and sample.labels.get("state") in ("live", "reserved")
                )
    return int(pages)


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.chaos", main))
