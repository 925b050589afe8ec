"""The life of a gRPC server, the same for all three services.

`run_service(service, config)` does, in order:

1. event loop, logs, metrics endpoint, port (a port in use: StartupError);
2. the port is open, health says NOT_SERVING, calls are answered UNAVAILABLE;
   stdout gets `{"event": "listening", "address": ..., "metrics_address": ...}`;
3. `service.start()`: load, compile, connect. StartupError ends the process with one line. Then
   the allocator is set up for serving;
4. health says SERVING for "" and every name (for "liveness" it always did); stdout gets
   `{"event": "serving", ...}`;
5. SIGTERM or SIGINT: health says NOT_SERVING, `service.drain(grace)`, `service.stop()`, exit 0.
   A SIGINT after that ends the process at once.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.config import ServiceConfig
from common.errors import StartupError
from common.http_endpoint import serve_http
from common.log import get_logger, set_up_logging
from common.metrics import Metrics
from common.process import (
    end_with_parent,
    event_loop_factory,
    return_free_memory,
    tune_malloc,
)
from common.security import RequireToken, refusing

_logger = get_logger("common.server")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_EXIT_GRACE_SECONDS = 2.0
"""For streams to close and threads to end after the drain."""


LIVENESS = "liveness"
"""Health name that says SERVING as long as the process answers: while it starts, while a peer is
away, while it drains. Restarting would mend none of these."""


class Health:
    """The serving state that grpc.health.v1 reports; a service may turn it off and on again."""

    def __init__(self, names: Sequence[str], metrics: Metrics) -> None:
        self.servicer = health.aio.HealthServicer()
        self.names = tuple(names)
        self._gauge = metrics.gauge("serving", "1 while health says SERVING")
        self._serving = False

    @property
    def serving(self) -> bool:
        return self._serving

    async def set_serving(self, serving: bool) -> None:
        """Sets the state of "" and of every service name."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        state = status.SERVING if serving else status.NOT_SERVING
        for name in ("", *self.names):
            await self.servicer.set(name, state)
        await self.servicer.set(LIVENESS, status.SERVING)
        self._serving = serving
        self._gauge.set(int(serving))


class Service(Protocol):
    """What `run_service` runs."""

    names: Sequence[str]
    """Full gRPC service names, as `canopy.v1.VerifyService`."""

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicers, before the port opens; calls reach them once `start` is over."""

    async def start(self, health: Health) -> None:
        """Loads, compiles, connects; heavy work on threads. Raises StartupError.

        Health turns to SERVING when this returns. A service whose readiness follows its peers keeps
        `health` and turns it off and on.
        """

    async def drain(self, grace_seconds: float) -> None:
        """Takes no new work; returns when running work is over, at the latest after the grace."""

    async def stop(self) -> None:
        """Gives everything back. Always called, also after a failed start."""


def server_options(max_message_bytes: int, silence_seconds: float = 30.0) -> list[tuple[str, int]]:
    """Options of every server of ours: a caller that answers no ping for `silence_seconds` is gone,
    and what it had is let go.
    """
    return [
        *message_options(max_message_bytes),
        *_silence_options(silence_seconds),
        ("grpc.so_reuseport", 0),  # two servers must never share a port unnoticed
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # default refuses pings < 300 s
        ("grpc.http2.max_ping_strikes", 0),
    ]


def channel_options(max_message_bytes: int, silence_seconds: float = 15.0) -> list[tuple[str, int]]:
    """Options of every channel of ours: same limits; a peer that answers no ping for
    `silence_seconds` is lost.
    """
    return [
        *message_options(max_message_bytes),
        *_silence_options(silence_seconds),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def _silence_options(silence_seconds: float) -> list[tuple[str, int]]:
    """A ping after two thirds of it, whose answer has the last third.

    It is the ping's own timeout that ends a connection: gRPC's core never looks at the keepalive
    timeout (github.com/grpc/grpc/pull/39239), and the default of the former is a minute.
    """
    ping_after_ms, answer_ms = round(silence_seconds * 2000 / 3), round(silence_seconds * 1000 / 3)
    return [
        ("grpc.keepalive_time_ms", ping_after_ms),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def message_options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]


def canopy_version() -> str:
    try:
        return version("canopy-spec")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0+checkout"


class _RefuseUntilStarted(grpc.aio.ServerInterceptor):
    """Answers UNAVAILABLE to everything but health and reflection until the service has started."""

    def __init__(self) -> None:
        self.started = False

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if self.started or handler is None or method.startswith("/grpc."):
            return handler
        message = "the service is starting; wait until health says SERVING"
        return refusing(handler, grpc.StatusCode.UNAVAILABLE, message)


def run_service(service: Service, config: ServiceConfig, metrics: Metrics) -> int:
    """Runs `service` until a signal; returns the process's exit code. Raises StartupError."""
    set_up_logging(config.SERVICE, config.log_format, config.log_level)
    if config.parent_pid:
        end_with_parent(config.parent_pid, config.drain_seconds + _EXIT_GRACE_SECONDS)
    metrics.add_process_metrics(canopy_version())
    metrics.add_certificate(config.tls_cert)
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        return runner.run(_Life(service, config, metrics).run())


