"""Several choices of one request: each its own text, tagged, in one stream; ended and moved as one.

The toy target writes another text for each choice index, so that an index that got lost shows.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from canopy.v1 import generation_pb2, types_pb2
from tests.protocol.router_toys import continuation
from tests.protocol.router_world import World, router_world, simulated_peers, until
from tests.protocol.test_router_fleet import fleet, verify_toy
from tests.protocol.test_router_service import PROMPT, STOPS, request
from tests.unit.router_tiny import write_model

LENGTH = generation_pb2.FINISH_REASON_LENGTH


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("choices") / "toy")


@pytest.fixture
async def world(model: Path) -> AsyncIterator[World]:
    verify, draft = simulated_peers(model)
    async with router_world(model, verify, draft) as running:
        yield running


class Read:
    """A stream of choices, read to its end."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.completions: dict[int, generation_pb2.GenerateCompletion] = {}
        self.order: list[int] = []

    async def all(self, call: Any) -> Read:
        while (response := await call.read()) is not grpc.aio.EOF:
            if response.HasField("chunk"):
                assert response.chunk.choice_index not in self.completions
                self.tokens[response.chunk.choice_index] += response.chunk.token_ids
                self.order.append(response.chunk.choice_index)
            else:
                assert response.completion.choice_index not in self.completions
                self.completions[response.completion.choice_index] = response.completion
        return self


def ask(world: World, **fields: Any) -> Any:
    return world.stub.Generate(generation_pb2.GenerateRequest(**request(**fields)))


def written(num_tokens: int, choice_index: int) -> list[int]:
    tokens = continuation(PROMPT, num_tokens, choice_index)
    ends = [place for place, token in enumerate(tokens) if token in STOPS]
    return tokens[: ends[0] + 1] if ends else tokens


def check(read: Read, count: int, num_tokens: int) -> None:
    assert sorted(read.completions) == list(range(count))
    for index in range(count):
        assert read.tokens[index] == written(num_tokens, index), index
        usage = read.completions[index].usage
        assert (usage.num_prompt_tokens, usage.num_completion_tokens) == (
            len(PROMPT),
            len(read.tokens[index]),
        )


async def test_each_choice_is_its_own_text_in_one_stream(world: World) -> None:
    one = await Read().all(ask(world, max_tokens=60))
    read = await Read().all(ask(world, max_tokens=60, n=4))
    check(one, 1, 60)
    check(read, 4, 60)
    assert read.tokens[0] == one.tokens[0]
    assert len({tuple(tokens) for tokens in read.tokens.values()}) == 4
    assert len({done.seed for done in read.completions.values()}) == 1
    first_half = read.order[: len(read.order) // 2]
    assert set(first_half) == {0, 1, 2, 3}, "choices take turns"
    assert not world.verify_simulator.toy.sequences


async def test_choices_end_each_for_its_own_reason(world: World) -> None:
    stop = written(60, 2)[11]
    cuts = {i: w.index(stop) for i in range(4) if stop in (w := written(60, i))}
    assert 2 in cuts
    assert len(cuts) < 4
    read = await Read().all(ask(world, max_tokens=60, n=4, stop_token_ids=[stop]))
    for index, done in read.completions.items():
        if index in cuts:
            assert done.stop_token_id == stop
            assert len(read.tokens[index]) == cuts[index] + 1
        else:
            assert read.tokens[index] == written(60, index)


async def test_others_are_opened_as_forks_of_the_first(world: World) -> None:
    toy = world.verify_simulator.toy
    opened = []
    handle = toy.handle

    def watch(command: Any) -> Any:
        if command.WhichOneof("command") == "open":
            opened.append((command.sequence_id, command.open))
        return handle(command)

    toy.handle = watch  # type: ignore[method-assign]
    await Read().all(ask(world, n=3, max_tokens=8))
    first = opened[0][0]
    assert [body.choice_index for _, body in opened] == [0, 1, 2]
    assert [body.fork_of for _, body in opened] == [b"", first, first]


async def test_a_client_that_leaves_ends_all_of_them(world: World) -> None:
    world.verify.simulator.trouble.delay_seconds = 0.02
    call = ask(world, n=4, max_tokens=400)
    await call.read()
    assert len(world.verify_simulator.toy.sequences) == 4
    call.cancel()
    await until(lambda: not world.verify_simulator.toy.sequences)
    await until(lambda: not world.draft_simulator.toy.sequences)
    assert world.service.core.num_running == 0


async def test_abort_ends_all_with_completions(world: World) -> None:
    world.verify.simulator.trouble.delay_seconds = 0.02
    call = ask(world, n=3, max_tokens=400, request_id="mine")
    first = await call.read()
    assert (await world.stub.Abort(generation_pb2.AbortRequest(request_id="mine"))).aborted
    read = await Read().all(call)
    reasons = [done.finish_reason for done in read.completions.values()]
    assert reasons == [generation_pb2.FINISH_REASON_ABORTED] * 3
    assert first.chunk.request_id == "mine"
    assert not (await world.stub.Abort(generation_pb2.AbortRequest(request_id="mine"))).aborted


async def test_one_that_fails_ends_the_call(world: World) -> None:
    """A client must not take three of four answers for a whole one."""
    toy, handle, num_trees = world.verify_simulator.toy, world.verify_simulator.toy.handle, 0

    def refuse(command: Any) -> Any:
        nonlocal num_trees
        is_tree = command.WhichOneof("command") == "verify_tree"
        num_trees += is_tree
        if is_tree and num_trees == 20:
            return [toy._error(command, types_pb2.SEQUENCE_ERROR_CODE_NEVER_FITS)]
        return handle(command)

    toy.handle = refuse  # type: ignore[method-assign]
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await Read().all(ask(world, n=4, max_tokens=400))
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await until(lambda: not toy.sequences)
    assert world.service.core.num_running == 0


async def test_fail_over_keeps_each_choice_its_own(model: Path) -> None:
    async with fleet(model) as (world, verifies, drafts):
        reading = asyncio.create_task(Read().all(ask(world, n=4, max_tokens=200)))
        await until(lambda: len(verify_toy(verifies[0]).sequences) == 4)
        await asyncio.sleep(0.2)
        assert not verify_toy(verifies[1]).sequences, "all on one replica, for its pages"
        await verifies[0].stop()
        verify_toy(verifies[0]).crash()
        await drafts[0].stop()
        check(await reading, 4, 200)
        assert verify_toy(verifies[1]).num_opens == 4


async def test_each_choice_takes_a_place(model: Path) -> None:
    verify, draft = simulated_peers(model)
    verify.simulator.trouble.delay_seconds = 0.02
    async with router_world(model, verify, draft, max_running=5) as world:
        running = ask(world, n=3, max_tokens=100)
        await running.read()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await Read().all(ask(world, n=3))
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        check(await Read().all(ask(world, n=2, max_tokens=8)), 2, 8)
        running.cancel()
