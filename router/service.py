"""The router as a service: its readiness follows its peers."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence

import grpc.aio

from canopy.v1 import generation_pb2_grpc
from common.callers import Callers
from common.errors import StartupError
from common.log import get_logger
from common.metrics import Metrics
from common.server import Health
from common.tracing import Tracing
from router.api import GenerationServicer
from router.config import RouterConfig
from router.core import RouterCore
from router.metrics import RouterMetrics
from router.names import Resolve, resolve
from router.tokenizer import ModelTokenizer

_logger = get_logger("router")


class RouterService:
    """The public face. Without verify nothing can be answered; without a draft, everything can."""

    names: Sequence[str] = ("canopy.v1.GenerationService",)

    def __init__(self, config: RouterConfig, metrics: Metrics, resolve: Resolve = resolve) -> None:
        """Raises StartupError if the model directory lacks a file, or tokens cannot be read."""
        self._config, self._resolve = config, resolve
        self._tokenizer = ModelTokenizer(config.model)
        self._metrics = RouterMetrics(metrics)
        self._tracing = Tracing.to("router", config.trace_endpoint)
        self._callers = Callers(config.token_file, config.tenant_header)
        self._health: Health | None = None
        self._changed = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self._core: RouterCore | None = None

    @property
    def core(self) -> RouterCore:
        assert self._core is not None
        return self._core

    def register(self, server: grpc.aio.Server) -> None:
        """Runs on the event loop, so that the core's events belong to it."""
        self._core = RouterCore(
            self._config,
            self._tokenizer,
            self._metrics,
            self._changed.set,
            resolve=self._resolve,
            tracing=self._tracing,
        )
        servicer = GenerationServicer(
            self._core, self._tokenizer, self._metrics, self._callers, self._config.max_running
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)

    async def start(self, health: Health) -> None:
        """Returns once a verify was met, and a draft, or the wait for one is over.

        Raises StartupError for a peer that does not fit. One that is found not to fit later is left
        out: without verify the router turns NOT_SERVING, without the draft it goes root-only.
        """
        core = self.core
        core.start()
        fleet = core.fleet
        await self._wait_until(lambda: fleet.verify_ready)
        if self._config.draft:
            try:
                async with asyncio.timeout(self._config.draft_wait_seconds):
                    await self._wait_until(lambda: fleet.draft_ready)
            except TimeoutError:
                peers = [link.peer for link in fleet.drafts]
                reasons = "; ".join(f"{peer.address} {peer.reason}" for peer in peers)
                _logger.warning("serving without a draft", reason=reasons)
        self._follower = asyncio.create_task(self._follow(health))
        _collect_seldom()

    async def drain(self, grace_seconds: float) -> None:
        await self._stop_following()
        await self.core.drain()

    async def stop(self) -> None:
        await self._stop_following()
        if self._core is not None:
            await self._core.stop()
        await asyncio.to_thread(self._tracing.stop)

    async def _wait_until(self, is_met: Callable[[], bool]) -> None:
        while not is_met():
            for peer in self.core.fleet.peers:
                if peer.misfit:
                    raise StartupError(f"{peer.role}: {peer.address} does not fit: {peer.reason}")
            self._changed.clear()
            await self._changed.wait()

    async def _follow(self, health: Health) -> None:
        """Health says SERVING exactly while a verify is linked and serves."""
        while True:
            ready = self.core.fleet.verify_ready
            if ready != health.serving:
                reason = "" if ready else self.core.fleet.verify_reason
                _logger.info("readiness", serving=ready, reason=reason)
                await health.set_serving(ready)
            await self._changed.wait()
            self._changed.clear()

    async def _stop_following(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.gather(self._follower, return_exceptions=True)
            self._follower = None


def _collect_seldom() -> None:
    """What is here now stays: the collector need not look at it again. Rounds leave no cycles, so
    that it may come by seldom; its default is every few rounds, for milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