class _Life:
    """One run of a service, from port to exit code."""

    def __init__(self, service: Service, config: ServiceConfig, metrics: Metrics) -> None:
        self._service = service
        self._config = config
        self._metrics = metrics
        self._health = Health(service.names, metrics)
        self._gate = _RefuseUntilStarted()
        self._stop_asked = asyncio.Event()

    async def run(self) -> int:
        self._listen_to_signals()
        loop = asyncio.get_running_loop()
        self._metrics.add_event_loop(lambda: len(asyncio.all_tasks(loop)))
        check_port(self._config.host, self._config.port)
        interceptors = self._interceptors()
        metrics_server, metrics_address = open_metrics(
            self._config, self._metrics, lambda: self._health.serving
        )
        server = grpc.aio.server(
            interceptors=interceptors,
            options=server_options(self._config.max_message_bytes),
        )
        try:
            address = await self._open(server)
            addresses = {"address": address, "metrics_address": metrics_address}
            announce("listening", **addresses)
            await self._start(server)
            if not self._stop_asked.is_set():
                announce("serving", **addresses)
                _logger.info("serving", **addresses)
                await self._stop_asked.wait()
                await self._drain()
        finally:
            await self._health.set_serving(False)
            try:
                await self._service.stop()
            finally:  # it raises where it ended of its own fault; the port must close then, too
                await server.stop(_EXIT_GRACE_SECONDS)
                metrics_server.shutdown()
                metrics_server.server_close()
        return 0

    def _listen_to_signals(self) -> None:
        def on_signal(number: signal.Signals) -> None:
            if self._stop_asked.is_set() and number is signal.SIGINT:
                _logger.warning("second signal; ending at once", signal=number.name)
                os._exit(1)
            _logger.info("asked to stop", signal=number.name)
            self._stop_asked.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)

    def _interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """The first is asked first. Raises StartupError."""
        token_file = self._config.token_file
        if token_file is None:
            return [self._gate]
        if self._config.tls is None and self._config.host not in LOOPBACK:
            _logger.warning("tokens travel in the clear; set --tls-cert and --tls-key")
        return [RequireToken(token_file), self._gate]

    async def _open(self, server: grpc.aio.Server) -> str:
        host, port = self._config.host, self._config.port
        self._service.register(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, server)
        if self._config.reflection:
            names = (*self._service.names, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        await self._health.set_serving(False)
        tls = self._config.tls
        try:
            if tls is None:
                bound = server.add_insecure_port(f"{host}:{port}")
            else:
                bound = server.add_secure_port(f"{host}:{port}", tls.credentials())
        except RuntimeError as error:  # between the check and here another took it
            raise StartupError(_bind_failure("port", host, port, error)) from None
        await server.start()
        return f"{host}:{bound}"

    async def _start(self, server: grpc.aio.Server) -> None:
        """Runs `service.start`; a signal meanwhile ends the process, for compiles cannot be cut."""
        begun = time.monotonic()
        starting = asyncio.ensure_future(self._service.start(self._health))
        stopping = asyncio.ensure_future(self._stop_asked.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            await server.stop(0)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        stopping.cancel()
        await starting
        return_free_memory()
        tune_malloc()  # not before: it would keep what loading and compiling set free
        self._gate.started = True
        await self._health.set_serving(True)
        _logger.info("started", seconds=round(time.monotonic() - begun, 2))

    async def _drain(self) -> None:
        await self._health.set_serving(False)
        grace = self._config.drain_seconds
        try:
            async with asyncio.timeout(grace):
                await self._service.drain(grace)
        except TimeoutError:
            _logger.warning("drain ran out of time; running work is cut", drain_seconds=grace)


def open_metrics(
    config: ServiceConfig, metrics: Metrics, is_ready: Callable[[], bool]
) -> tuple[Any, str]:
    """The HTTP port of a process, and its address. Raises StartupError."""
    host, port = config.host, config.metrics_port
    try:
        server = serve_http(host, port, metrics.registry, is_ready)
    except OSError as error:
        raise StartupError(_bind_failure("metrics_port", host, port, error)) from None
    return server, f"{host}:{server.server_port}"


def announce(event: str, **fields: object) -> None:
    """One JSON line on stdout, for the parent process."""
    print(json.dumps({"event": event, **fields}), flush=True)


def check_port(host: str, port: int) -> None:
    """Raises StartupError if there is no listening on it; gRPC's own failure is several lines."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OverflowError:
            raise StartupError(f"port: {port} is not within 0 to 65535; set --port") from None
        except OSError as error:
            raise StartupError(_bind_failure("port", host, port, error)) from None


def _bind_failure(field: str, host: str, port: int, error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    no_such_host = isinstance(error, socket.gaierror)
    if no_such_host or (isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL):
        return f"host: {host!r} is no address of this machine ({reason.lower()}); set --host"
    remedy = (
        f"stop what listens there, or set --{field.replace('_', '-')} to another (0: a free one)"
    )
    return f"{field}: cannot listen on {host}:{port} ({reason.lower()}); {remedy}"
