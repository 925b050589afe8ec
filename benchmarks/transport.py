"""What does the transport cost: CPU of a frame, bytes of a token, the router's part of a round?

    python -m benchmarks.transport --sequences 1,16,64 --limit 4 --max-tokens 64

Three parts:

- `frames`: bytes of a frame of each kind and the CPU time that its two ends take for it, by the
  number of sequences in it (`transport_frames.py`; codecs and protobuf, no sockets).
- `stack`: real services answer prompts, once with features as captured and once fused; bytes
  that went over each link, by kind, for each token that was emitted and for each drafted token that
  was accepted; CPU time of the router's process for each command frame, everything included.
- `router`: the router's process between peers that answer at once, at the largest of
  `--sequences`, with features and with next to none (`benchmarks.router_overhead`).

CPU times are the process's own: a busy machine changes them little. The last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks import router_overhead
from benchmarks.prompts import GOLDENS, read_conversations
from benchmarks.serving import add_model_arguments, model_and_head, print_report
from benchmarks.transport_frames import measure_frames
from canopy import library
from canopy.client import Client
from canopy.results import Generation, Options
from canopy.stack import Stack, StackSettings
from common.entry import run_program

KINDS = {
    ("verify", "sent"): "trees to verify (and opens)",
    ("verify", "received"): "results",
    ("draft", "sent"): "extends (and opens)",
    ("draft", "received"): "trees from draft",
}
FEATURES = ("captured", "fused")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", default="1,16,64", help="of a frame [%(default)s]")
    parser.add_argument("--nodes", type=int, default=16, help="of a tree [%(default)s]")
    parser.add_argument("--row-width", type=int, default=1728, help="of features [%(default)s]")
    add_model_arguments(parser)
    parser.add_argument("--limit", type=int, default=4, help="prompts, asked together")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer [%(default)s]")
    parser.add_argument("--rounds", type=int, default=300, help="of the router's part")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Raises StartupError."""
    arguments = parse(argv)
    counts = [int(part) for part in arguments.sequences.split(",")]
    model, head = model_and_head(arguments)
    head = head or library.demo_head(model)  # without trees nothing would be accepted
    frames = [
        figure
        for count in counts
        for figure in measure_frames(count, arguments.nodes, arguments.row_width)
    ]
    for figure in frames:
        print(
            f"{figure['kind']:17} {figure['sequences']:3} sequences: {figure['bytes']:8} bytes,"
            f" {figure['send_us']:8.1f} us to send, {figure['receive_us']:8.1f} us to receive",
            flush=True,
        )
    stack = {kind: measure_stack(model, head, kind, arguments) for kind in FEATURES}
    result: dict[str, object] = {
        "benchmark": "transport",
        "frames": frames,
        "stack": stack,
        "router": measure_router(max(counts), arguments),
    }
    print_report(result, arguments)
    return 0


def measure_stack(
    model: Path, head: Path, features: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """`features`: as verify sends them, its setting of this name and the draft's."""
    options = Options(max_tokens=arguments.max_tokens, ignore_eos=True)
    prompts = [c.messages for c in read_conversations(GOLDENS, arguments.limit)]
    sent = ("--features", features)
    flags = {  # a whole tree in every round, and on a busy machine too: none comes too late
        "verify": ("--tree-budget", "full", *sent),
        "draft": ("--levels", "all", *sent),
        "router": ("--tree-seconds", "30"),
    }
    settings = StackSettings(model=model, head=head, flags=flags, show_logs=False)
    with Stack(settings) as stack, Client(stack.address) as client:
        router = stack.children["router"]
        before = router_overhead.cpu_seconds(router.process.pid)
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(lambda prompt: client.generate(prompt, options), prompts))
        cpu = router_overhead.cpu_seconds(router.process.pid) - before
        counted = read_counters(router.metrics_address)
    figures = of_tokens(answers, counted, cpu)
    print(f"features {features}:")
    for kind, accepted in figures["bytes_per_accepted_token"].items():
        emitted = figures["bytes_per_emitted_token"][kind]
        print(
            f"{kind:27} {accepted:9} bytes for each accepted drafted token,"
            f" {emitted:9} for each emitted token",
            flush=True,
        )
    return figures


def of_tokens(
    answers: Sequence[Generation], counted: dict[str, float], cpu: float
) -> dict[str, Any]:
    num_emitted = sum(answer.completion.num_completion_tokens for answer in answers)
    num_accepted = sum(answer.completion.speculation.num_accepted for answer in answers)
    num_rounds = sum(answer.completion.speculation.num_rounds for answer in answers)
    num_frames = sum(value for name, value in counted.items() if name.startswith("frames"))
    num_bytes = {
        kind: counted.get(f"bytes {role} {way}", 0.0) for (role, way), kind in KINDS.items()
    }
    num_bytes["features from verify"] = counted.get("features verify", 0.0)
    num_bytes["features to draft"] = counted.get("features draft", 0.0)
    return {
        "emitted_tokens": num_emitted,
        "accepted_draft_tokens": num_accepted,
        "rounds": num_rounds,
        "bytes_per_emitted_token": {k: round(v / num_emitted, 1) for k, v in num_bytes.items()},
        "bytes_per_accepted_token": {
            k: round(v / max(1, num_accepted), 1) for k, v in num_bytes.items()
        },
        "command_frames": int(num_frames),
        "router_cpu_ms_per_frame": round(1000 * cpu / max(1.0, num_frames), 3),
        "router_cpu_ms_per_token": round(1000 * cpu / num_emitted, 3),
    }


def read_counters(metrics_address: str) -> dict[str, float]:
    """Of the router's links, as `bytes verify sent`, `frames draft received`, `features draft`."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=30) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    counted: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        what = sample.name.removeprefix("canopy_router_").removesuffix("_total")
        names = {"wire_bytes": "bytes", "wire_frames": "frames", "feature_bytes": "features"}
        if what in names:
            labels = (sample.labels["role"], sample.labels.get("direction", ""))
            key = " ".join(filter(None, (names[what], *labels)))
            counted[key] = counted.get(key, 0.0) + sample.value
    return counted


def measure_router(num_sequences: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Of a round of so many sequences; `without_features`: with rows of one value."""
    measured = {}
    for name, row_bytes in (("whole", 4 * arguments.row_width), ("without_features", 4)):
        settings = argparse.Namespace(
            tokens=arguments.rounds * 3, nodes=arguments.nodes, feature_row_bytes=row_bytes
        )
        measured[name] = router_overhead.measure(num_sequences, settings)
        print(f"router, {name}: {measured[name]['router_cpu_ms']} ms of CPU a round", flush=True)
    return measured


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.transport", main))
