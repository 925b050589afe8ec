"""GenerationService: decode, call, encode."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from canopy.v1 import generation_pb2 as pb
from canopy.v1 import generation_pb2_grpc
from common.server import canopy_version
from router.core import RouterCore
from router.handshake import PROTOCOL_VERSION
from router.requests import ErrorKind, RequestError
from router.status import to_status
from router.tokenizer import ModelTokenizer

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, core: RouterCore, tokenizer: ModelTokenizer, max_running: int) -> None:
        self._core, self._tokenizer, self._max_running = core, tokenizer, max_running

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        try:
            session = self._core.open(request)
        except RequestError as error:
            await context.abort_with_status(to_status(error))
        try:
            while True:
                output = await session.next_output()
                if isinstance(output, RequestError):
                    await context.abort_with_status(to_status(output))
                yield output
                if output.HasField("completion"):
                    return
        finally:
            session.cancel()  # the client may be gone; a session that has ended ignores it

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        return pb.AbortResponse(aborted=self._core.abort(request.request_id))

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        try:
            limits = self._core.limits()
            if request.model and request.model != limits.model_name:
                raise RequestError(
                    "model", f"{request.model!r} is not served here", ErrorKind.NOT_FOUND
                )
        except RequestError as error:
            await context.abort_with_status(to_status(error))
        response = pb.GetModelInfoResponse(
            max_context_len=limits.context_len,
            stop_token_ids=self._tokenizer.stop_token_ids,
            has_chat_template=self._tokenizer.has_chat_template,
        )
        if self._core.verify.info is not None:
            response.target.CopyFrom(self._core.verify.info.target)
        response.target.model_name = limits.model_name
        draft = self._core.draft
        if draft is not None and draft.info is not None:
            response.head_name = draft.info.head_name
            response.max_tree.max_depth = limits.max_tree.max_depth
            response.max_tree.top_k = limits.max_tree.top_k
            response.max_tree.max_nodes = limits.max_tree.max_nodes
        return response

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        peers = [
            pb.Peer(address=peer.address, role=peer.role, ready=peer.ready, reason=peer.reason)
            for peer in self._core.peers
        ]
        return pb.GetServerInfoResponse(
            version=canopy_version(), protocol_version=PROTOCOL_VERSION, peers=peers
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(num_running=self._core.num_running, max_running=self._max_running)
