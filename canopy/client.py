"""Clients of the router: `Client` for ordinary code, `AsyncClient` for asyncio.

    with Client("127.0.0.1:50051") as client:
        for event in client.stream("The capital of France is", Options(max_tokens=16)):
            ...  # Chunk after Chunk, then one Completion

A call is tried again only while nothing of its answer has come, and only where the server says
that it is away (UNAVAILABLE). Leaving the loop early cancels the call and frees its pages. Every
failure is a CanopyError.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from canopy.convert import to_error, to_event, to_generation, to_generations, to_request
from canopy.results import CanopyError, Chunk, Completion, Generation, Options, Prompt
from canopy.v1 import generation_pb2_grpc
from common.security import CallerSecurity, aio_channel, sync_channel
from common.server import channel_options

DEFAULT_ADDRESS = "127.0.0.1:50051"
MAX_MESSAGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often, and with what pauses, a call is begun again."""

    max_attempts: int = 4
    first_pause_seconds: float = 0.2

    def pause(self, attempt: int, error: CanopyError, deadline: float | None) -> float | None:
        """Seconds to wait after failed attempt `attempt` (from 0); None: give up."""
        if error.code != "UNAVAILABLE" or attempt + 1 >= self.max_attempts:
            return None
        pause = error.retry_seconds or self.first_pause_seconds * 2**attempt
        if deadline is not None and time.monotonic() + pause >= deadline:
            return None
        return pause


def _deadline(timeout_seconds: float | None) -> float | None:
    return None if timeout_seconds is None else time.monotonic() + timeout_seconds


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


class Client:
    """A synchronous client; safe to share between threads."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        retry: Retry | None = None,
        security: CallerSecurity | None = None,
    ) -> None:
        """Raises StartupError if a file of `security` cannot be used."""
        security = security or CallerSecurity()
        self._metadata = security.metadata
        self._channel = sync_channel(address, security, channel_options(MAX_MESSAGE_BYTES))
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._retry = retry or Retry()

    def stream(
        self,
        prompt: Prompt,
        options: Options | None = None,
        timeout_seconds: float | None = None,
    ) -> Iterator[Chunk | Completion]:
        """Chunks as they become final, then one Completion; with `n` one for each choice."""
        request = to_request(prompt, options or Options())
        deadline = _deadline(timeout_seconds)
        attempt, begun = 0, False
        while True:
            call = self._stub.Generate(request, timeout=_left(deadline), metadata=self._metadata)
            try:
                for response in call:
                    begun = True
                    yield to_event(response)
                return
            except grpc.RpcError as rpc_error:
                error = to_error(rpc_error)
                pause = None if begun else self._retry.pause(attempt, error, deadline)
                if pause is None:
                    raise error from None
                time.sleep(pause)
                attempt += 1
            finally:
                call.cancel()

    def generate(
        self,
        prompt: Prompt,
        options: Options | None = None,
        timeout_seconds: float | None = None,
    ) -> Generation:
        """The whole answer."""
        return to_generation(list(self.stream(prompt, options, timeout_seconds)))

    def generate_choices(
        self,
        prompt: Prompt,
        options: Options | None = None,
        timeout_seconds: float | None = None,
    ) -> list[Generation]:
        """The whole answers, `options.n` of them."""
        return to_generations(list(self.stream(prompt, options, timeout_seconds)))

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """The same for asyncio."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        retry: Retry | None = None,
        security: CallerSecurity | None = None,
    ) -> None:
        """Raises StartupError if a file of `security` cannot be used."""
        security = security or CallerSecurity()
        self._metadata = security.metadata
        self._channel = aio_channel(address, security, channel_options(MAX_MESSAGE_BYTES))
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._retry = retry or Retry()

    async def stream(
        self,
        prompt: Prompt,
        options: Options | None = None,
        timeout_seconds: float | None = None,
    ) -> AsyncIterator[Chunk | Completion]:
        """Chunks as they become final, then one Completion; with `n` one for each choice."""
        request = to_request(prompt, options or Options())
        deadline = _deadline(timeout_seconds)
        attempt, begun = 0, False
        while True:
            call = self._stub.Generate(request, timeout=_left(deadline), metadata=self._metadata)
            try:
                async for response in call:
                    begun = True
                    yield to_event(response)
                return
            except grpc.aio.AioRpcError as rpc_error:
                error = to_error(rpc_error)
                pause = None if begun else self._retry.pause(attempt, error, deadline)
                if pause is None:
                    raise error from None
                await asyncio.sleep(pause)
                attempt += 1
            finally:
                call.cancel()

    async def generate(
        self,
        prompt: Prompt,
        options: Options | None = None,
        timeout_seconds: float | None = None,
    ) -> Generation:
        """The whole answer."""
        return to_generation(
            [event async for event in self.stream(prompt, options, timeout_seconds)]
        )

    async def generate_choices(
        self,
        prompt: Prompt,
        options: Options | None = None,
        timeout_seconds: float | None = None,
    ) -> list[Generation]:
        """The whole answers, `options.n` of them."""
        return to_generations(
            [event async for event in self.stream(prompt, options, timeout_seconds)]
        )

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
