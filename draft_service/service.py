"""DraftService over gRPC: decode, hand to the loop, encode. No decisions, no jax."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from canopy.v1 import draft_pb2, draft_pb2_grpc
from common.log import get_logger
from common.outbox import Outbox
from common.stream_reader import beside
from common.tracing import note_open
from common.types import FeatureRows, TreeShape
from draft_service.codec import decode_features, decode_request, encode_events, encode_info
from draft_service.commands import Open
from draft_service.events import Event
from draft_service.info import DraftInfo
from draft_service.loop import DraftLoop
from draft_service.streams import FeatureSender, StreamHub

_logger = get_logger("draft.service")

Context = grpc.aio.ServicerContext[Any, Any]


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    def __init__(self, hub: StreamHub, tree: TreeShape) -> None:
        """`loop` and `info` are set once the engine is warm; no call arrives before."""
        self._hub = hub
        self._tree = tree
        self.loop: DraftLoop | None = None
        self.info: DraftInfo | None = None

    def register(self, server: grpc.aio.Server) -> None:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)

    async def GetDraftInfo(
        self, request: draft_pb2.GetDraftInfoRequest, context: Context
    ) -> draft_pb2.GetDraftInfoResponse:
        assert self.info is not None
        return encode_info(self.info)

    async def Draft(
        self, request_iterator: AsyncIterator[draft_pb2.DraftRequest], context: Context
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        loop = self._loop
        stream, outbox = self._hub.open_outbox()
        loop.connect(stream)
        try:
            async with beside(self._read(stream, outbox, request_iterator), context):
                while events := await outbox.take():
                    yield encode_events(events)
                if outbox.overflowed:
                    message = "events are not read fast enough; attach again and read on"
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        finally:
            self._hub.close_outbox(stream)
            loop.disconnect(stream)

    async def SendFeatures(
        self, request_iterator: AsyncIterator[draft_pb2.SendFeaturesRequest], context: Context
    ) -> AsyncIterator[draft_pb2.SendFeaturesResponse]:
        loop, sender = self._loop, self._hub.add_sender()
        loop.share_room()
        try:
            async with beside(self._read_features(sender, request_iterator), context):
                while not sender.ended:
                    await sender.wake.wait()
                    sender.wake.clear()
                    granted, sender.to_grant_bytes = sender.to_grant_bytes, 0
                    if granted:
                        yield draft_pb2.SendFeaturesResponse(credit_bytes=granted)
        finally:
            self._hub.remove_sender(sender)

    @property
    def _loop(self) -> DraftLoop:
        assert self.loop is not None
        return self.loop

    async def _read(
        self,
        stream: int,
        outbox: Outbox[Event],
        requests: AsyncIterator[draft_pb2.DraftRequest],
    ) -> None:
        """Until the router half-closes or goes; then the stream ends."""
        try:
            async for request in requests:
                commands, errors = decode_request(stream, request, self._tree)
                for command in commands:
                    if isinstance(command, Open):
                        note_open(_logger, command.sequence_id, command.trace)
                self._hub.deliver(errors)
                self._loop.submit(stream, commands)
        finally:
            outbox.close()

    async def _read_features(
        self, sender: FeatureSender, requests: AsyncIterator[draft_pb2.SendFeaturesRequest]
    ) -> None:
        try:
            async for request in requests:
                sender.outstanding_bytes -= sum(len(block.data) for block in request.blocks)
                self._loop.receive(self._decoded(request))
        finally:
            sender.end()

    def _decoded(self, request: draft_pb2.SendFeaturesRequest) -> list[FeatureRows]:
        """The blocks that can be read; of the others their sequences' owners are told."""
        rows = []
        for block in request.blocks:
            try:
                rows.append(decode_features(block))
            except ValueError as error:
                self._loop.refuse(block.sequence_id, block.epoch, str(error))
        return rows
