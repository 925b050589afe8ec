"""The life of a service that has an engine loop: from the hosts of its slice to the last stream."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any, Protocol

from prometheus_client import Gauge

from common.device_config import DeviceConfig
from common.engine_loop import EngineLoop
from common.entry import end_process
from common.errors import StartupError
from common.group.leader import Leader
from common.group.terms import END_SECONDS, GroupLost, terms_of
from common.log import get_logger
from common.metrics import Metrics


class Streams(Protocol):
    """Who is connected."""

    def close_all(self) -> None: ...


def hosts_missing(metrics: Metrics) -> Gauge:
    """The health of a slice in one figure: 0 on a single host, and where all of them are there."""
    return metrics.gauge(
        "hosts_missing", "Hosts of the slice that are not in step with this one, the leader"
    )


class EngineService:
    """The half of `common.server.Service` that draft and verify share; they add `register` and
    `start`, which begins with `_gather` and ends in `_run`.
    """

    def __init__(self, config: DeviceConfig, metrics: Metrics, streams: Streams) -> None:
        self._service = config.SERVICE
        self._logger = get_logger(f"{config.SERVICE}.main")
        self._config = config
        self._streams = streams
        self._group: Leader | None = None
        self._running: EngineLoop[Any, Any, Any] | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: StartupError | None = None
        self._missing = hosts_missing(metrics)
        self._missing.set(config.num_hosts - 1)

    async def _gather(self) -> Leader | None:
        """Waits for the other hosts of the slice; None on a single one. Raises StartupError."""
        if self._config.num_hosts == 1:
            return None
        # Until the loop runs there is nothing to give back, and compiles cannot be cut.
        group = Leader(terms_of(self._config), lambda why: end_process(GroupLost(why)))
        self._group = group
        self._missing.set_function(lambda: group.num_missing)
        await asyncio.to_thread(group.gather)
        return group

    def _run(self, loop: EngineLoop[Any, Any, Any]) -> None:
        """Runs the loop beside the server from now on."""
        self._running = loop
        self._task = asyncio.create_task(loop.run(), name=f"{self._service}-loop")
        self._task.add_done_callback(self._on_loop_end)
        if self._group is not None:
            self._group.on_lost = self._on_host_lost
            self._group.on_drain = lambda: os.kill(os.getpid(), signal.SIGTERM)

    async def drain(self, grace_seconds: float) -> None:
        """Refuses new sequences; returns when those that are open were closed."""
        if self._running is not None and self._failure is None:
            await self._running.drain()

    async def stop(self) -> None:
        """Ends all streams, and the group. Raises StartupError if the device was lost, for the exit
        code.
        """
        self._streams.close_all()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._group is not None and self._failure is not None:
            self._group.fail(str(self._failure))
        if self._running is not None:
            await asyncio.to_thread(self._running.stop)
        if self._group is not None:
            await asyncio.to_thread(self._group.end)
        if self._failure is not None:
            raise self._failure

    def _on_loop_end(self, task: asyncio.Task[None]) -> None:
        """A loop that ends by itself cannot serve any more: the process ends, visibly."""
        if task.cancelled() or task.exception() is None:
            return
        why = task.exception()
        ended = StartupError(f"the {self._service} loop ended: {why}; start the service again")
        self._end(why if isinstance(why, GroupLost) else ended)

    def _on_host_lost(self, reason: str) -> None:
        """On a thread of the group's. The step under way may never end, and the loop with it."""
        error = GroupLost(reason)
        self._end(error)
        timer = threading.Timer(END_SECONDS, end_process, (error,))
        timer.daemon = True
        timer.start()

    def _end(self, error: StartupError) -> None:
        if self._failure is None:
            self._failure = error
            self._logger.error(f"the {self._service} service ends", reason=str(error))
            os.kill(os.getpid(), signal.SIGTERM)
