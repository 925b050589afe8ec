"""Host 0 of a slice: waits for the others, hands out operations, ends the group."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from typing import Any

from common.errors import StartupError
from common.group.terms import (
    END_SECONDS,
    PING_SECONDS,
    REPORT_SECONDS,
    SILENCE_SECONDS,
    GroupLost,
    GroupTerms,
    differences,
)
from common.group.wire import (
    Array,
    Kind,
    WireError,
    frame,
    operation_frame,
    read_frame,
    read_json,
    tune,
)
from common.log import get_logger

_SILENT = f"it has been silent for {SILENCE_SECONDS:.0f} s"
_logger = get_logger("group")


@contextmanager
def in_step(group: Leader | None) -> Iterator[None]:
    """Within, the hosts of a group do the same; if that fails here, the group is over: what the
    others hold may be different from now on. Raises GroupLost then.
    """
    try:
        yield
    except Exception as error:
        if group is None or isinstance(error, GroupLost):
            raise
        raise group.explain(error) from error


class _Member:
    """The leader's end of the connection to one follower."""

    def __init__(self, host_id: int, connection: socket.socket, stream: BufferedReader) -> None:
        self.host_id, self.connection, self.stream = host_id, connection, stream
        self.facts: Mapping[str, Any] | None = None  # once it is ready
        self.heard = time.monotonic()  # when it last said anything
        self.gone = threading.Event()
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        """Whole frames, from any thread. Raises OSError."""
        with self._lock:
            self.connection.sendall(data)

    def close(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


class Leader:
    """Host 0. `tell` may be called from one thread, the rest from any.

    `on_lost` is called once, from a thread of the group's, with why it is over; `on_drain` when a
    follower was asked to stop. Both are to be set by who serves.
    """

    def __init__(self, terms: GroupTerms, on_lost: Callable[[str], None]) -> None:
        """Listens. Raises StartupError if there is no listening on the address."""
        self._terms = terms
        self.on_lost = on_lost
        self.on_drain: Callable[[], None] = lambda: None
        self._members: dict[int, _Member] = {}
        self._changed = threading.Condition()
        self._whole = False  # all have come
        self._over = False  # ended, or lost
        self._reason: str | None = None
        host, port = terms.address
        local = host in ("localhost", "127.0.0.1", "::1")
        try:
            self._server = socket.create_server(
                (host, port) if local else ("", port),
                family=socket.AF_INET6 if host == "::1" else socket.AF_INET,
            )
        except OSError as error:
            raise StartupError(
                f"coordinator_address: cannot listen on port {port} ({error.strerror}); choose"
                " another on all hosts"
            ) from None

    @property
    def num_missing(self) -> int:
        """Hosts of the slice that are not in step with this one."""
        return len(self._missing())

    def gather(self) -> None:
        """Waits until every follower has come; those that do not fit are refused."""
        self._server.settimeout(REPORT_SECONDS)
        while missing := self._missing():
            try:
                connection, peer = self._server.accept()
            except TimeoutError:
                _logger.info("waiting for hosts", missing=sorted(missing))
                continue
            member = self._admit(connection, str(peer[0]))
            if member is not None:
                self._members[member.host_id] = member
                self._run(self._listen, member)
                _logger.info("a host has joined", host_id=member.host_id)
        self._server.close()
        self._whole = True
        self._to_all(frame(Kind.WELCOME))
        for member in self._members.values():
            member.heard = time.monotonic()
            member.connection.settimeout(SILENCE_SECONDS)
        self._run(self._ping)

    def await_ready(self, facts: Mapping[str, Any]) -> None:
        """Until all followers are ready with the same facts. Raises GroupLost."""
        with self._changed:
            while any(member.facts is None for member in self._members.values()):
                self._check()
                self._changed.wait(PING_SECONDS)
        self._check()
        for member in self._members.values():
            different = differences(facts, member.facts or {})
            if different:
                reason = f"host {member.host_id} has loaded something else ({different})"
                self.fail(reason)
                raise GroupLost(reason)

    def tell(self, operation: str, *arrays: Array) -> None:
        """Hands an operation to all followers. Raises GroupLost."""
        self._check()
        data = operation_frame(operation, arrays)
        for member in self._members.values():
            try:
                member.send(data)
            except OSError as error:
                self._lose(member, str(error))
                self._check()

    def explain(self, error: Exception) -> GroupLost:
        """Why a step failed: mostly because another host went in the middle of it."""
        with self._changed:
            self._changed.wait_for(lambda: self._reason is not None, PING_SECONDS)
        return GroupLost(self._reason or f"a step failed on host 0 of the slice: {error}")

    def fail(self, reason: str) -> None:
        """Tells the followers that it is over, and why."""
        self._over = True
        self._to_all(frame(Kind.FAILED, reason.encode()))

    def end(self) -> None:
        """Ends the group in peace; returns when the followers are gone, at the latest after
        END_SECONDS.
        """
        if not self._over:
            self._over = True
            self._to_all(frame(Kind.END))
            deadline = time.monotonic() + END_SECONDS
            for member in self._members.values():
                member.gone.wait(max(0.0, deadline - time.monotonic()))
        self.close()

    def close(self) -> None:
        self._over = True
        self._server.close()
        for member in self._members.values():
            member.close()

    # -- within

    def _missing(self) -> set[int]:
        here = {m.host_id for m in list(self._members.values()) if not m.gone.is_set()}
        return set(range(1, self._terms.num_hosts)) - here

    def _admit(self, connection: socket.socket, peer: str) -> _Member | None:
        """The follower behind a new connection, if it fits."""
        stream = tune(connection, SILENCE_SECONDS)
        try:
            kind, body = read_frame(stream)
            hello = read_json(body) if kind is Kind.HELLO else {}
        except (OSError, EOFError, WireError) as error:
            _logger.warning("no host of this slice", peer=peer, reason=str(error))
            stream.close()
            connection.close()
            return None
        host_id = hello.get("host_id")
        settings = hello.get("settings")
        if not isinstance(settings, dict):
            settings = {}
        different = differences(self._terms.settings, settings)
        if different:
            reason = f"its settings are not the leader's: {different}"
        elif not isinstance(host_id, int) or host_id not in self._missing():
            reason = f"host_id: {host_id} is not awaited; give each host of the slice its own"
        else:
            connection.settimeout(None)  # it waits for the others and says nothing
            return _Member(host_id, connection, stream)
        _logger.warning("a host was refused", peer=peer, host_id=host_id, reason=reason)
        with suppress(OSError):
            connection.sendall(frame(Kind.REFUSED, reason.encode()))
        stream.close()
        connection.close()
        return None

    def _listen(self, member: _Member) -> None:
        """A thread for each follower."""
        with member.stream:
            self._lose(member, self._hear_out(member))

    def _hear_out(self, member: _Member) -> str:
        """Takes what a follower says, to the end; returns why it is one."""
        reason = "it said nothing of ours"
        try:
            while True:
                kind, body = read_frame(member.stream)
                member.heard = time.monotonic()
                if kind is Kind.READY:
                    with self._changed:
                        member.facts = read_json(body)
                        self._changed.notify_all()
                elif kind is Kind.DRAIN:
                    _logger.info("a host was asked to stop", host_id=member.host_id)
                    self.on_drain()
                elif kind is Kind.FAILED:
                    reason = body.decode(errors="replace")
                    break
                elif kind is not Kind.PONG:
                    break
        except TimeoutError:
            reason = _SILENT
        except (OSError, EOFError, WireError) as error:
            reason = str(error)
        return reason

    def _ping(self) -> None:
        """So that a follower hears something while nothing is done, and answers."""
        while not self._over:
            for member in self._members.values():
                try:
                    member.send(frame(Kind.PING))
                except OSError as error:
                    self._lose(member, str(error))
                if time.monotonic() - member.heard > SILENCE_SECONDS:
                    self._lose(member, _SILENT)
            time.sleep(PING_SECONDS)

    def _lose(self, member: _Member, reason: str) -> None:
        with self._changed:
            member.gone.set()
            first = self._whole and not self._over
            if first:
                self._over = True
                self._reason = f"host {member.host_id} of the slice is gone: {reason}"
            self._changed.notify_all()
        member.close()
        if first and self._reason is not None:
            self._to_all(frame(Kind.FAILED, self._reason.encode()))
            self.on_lost(self._reason)

    def _run(self, function: Callable[..., None], *args: object) -> None:
        threading.Thread(target=function, args=args, name="group", daemon=True).start()

    def _to_all(self, data: bytes) -> None:
        for member in self._members.values():
            with suppress(OSError):
                member.send(data)

    def _check(self) -> None:
        if self._reason is not None:
            raise GroupLost(self._reason)
        if self._over:
            raise GroupLost("the group has ended")
