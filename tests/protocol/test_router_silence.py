"""Peers that fall silent, their connections open, as when a host dies or a cable is cut.

A proxy between the router and a simulated peer stops passing bytes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from common.server import channel_options, server_options
from tests.protocol.router_simulators import Host
from tests.protocol.router_world import router_world, simulated_peers, until
from tests.protocol.test_router_fleet import PROMPTS, ask, check_all, verify_toy
from tests.unit.router_tiny import write_model

SILENCE_SECONDS = 1.5


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("silence") / "toy")


class Cable:
    """Passes bytes on between whoever connects and `address`, until it is cut."""

    def __init__(self) -> None:
        self.whole = asyncio.Event()
        self.whole.set()
        self.address = ""
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def lead_to(self, host: Host) -> AsyncIterator[str]:
        """The address of this end."""

        async def connected(near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
            try:
                far, on = await asyncio.open_connection("127.0.0.1", host.port)
            except OSError:
                back.close()
                return
            pairs = ((near, on), (far, back))
            self._tasks += [asyncio.create_task(self._pass_on(*pair)) for pair in pairs]

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            server.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                await self.whole.wait()
                writer.write(data)
                await writer.drain()

    def cut(self) -> None:
        self.whole.clear()


async def test_silent_verify_and_draft_are_lost_and_others_take_over(model: Path) -> None:
    verifies, drafts = zip(simulated_peers(model), simulated_peers(model), strict=True)
    for host in verifies:
        host.simulator.trouble.delay_seconds = 0.02
    for host in (*verifies, *drafts):
        await host.start()  # their ports are known; started again it is the same one
        await host.stop()
    cables = Cable(), Cable()
    async with (
        cables[0].lead_to(verifies[0]) as verify_address,
        cables[1].lead_to(drafts[0]) as draft_address,
        router_world(
            model,
            verifies[0],
            drafts[0],
            more_verify=verifies[1:],
            more_draft=drafts[1:],
            names={
                "verify": (verify_address, verifies[1].address),
                "draft": (draft_address, drafts[1].address),
            },
            silence_seconds=SILENCE_SECONDS,
            fail_over_seconds=0.1,
        ) as world,
    ):
        await until(lambda: all(peer.linked for peer in world.service.core.fleet.peers))
        running = ask(world, 400)
        await until(lambda: len(verify_toy(verifies[0]).sequences) == 3)
        await asyncio.sleep(0.2)
        before = time.monotonic()
        for cable in cables:
            cable.cut()
        await until(lambda: verify_toy(verifies[1]).num_opens == len(PROMPTS))
        assert time.monotonic() - before < SILENCE_SECONDS + 2.0
        await check_all(running, 400)
        assert all(t.result().completion.speculation.num_accepted > 10 for t in running)


async def test_server_lets_go_of_a_caller_that_fell_silent() -> None:
    """Else its generation would be held for as long as TCP believes in it."""
    ended = asyncio.Event()

    class Endless(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            async def stream(request: bytes, context: object) -> AsyncIterator[bytes]:
                try:
                    yield b"first"
                    await asyncio.sleep(60)
                finally:
                    ended.set()

            return grpc.unary_stream_rpc_method_handler(stream)

    server = grpc.aio.server(options=server_options(1 << 20, SILENCE_SECONDS))
    server.add_generic_rpc_handlers((Endless(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    cable, host = Cable(), Host(None, port)  # type: ignore[arg-type]  # its address alone
    async with (
        cable.lead_to(host) as address,
        grpc.aio.insecure_channel(address, options=channel_options(1 << 20)) as channel,
    ):
        call = channel.unary_stream("/toy.Toy/Stream")(b"")
        assert await call.read() == b"first"
        cable.cut()
        async with asyncio.timeout(SILENCE_SECONDS + 5):
            await ended.wait()
        call.cancel()
    await server.stop(None)
