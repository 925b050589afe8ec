"""The link to verify: commands, events, and features within the credit that the router grants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import grpc.aio

from canopy.v1 import types_pb2, verify_pb2, verify_pb2_grpc
from common.security import CallerSecurity, Metadata
from router.codec import num_data_bytes
from router.links import CALL_TIMEOUT_SECONDS, Link, LinkListener, Misfit, write

FEATURE_CREDIT_BYTES = 16 << 20
"""Feature bytes that may be inside the router at one time: the bound of all its feature queues."""

_MIN_GRANT_BYTES = 256 << 10
"""Credit goes back in such portions, not row by row."""


class VerifyLink(Link[verify_pb2.VerifyCommand, verify_pb2.VerifyEvent]):
    """`info`: of the last verify that fitted. `check`: the mismatch in words, or None."""

    role = "verify"
    service = "canopy.v1.VerifyService"
    stream_path = "/canopy.v1.VerifyService/Verify"
    response_type = verify_pb2.VerifyResponse

    def __init__(
        self,
        address: str,
        max_message_bytes: int,
        listener: LinkListener[verify_pb2.VerifyEvent],
        security: CallerSecurity,
        silence_seconds: float,
        check: Callable[[verify_pb2.GetVerifyInfoResponse], str | None],
        on_features: Callable[[types_pb2.FeatureBlock, Callable[[int], None]], None],
    ) -> None:
        """`on_features`: gets each block, and what to call when bytes have left the router."""
        super().__init__(address, max_message_bytes, listener, security, silence_seconds)
        self.info: verify_pb2.GetVerifyInfoResponse | None = None
        self.num_feature_bytes = 0
        self._check, self._on_features = check, on_features
        self._life = 0
        self._owed_bytes = 0
        self._owes = asyncio.Event()

    def _return_credit(self, life: int, num_bytes: int) -> None:
        """Feature bytes that have left the router: as many more may come.

        Bytes of an earlier life of the stream are owed to nobody.
        """
        if life != self._life:
            return
        self._owed_bytes += num_bytes
        if self._owed_bytes >= _MIN_GRANT_BYTES:
            self._owes.set()

    async def _meet(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        info = await stub.GetVerifyInfo(
            verify_pb2.GetVerifyInfoRequest(),
            timeout=CALL_TIMEOUT_SECONDS,
            metadata=metadata,
        )
        if (mismatch := self._check(info)) is not None:
            raise Misfit(mismatch)
        self.info = info

    def _frame(self, commands: list[verify_pb2.VerifyCommand]) -> verify_pb2.VerifyRequest:
        return verify_pb2.VerifyRequest(commands=commands)

    def _feature_work(
        self, channel: grpc.aio.Channel, metadata: Metadata
    ) -> list[Coroutine[Any, Any, None]]:
        call = verify_pb2_grpc.VerifyServiceStub(channel).ReceiveFeatures(metadata=metadata)
        # What was owed to the stream before is void: every stream begins with the whole credit.
        self._owed_bytes, self._owes = FEATURE_CREDIT_BYTES, asyncio.Event()
        self._owes.set()
        self._life += 1
        return [self._receive_features(call), self._grant(call)]

    async def _receive_features(self, call: Any) -> None:
        returned = partial(self._return_credit, self._life)
        async for response in call:
            for block in response.blocks:
                self.num_feature_bytes += num_data_bytes(block)
                self._on_features(block, returned)

    async def _grant(self, call: Any) -> None:
        while True:
            await self._owes.wait()
            self._owes.clear()
            granted, self._owed_bytes = self._owed_bytes, 0
            await write(call, verify_pb2.ReceiveFeaturesRequest(credit_bytes=granted))
