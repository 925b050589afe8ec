"""A slice of two hosts on this machine: two real processes of one service, a device each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2

ROOT = Path(__file__).parents[1]
START_SECONDS = 600.0
"""Both compile, on two cores that may be busy."""


class Host:
    """One process, its output in files."""

    def __init__(self, service: str, flags: Sequence[str], where: Path) -> None:
        self._out, self._err = where.with_suffix(".out"), where.with_suffix(".err")
        environ = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"{service}_service", *flags],
                stdout=out,
                stderr=err,
                env=environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
            )

    def await_event(self, name: str) -> dict[str, Any]:
        """What the process announced; gloo writes lines of its own beside it."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            for line in self._out.read_text().splitlines():
                if line.startswith("{") and json.loads(line)["event"] == name:
                    event: dict[str, Any] = json.loads(line)
                    return event
            assert self.process.poll() is None, self.errors
            time.sleep(0.1)
        raise AssertionError(f"no {name} within {START_SECONDS} s: {self.errors}")

    @property
    def errors(self) -> str:
        return self._err.read_text()

    @property
    def last_words(self) -> list[str]:
        """Lines that say why the process could not go on."""
        return [line for line in self.errors.splitlines() if line.startswith("canopy serve")]

    def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        return self.process.wait(60)


class Pair:
    """Leader and follower, serving."""

    def __init__(self, service: str, flags: Sequence[str], where: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = min(server.getsockname()[1], 65533)
        group = ["--tensor-parallel", "2", "--num-hosts", "2"]
        group += ["--coordinator-address", f"127.0.0.1:{port}", "--drain-seconds", "60"]
        where.mkdir()
        self.leader = Host(service, [*flags, *group, "--port", "0"], where / "leader")
        self.follower = Host(service, [*flags, *group, "--host-id", "1"], where / "follower")

    def __enter__(self) -> Pair:
        try:
            serving = self.leader.await_event("serving")
            self.follower.await_event("following")
        except BaseException:
            self.__exit__()
            raise
        self.address: str = serving["address"]
        self.metrics_address: str = serving["metrics_address"]
        return self

    def __exit__(self, *_: object) -> None:
        for host in (self.leader, self.follower):
            host.process.kill()
            host.process.wait()


async def note_states(
    watch: grpc.aio.UnaryStreamCall[Any, health_pb2.HealthCheckResponse], states: list[int]
) -> None:
    """What a health watch says, to its end."""
    with contextlib.suppress(grpc.aio.AioRpcError):  # it ends with the process
        async for response in watch:  # noted one by one: what came before the end counts
            states += [response.status]
