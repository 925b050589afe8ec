"""The toys of `router_toys` as real gRPC services in this process, with knobs for trouble."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from canopy.v1 import (
    draft_pb2,
    draft_pb2_grpc,
    types_pb2,
    verify_pb2,
    verify_pb2_grpc,
)
from common.security import RequireToken, ServerTls
from common.server import server_options
from router.handshake import PROTOCOL_VERSION
from tests.protocol.router_toys import ROW_WIDTH, VOCAB_SIZE, ToyDraft, ToyVerify

CREDIT_BYTES = 4096
FEATURES = types_pb2.FeatureSpec(
    kind=types_pb2.FEATURE_KIND_AUX,
    boundaries=[1, 2, 3],
    dtype=types_pb2.FEATURE_DTYPE_FLOAT32,
    row_width=ROW_WIDTH,
)


def target_identity(tokenizer_hash: str) -> types_pb2.TargetIdentity:
    return types_pb2.TargetIdentity(
        model_name="toy",
        vocab_size=VOCAB_SIZE,
        padded_vocab_size=VOCAB_SIZE,
        tokenizer_hash=tokenizer_hash,
        hidden_size=8,
        weights_hash="w",
    )


@dataclass
class Trouble:
    """`delay_seconds` before each answer; `repeat`: each event twice; `mute`: no events at all.

    `refuse`: every Open gets this error code.
    """

    delay_seconds: float = 0.0
    repeat: bool = False
    mute: bool = False
    refuse: int = 0


class VerifySimulator(verify_pb2_grpc.VerifyServiceServicer):
    def __init__(self, tokenizer_hash: str) -> None:
        self.toy = ToyVerify()
        self.trouble = Trouble()
        self.frames: list[int] = []  # commands in each
        self.outbox: asyncio.Queue[list[verify_pb2.VerifyEvent]] = asyncio.Queue()
        self.credit_bytes = 0
        self.num_feature_bytes = 0
        self.changed = asyncio.Event()
        self.info = verify_pb2.GetVerifyInfoResponse(
            protocol_version=PROTOCOL_VERSION,
            target=target_identity(tokenizer_hash),
            features=FEATURES,
            max_context_len=512,
            max_tree_nodes=32,
            max_sequences=64,
        )

    async def GetVerifyInfo(self, request: Any, context: Any) -> verify_pb2.GetVerifyInfoResponse:
        return self.info

    async def Verify(self, requests: Any, context: Any) -> AsyncIterator[verify_pb2.VerifyResponse]:
        self.outbox = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests, self.outbox))
        try:
            while True:
                events = await self.outbox.get()
                if self.trouble.delay_seconds:
                    await asyncio.sleep(self.trouble.delay_seconds)
                while not self.outbox.empty():
                    events += self.outbox.get_nowait()
                if events and not self.trouble.mute:
                    yield verify_pb2.VerifyResponse(events=events)
        finally:
            reader.cancel()

    async def _read(self, requests: Any, outbox: asyncio.Queue[Any]) -> None:
        async for request in requests:
            self.frames.append(len(request.commands))
            events = []
            for command in request.commands:
                if self.trouble.refuse and command.WhichOneof("command") == "open":
                    error = types_pb2.SequenceError(
                        code=self.trouble.refuse,  # type: ignore[arg-type]
                        message="the toy refuses",
                    )
                    events.append(
                        verify_pb2.VerifyEvent(
                            sequence_id=command.sequence_id, epoch=command.epoch, error=error
                        )
                    )
                    continue
                events += self.toy.handle(command) * (2 if self.trouble.repeat else 1)
            outbox.put_nowait(events)
            self.changed.set()

    async def ReceiveFeatures(
        self, requests: Any, context: Any
    ) -> AsyncIterator[verify_pb2.ReceiveFeaturesResponse]:
        self.credit_bytes = 0
        reader = asyncio.create_task(self._read_credit(requests))
        try:
            while True:
                self.changed.clear()
                if self.credit_bytes > 0 and (blocks := self.toy.features(max_rows=16)):
                    num_bytes = sum(len(block.data) for block in blocks)
                    self.credit_bytes -= num_bytes
                    self.num_feature_bytes += num_bytes
                    yield verify_pb2.ReceiveFeaturesResponse(blocks=blocks)
                else:
                    await self.changed.wait()
        finally:
            reader.cancel()

    async def _read_credit(self, requests: Any) -> None:
        async for request in requests:
            self.credit_bytes += request.credit_bytes
            self.changed.set()


class DraftSimulator(draft_pb2_grpc.DraftServiceServicer):
    def __init__(self, tokenizer_hash: str) -> None:
        self.toy = ToyDraft()
        self.trouble = Trouble()
        self.outbox: asyncio.Queue[list[draft_pb2.DraftEvent]] = asyncio.Queue()
        self.num_feature_bytes = 0
        self.granted_bytes = 0
        self.info = draft_pb2.GetDraftInfoResponse(
            protocol_version=PROTOCOL_VERSION,
            head_name="toy-head",
            target=target_identity(tokenizer_hash),
            features=FEATURES,
            max_context_len=512,
            max_tree=types_pb2.TreeShape(max_depth=8, top_k=8, max_nodes=32),
            max_sequences=64,
        )

    async def GetDraftInfo(self, request: Any, context: Any) -> draft_pb2.GetDraftInfoResponse:
        return self.info

    async def Draft(self, requests: Any, context: Any) -> AsyncIterator[draft_pb2.DraftResponse]:
        self.outbox = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests, self.outbox))
        try:
            while True:
                events = await self.outbox.get()
                if self.trouble.delay_seconds:
                    await asyncio.sleep(self.trouble.delay_seconds)
                while not self.outbox.empty():
                    events += self.outbox.get_nowait()
                if events and not self.trouble.mute:
                    events = events * 2 if self.trouble.repeat else events
                    yield draft_pb2.DraftResponse(events=events)
        finally:
            reader.cancel()

    async def _read(self, requests: Any, outbox: asyncio.Queue[Any]) -> None:
        async for request in requests:
            outbox.put_nowait(
                [event for command in request.commands for event in self.toy.handle(command)]
            )

    async def SendFeatures(
        self, requests: Any, context: Any
    ) -> AsyncIterator[draft_pb2.SendFeaturesResponse]:
        self.granted_bytes, self.num_feature_bytes = CREDIT_BYTES, 0
        yield draft_pb2.SendFeaturesResponse(credit_bytes=CREDIT_BYTES)
        async for request in requests:
            taken = 0
            for block in request.blocks:
                taken += len(block.data)
                self.outbox.put_nowait(self.toy.take(block))
            self.num_feature_bytes += taken
            assert self.num_feature_bytes <= self.granted_bytes, "more than the credit"
            self.granted_bytes += taken
            yield draft_pb2.SendFeaturesResponse(credit_bytes=taken)


@dataclass
class Host:
    """A simulator behind a port of its own, that can go and come back."""

    simulator: VerifySimulator | DraftSimulator
    port: int = 0
    tls: ServerTls | None = None
    token_file: Path | None = None
    server: grpc.aio.Server | None = None
    health: health.aio.HealthServicer = field(default_factory=health.aio.HealthServicer)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def service(self) -> str:
        kind = "Verify" if isinstance(self.simulator, VerifySimulator) else "Draft"
        return f"canopy.v1.{kind}Service"

    async def start(self) -> None:
        guards = [RequireToken(self.token_file)] if self.token_file else []
        server = grpc.aio.server(interceptors=guards, options=server_options(1 << 24))
        if isinstance(self.simulator, VerifySimulator):
            verify_pb2_grpc.add_VerifyServiceServicer_to_server(self.simulator, server)
        else:
            draft_pb2_grpc.add_DraftServiceServicer_to_server(self.simulator, server)
        self.health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        await self.say_serving(True)
        address = f"127.0.0.1:{self.port}"
        if self.tls is None:
            self.port = server.add_insecure_port(address)
        else:
            self.port = server.add_secure_port(address, self.tls.credentials())
        await server.start()
        self.server = server

    async def say_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        state = status.SERVING if serving else status.NOT_SERVING
        await self.health.set(self.service, state)

    async def stop(self) -> None:
        """At once, in mid-stream."""
        if self.server is not None:
            await self.server.stop(None)
            self.server = None
