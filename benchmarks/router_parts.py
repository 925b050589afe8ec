"""Where does the CPU time of the router's round go?

    python -m benchmarks.router_parts --sequences 64

The router's core between peers' frames, without sockets: bytes of a frame in, bytes of the frames
that follow out. For a round of all sequences together, in milliseconds of CPU time:

- `results_ms`: verify's frame is parsed, each result goes through its sequence's machine, tokens
  become text, the Extends are made.
- `trees_ms`: the draft's frame is parsed, each tree goes through its machine, the VerifyTrees are
  made.
- `frames_ms`: the two frames of commands become bytes.
- `chunks_ms`: each client's chunk is made and becomes bytes.
- `grpc_writes_ms`: gRPC's asyncio server alone, no router in it, writes as many small messages to
  as many streams of a client in another process.

What `benchmarks.router_overhead` measures above their sum is the passing on of features and gRPC's
own work on four streams. Of many rounds the tenth that took least count: a busy machine only adds.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.router_overhead import PROMPT, write_model
from benchmarks.router_peers import InstantDraft, InstantVerify, Lockstep
from benchmarks.serving import print_report
from canopy.v1 import draft_pb2, generation_pb2, generation_pb2_grpc, verify_pb2
from common.metrics import Metrics
from common.process import event_loop_factory
from router.choices import Choices
from router.config import RouterConfig
from router.core import RouterCore
from router.draft_link import DraftLink
from router.metrics import RouterMetrics
from router.tokenizer import ModelTokenizer
from router.verify_link import VerifyLink

WARM_UP_ROUNDS = 40
SECONDS_BETWEEN_WRITES = 0.012


class Rounds:
    """A router's core, and peers that answer what it says in the same process."""

    def __init__(self, model: Path, nodes: int) -> None:
        flags = ["--model", str(model), "--verify", "127.0.0.1:1", "--draft", "127.0.0.1:2"]
        flags += ["--tree-nodes", str(nodes), "--tree-seconds", "30", "--max-running", "4096"]
        tokenizer = ModelTokenizer(model)
        told = argparse.Namespace(
            tokenizer_hash=tokenizer.tokenizer_hash, nodes=nodes, feature_row_bytes=4
        )
        self.core = RouterCore(
            RouterConfig.load(flags), tokenizer, RouterMetrics(Metrics("router")), lambda: None
        )
        self.verify, self.draft = InstantVerify(told, Lockstep()), InstantDraft(told)
        (self.to_verify,), (self.to_draft,) = self.core.fleet.verifies, self.core.fleet.drafts
        self.choices: list[Choices] = []
        self.seconds: dict[str, list[float]] = defaultdict(list)

    async def open(self, num_sequences: int, num_tokens: int) -> None:
        self.to_verify.info = await self.verify.GetVerifyInfo(None, None)
        self.to_draft.info = await self.draft.GetDraftInfo(None, None)
        for link in (self.to_verify, self.to_draft):
            link.peer.linked = link.peer.ready = True
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=PROMPT), max_tokens=num_tokens
        )
        self.choices = [await self.core.open(request) for _ in range(num_sequences)]

    def turn(self) -> None:
        """A round: the peers hear what was said, and are heard."""
        for data in self._sent(self.to_draft):
            commands = draft_pb2.DraftRequest.FromString(data).commands
            events = [event for command in commands for event in self.draft.answer(command)]
            trees = draft_pb2.DraftResponse(events=events).SerializeToString()
            with self._timed("trees_ms"):
                self.core.on_draft_events(
                    self.to_draft, draft_pb2.DraftResponse.FromString(trees).events
                )
        results = []
        for data in self._sent(self.to_verify):
            for command in verify_pb2.VerifyRequest.FromString(data).commands:
                answered = self.verify.answer(command)
                assert answered is not None
                results.append(answered[0])
        answer = verify_pb2.VerifyResponse(events=results).SerializeToString()
        with self._timed("results_ms"):
            self.core.on_verify_events(
                self.to_verify, verify_pb2.VerifyResponse.FromString(answer).events
            )
        with self._timed("chunks_ms"):
            for choices in self.choices:
                response = choices.sessions[0].take_response()
                assert response is not None
                response.SerializeToString()

    def _sent(self, link: VerifyLink | DraftLink) -> list[bytes]:
        frames = []
        while link.has_commands:
            with self._timed("frames_ms"):
                frames.append(link.next_frame().SerializeToString())
        return frames

    def _timed(self, part: str) -> _Timed:
        return _Timed(self.seconds[part])


