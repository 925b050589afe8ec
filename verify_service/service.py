"""VerifyService over gRPC: decode, hand to the loop, encode. No decisions, no jax."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from canopy.v1 import verify_pb2, verify_pb2_grpc
from common.log import get_logger
from common.outbox import Outbox
from common.stream_reader import beside
from common.tensors import MAX_PIECE_BYTES, FeaturePiece, split_rows
from common.tracing import note_open
from verify_service.codec import decode_request, encode_events, encode_pieces
from verify_service.commands import Open
from verify_service.events import Event
from verify_service.loop import VerifyLoop
from verify_service.streams import FeatureReceiver, StreamHub

LINK_ID_KEY = "canopy-link-id"
MAX_LINK_ID_CHARACTERS = 64

_logger = get_logger("verify.service")

Context = grpc.aio.ServicerContext[Any, Any]


class VerifyServicer(verify_pb2_grpc.VerifyServiceServicer):
    def __init__(self, hub: StreamHub) -> None:
        """`loop` and `info` are set once the engine is warm; no call arrives before."""
        self._hub = hub
        self.loop: VerifyLoop | None = None
        self.info: verify_pb2.GetVerifyInfoResponse | None = None

    async def GetVerifyInfo(
        self, request: verify_pb2.GetVerifyInfoRequest, context: Context
    ) -> verify_pb2.GetVerifyInfoResponse:
        assert self.info is not None
        return self.info

    async def Verify(
        self, request_iterator: AsyncIterator[verify_pb2.VerifyRequest], context: Context
    ) -> AsyncIterator[verify_pb2.VerifyResponse]:
        loop, link_id = self._loop, await _link_id(context)
        stream, outbox = self._hub.open(link_id)
        loop.connect(stream)
        try:
            async with beside(self._read(stream, outbox, request_iterator), context):
                while events := await outbox.take():
                    yield encode_events(events)
                if outbox.overflowed:
                    message = "events are not read fast enough; attach again and read on"
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        finally:
            self._hub.close(stream, link_id)
            loop.disconnect(stream)

    async def ReceiveFeatures(
        self, request_iterator: AsyncIterator[verify_pb2.ReceiveFeaturesRequest], context: Context
    ) -> AsyncIterator[verify_pb2.ReceiveFeaturesResponse]:
        link_id = await _link_id(context)
        receiver = self._hub.add_receiver(link_id)
        try:
            async with beside(_read_credit(receiver, request_iterator), context):
                while not receiver.ended:
                    receiver.wake.clear()
                    while pieces := self._next_pieces(link_id, receiver):
                        yield encode_pieces(pieces)
                    if not receiver.ended:
                        await receiver.wake.wait()
        finally:
            self._hub.remove_receiver(link_id, receiver)

    @property
    def _loop(self) -> VerifyLoop:
        assert self.loop is not None
        return self.loop

    async def _read(
        self,
        stream: int,
        outbox: Outbox[Event],
        requests: AsyncIterator[verify_pb2.VerifyRequest],
    ) -> None:
        """Until the router half-closes or goes; then the stream ends."""
        try:
            async for request in requests:
                commands, errors = decode_request(stream, request)
                for command in commands:
                    if isinstance(command, Open):
                        note_open(_logger, command.sequence_id, command.trace)
                self._loop.submit(stream, commands, errors)
        finally:
            outbox.close()

    def _next_pieces(self, link_id: str, receiver: FeatureReceiver) -> list[FeaturePiece]:
        """Pieces of one message: within the credit and 1 MiB in all."""
        pieces: list[FeaturePiece] = []
        room = min(receiver.credit_bytes, MAX_PIECE_BYTES)
        stream = self._hub.stream_of(link_id)
        while stream is not None and room > 0 and not receiver.ended:
            rows = self._loop.next_features(stream, room)
            if rows is None:
                break
            pieces += split_rows(rows)
            room -= rows.rows.nbytes
            receiver.credit_bytes -= rows.rows.nbytes
        return pieces


async def _read_credit(
    receiver: FeatureReceiver, requests: AsyncIterator[verify_pb2.ReceiveFeaturesRequest]
) -> None:
    try:
        async for request in requests:
            receiver.grant(request.credit_bytes)
    finally:
        receiver.end()


async def _link_id(context: Context) -> str:
    """The router's name for its pair of streams; without one, the channel's own address."""
    for key, value in context.invocation_metadata() or ():
        if key == LINK_ID_KEY:
            link_id = str(value)
            if not 0 < len(link_id) <= MAX_LINK_ID_CHARACTERS:
                message = (
                    f"{LINK_ID_KEY}: {len(link_id)} characters; must be 1 to"
                    f" {MAX_LINK_ID_CHARACTERS}"
                )
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
            return link_id
    return context.peer()
