"""What does the router itself cost per round, at 1, 16 and 64 sequences?

    python -m benchmarks.router_overhead --sequences 1,16,64 --tokens 600

Real processes and real gRPC: a router, and peers that answer at once (`router_peers.py`). One round
is a turn of all sequences together: result → tokens to the clients, Extend → tree → VerifyTree. Per
round are given:

- `router_cpu_ms`: CPU time of the router's process, clients' streams and features included
  (/proc/PID/stat), over rounds. This is the overhead; it does not depend on the machine's load.
- `turnaround_ms_p50`: what the router adds to a round's time: from the arrival of verify's frame to
  the Extend frame that it causes, and from the trees' frame to the VerifyTree frame, both added.
- `wall_ms_p50`, `wall_ms_p99`: from verify's frame to the last of the next round's commands, so
  with four crossings of loopback, the draft's answers, and whatever else the machine does.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from canopy.v1 import generation_pb2, generation_pb2_grpc
from common.process import event_loop_factory
from router.tokenizer import ModelTokenizer

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PROMPT = [97, 98, 99, 100]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", default="1,16,64", help="numbers of sequences, commas")
    parser.add_argument("--tokens", type=int, default=600, help="tokens of each sequence")
    parser.add_argument("--nodes", type=int, default=16, help="nodes of a tree with its root")
    parser.add_argument(
        "--feature-row-bytes", type=int, default=6912, help="6912: SmolLM2 in float32"
    )
    arguments = parser.parse_args()
    results = []
    for count in (int(part) for part in arguments.sequences.split(",")):
        result = measure(count, arguments)
        results.append(result)
        print(
            f"{count:4d} sequences: {result['router_cpu_ms']:.2f} ms of CPU per round,"
            f" {result['turnaround_ms_p50']:.2f} ms turnaround,"
            f" {result['wall_ms_p50']:.2f} ms on the clock (p50), {result['num_rounds']} rounds"
        )
    report = {
        "benchmark": "router_overhead",
        "tokens": arguments.tokens,
        "nodes": arguments.nodes,
        "feature_row_bytes": arguments.feature_row_bytes,
        "load_average": round(os.getloadavg()[0], 1),
        "num_cpus": os.cpu_count(),
        "results": results,
    }
    print(json.dumps(report))
    return 0


def measure(num_sequences: int, arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_model(model)
        peer_flags = [
            *("--tokenizer-hash", ModelTokenizer(model).tokenizer_hash),
            *("--nodes", str(arguments.nodes)),
            *("--feature-row-bytes", str(arguments.feature_row_bytes)),
        ]
        with process("benchmarks.router_peers", peer_flags) as peers:
            address = announced(peers)["address"]
            flags = [
                *("--model", str(model), "--port", "0", "--max-running", "4096"),
                *("--verify", address, "--draft", address, "--tree-nodes", str(arguments.nodes)),
                *("--tree-seconds", "30", "--log-level", "warning"),
            ]
            with process("router", flags) as router:
                serving = announced(router, event="serving")
                server = serving["address"]
                cpu_before = cpu_seconds(router.pid)
                with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
                    runner.run(run_clients(server, num_sequences, arguments.tokens))
                cpu = cpu_seconds(router.pid) - cpu_before
                turnaround = turnaround_medians(serving["metrics_address"])
            peers.send_signal(signal.SIGTERM)
            seconds = announced(peers)["round_seconds"]
    num_rounds = len(seconds) + 10
    ordered = sorted(seconds)
    return {
        "sequences": num_sequences,
        "num_rounds": num_rounds,
        "router_cpu_ms": round(1000 * cpu / num_rounds, 3),
        "router_cpu_ms_per_sequence": round(1000 * cpu / num_rounds / num_sequences, 4),
        "turnaround_ms_p50": round(1000 * turnaround, 3),
        "wall_ms_p50": round(1000 * statistics.median(ordered), 3),
        "wall_ms_p99": round(1000 * ordered[int(0.99 * (len(ordered) - 1))], 3),
    }


async def run_clients(address: str, num_sequences: int, num_tokens: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        await asyncio.gather(*(run_client(stub, num_tokens) for _ in range(num_sequences)))


async def run_client(stub: Any, num_tokens: int) -> None:
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=PROMPT), max_tokens=num_tokens
    )
    num_characters = 0
    async for response in stub.Generate(request):
        num_characters += len(response.chunk.text)
    if num_characters != num_tokens:
        raise RuntimeError(f"{num_characters} characters came for {num_tokens} tokens")


def write_model(directory: Path) -> None:
    """A tokenizer of bytes alone, without a stop token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)
    printable = [c for c in letters if ord(c) < 0x100]
    shifted = iter(c for c in letters if ord(c) >= 0x100)
    vocab = {chr(b) if chr(b) in printable else next(shifted): b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text("{}", encoding="utf-8")


@contextmanager
def process(module: str, flags: list[str]) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", module, *flags], stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def announced(child: subprocess.Popen[str], event: str | None = None) -> dict[str, Any]:
    """The next JSON line of a child, or the next of that event."""
    assert child.stdout is not None
    for line in child.stdout:
        fields: dict[str, Any] = json.loads(line)
        if event in (None, fields.get("event")):
            return fields
    raise RuntimeError(f"{child.args!r} ended early")


def turnaround_medians(metrics_address: str) -> float:
    """Seconds from a frame to the one that answers it: the two links' medians, added."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics") as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    buckets: dict[str, list[tuple[float, float]]] = {}
    for sample in (sample for family in families for sample in family.samples):
        if sample.name == "canopy_router_turnaround_seconds_bucket":
            edge = (float(sample.labels["le"]), sample.value)
            buckets.setdefault(sample.labels["role"], []).append(edge)
    return sum(histogram_median(edges) for edges in buckets.values())


def histogram_median(edges: list[tuple[float, float]]) -> float:
    """Of (upper edge, count up to it), rising; within a bucket as if evenly spread."""
    half, lower, before = edges[-1][1] / 2, 0.0, 0.0
    for upper, count in edges:
        if count >= half:
            return lower + (upper - lower) * (half - before) / max(1.0, count - before)
        lower, before = upper, count
    raise ValueError("an empty histogram")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


if __name__ == "__main__":
    sys.exit(main())
