"""The router's long-lived link to one verify or draft service: made, kept, made again.

A link has a command stream, whose frames carry whatever many sequences have to say at that moment,
and a feature stream beside it. A lost link is made again with growing pauses; whoever holds
sequences is told. Commands not yet sent when a link goes down are dropped: the state machines ask
again. `verify_link.py` and `draft_link.py` are the two kinds.
"""

from __future__ import annotations

import abc
import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import StartupError
from common.log import get_logger
from common.security import CallerSecurity, Metadata, aio_channel
from common.server import channel_options

MAX_COMMANDS_PER_FRAME = 256
MAX_TOKENS_PER_FRAME = 1 << 18
"""Of Opens; three bytes each. One prompt more than that still fits a message of the usual limit."""
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 1.0
CALL_TIMEOUT_SECONDS = 5.0

_logger = get_logger("router.links")

CommandMessage = TypeVar("CommandMessage")
EventMessage = TypeVar("EventMessage")


class Misfit(Exception):
    """The peer answers but does not fit; the message names the mismatch and the remedy."""


class NotYet(Exception):
    """The peer cannot be judged yet; the message says what it waits for."""


@dataclass(slots=True)
class PeerState:
    """What GetServerInfo shows of a peer. `linked`: the streams are up. `ready`: and it serves."""

    address: str
    role: str
    linked: bool = False
    ready: bool = False
    misfit: bool = False
    reason: str = "not connected yet"


@dataclass(slots=True)
class LinkCounts:
    """Since the start of the process."""

    num_frames_sent: int = 0
    num_frames_received: int = 0
    num_commands_sent: int = 0
    num_events_received: int = 0
    num_bytes_sent: int = 0
    num_bytes_received: int = 0
    num_losses: int = 0


@dataclass(frozen=True, slots=True)
class LinkListener(Generic[EventMessage]):
    """`on_events`: one frame's. `on_up`, `on_down`: the streams. `on_change`: the peer's state.

    `asked_at`: when what is being answered arrived. `on_sent`: a frame whose first command answers
    that is handed to the transport; told the role, and when that was.
    """

    on_events: Callable[[Iterable[EventMessage]], None]
    on_up: Callable[[], None]
    on_down: Callable[[], None]
    on_change: Callable[[], None]
    asked_at: Callable[[], float]
    on_sent: Callable[[str, float], None]


