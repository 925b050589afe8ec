"""`canopy serve router`: puts the router together and runs it until a signal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc.aio

from canopy.v1 import generation_pb2_grpc
from common.metrics import Metrics
from common.server import Health, run_service
from router.api import GenerationServicer
from router.config import RouterConfig
from router.core import RouterCore
from router.metrics import RouterMetrics
from router.tokenizer import ModelTokenizer


class RouterService:
    """The public face. Its health follows verify: without it nothing can be answered."""

    names: Sequence[str] = ("canopy.v1.GenerationService",)

    def __init__(self, config: RouterConfig, metrics: Metrics) -> None:
        """Raises StartupError if the model directory lacks a file."""
        self._config = config
        self._tokenizer = ModelTokenizer(config.model)
        self._core = RouterCore(
            config, self._tokenizer, RouterMetrics(metrics), self._on_verify_ready
        )
        self._health: Health | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def register(self, server: grpc.aio.Server) -> None:
        servicer = GenerationServicer(self._core, self._tokenizer, self._config.max_running)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)

    async def start(self, health: Health) -> None:
        """Returns once verify, and draft where one is configured, were met for the first time."""
        self._core.start()
        await self._core.all_met.wait()
        self._health = health

    async def drain(self, grace_seconds: float) -> None:
        self._health = None
        await self._core.drain()

    async def stop(self) -> None:
        await self._core.stop()

    def _on_verify_ready(self, ready: bool) -> None:
        if self._health is None:
            return
        task = asyncio.ensure_future(self._health.set_serving(ready))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the router; returns its exit code. Raises StartupError."""
    config = RouterConfig.load(argv)
    metrics = Metrics("router")
    return run_service(RouterService(config, metrics), config, metrics)
