"""`canopy serve router`: puts the router together and runs it until a signal."""

from __future__ import annotations

from collections.abc import Sequence

from common.metrics import Metrics
from common.server import run_service
from router.config import RouterConfig
from router.service import RouterService


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the router; returns its exit code. Raises StartupError."""
    config = RouterConfig.load(argv)
    metrics = Metrics(config.SERVICE)
    return run_service(RouterService(config, metrics), config, metrics)