class Link(abc.ABC, Generic[CommandMessage, EventMessage]):
    """Connects, reconnects, sends commands in coalesced frames, hands events on."""

    role: str
    service: str
    stream_path: str
    response_type: Any

    def __init__(
        self,
        address: str,
        max_message_bytes: int,
        listener: LinkListener[EventMessage],
        security: CallerSecurity,
        silence_seconds: float,
    ) -> None:
        """`silence_seconds`: without an answer to pings for so long, the peer is lost."""
        self.peer = PeerState(address, self.role)
        self.counts = LinkCounts()
        self._listener = listener
        self._security = security
        self._options = [
            *channel_options(max_message_bytes, silence_seconds),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        self._outbox: deque[tuple[CommandMessage, int]] = deque()
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._doubted = asyncio.Event()
        self._was_linked = False
        self._asked_at = 0.0  # for the first command of the outbox
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_connected(), name=f"link-{self.role}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def send(self, command: CommandMessage, num_tokens: int = 0) -> None:
        """Queues a command for the next frame; dropped while the link is down.

        `num_tokens`: those of an Open, by which frames are kept small.
        """
        if self.peer.linked:
            if not self._outbox:
                self._asked_at = self._listener.asked_at()
                self._filled.set()
            self._outbox.append((command, num_tokens))

    def meet_again(self) -> None:
        """Ends this life of the link, so that the next asks anew whether the peer fits."""
        self._doubted.set()

    @property
    def has_commands(self) -> bool:
        return bool(self._outbox)

    async def flush(self) -> None:
        """Returns once the outbox was handed to the transport, or the link is down."""
        while self.peer.linked and self._outbox:
            self._emptied.clear()
            await self._emptied.wait()

    # -- the kinds fill in

    @abc.abstractmethod
    async def _meet(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        """Asks who the peer is. Raises Misfit."""

    @abc.abstractmethod
    def _frame(self, commands: list[CommandMessage]) -> Any:
        """One message of the command stream."""

    @abc.abstractmethod
    def _feature_work(
        self, channel: grpc.aio.Channel, metadata: Metadata
    ) -> list[Coroutine[Any, Any, None]]:
        """What keeps the feature stream going."""

    # -- one life after the other

    async def _keep_connected(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                async with aio_channel(self.peer.address, self._security, self._options) as channel:
                    await self._live(channel)
                self._note_loss("the peer ended the stream")
            except Misfit as misfit:
                self._note_loss(str(misfit), misfit=True)
            except NotYet as wait:
                self._note_loss(str(wait))
                pause = FIRST_PAUSE_SECONDS
            except StartupError as error:  # a file that is not there at this moment
                self._note_loss(str(error))
            except grpc.aio.AioRpcError as error:
                self._note_loss(f"{error.code().name}: {error.details()}")
            except Exception as error:  # a fault of ours must not end the link for good
                _logger.exception("link failed", peer=self.peer.address, role=self.role)
                self._note_loss(f"{type(error).__name__}: {error}")
            pause = FIRST_PAUSE_SECONDS if self._was_linked else pause
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _note_loss(self, reason: str, *, misfit: bool = False) -> None:
        peer = self.peer
        self._was_linked = peer.linked
        if peer.linked:
            _logger.warning("peer lost", peer=peer.address, role=self.role, reason=reason)
        elif misfit and reason != peer.reason:
            _logger.warning("peer does not fit", peer=peer.address, role=self.role, reason=reason)
        elif reason != peer.reason:
            _logger.info("no peer yet", peer=peer.address, role=self.role, reason=reason)
        peer.linked, peer.ready, peer.misfit, peer.reason = False, False, misfit, reason
        self._outbox.clear()
        self._emptied.set()
        if self._was_linked:
            self.counts.num_losses += 1
            self._listener.on_down()
        self._listener.on_change()

    async def _live(self, channel: grpc.aio.Channel) -> None:
        """One life of the link: until one of its streams ends."""
        shown = self._security.metadata
        await self._meet(channel, shown)
        metadata: Metadata = (("canopy-link-id", secrets.token_hex(16)), *shown)
        call = self._open_stream(channel, metadata)
        self._filled, self._doubted = asyncio.Event(), asyncio.Event()
        peer = self.peer
        peer.linked, peer.ready, peer.misfit, peer.reason = True, True, False, ""
        _logger.info("peer linked", peer=peer.address, role=self.role)
        work = [
            *(self._write(call), self._read(call), self._watch_health(channel), self._doubt()),
            *self._feature_work(channel, metadata),
        ]
        tasks = [asyncio.ensure_future(part) for part in work]
        self._listener.on_up()
        self._listener.on_change()
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.cancel()

    def _open_stream(self, channel: grpc.aio.Channel, metadata: Metadata) -> Any:
        """The command stream. Bytes are counted where they are made: asking a message for its size
        costs as much as making them.
        """
        counts, parse = self.counts, self.response_type.FromString

        def serialize(frame: Any) -> bytes:
            data: bytes = frame.SerializeToString()
            counts.num_bytes_sent += len(data)
            return data

        def deserialize(data: bytes) -> Any:
            counts.num_bytes_received += len(data)
            return parse(data)

        open_stream = channel.stream_stream(self.stream_path, serialize, deserialize)
        return open_stream(metadata=metadata)

    async def _write(self, call: Any) -> None:
        """What is ready at this moment goes in one frame; a slow transport makes fuller ones."""
        while True:
            await self._filled.wait()
            frame = self.next_frame()
            self._listener.on_sent(self.role, self._asked_at)
            await write(call, frame)
            if not self._outbox:
                self._emptied.set()

    def next_frame(self) -> Any:
        """The commands that are ready, as one message of the stream."""
        batch = self._next_batch()
        self.counts.num_frames_sent += 1
        self.counts.num_commands_sent += len(batch)
        return self._frame(batch)

    def _next_batch(self) -> list[CommandMessage]:
        batch: list[CommandMessage] = []
        outbox, num_tokens = self._outbox, 0
        while outbox and len(batch) < MAX_COMMANDS_PER_FRAME and num_tokens < MAX_TOKENS_PER_FRAME:
            command, tokens = outbox.popleft()
            batch.append(command)
            num_tokens += tokens
        if not outbox:
            self._filled.clear()
        return batch

    async def _read(self, call: Any) -> None:
        counts = self.counts
        while (frame := await call.read()) is not grpc.aio.EOF:
            counts.num_frames_received += 1
            counts.num_events_received += len(frame.events)
            self._listener.on_events(frame.events)
        await _raise_status(call)

    async def _doubt(self) -> None:
        await self._doubted.wait()
        raise NotYet("asked anew whether it fits")

    async def _watch_health(self, channel: grpc.aio.Channel) -> None:
        """A peer that drains takes no new sequences; those that run go on."""
        stub = health_pb2_grpc.HealthStub(channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(service=self.service))
        serving = health_pb2.HealthCheckResponse.SERVING
        try:
            async for response in call:
                ready = response.status == serving
                if ready != self.peer.ready:
                    self.peer.ready, self.peer.reason = ready, "" if ready else "draining"
                    self._listener.on_change()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
        await _forever()  # the command stream says when the peer is gone


async def write(call: Any, message: Any) -> None:
    """Writes; on a stream that has ended it waits to be cancelled, for the reader knows why."""
    try:
        await call.write(message)
    except asyncio.InvalidStateError:
        await _forever()


async def _forever() -> None:
    await asyncio.Event().wait()


async def _raise_status(call: Any) -> None:
    """Raises AioRpcError unless the stream ended well."""
    code = await call.code()
    if code is not grpc.StatusCode.OK:
        trailers = await call.trailing_metadata()
        raise grpc.aio.AioRpcError(
            code, await call.initial_metadata(), trailers, await call.details()
        )
