"""A router on loopback between simulated peers, and a client of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from canopy.v1 import generation_pb2, generation_pb2_grpc
from common.metrics import Metrics
from common.server import Health, server_options
from router.config import RouterConfig
from router.names import Resolve, resolve
from router.service import RouterService
from router.tokenizer import ModelTokenizer
from tests.protocol.router_simulators import DraftSimulator, Host, VerifySimulator

SETTINGS: dict[str, Any] = {"tree_seconds": 0.5, "verify_lost_seconds": 5.0, "model_name": "toy"}


@dataclass
class World:
    service: RouterService
    health: Health
    stub: Any
    verify: Host
    draft: Host

    @property
    def verify_simulator(self) -> VerifySimulator:
        assert isinstance(self.verify.simulator, VerifySimulator)
        return self.verify.simulator

    @property
    def draft_simulator(self) -> DraftSimulator:
        assert isinstance(self.draft.simulator, DraftSimulator)
        return self.draft.simulator

    async def generate(self, **fields: Any) -> Answer:
        return await collect(self.stub.Generate(generation_pb2.GenerateRequest(**fields)))


@dataclass
class Answer:
    chunks: list[generation_pb2.GenerateChunk]
    completion: generation_pb2.GenerateCompletion

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]


async def collect(call: Any) -> Answer:
    """Reads a stream to its end: chunks, then exactly one completion."""
    chunks, completion = [], None
    while (response := await call.read()) is not grpc.aio.EOF:
        assert completion is None
        if response.HasField("chunk"):
            chunks.append(response.chunk)
        else:
            completion = response.completion
    assert completion is not None
    return Answer(chunks, completion)


def simulated_peers(model: Path) -> tuple[Host, Host]:
    tokenizer_hash = ModelTokenizer(model).tokenizer_hash
    return Host(VerifySimulator(tokenizer_hash)), Host(DraftSimulator(tokenizer_hash))


@contextlib.asynccontextmanager
async def router_world(
    model: Path,
    verify: Host,
    draft: Host,
    *,
    with_draft: bool = True,
    start_draft: bool = True,
    more_verify: Sequence[Host] = (),
    more_draft: Sequence[Host] = (),
    resolve: Resolve = resolve,
    names: Mapping[str, tuple[str, ...]] | None = None,
    **settings: Any,
) -> AsyncIterator[World]:
    """Everything up, and everything down again; at the end no sequence is left on either peer.

    `names`: what the router is given in place of the peers' addresses.
    """
    hosts = [verify, draft, *more_verify, *more_draft]
    for host in hosts:
        await host.start()
    if not start_draft:
        await draft.stop()
    settings = SETTINGS | settings
    addresses = {
        "verify": tuple(host.address for host in (verify, *more_verify)),
        "draft": tuple(host.address for host in (draft, *more_draft) if with_draft),
    }
    config = RouterConfig(model=model, **(addresses | dict(names or {}) | settings))
    metrics = Metrics("router")
    service = RouterService(config, metrics, resolve)
    server = grpc.aio.server(options=server_options(config.max_message_bytes))
    service.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    health = Health(service.names, metrics)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            async with asyncio.timeout(20):
                await service.start(health)
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            yield World(service, health, stub, verify, draft)
        finally:
            await service.stop()
            await server.stop(None)
            for host in hosts:
                await host.stop()


async def until(condition: Any, seconds: float = 10.0) -> None:
    """Waits for something that others bring about, and that no event tells of."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
