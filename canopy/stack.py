"""The services as processes of one parent: started, watched and ended together.

`canopy serve all`, the demo, the benchmarks and the end-to-end tests stand on this. Children get
`--parent-pid`, so that they end even if this process is killed outright.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn, Self

from common.entry import stoppable
from common.errors import StartupError

MODULES = {"verify": "verify_service", "draft": "draft_service", "router": "router"}
START_SECONDS = 1200.0
"""Long enough to compile on two busy cores."""
STOP_SECONDS = 30.0
MAX_RESTARTS, RESTARTS_SECONDS = 3, 600.0
"""So many times within so long an engine that ends is started anew; once more is too often."""
_STOP_ORDER = ("router", "draft", "verify")


@dataclass(frozen=True, kw_only=True)
class StackSettings:
    """What to serve. `flags` holds further flags per service, as ("--max-sequences", "8")."""

    model: Path
    head: Path | None = None  # None: no draft service, root-only decoding
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    num_verify: int = 1
    num_draft: int = 1  # of no meaning without a head
    show_logs: bool = True  # False: logs go to a file that is read when a child fails


class Child:
    """One service's process and where it listens. `name`: the service, or `verify-2` for the second
    replica.
    """

    def __init__(self, name: str, flags: Sequence[str], show_logs: bool) -> None:
        self.name = name
        self.service = name.partition("-")[0]
        self.flags = tuple(flags)
        self.address = ""
        self.metrics_address = ""
        self.failure = ""  # why it could not serve, in its own words
        self.announced: dict[str, float] = {}  # when, by time.monotonic
        self.events: queue.Queue[str] = queue.Queue()  # announced events; "ended" is the last
        self._log: IO[bytes] | None = None
        if not show_logs:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the child)
        parent = ("--parent-pid", str(os.getpid()))
        self.process = subprocess.Popen(
            [sys.executable, "-m", MODULES[self.service], *flags, *parent],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which ends them in order
        )
        self._reader = threading.Thread(target=self._read, name=f"read-{name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                try:
                    announced = json.loads(line)
                    event = str(announced["event"])
                except (ValueError, KeyError, TypeError):
                    continue  # not an announcement
                self.failure = announced.get("reason", self.failure)
                self.address = announced.get("address", self.address)
                self.metrics_address = announced.get("metrics_address", self.metrics_address)
                self.announced[event] = time.monotonic()
                self.events.put(event)
        self.events.put("ended")

    def await_event(self, wanted: str, deadline: float) -> None:
        """Returns once `wanted` was announced. Raises StartupError if it never will be."""
        while True:
            try:
                event = self.events.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                raise StartupError(
                    f"{self.name}: not {wanted} in time; look at its logs (canopy serve"
                    f" {self.service})"
                ) from None
            if event == wanted:
                return
            if event == "ended":
                raise StartupError(self.last_words())

    def last_words(self) -> str:
        """Why it ended: what it announced, else the last line of its log, else its status."""
        code = self.process.wait()
        self._reader.join()
        lines = self.log_text().strip().splitlines()
        reason = self.failure or (lines[-1] if lines else f"ended with status {code}")
        return f"{self.name}: {reason}"

    def log_text(self) -> str:
        """The log so far; empty if it went to the parent's own stderr."""
        if self._log is None:
            return ""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        """After the end of the process."""
        self._reader.join()
        if self._log is not None:
            self._log.close()


def _replicas(service: str, count: int) -> list[str]:
    return [service, *(f"{service}-{number}" for number in range(2, count + 1))]


