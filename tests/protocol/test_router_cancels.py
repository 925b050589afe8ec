"""Clients that leave in every way there is: nothing of them stays behind."""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path

import grpc
import pytest

from canopy.v1 import generation_pb2
from tests.protocol.router_world import World, router_world, simulated_peers, until
from tests.protocol.test_router_service import request, tokens_of
from tests.unit.router_tiny import write_model

AT_A_TIME = 32
GROWTH_BYTES = 24 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def leave(world: World, chance: random.Random, number: int) -> None:
    """Asks for a long answer and goes away: at once, after some chunks, by deadline or abort."""
    prompt = tokens_of([chance.choice((8, 13, 17, 26)), 1, 7])
    fields = request(token_ids=prompt, max_tokens=400, request_id=str(number))
    way = chance.choice(("cancel", "cancel", "deadline", "abort"))
    timeout = chance.uniform(0.001, 0.03) if way == "deadline" else None
    call = world.stub.Generate(generation_pb2.GenerateRequest(**fields), timeout=timeout)
    try:
        for _ in range(chance.randrange(4)):
            await call.read()
        if way == "abort":
            await world.stub.Abort(generation_pb2.AbortRequest(request_id=str(number)))
        elif way == "deadline":
            while await call.read() is not grpc.aio.EOF:
                pass
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # noqa: PT017
    finally:
        call.cancel()


async def leave_often(world: World, count: int, seed: int) -> None:
    chance = random.Random(seed)
    for start in range(0, count, AT_A_TIME):
        numbers = range(start, min(count, start + AT_A_TIME))
        await asyncio.gather(*(leave(world, chance, number) for number in numbers))


@pytest.mark.parametrize(
    "count", [256, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
async def test_nothing_of_those_who_left_stays_behind(tmp_path: Path, count: int) -> None:
    verify, draft = simulated_peers(write_model(tmp_path / "toy"))
    async with router_world(tmp_path / "toy", verify, draft, draft_wait_seconds=5) as world:
        verify.simulator.trouble.delay_seconds = 0.002
        core = world.service.core

        def is_over() -> bool:
            toys = (world.verify_simulator.toy, world.draft_simulator.toy)
            return core.num_running == 0 and not any(toy.sequences for toy in toys)

        await leave_often(world, 128, seed=1)
        await until(is_over)
        gc.collect()
        num_tasks, resident = len(asyncio.all_tasks()), resident_bytes()
        await leave_often(world, count, seed=2)
        await until(is_over)
        world.verify_simulator.toy.closed.clear()
        world.verify_simulator.frames.clear()
        gc.collect()
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks)
        assert resident_bytes() - resident < GROWTH_BYTES
        assert not core._by_request
