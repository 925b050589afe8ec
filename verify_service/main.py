"""`canopy serve verify`: puts the verify service together and runs it until a signal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio

from canopy.v1 import verify_pb2_grpc
from common.engine_service import EngineService
from common.group.life import FollowingEngine, run_follower
from common.metrics import Metrics
from common.server import Health, run_service
from common.tracing import Tracing
from models.device import leave_hosts
from verify_service.assembly import assemble, build_engine, facts_of
from verify_service.codec import encode_info
from verify_service.config import VerifyConfig
from verify_service.loop import VerifyLoop
from verify_service.machine import VerifyMachine
from verify_service.metrics import VerifyMetrics
from verify_service.service import VerifyServicer
from verify_service.streams import StreamHub


class VerifyService(EngineService):
    """The target behind gRPC; implements `common.server.Service`."""

    names: Sequence[str] = ("canopy.v1.VerifyService",)

    def __init__(self, config: VerifyConfig, metrics: Metrics) -> None:
        self._settings = config
        self._metrics = VerifyMetrics(metrics, config.max_tree_depth, config.max_step_tokens)
        self._tracing = Tracing.to("verify", config.trace_endpoint)
        self._hub = StreamHub(self._tracing)
        self._servicer = VerifyServicer(self._hub)
        super().__init__(config, metrics, self._hub)

    def register(self, server: grpc.aio.Server) -> None:
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(self._servicer, server)

    async def start(self, health: Health) -> None:
        """Waits for the other hosts, loads and compiles, on threads. Raises StartupError."""
        group = await self._gather()
        assembly = await asyncio.to_thread(assemble, self._settings, group)
        loop = VerifyLoop(
            VerifyMachine(assembly.limits, assembly.budget, assembly.gate, assembly.pace),
            assembly.engine,
            deliver=self._hub.deliver,
            on_features=self._hub.wake_receivers,
            metrics=self._metrics,
            gather_seconds=self._settings.gather_seconds,
        )
        self._servicer.loop = loop
        self._servicer.info = encode_info(assembly.info)
        self._run(loop)

    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            await asyncio.to_thread(self._tracing.stop)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service; returns its exit code. Raises StartupError."""
    config = VerifyConfig.load(argv)
    metrics = Metrics("verify")
    if config.host_id:
        return run_follower(config, metrics, lambda: _build_follower(config), leave_hosts)
    return run_service(VerifyService(config, metrics), config, metrics)


def _build_follower(config: VerifyConfig) -> tuple[FollowingEngine, dict[str, Any]]:
    engine, identity = build_engine(config)
    return engine, facts_of(engine, identity)
