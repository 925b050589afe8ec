"""The life of a further host of a slice: join, load, compile, follow, end with the others.

It serves no gRPC; its metrics port answers `/alive` from the start and `/ready` while it follows.
stdout gets `{"event": "listening"}` and `{"event": "following"}`. SIGTERM and SIGINT ask the leader
to drain, and the end comes from there; until it follows they end it at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

from common.device_config import DeviceConfig
from common.entry import end_process
from common.errors import StartupError
from common.group.follower import Follower
from common.group.terms import END_SECONDS, GroupLost, terms_of
from common.group.wire import Array
from common.log import get_logger, set_up_logging
from common.metrics import Metrics
from common.process import end_with_parent, return_free_memory, tune_malloc
from common.server import announce, canopy_version, open_metrics

_logger = get_logger("group")


class FollowingEngine(Protocol):
    """An engine that can do what the leader's does, without looking at what comes out."""

    def follow(self, operation: str, arrays: Sequence[Array]) -> None: ...


Build = Callable[[], tuple[FollowingEngine, Mapping[str, Any]]]
"""The engine, its programs compiled, and the facts that all hosts must agree on."""


def run_follower(
    config: DeviceConfig, metrics: Metrics, build: Build, leave: Callable[[], None]
) -> int:
    """Follows until the leader ends the group; returns the exit code. Raises StartupError.

    `leave` is called before a peaceful end, to take this host's devices out of jax's group.
    """
    set_up_logging(config.SERVICE, config.log_format, config.log_level)
    if config.parent_pid:
        end_with_parent(config.parent_pid, config.drain_seconds + END_SECONDS)
    metrics.add_process_metrics(canopy_version())
    life = _Life(config, build, leave)
    server, address = open_metrics(config, metrics, lambda: life.follows)
    announce("listening", metrics_address=address)
    try:
        life.run()
    finally:
        server.shutdown()
        server.server_close()
    return 0


class _Life:
    def __init__(self, config: DeviceConfig, build: Build, leave: Callable[[], None]) -> None:
        self._config, self._build, self._leave = config, build, leave
        self._follower = Follower(terms_of(config), lambda why: end_process(GroupLost(why)))
        self._error: BaseException | None = None
        self.follows = False

    def run(self) -> None:
        """The work is a thread's, so that the main one can hear signals while it compiles."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        worker = threading.Thread(target=self._work, name="follower", daemon=True)
        worker.start()
        worker.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            self._follower.join()
            engine, facts = self._build()
            return_free_memory()
            tune_malloc()
            self._follower.ready(facts)
            self.follows = True
            announce("following", host_id=self._config.host_id)
            for operation in self._follower.operations():
                engine.follow(operation.name, operation.arrays)
            self._leave()
        except BaseException as error:
            # A collective fails when another host goes: then the connection tells it better.
            self._follower.await_loss(1.0)
            self._follower.fail(f"{type(error).__name__}: {error}")
            self._error = error
        finally:
            self.follows = False
            self._follower.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.follows:
            sys.stdout.flush()
            os._exit(0)
        _logger.info("asked to stop; asking the leader to drain", signal=number)
        self._follower.ask_to_drain()
        seconds = self._config.drain_seconds + END_SECONDS
        late = StartupError(f"the leader has not ended the group within {seconds:.0f} s")
        timer = threading.Timer(seconds, end_process, (late,))
        timer.daemon = True
        timer.start()
