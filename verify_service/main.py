"""`canopy serve verify`: puts the verify service together and runs it until a signal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc.aio

from canopy.v1 import verify_pb2_grpc
from common.engine_service import EngineService
from common.metrics import Metrics
from common.server import Health, run_service
from common.tracing import Tracing
from verify_service.assembly import assemble
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
        self._config = config
        self._metrics = VerifyMetrics(metrics, config.max_tree_depth, config.max_step_tokens)
        self._tracing = Tracing.to("verify", config.trace_endpoint)
        self._hub = StreamHub(self._tracing)
        self._servicer = VerifyServicer(self._hub)
        super().__init__("verify", self._hub)

    def register(self, server: grpc.aio.Server) -> None:
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(self._servicer, server)

    async def start(self, health: Health) -> None:
        """Loads and compiles on a thread. Raises StartupError."""
        assembly = await asyncio.to_thread(assemble, self._config)
        loop = VerifyLoop(
            VerifyMachine(assembly.limits, assembly.budget, assembly.gate),
            assembly.engine,
            deliver=self._hub.deliver,
            on_features=self._hub.wake_receivers,
            metrics=self._metrics,
            gather_seconds=self._config.gather_seconds,
        )
        self._servicer.loop = loop
        self._servicer.info = encode_info(assembly.info)
        self._run(loop)

    async def stop(self) -> None:
        await super().stop()
        await asyncio.to_thread(self._tracing.stop)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service; returns its exit code. Raises StartupError."""
    config = VerifyConfig.load(argv)
    metrics = Metrics("verify")
    return run_service(VerifyService(config, metrics), config, metrics)
