"""Several replicas of each service: placement, and fail-over from one that dies, drains or is full.

Real gRPC between a router and simulated peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from canopy.v1 import generation_pb2, types_pb2
from tests.protocol.router_simulators import DraftSimulator, Host, VerifySimulator
from tests.protocol.router_world import Answer, World, collect, router_world, simulated_peers, until
from tests.protocol.test_router_service import check, request, tokens_of
from tests.unit.router_tiny import write_model

PROMPTS = [[start, 1, 7] for start in (8, 13, 17, 26, 30, 43)]  # no stop token within 400


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("fleet") / "toy")


@contextlib.asynccontextmanager
async def fleet(
    model: Path, **settings: Any
) -> AsyncIterator[tuple[World, list[Host], list[Host]]]:
    """A router with two of each, all slow enough for trouble to come in mid-stream."""
    verifies, drafts = zip(simulated_peers(model), simulated_peers(model), strict=True)
    for host in verifies:
        host.simulator.trouble.delay_seconds = 0.02
    settings = {"fail_over_seconds": 0.1} | settings
    async with router_world(
        model, verifies[0], drafts[0], more_verify=verifies[1:], more_draft=drafts[1:], **settings
    ) as world:
        await until(lambda: all(peer.linked for peer in world.service.core.fleet.peers))
        yield world, list(verifies), list(drafts)


def verify_toy(host: Host) -> Any:
    assert isinstance(host.simulator, VerifySimulator)
    return host.simulator.toy


def draft_toy(host: Host) -> Any:
    assert isinstance(host.simulator, DraftSimulator)
    return host.simulator.toy


def ask(world: World, num_tokens: int) -> list[asyncio.Task[Answer]]:
    calls = [
        world.stub.Generate(
            generation_pb2.GenerateRequest(**request(token_ids=tokens_of(p), max_tokens=num_tokens))
        )
        for p in PROMPTS
    ]
    return [asyncio.create_task(collect(call)) for call in calls]


async def check_all(running: list[asyncio.Task[Answer]], num_tokens: int) -> None:
    for prompt, task in zip(PROMPTS, running, strict=True):
        check(await task, prompt, num_tokens)


async def test_sequences_are_spread_over_replicas(model: Path) -> None:
    async with fleet(model) as (world, verifies, drafts):
        running = ask(world, 100)
        await until(lambda: sum(len(verify_toy(host).sequences) for host in verifies) == 6)
        assert [len(verify_toy(host).sequences) for host in verifies] == [3, 3]
        await until(lambda: sum(len(draft_toy(host).sequences) for host in drafts) == 6)
        assert [len(draft_toy(host).sequences) for host in drafts] == [3, 3]
        await check_all(running, 100)
        await until(lambda: not any(verify_toy(host).sequences for host in verifies))
        await until(lambda: not any(draft_toy(host).sequences for host in drafts))


async def test_lost_verify_is_taken_over_by_the_other(model: Path) -> None:
    async with fleet(model) as (world, verifies, _):
        running = ask(world, 300)
        await asyncio.sleep(0.2)
        await verifies[0].stop()
        verify_toy(verifies[0]).crash()
        assert world.health.serving
        await until(lambda: len(verify_toy(verifies[1]).sequences) == 6, 1.5)
        await asyncio.sleep(0.1)
        assert world.health.serving
        await verifies[0].start()
        await check_all(running, 300)
        assert not verify_toy(verifies[0]).sequences


async def test_a_timer_that_comes_too_early_is_set_again(model: Path) -> None:
    """Event loops count from the beginning of a turn: behind a long one, timers come early."""
    async with fleet(model) as (world, verifies, _):
        moving, clock = world.service.core._moving, time.monotonic

        def late() -> float:
            return clock() - (0.05 if moving._lost_at else 0.0)

        moving._clock = late
        running = ask(world, 300)
        await asyncio.sleep(0.2)
        await verifies[0].stop()
        verify_toy(verifies[0]).crash()
        await until(lambda: len(verify_toy(verifies[1]).sequences) == 6, 1.5)
        await check_all(running, 300)


async def test_verify_that_is_back_at_once_keeps_its_sequences(model: Path) -> None:
    async with fleet(model, fail_over_seconds=3.0) as (world, verifies, _):
        running = ask(world, 200)
        await asyncio.sleep(0.2)
        opens = verify_toy(verifies[1]).num_opens
        await verifies[0].stop()
        await verifies[0].start()
        await check_all(running, 200)
        assert verify_toy(verifies[1]).num_opens == opens


async def test_both_lost_in_turn_and_back(model: Path) -> None:
    async with fleet(model) as (world, verifies, drafts):
        running = ask(world, 400)
        for hosts in (verifies, drafts, verifies):
            for host in hosts:
                await asyncio.sleep(0.1)
                await host.stop()
                toy = host.simulator.toy
                toy.crash()
                await asyncio.sleep(0.15)
                await host.start()
        await check_all(running, 400)


async def test_all_verify_lost_and_another_than_before_comes_back(model: Path) -> None:
    async with fleet(model) as (world, verifies, _):
        running = ask(world, 200)
        await asyncio.sleep(0.2)
        for host in verifies:
            await host.stop()
            verify_toy(host).crash()
        await until(lambda: not world.health.serving)
        await asyncio.sleep(0.2)
        await verifies[1].start()
        await check_all(running, 200)


async def test_lost_draft_is_taken_over_by_the_other(model: Path) -> None:
    async with fleet(model) as (world, _, drafts):
        running = ask(world, 300)
        await asyncio.sleep(0.2)
        await drafts[0].stop()
        draft_toy(drafts[0]).crash()
        before = time.monotonic()
        await until(lambda: len(draft_toy(drafts[1]).sequences) == 6)
        assert time.monotonic() - before < 1.0
        await check_all(running, 300)
        answers = [task.result() for task in running]
        assert all(a.completion.speculation.num_accepted > 10 for a in answers)


@pytest.mark.parametrize(
    "code", [types_pb2.SEQUENCE_ERROR_CODE_OVERLOADED, types_pb2.SEQUENCE_ERROR_CODE_NOT_SERVING]
)
async def test_what_one_replica_refuses_another_takes(model: Path, code: int) -> None:
    async with fleet(model) as (world, verifies, _):
        verifies[0].simulator.trouble.refuse = code
        await check_all(ask(world, 60), 60)
        assert verify_toy(verifies[1]).num_opens == 6


async def test_when_all_are_full_the_client_is_told_to_come_again(model: Path) -> None:
    async with fleet(model) as (world, verifies, _):
        for host in verifies:
            host.simulator.trouble.refuse = types_pb2.SEQUENCE_ERROR_CODE_OVERLOADED
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await world.generate(**request())
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_draining_replica_gets_no_new_sequence(model: Path) -> None:
    async with fleet(model) as (world, verifies, _):
        running = ask(world, 100)
        await until(lambda: len(verify_toy(verifies[0]).sequences) == 3)
        await verifies[0].say_serving(False)
        await until(lambda: not world.service.core.fleet.peers[0].ready)
        opens = verify_toy(verifies[0]).num_opens
        await check_all(ask(world, 40), 40)
        await check_all(running, 100)
        assert verify_toy(verifies[0]).num_opens == opens
