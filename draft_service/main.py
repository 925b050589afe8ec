"""`canopy serve draft`: puts the draft service together and runs it until a signal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio

from common.engine_service import EngineService
from common.group.life import FollowingEngine, run_follower
from common.metrics import Metrics
from common.server import Health, run_service
from draft_service.assembly import assemble, build_engine, facts_of
from draft_service.config import DraftConfig
from draft_service.loop import DraftLoop
from draft_service.machine import DraftMachine
from draft_service.metrics import DraftMetrics
from draft_service.service import DraftServicer
from draft_service.streams import StreamHub
from models.device import leave_hosts


class DraftService(EngineService):
    """The head behind gRPC; implements `common.server.Service`."""

    names: Sequence[str] = ("canopy.v1.DraftService",)

    def __init__(self, config: DraftConfig, metrics: Metrics) -> None:
        self._settings = config
        self._metrics = DraftMetrics(metrics, config.tree, config.max_extend_tokens)
        self._hub = StreamHub(config.feature_memory_bytes)
        self._servicer = DraftServicer(self._hub, config.tree)
        super().__init__(config, metrics, self._hub)

    def register(self, server: grpc.aio.Server) -> None:
        self._servicer.register(server)

    async def start(self, health: Health) -> None:
        """Waits for the other hosts, loads and compiles, on threads. Raises StartupError."""
        group = await self._gather()
        assembly = await asyncio.to_thread(assemble, self._settings, group)
        loop = DraftLoop(
            DraftMachine(assembly.limits),
            assembly.engine,
            deliver=self._hub.deliver,
            on_room=self._hub.share_credit,
            metrics=self._metrics,
            gather_seconds=self._settings.gather_seconds,
        )
        self._servicer.loop = loop
        self._servicer.info = assembly.info
        self._run(loop)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service; returns its exit code. Raises StartupError."""
    config = DraftConfig.load(argv)
    metrics = Metrics("draft")
    if config.host_id:
        return run_follower(config, metrics, lambda: _build_follower(config), leave_hosts)
    return run_service(DraftService(config, metrics), config, metrics)


def _build_follower(config: DraftConfig) -> tuple[FollowingEngine, dict[str, Any]]:
    engine, identity = build_engine(config)
    return engine, facts_of(config, engine, identity)
