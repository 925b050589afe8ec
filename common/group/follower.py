"""A further host of a slice: joins the leader, and does what it does."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import BufferedReader
from typing import Any

from common.errors import StartupError
from common.group.terms import REPORT_SECONDS, SILENCE_SECONDS, GroupTerms
from common.group.wire import (
    Kind,
    Operation,
    WireError,
    frame,
    json_frame,
    read_frame,
    read_operation,
    tune,
)
from common.log import get_logger

_RETRY_SECONDS = 0.5
_logger = get_logger("group")


class Follower:
    """A further host. `on_lost` is called from a thread of the group's when the leader is gone,
    whatever this host is doing: it may be stuck in a collective that will never end.
    """

    def __init__(self, terms: GroupTerms, on_lost: Callable[[str], None]) -> None:
        self._terms = terms
        self._on_lost = on_lost
        self._connection: socket.socket | None = None
        self._stream: BufferedReader
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._listening = threading.Thread(target=self._listen, name="leader", daemon=True)
        self._over = False

    def join(self) -> None:
        """Waits for the leader and for all others. Raises StartupError if it refuses this host."""
        reported = time.monotonic()
        while not self._try_to_join():
            time.sleep(_RETRY_SECONDS)
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                _logger.info("waiting for the leader", address="{}:{}".format(*self._terms.address))
        self._listening.start()

    def ready(self, facts: Mapping[str, Any]) -> None:
        """This host has loaded and compiled; `facts`: what must be the same everywhere."""
        self._send(json_frame(Kind.READY, facts))

    def operations(self) -> Iterator[Operation]:
        """What the leader does, until it ends the group."""
        while (operation := self._queue.get()) is not None:
            yield operation

    def ask_to_drain(self) -> None:
        self._send(frame(Kind.DRAIN))

    def fail(self, reason: str) -> None:
        """Tells the leader why this host cannot go on."""
        self._over = True
        self._send(frame(Kind.FAILED, reason.encode()))

    def await_loss(self, seconds: float) -> None:
        """Lets the listening thread find out first; it ends the process where it does."""
        if self._listening.is_alive():
            self._listening.join(seconds)

    def close(self) -> None:
        self._over = True
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()

    # -- within

    def _try_to_join(self) -> bool:
        try:
            connection = socket.create_connection(self._terms.address, SILENCE_SECONDS)
        except OSError:  # not there yet, or its name is not
            return False
        stream = tune(connection, SILENCE_SECONDS)
        hello = {"host_id": self._terms.host_id, "settings": dict(self._terms.settings)}
        try:
            connection.sendall(json_frame(Kind.HELLO, hello))
            connection.settimeout(None)  # others may be long in coming
            kind, body = read_frame(stream)
        except (OSError, EOFError, WireError):
            kind, body = Kind.FAILED, b""
        if kind is not Kind.WELCOME:
            stream.close()
            connection.close()
        if kind is Kind.REFUSED:
            raise StartupError(f"the leader refuses host {self._terms.host_id}: {body.decode()}")
        if kind is not Kind.WELCOME:
            return False
        connection.settimeout(SILENCE_SECONDS)
        self._connection, self._stream = connection, stream
        return True

    def _listen(self) -> None:
        with self._stream:
            reason = self._hear_out()
        if reason is not None:
            self._lose(reason)

    def _hear_out(self) -> str | None:
        """Takes what the leader says, to the end; returns why it is one, None if in peace."""
        reason = "it said nothing of ours"
        try:
            while True:
                kind, body = read_frame(self._stream)
                if kind is Kind.DO:
                    self._queue.put(read_operation(body))
                elif kind is Kind.PING:
                    self._send(frame(Kind.PONG))
                elif kind is Kind.END:
                    self._over = True
                    self._queue.put(None)
                    return None
                elif kind is Kind.FAILED:
                    return body.decode(errors="replace")
                else:
                    break
        except TimeoutError:
            reason = f"it has been silent for {SILENCE_SECONDS:.0f} s"
        except (OSError, EOFError, WireError) as error:
            reason = str(error)
        return f"the leader of the slice is gone: {reason}"

    def _lose(self, reason: str) -> None:
        if not self._over:
            self._over = True
            self._on_lost(reason)

    def _send(self, data: bytes) -> None:
        with self._lock, suppress(OSError):  # the listening thread notices the same
            if self._connection is not None:
                self._connection.sendall(data)
