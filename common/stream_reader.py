"""The requests of a stream, read beside the answers that go out on it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError


@contextlib.asynccontextmanager
async def beside(
    reader: Coroutine[Any, Any, None], context: grpc.aio.ServicerContext[Any, Any]
) -> AsyncIterator[None]:
    """Runs `reader` of a call's requests as a task while the block lasts.

    Bytes that are no request end the call with INVALID_ARGUMENT.
    """
    task = asyncio.create_task(reader)
    try:
        yield
    finally:
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        except DecodeError:
            message = "a frame is no message of this stream; use the stubs of protos/canopy/v1"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
