"""The clients of `benchmarks.cancels`: each asks, and leaves in its own way.

Run as a program it is one that holds streams until it is killed.
"""

from __future__ import annotations

import asyncio
import enum
import random
import sys
from collections import Counter
from typing import Any

import grpc
import grpc.aio

from canopy.v1 import generation_pb2 as pb
from canopy.v1 import generation_pb2_grpc, types_pb2

NUM_TOKENS = 160
STREAMS_OF_A_PROCESS = 20
LET_GO = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)


class Way(enum.Enum):
    """How a client leaves."""

    BEFORE_FIRST_CHUNK = "cancelled before the first chunk"
    AFTER_SOME = "cancelled after some chunks"
    DEADLINE = "deadline passed"
    ABORT = "aborted by id"
    DISCONNECT = "connection broken"
    KILLED = "process killed"


WEIGHTS = {
    Way.BEFORE_FIRST_CHUNK: 30, Way.AFTER_SOME: 35, Way.DEADLINE: 15, Way.ABORT: 10,
    Way.DISCONNECT: 9.5, Way.KILLED: 0.5,
}  # fmt: skip


class Leaver:
    """So many clients at once, one after the other. `failures`: statuses nobody asked for."""

    def __init__(self, address: str, at_once: int, chance: random.Random) -> None:
        self._address, self._at_once, self._chance = address, at_once, chance
        self.num_begun = 0
        self.num_streams = 0
        self.num_chunks = 0
        self.ways: Counter[Way] = Counter()
        self.failures: list[str] = []

    async def go_on_to(self, num_clients: int) -> None:
        """Returns when so many in all have come and gone."""
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)

            async def come_and_go() -> None:
                while self.num_begun < num_clients:
                    self.num_begun += 1
                    await self._one(stub)

            await asyncio.gather(*(come_and_go() for _ in range(self._at_once)))

    async def _one(self, stub: Any) -> None:
        [way] = self._chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        self.ways[way] += 1
        if way is Way.KILLED:
            await self._kill_a_process()
            return
        if way is Way.DISCONNECT:  # a connection of its own, shut with the call under way
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(self._address, options=options) as channel:
                own = generation_pb2_grpc.GenerationServiceStub(channel)
                await self._leave(own, way)
            return
        await self._leave(stub, way)

    async def _leave(self, stub: Any, way: Way) -> None:
        chance = self._chance
        ask = request(chance)
        self.num_streams += ask.n
        timeout = chance.uniform(0.001, 0.2) if way is Way.DEADLINE else 60.0
        call = stub.Generate(ask, timeout=timeout)
        try:
            if way is Way.BEFORE_FIRST_CHUNK:
                await asyncio.sleep(chance.uniform(0, 0.03))
            elif way in (Way.DEADLINE, Way.ABORT):
                if way is Way.ABORT:
                    await self._read(call, 1)
                    await stub.Abort(pb.AbortRequest(request_id=ask.request_id))
                await self._read(call, None)
            else:
                await self._read(call, chance.randrange(1, 20))
        except grpc.aio.AioRpcError as error:
            if error.code() not in LET_GO:
                self.failures.append(f"{error.code().name}: {error.details()}")
        finally:
            if way is not Way.DISCONNECT:
                call.cancel()

    async def _read(self, call: Any, num_chunks: int | None) -> None:
        """So many chunks, or all."""
        while num_chunks is None or num_chunks > 0:
            if await call.read() is grpc.aio.EOF:
                return
            self.num_chunks += 1
            num_chunks = None if num_chunks is None else num_chunks - 1

    async def _kill_a_process(self) -> None:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.cancels_clients", self._address),
            stdout=asyncio.subprocess.PIPE,
        )
        assert child.stdout is not None
        await child.stdout.readline()  # its streams run
        self.num_streams += STREAMS_OF_A_PROCESS
        await asyncio.sleep(self._chance.uniform(0, 0.1))
        child.kill()
        await child.wait()


def request(chance: random.Random) -> pb.GenerateRequest:
    """Prompts of which some share a beginning; greedy and sampled, one choice and several."""
    stem = [1 + (7 * place) % 90 for place in range(chance.choice([0, 20, 40]))]
    tail = [chance.randrange(1, 250) for _ in range(chance.randrange(1, 30))]
    return pb.GenerateRequest(
        request_id=f"{chance.getrandbits(96):x}",
        token_ids=pb.TokenIds(ids=[*stem, *tail]),
        max_tokens=NUM_TOKENS,
        n=chance.choice([1, 1, 1, 3]),
        sampling=types_pb2.SamplingParams(temperature=chance.choice([0.0, 1.0]), ignore_eos=True),
    )


async def hold_streams(address: str) -> None:
    """Says when they run; reads slowly until somebody kills this process."""
    chance = random.Random()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        calls = [stub.Generate(request(chance)) for _ in range(STREAMS_OF_A_PROCESS)]
        for call in calls:
            await call.read()
        print("running", flush=True)
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(hold_streams(sys.argv[1]))
