"""`canopy serve draft`: puts the draft service together and runs it until a signal."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

import grpc.aio

from common.errors import StartupError
from common.log import get_logger
from common.metrics import Metrics
from common.server import Health, run_service
from draft_service.assembly import assemble
from draft_service.config import DraftConfig
from draft_service.loop import DraftLoop
from draft_service.machine import DraftMachine
from draft_service.metrics import DraftMetrics
from draft_service.service import DraftServicer
from draft_service.streams import StreamHub

_logger = get_logger("draft.main")


class DraftService:
    """The head behind gRPC; implements `common.server.Service`."""

    names: Sequence[str] = ("canopy.v1.DraftService",)

    def __init__(self, config: DraftConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = DraftMetrics(metrics, config.tree, config.max_extend_tokens)
        self._hub = StreamHub(config.feature_memory_bytes)
        self._servicer = DraftServicer(self._hub, config.tree)
        self._loop: DraftLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: str | None = None

    def register(self, server: grpc.aio.Server) -> None:
        self._servicer.register(server)

    async def start(self, health: Health) -> None:
        """Loads and compiles on a thread. Raises StartupError."""
        assembly = await asyncio.to_thread(assemble, self._config)
        self._loop = DraftLoop(
            DraftMachine(assembly.limits),
            assembly.engine,
            deliver=self._hub.deliver,
            on_room=self._hub.share_credit,
            metrics=self._metrics,
            gather_seconds=self._config.gather_seconds,
        )
        self._servicer.loop = self._loop
        self._servicer.info = assembly.info
        self._task = asyncio.create_task(self._loop.run(), name="draft-loop")
        self._task.add_done_callback(self._on_loop_end)

    async def drain(self, grace_seconds: float) -> None:
        """Refuses new sequences; returns when those that are open were closed."""
        if self._loop is not None and self._failure is None:
            await self._loop.drain()

    async def stop(self) -> None:
        """Ends all streams. Raises StartupError if the device was lost, for the exit code."""
        self._hub.close_all()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._loop is not None:
            self._loop.stop()
        if self._failure is not None:
            raise StartupError(f"{self._failure}; start the service again")

    def _on_loop_end(self, task: asyncio.Task[None]) -> None:
        """A loop that ends by itself cannot serve any more: the process ends, visibly."""
        if task.cancelled() or task.exception() is None:
            return
        self._failure = f"the draft loop ended: {task.exception()}"
        _logger.error("the draft loop ended", reason=str(task.exception()))
        os.kill(os.getpid(), signal.SIGTERM)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service; returns its exit code. Raises StartupError."""
    config = DraftConfig.load(argv)
    metrics = Metrics("draft")
    return run_service(DraftService(config, metrics), config, metrics)
