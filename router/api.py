"""GenerationService: decode, call, encode."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from canopy.v1 import generation_pb2 as pb
from canopy.v1 import generation_pb2_grpc
from common.callers import Callers
from common.server import canopy_version
from common.tracing import traceparent_of
from router.core import RouterCore
from router.errors import ErrorKind, Failure, GenerationError, RequestError
from router.handshake import PROTOCOL_VERSION
from router.metrics import RouterMetrics
from router.status import abort
from router.tokenizer import ModelTokenizer

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(
        self,
        core: RouterCore,
        tokenizer: ModelTokenizer,
        metrics: RouterMetrics,
        callers: Callers,
        max_running: int,
    ) -> None:
        self._callers = callers
        self._core, self._tokenizer, self._metrics = core, tokenizer, metrics
        self._max_running = max_running

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        try:
            caller = self._callers.of(context.invocation_metadata())
            traceparent = traceparent_of(context.invocation_metadata())
            choices = await self._core.open(request, caller, traceparent)
        except (RequestError, GenerationError) as error:
            self._metrics.count_rejected(error.failure)
            await abort(context, error.failure)
        try:
            while not choices.are_read:
                yield await choices.next_response()
        except GenerationError as error:
            await abort(context, error.failure)
        finally:
            choices.cancel()  # the client may be gone; nothing happens to one that has ended

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        if not request.request_id:
            await abort(context, _invalid("request_id", "empty; send the id of the generation"))
        caller = self._callers.of(context.invocation_metadata())
        aborted = self._core.abort(request.request_id, caller)
        return pb.AbortResponse(aborted=aborted)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        try:
            served = self._core.served()
        except GenerationError as error:
            await abort(context, error.failure)
        if request.model and request.model != served.model_name:
            message = f"model: {request.model!r} is not served here; send {served.model_name!r}"
            await abort(context, Failure(ErrorKind.NOT_FOUND, message, field="model"))
        response = pb.GetModelInfoResponse(
            max_context_len=served.max_context_len,
            stop_token_ids=self._tokenizer.stop_token_ids,
            has_chat_template=self._tokenizer.chat_template is not None,
        )
        response.target.CopyFrom(self._core.fleet.verify_infos[0].target)
        response.target.model_name = served.model_name
        for draft in self._core.fleet.draft_infos[:1]:
            response.head_name = draft.head_name
            response.max_tree.max_depth = served.max_tree.max_depth
            response.max_tree.top_k = served.max_tree.top_k
            response.max_tree.max_nodes = served.max_tree.max_nodes
        return response

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        peers = [
            pb.Peer(address=peer.address, role=peer.role, ready=peer.ready, reason=peer.reason)
            for peer in self._core.fleet.peers
        ]
        return pb.GetServerInfoResponse(
            version=canopy_version(), protocol_version=PROTOCOL_VERSION, peers=peers
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(
            num_running=self._core.num_running,
            num_waiting=self._core.num_waiting,
            max_running=self._max_running,
        )


def _invalid(field: str, message: str) -> Failure:
    return Failure(ErrorKind.INVALID_ARGUMENT, f"{field}: {message}", field=field)
