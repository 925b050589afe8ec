"""What one caller may take: concurrent generations and its share of the queue; who a caller is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from canopy.v1 import generation_pb2
from common.callers import ANYBODY, Caller, Callers
from common.errors import ConfigError, StartupError
from router.config import RouterConfig
from tests.protocol.router_world import World, collect, router_world, simulated_peers, until
from tests.protocol.test_router_service import request
from tests.unit.router_tiny import write_model

ACME, ACME_NEW, BETA, NAMELESS = (letter * 32 for letter in "abcd")
TOKENS = f"# callers\n{ACME} acme\n{ACME_NEW} acme\n{BETA}  beta\n{NAMELESS}\n"
CODE = grpc.StatusCode


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tenants") / "toy")


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.write_text(TOKENS)
    return file


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def ask(world: World, metadata: Any, **fields: Any) -> Any:
    message = generation_pb2.GenerateRequest(**request(**fields))
    return world.stub.Generate(message, metadata=metadata)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str, bool]:
    """Status, message, and whether it says when to come again."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await collect(call)
    status = rpc_status.from_call(failure.value)
    assert status is not None
    retry = error_details_pb2.RetryInfo()
    told = any(detail.Unpack(retry) for detail in status.details)
    return failure.value.code(), failure.value.details() or "", told


def refusals(world: World, limit: str) -> float:
    return world.service._metrics.tenant_refusals.labels(limit)._value.get()


async def begun(world: World, *calls: Any) -> None:
    """All have their first token, and go on slowly."""
    for call in calls:
        assert (await call.read()).HasField("chunk")


async def test_a_caller_at_its_limit_is_refused_and_others_are_not(
    model: Path, token_file: Path
) -> None:
    verify, draft = simulated_peers(model)
    verify.simulator.trouble.delay_seconds = 0.02
    settings = {"tenant_max_running": 2, "tenant_max_running_of": ("beta=1",)}
    async with router_world(model, verify, draft, token_file=token_file, **settings) as world:
        acme = [ask(world, bearer(token), max_tokens=300) for token in (ACME, ACME_NEW)]
        await begun(world, *acme)
        code, message, told = await refusal(ask(world, bearer(ACME)))
        assert (code, told) == (CODE.RESOURCE_EXHAUSTED, True)
        assert "tenant 'acme' run" in message
        assert ACME not in message

        beta = ask(world, bearer(BETA), max_tokens=300)
        await begun(world, beta)
        assert (await refusal(ask(world, bearer(BETA))))[0] is CODE.RESOURCE_EXHAUSTED
        await collect(ask(world, bearer(NAMELESS), max_tokens=4))
        assert refusals(world, "running") == 2

        acme[0].cancel()
        await until(lambda: world.service.core.num_running == 2)
        await collect(ask(world, bearer(ACME), max_tokens=4))


async def test_choices_count_and_more_than_ever_possible_is_invalid(
    model: Path, token_file: Path
) -> None:
    verify, draft = simulated_peers(model)
    async with router_world(
        model, verify, draft, token_file=token_file, tenant_max_running=3
    ) as world:
        code, message, told = await refusal(ask(world, bearer(ACME), n=4))
        assert (code, told) == (CODE.INVALID_ARGUMENT, False)
        assert message.startswith("n: 4 choices")
        running = ask(world, bearer(ACME), n=2, max_tokens=400)
        await begun(world, running)
        assert (await refusal(ask(world, bearer(ACME), n=2)))[0] is CODE.RESOURCE_EXHAUSTED
        running.cancel()


async def test_what_was_refused_for_another_reason_holds_no_place(
    model: Path, token_file: Path
) -> None:
    verify, draft = simulated_peers(model)
    async with router_world(
        model, verify, draft, token_file=token_file, tenant_max_running=1
    ) as world:
        too_long = generation_pb2.TokenIds(ids=[5] * 600)
        code, _, _ = await refusal(ask(world, bearer(ACME), token_ids=too_long))
        assert code is CODE.INVALID_ARGUMENT
        await collect(ask(world, bearer(ACME), max_tokens=4))


async def test_one_caller_does_not_fill_the_queue(model: Path, token_file: Path) -> None:
    """Of eight places a caller's generations without a token take two; begun ones do not count."""
    verify, draft = simulated_peers(model)
    verify.simulator.trouble.delay_seconds = 0.02
    settings = {"max_running": 8, "tenant_queue_share": 0.25}
    async with router_world(model, verify, draft, token_file=token_file, **settings) as world:
        running = [ask(world, bearer(ACME), max_tokens=300) for _ in range(2)]
        await begun(world, *running)
        verify.simulator.trouble.mute = True
        waiting = [ask(world, bearer(ACME), max_tokens=300) for _ in range(2)]
        await until(lambda: world.service.core.num_running == 4)
        code, message, told = await refusal(ask(world, bearer(ACME)))
        assert (code, told) == (CODE.RESOURCE_EXHAUSTED, True)
        assert "wait for a first token" in message
        beta = ask(world, bearer(BETA), max_tokens=300)
        await until(lambda: world.service.core.num_running == 5)
        assert refusals(world, "waiting") == 1
        for call in (*running, *waiting, beta):
            call.cancel()
        await until(lambda: world.service.core.num_running == 0)


async def test_a_gateway_names_callers(model: Path) -> None:
    verify, draft = simulated_peers(model)
    verify.simulator.trouble.delay_seconds = 0.02
    settings = {"tenant_header": "x-tenant", "tenant_max_running": 1}
    async with router_world(model, verify, draft, **settings) as world:
        one = ask(world, (("x-tenant", "one"),), max_tokens=300, request_id="mine")
        await begun(world, one)
        assert (await refusal(ask(world, (("x-tenant", "one"),))))[0] is CODE.RESOURCE_EXHAUSTED
        other = ask(world, (("x-tenant", "other"),), max_tokens=4, request_id="mine")
        await collect(other)
        one.cancel()


def test_callers_by_name_by_token_and_by_nothing(token_file: Path) -> None:
    callers = Callers(token_file)
    assert callers.of(bearer(ACME)) == callers.of(bearer(ACME_NEW)) == Caller("acme", "acme")
    nameless = callers.of(bearer(NAMELESS))
    assert not nameless.name
    assert nameless.key not in ("", NAMELESS)
    assert callers.of(None) == callers.of((("authorization", "Basic x"),)) == ANYBODY
    token_file.write_text(f"{ACME} other\n")
    assert callers.of(bearer(ACME)) == Caller("other", "other")
    token_file.write_text("broken")  # what was known stays
    assert callers.of(bearer(ACME)) == Caller("other", "other")


def test_what_cannot_be_meant_is_refused_at_start(token_file: Path, model: Path) -> None:
    token_file.write_text(f"{ACME} acme corporation\n")
    with pytest.raises(StartupError, match="more than a token and a name") as caught:
        Callers(token_file)
    assert ACME not in str(caught.value)
    for flags, words in (
        (("--tenant-max-running-of", "acme"), "tenant_max_running_of: .*NAME=NUMBER"),
        (("--tenant-header", "X Tenant"), "tenant_header: .*no metadata key"),
        (("--tenant-queue-share", "0"), "tenant_queue_share"),
    ):
        with pytest.raises(ConfigError, match=words):
            RouterConfig.load(["--model", str(model), "--verify", "v:1", *flags], environ={})
