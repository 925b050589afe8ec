"""Does anything grow when clients leave, again and again?

    python -m benchmarks.cancels --clients 10000

Real processes: router, verify and draft with a tiny random model. Clients ask for more than they
wait for and leave in one of six ways, drawn at random: they cancel before the first chunk, cancel
after some, let a deadline pass, ask for the end by id (Abort), break the connection, or are killed
with all their streams (a process of their own). Some ask for several choices.

A first tenth is there to fill pools and caches. After it, in the middle and at the end, when all
has come to rest, each process is looked at: sequences and KV pages held, tasks of its event loop,
open files, threads, resident memory. Growth is the last look less the first. Memory may waver by
`--memory-slack-mib` (verify keeps features of cached pages, up to a bound) and gRPC's pool of
threads by a few, everything else by nothing.

The last line is JSON; exit code 0 if nothing grew and nobody was refused.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cancels_clients import Leaver, Way
from benchmarks.cancels_looks import Look, look_at_rest
from benchmarks.serving import print_report
from benchmarks.tiny_models import write_tiny_pair
from canopy.stack import Stack, StackSettings
from common.entry import run_program
from common.errors import StartupError

FLAGS = {
    "router": ("--max-running", "512"),
    "verify": ("--kv-pool-tokens", "4096", "--max-sequences", "16", "--max-context-tokens", "256",
               "--max-waiting-sequences", "512", "--row-buckets", "16,64"),
    "draft": ("--kv-pool-tokens", "4096", "--max-context-tokens", "256", "--max-depth", "3",
              "--max-extend-tokens", "64", "--max-step-sequences", "4"),
}  # fmt: skip
"""Few programs: what is measured is what clients do, not what steps cost."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=10_000, help="that leave [%(default)s]")
    parser.add_argument("--at-once", type=int, default=24, help="[%(default)s]")
    parser.add_argument("--seed", type=int, default=1, help="of all chances [%(default)s]")
    parser.add_argument(
        "--memory-slack-mib", type=float, default=24.0, help="for each process [%(default)s]"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if nothing grew. Raises StartupError."""
    arguments = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        target, head = write_tiny_pair(Path(folder))
        settings = StackSettings(model=target, head=head, flags=FLAGS, show_logs=False)
        with Stack(settings) as stack:
            try:
                result = asyncio.run(run(stack, arguments))
            except OSError:
                dead = [c for c in stack.children.values() if c.process.poll() is not None]
                for child in dead:
                    print(child.log_text(), file=sys.stderr)
                    raise StartupError(f"{child.name} ended: {child.last_words()}") from None
                raise
    print_report(result, arguments)
    grew, failures = result["grew"], result["failures"]
    return 1 if grew or failures else 0


async def run(stack: Stack, arguments: argparse.Namespace) -> dict[str, object]:
    chance = random.Random(arguments.seed)
    leaver = Leaver(stack.address, arguments.at_once, chance)
    looks: list[dict[str, Look]] = []
    begun, begun_cpu = time.monotonic(), 0.0
    for share in (0.1, 0.5, 1.0):
        await leaver.go_on_to(round(share * arguments.clients))
        looks.append(await asyncio.to_thread(look_at_rest, stack))
        print(f"after {leaver.num_begun}: {looks[-1]}", flush=True)
        if len(looks) == 1:
            begun, begun_cpu = time.monotonic(), looks[0]["router"].cpu_seconds
    first, last = looks[0], looks[-1]
    seconds, num_timed = time.monotonic() - begun, round(0.9 * arguments.clients)
    return {
        "benchmark": "cancels",
        "clients": leaver.num_begun,
        "streams": leaver.num_streams,
        "ways": {way.value: leaver.ways[way] for way in Way},
        "chunks_read": leaver.num_chunks,
        "failures": dict(Counter(leaver.failures)),
        "clients_per_second": round(num_timed / seconds, 1),
        "router_cpu_ms_per_client": round(
            1000 * (last["router"].cpu_seconds - begun_cpu) / num_timed, 3
        ),
        "first": {name: seen.figures() for name, seen in first.items()},
        "last": {name: seen.figures() for name, seen in last.items()},
        "grew": {
            name: growth
            for name, seen in last.items()
            if (growth := seen.growth_since(first[name], arguments.memory_slack_mib))
        },
    }


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.cancels", main))
