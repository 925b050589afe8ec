"""The link to the draft: commands and events, and features within the credit that it grants."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import grpc.aio

from canopy.v1 import draft_pb2, draft_pb2_grpc, types_pb2
from common.security import CallerSecurity, Metadata
from router.codec import num_data_bytes
from router.links import CALL_TIMEOUT_SECONDS, Link, LinkListener, Misfit, write

MAX_FEATURE_FRAME_BYTES = 1 << 20


class DraftLink(Link[draft_pb2.DraftCommand, draft_pb2.DraftEvent]):
    """`info`: of the last draft that fitted. `check`: the mismatch in words, or None."""

    role = "draft"
    service = "canopy.v1.DraftService"
    stream_path = "/canopy.v1.DraftService/Draft"
    response_type = draft_pb2.DraftResponse

    def __init__(
        self,
        address: str,
        max_message_bytes: int,
        listener: LinkListener[draft_pb2.DraftEvent],
        security: CallerSecurity,
        silence_seconds: float,
        check: Callable[[draft_pb2.GetDraftInfoResponse], str | None],
    ) -> None:
        super().__init__(address, max_message_bytes, listener, security, silence_seconds)
        self.info: draft_pb2.GetDraftInfoResponse | None = None
        self.num_feature_bytes = 0
        self._check = check
        self._blocks: deque[tuple[types_pb2.FeatureBlock, Callable[[int], None]]] = deque()
        self._credit_bytes = 0
        self._changed = asyncio.Event()

    def send_features(self, block: types_pb2.FeatureBlock, returned: Callable[[int], None]) -> None:
        """Queued until the draft has credit; the verify link's credit bounds the queue.

        `returned` is told how many bytes have left the router, sent or dropped.
        """
        if self.peer.linked:
            self._blocks.append((block, returned))
            self._changed.set()
        else:
            returned(num_data_bytes(block))

    async def _meet(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        info = await stub.GetDraftInfo(
            draft_pb2.GetDraftInfoRequest(),
            timeout=CALL_TIMEOUT_SECONDS,
            metadata=metadata,
        )
        if (mismatch := self._check(info)) is not None:
            raise Misfit(mismatch)
        self.info = info

    def _frame(self, commands: list[draft_pb2.DraftCommand]) -> draft_pb2.DraftRequest:
        return draft_pb2.DraftRequest(commands=commands)

    def _feature_work(
        self, channel: grpc.aio.Channel, metadata: Metadata
    ) -> list[Coroutine[Any, Any, None]]:
        call = draft_pb2_grpc.DraftServiceStub(channel).SendFeatures(metadata=metadata)
        self._credit_bytes, self._changed = 0, asyncio.Event()
        return [self._take_credit(call), self._send_blocks(call)]

    async def _take_credit(self, call: Any) -> None:
        async for response in call:
            self._credit_bytes += response.credit_bytes
            self._changed.set()

    async def _send_blocks(self, call: Any) -> None:
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                while batch := self._next_blocks():
                    blocks = [block for block, _ in batch]
                    num_bytes = sum(map(num_data_bytes, blocks))
                    self._credit_bytes -= num_bytes
                    try:
                        await write(call, draft_pb2.SendFeaturesRequest(blocks=blocks))
                    finally:
                        self.num_feature_bytes += num_bytes
                        _return(batch)
        finally:
            dropped = list(self._blocks)
            self._blocks.clear()
            _return(dropped)

    def _next_blocks(self) -> list[tuple[types_pb2.FeatureBlock, Callable[[int], None]]]:
        """Blocks of one message: within the credit and 1 MiB in all, at least one."""
        batch = []
        room = min(self._credit_bytes, MAX_FEATURE_FRAME_BYTES)
        while self._blocks and (num_bytes := num_data_bytes(self._blocks[0][0])) <= room:
            room -= num_bytes
            batch.append(self._blocks.popleft())
        return batch


def _return(blocks: list[tuple[types_pb2.FeatureBlock, Callable[[int], None]]]) -> None:
    for block, returned in blocks:
        returned(num_data_bytes(block))
