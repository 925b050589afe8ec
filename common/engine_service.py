"""The life of a service that has an engine loop: from the warm engine to the last stream."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any, Protocol

from common.engine_loop import EngineLoop
from common.errors import StartupError
from common.log import get_logger


class Streams(Protocol):
    """Who is connected."""

    def close_all(self) -> None: ...


class EngineService:
    """The half of `common.server.Service` that draft and verify share; they add `register` and
    `start`, which ends in `_run`.
    """

    def __init__(self, service: str, streams: Streams) -> None:
        self._service = service
        self._streams = streams
        self._running: EngineLoop[Any, Any, Any] | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: str | None = None

    def _run(self, loop: EngineLoop[Any, Any, Any]) -> None:
        """Runs the loop beside the server from now on."""
        self._running = loop
        self._task = asyncio.create_task(loop.run(), name=f"{self._service}-loop")
        self._task.add_done_callback(self._on_loop_end)

    async def drain(self, grace_seconds: float) -> None:
        """Refuses new sequences; returns when those that are open were closed."""
        if self._running is not None and self._failure is None:
            await self._running.drain()

    async def stop(self) -> None:
        """Ends all streams. Raises StartupError if the device was lost, for the exit code."""
        self._streams.close_all()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._running is not None:
            self._running.stop()
        if self._failure is not None:
            raise StartupError(f"{self._failure}; start the service again")

    def _on_loop_end(self, task: asyncio.Task[None]) -> None:
        """A loop that ends by itself cannot serve any more: the process ends, visibly."""
        if task.cancelled() or task.exception() is None:
            return
        self._failure = f"the {self._service} loop ended: {task.exception()}"
        logger = get_logger(f"{self._service}.main")
        logger.error(f"the {self._service} loop ended", reason=str(task.exception()))
        os.kill(os.getpid(), signal.SIGTERM)