class Stack:
    """The running services; a context manager that ends them, also on SIGINT and SIGTERM."""

    def __init__(self, settings: StackSettings) -> None:
        """Raises StartupError for settings out of range."""
        for field_name in ("num_verify", "num_draft"):
            if (count := getattr(settings, field_name)) < 1:
                raise StartupError(f"{field_name}: {count} replicas; ask for at least 1")
        self._settings = settings
        self.children: dict[str, Child] = {}
        self._undo = ExitStack()

    @property
    def address(self) -> str:
        """The router's."""
        return self.children["router"].address

    def start(self, timeout_seconds: float = START_SECONDS) -> None:
        """Returns once all are SERVING. Raises StartupError, nothing left running, otherwise."""
        deadline = time.monotonic() + timeout_seconds
        try:
            self._start(deadline)
        except BaseException:  # Ctrl-C too
            self.stop()
            raise

    def _start(self, deadline: float) -> None:
        settings = self._settings
        model, head = str(settings.model), settings.head
        for name in _replicas("verify", settings.num_verify):
            self._spawn(name, "--model", model, *(("--head", str(head)) if head else ()))
        for name in _replicas("draft", settings.num_draft) if head else ():
            self._spawn(name, "--head", str(head), "--target", model)
        peers: dict[str, list[str]] = {}
        for child in self.children.values():
            child.await_event("listening", deadline)
            peers.setdefault(child.service, []).append(child.address)
        addresses = ((f"--{service}", ",".join(those)) for service, those in peers.items())
        self._spawn("router", "--model", model, *(part for pair in addresses for part in pair))
        for child in self.children.values():
            child.await_event("serving", deadline)

    def _spawn(self, name: str, *flags: str) -> None:
        free_ports = ("--port", "0", "--metrics-port", "0")
        extra = self._settings.flags.get(name.partition("-")[0], ())
        self.children[name] = Child(name, (*flags, *free_ports, *extra), self._settings.show_logs)

    def kill(self, name: str) -> None:
        """Ends a child outright (SIGKILL), as a crash would."""
        child = self.children[name]
        child.process.kill()
        child.process.wait()
        child.close()

    def freeze(self, name: str) -> None:
        """Stops a child where it is (SIGSTOP): silent, its connections open, as if its host died.
        `kill` ends it.
        """
        self.children[name].process.send_signal(signal.SIGSTOP)

    def restart(self, name: str) -> Child:
        """Starts a killed child anew on the port it had; returns before it serves."""
        before = self.children[name]
        port = before.address.rpartition(":")[2]
        flags = (*before.flags, "--port", port)
        child = self.children[name] = Child(name, flags, self._settings.show_logs)
        return child

    def watch(self, report: Callable[[str], None]) -> NoReturn:
        """Starts engines that end by themselves anew, as an orchestrator would, and says so.

        The router goes on meanwhile: root-only without a draft, on another replica without a
        verify. Raises StartupError naming the child, when it is the router, when it had not come to
        serve, and when it ends again and again.
        """
        restarts: dict[str, list[float]] = {}
        while True:
            for name, child in list(self.children.items()):
                if child.process.poll() is None:
                    continue
                now, reason = time.monotonic(), child.last_words()
                recent = [at for at in restarts.get(name, ()) if now - at < RESTARTS_SECONDS]
                if name == "router" or "serving" not in child.announced:
                    raise StartupError(reason)
                if len(recent) == MAX_RESTARTS:
                    raise StartupError(f"{reason}; it was started {MAX_RESTARTS} times anew before")
                restarts[name] = [*recent, now]
                report(f"{reason}; starting it anew")
                child.close()
                self.restart(name)
            time.sleep(0.2)

    def stop(self, grace_seconds: float = STOP_SECONDS) -> dict[str, int]:
        """Ends the router first, so that its generations finish; returns the exit codes.

        A signal meanwhile (a second Ctrl-C) ends all of them at once.
        """
        try:
            return self._stop(grace_seconds)
        except BaseException:
            for child in self.children.values():
                child.process.kill()
                child.process.wait()
                child.close()
            self.children.clear()
            raise

    def _stop(self, grace_seconds: float) -> dict[str, int]:
        codes: dict[str, int] = {}
        order = sorted(self.children, key=lambda name: _STOP_ORDER.index(name.partition("-")[0]))
        for name in order:
            child = self.children[name]
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)
            try:
                codes[name] = child.process.wait(grace_seconds)
            except subprocess.TimeoutExpired:
                child.process.kill()
                codes[name] = child.process.wait()
            child.close()
            del self.children[name]
        return codes

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.enter_context(stoppable())
            self.start()
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._undo:
            self.stop()