class _Timed:
    """Adds the CPU time of its block to the list."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._begun = time.process_time()

    def __exit__(self, *error: object) -> None:
        self._seconds.append(time.process_time() - self._begun)


async def measure_rounds(num_sequences: int, num_rounds: int, nodes: int) -> dict[str, float]:
    """Milliseconds of a round, by part."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        rounds = Rounds(Path(folder), nodes)
        await rounds.open(num_sequences, 4 * (num_rounds + WARM_UP_ROUNDS))
        for _ in range(WARM_UP_ROUNDS):
            rounds.turn()
        rounds.seconds.clear()
        for _ in range(num_rounds):
            rounds.turn()
    parts = {}
    for name in ("results_ms", "trees_ms", "frames_ms", "chunks_ms"):
        seconds = sorted(rounds.seconds[name])
        least = seconds[len(seconds) // 10]
        parts[name] = round(1000 * least * len(seconds) / num_rounds, 3)
    return parts


class Chunks(generation_pb2_grpc.GenerationServiceServicer):
    """Writes one small chunk to each stream whenever told to."""

    def __init__(self, num_streams: int) -> None:
        self.tick, self.all_here = asyncio.Event(), asyncio.Event()
        self.over = False
        self._num_awaited = num_streams

    def write(self) -> None:
        told, self.tick = self.tick, asyncio.Event()
        told.set()

    async def Generate(
        self, request: Any, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self._num_awaited -= 1
        if not self._num_awaited:
            self.all_here.set()
        while True:
            await self.tick.wait()
            if self.over:
                return
            response = generation_pb2.GenerateResponse()
            response.chunk.text, response.chunk.request_id = "abc", "0123456789abcdef"
            yield response


async def measure_writes(num_streams: int, num_writes: int) -> float:
    """Milliseconds for one write to every stream."""
    chunks, server = Chunks(num_streams), grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(chunks, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    flags = ["--read-from", f"127.0.0.1:{port}", "--sequences", str(num_streams)]
    command = [sys.executable, "-m", "benchmarks.router_parts", *flags]
    reader = await asyncio.to_thread(subprocess.Popen, command)
    try:
        async with asyncio.timeout(60.0):
            await chunks.all_here.wait()
        seconds = []
        for _ in range(num_writes):
            begun = time.process_time()
            chunks.write()
            await asyncio.sleep(SECONDS_BETWEEN_WRITES)
            seconds.append(time.process_time() - begun)
        chunks.over = True
        chunks.write()
        await server.stop(5.0)
    finally:
        reader.terminate()
        await asyncio.to_thread(reader.wait)
    return round(1000 * sorted(seconds)[num_writes // 10], 3)


async def read_streams(address: str, num_streams: int) -> None:
    """The client of `measure_writes`."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def read() -> None:
            async for _ in stub.Generate(generation_pb2.GenerateRequest()):
                pass

        await asyncio.gather(*(read() for _ in range(num_streams)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=64, help="of a round [%(default)s]")
    parser.add_argument("--rounds", type=int, default=300, help="to measure [%(default)s]")
    parser.add_argument("--nodes", type=int, default=16, help="of a tree [%(default)s]")
    parser.add_argument("--read-from", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        if arguments.read_from:
            runner.run(read_streams(arguments.read_from, arguments.sequences))
            return 0
        parts = runner.run(measure_rounds(arguments.sequences, arguments.rounds, arguments.nodes))
        parts["grpc_writes_ms"] = runner.run(measure_writes(arguments.sequences, arguments.rounds))
    print_report(
        {"benchmark": "router_parts", **parts, "sum_ms": round(sum(parts.values()), 3)}, arguments
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
