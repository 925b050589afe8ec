"""`canopy serve verify`: puts the verify service together and runs it until a signal."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

import grpc.aio

from canopy.v1 import verify_pb2_grpc
from common.errors import StartupError
from common.log import get_logger
from common.metrics import Metrics
from common.server import Health, run_service
from verify_service.assembly import assemble
from verify_service.codec import encode_info
from verify_service.config import VerifyConfig
from verify_service.loop import VerifyLoop
from verify_service.machine import VerifyMachine
from verify_service.metrics import VerifyMetrics
from verify_service.service import VerifyServicer
from verify_service.streams import StreamHub

_logger = get_logger("verify.main")


class VerifyService:
    """The target behind gRPC; implements `common.server.Service`."""

    names: Sequence[str] = ("canopy.v1.VerifyService",)

    def __init__(self, config: VerifyConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = VerifyMetrics(metrics, config.max_tree_depth, config.max_step_tokens)
        self._hub = StreamHub()
        self._servicer = VerifyServicer(self._hub)
        self._loop: VerifyLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: str | None = None

    def register(self, server: grpc.aio.Server) -> None:
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(self._servicer, server)

    async def start(self, health: Health) -> None:
        """Loads and compiles on a thread. Raises StartupError."""
        assembly = await asyncio.to_thread(assemble, self._config)
        self._loop = VerifyLoop(
            VerifyMachine(assembly.limits, assembly.budget),
            assembly.engine,
            deliver=self._hub.deliver,
            on_features=self._hub.wake_receivers,
            metrics=self._metrics,
            gather_seconds=self._config.gather_seconds,
        )
        self._servicer.loop = self._loop
        self._servicer.info = encode_info(assembly.info)
        self._task = asyncio.create_task(self._loop.run(), name="verify-loop")
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
        self._failure = f"the verify loop ended: {task.exception()}"
        _logger.error("the verify loop ended", reason=str(task.exception()))
        os.kill(os.getpid(), signal.SIGTERM)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service; returns its exit code. Raises StartupError."""
    config = VerifyConfig.load(argv)
    metrics = Metrics("verify")
    return run_service(VerifyService(config, metrics), config, metrics)
