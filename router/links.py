"""The router's long-lived streams to one verify and one draft service.

Each link keeps one command stream, whose frames carry whatever many sequences have to say at that
moment, and one feature stream beside it. A lost link is made again with growing pauses; whoever
holds sequences is told `on_up` and `on_down`. Frames not yet sent when a link goes down are
dropped: the state machines ask again.
"""

from __future__ import annotations

import abc
import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from canopy.v1 import draft_pb2, draft_pb2_grpc, types_pb2, verify_pb2, verify_pb2_grpc
from common.log import get_logger
from common.server import channel_options

FEATURE_CREDIT_BYTES = 8 << 20
"""Feature bytes that may be on their way through the router, per verify link."""
MAX_COMMANDS_PER_FRAME = 256
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0
_CALL_TIMEOUT_SECONDS = 5.0

_logger = get_logger("router.links")

Command = TypeVar("Command")
Event = TypeVar("Event")
FeatureSink = Callable[[types_pb2.FeatureBlock], None]


class Misfit(Exception):
    """The peer answers but does not fit; the message names the mismatch."""


@dataclass(slots=True)
class PeerState:
    """What GetServerInfo shows of a peer."""

    address: str
    role: str
    ready: bool = False
    reason: str = "not connected yet"


class Link(abc.ABC, Generic[Command, Event]):
    """Connects, reconnects, sends commands in coalesced frames, hands events on."""

    role: str

    def __init__(
        self,
        address: str,
        max_message_bytes: int,
        on_event: Callable[[Event], None],
        on_up: Callable[[], None],
        on_down: Callable[[], None],
    ) -> None:
        self.peer = PeerState(address, self.role)
        self.link_id = secrets.token_hex(8)
        self._options = channel_options(max_message_bytes)
        self._on_event, self._on_up, self._on_down = on_event, on_up, on_down
        self._outbox: list[Command] = []
        self._wake = asyncio.Event()
        self._emptied = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.num_frames_sent = 0
        self.num_bytes_sent = 0
        self.num_bytes_received = 0

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_connected(), name=f"link-{self.role}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def send(self, command: Command) -> None:
        """Queues a command for the next frame; dropped while the link is down."""
        if self.peer.ready:
            self._outbox.append(command)
            self._wake.set()

    async def flush(self) -> None:
        """Returns once the outbox was handed to the transport, or the link is down."""
        self._emptied.clear()
        if self.peer.ready and self._outbox:
            await self._emptied.wait()

    async def _keep_connected(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                async with grpc.aio.insecure_channel(
                    self.peer.address, options=self._options
                ) as channel:
                    await self._run(channel)
                reason = "the peer closed the stream"
            except Misfit as misfit:
                reason = str(misfit)
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            was_ready, self.peer.ready = self.peer.ready, False
            if was_ready or reason != self.peer.reason:
                _logger.warning("peer lost", peer=self.peer.address, role=self.role, reason=reason)
            self.peer.reason = reason
            self._emptied.set()
            if was_ready:
                self._outbox.clear()
                self._on_down()
                pause = _FIRST_PAUSE_SECONDS
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _run(self, channel: grpc.aio.Channel) -> None:
        """One life of the link: until a stream ends."""
        await self._handshake(channel)
        self._wake = asyncio.Event()
        metadata = (("canopy-link-id", self.link_id),)
        call = self._open_stream(channel, self._frames(), metadata)
        others = [self._read(call), *self._feature_tasks(channel, metadata)]
        tasks = [asyncio.ensure_future(task) for task in others]
        self.peer.ready, self.peer.reason = True, ""
        _logger.info("peer connected", peer=self.peer.address, role=self.role)
        self._on_up()
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _frames(self) -> AsyncIterator[Any]:
        while True:
            await self._wake.wait()
            # Let every sequence that is ready in this turn of the loop into the same frame.
            await asyncio.sleep(0)
            batch = self._outbox[:MAX_COMMANDS_PER_FRAME]
            del self._outbox[:MAX_COMMANDS_PER_FRAME]
            if not self._outbox:
                self._wake.clear()
            if batch:
                frame = self._frame(batch)
                self.num_frames_sent += 1
                self.num_bytes_sent += frame.ByteSize()
                yield frame
            if not self._outbox:
                self._emptied.set()

    async def _read(self, call: Any) -> None:
        async for frame in call:
            self.num_bytes_received += frame.ByteSize()
            for event in frame.events:
                self._on_event(event)

    @abc.abstractmethod
    async def _handshake(self, channel: grpc.aio.Channel) -> None:
        """Asks who the peer is. Raises Misfit."""

    @abc.abstractmethod
    def _open_stream(self, channel: grpc.aio.Channel, frames: Any, metadata: Any) -> Any: ...

    @abc.abstractmethod
    def _frame(self, commands: list[Command]) -> Any: ...

    @abc.abstractmethod
    def _feature_tasks(self, channel: grpc.aio.Channel, metadata: Any) -> list[Awaitable[None]]: ...


class VerifyLink(Link[verify_pb2.VerifyCommand, verify_pb2.VerifyEvent]):
    role = "verify"

    def __init__(
        self,
        *args: Any,
        check: Callable[[verify_pb2.GetVerifyInfoResponse], str | None],
        on_features: FeatureSink,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.info: verify_pb2.GetVerifyInfoResponse | None = None
        self._check, self._on_features = check, on_features
        self._credit: asyncio.Queue[int] = asyncio.Queue()

    def return_credit(self, num_bytes: int) -> None:
        """Feature bytes that have left the router: as many more may come."""
        self._credit.put_nowait(num_bytes)

    async def _handshake(self, channel: grpc.aio.Channel) -> None:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        info = await stub.GetVerifyInfo(
            verify_pb2.GetVerifyInfoRequest(), timeout=_CALL_TIMEOUT_SECONDS
        )
        if (mismatch := self._check(info)) is not None:
            raise Misfit(mismatch)
        self.info = info

    def _open_stream(self, channel: grpc.aio.Channel, frames: Any, metadata: Any) -> Any:
        return verify_pb2_grpc.VerifyServiceStub(channel).Verify(frames, metadata=metadata)

    def _frame(self, commands: list[verify_pb2.VerifyCommand]) -> verify_pb2.VerifyRequest:
        return verify_pb2.VerifyRequest(commands=commands)

    def _feature_tasks(self, channel: grpc.aio.Channel, metadata: Any) -> list[Awaitable[None]]:
        return [self._receive_features(channel, metadata)]

    async def _receive_features(self, channel: grpc.aio.Channel, metadata: Any) -> None:
        self._credit = asyncio.Queue()
        self._credit.put_nowait(FEATURE_CREDIT_BYTES)
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        call = stub.ReceiveFeatures(self._grants(), metadata=metadata)
        async for response in call:
            for block in response.blocks:
                self._on_features(block)

    async def _grants(self) -> AsyncIterator[verify_pb2.ReceiveFeaturesRequest]:
        queue = self._credit
        while True:
            granted = await queue.get()
            while not queue.empty():
                granted += queue.get_nowait()
            yield verify_pb2.ReceiveFeaturesRequest(credit_bytes=granted)


class DraftLink(Link[draft_pb2.DraftCommand, draft_pb2.DraftEvent]):
    role = "draft"

    def __init__(
        self,
        *args: Any,
        check: Callable[[draft_pb2.GetDraftInfoResponse], str | None],
        on_features_sent: Callable[[int], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.info: draft_pb2.GetDraftInfoResponse | None = None
        self._check, self._on_features_sent = check, on_features_sent
        self._blocks: list[types_pb2.FeatureBlock] = []
        self._changed = asyncio.Event()
        self._credit_bytes = 0

    def send_features(self, block: types_pb2.FeatureBlock) -> None:
        """Queued until the draft has credit; the verify link's credit bounds the queue."""
        if self.peer.ready:
            self._blocks.append(block)
            self._changed.set()
        else:
            self._on_features_sent(len(block.data))

    async def _handshake(self, channel: grpc.aio.Channel) -> None:
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        info = await stub.GetDraftInfo(
            draft_pb2.GetDraftInfoRequest(), timeout=_CALL_TIMEOUT_SECONDS
        )
        if (mismatch := self._check(info)) is not None:
            raise Misfit(mismatch)
        self.info = info

    def _open_stream(self, channel: grpc.aio.Channel, frames: Any, metadata: Any) -> Any:
        return draft_pb2_grpc.DraftServiceStub(channel).Draft(frames, metadata=metadata)

    def _frame(self, commands: list[draft_pb2.DraftCommand]) -> draft_pb2.DraftRequest:
        return draft_pb2.DraftRequest(commands=commands)

    def _feature_tasks(self, channel: grpc.aio.Channel, metadata: Any) -> list[Awaitable[None]]:
        return [self._send_features(channel, metadata)]

    async def _send_features(self, channel: grpc.aio.Channel, metadata: Any) -> None:
        self._changed, self._credit_bytes = asyncio.Event(), 0
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        call = stub.SendFeatures(self._feature_frames(), metadata=metadata)
        try:
            async for response in call:
                self._credit_bytes += response.credit_bytes
                self._changed.set()
        finally:
            dropped, self._blocks = self._blocks, []
            self._on_features_sent(sum(len(block.data) for block in dropped))

    async def _feature_frames(self) -> AsyncIterator[draft_pb2.SendFeaturesRequest]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._blocks and self._credit_bytes > 0:
                batch = [self._blocks.pop(0)]
                num_bytes = len(batch[0].data)
                while self._blocks and num_bytes + len(self._blocks[0].data) <= 1 << 20:
                    batch.append(self._blocks.pop(0))
                    num_bytes += len(batch[-1].data)
                self._credit_bytes -= num_bytes
                yield draft_pb2.SendFeaturesRequest(blocks=batch)
                self._on_features_sent(num_bytes)
