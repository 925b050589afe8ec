"""The hosts of a slice as threads of one process, joined by real connections."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from common.group.follower import Follower
from common.group.leader import Leader
from common.group.terms import GroupTerms

SETTINGS = {"max_sequences": 4, "dtype": "float32"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Group:
    """A leader that gathers on a thread, and the reasons that anybody was given for an end."""

    def __init__(self, num_hosts: int) -> None:
        self.num_hosts, self.address = num_hosts, ("127.0.0.1", free_port())
        self.lost: queue.Queue[str] = queue.Queue()
        self.leader = Leader(self.terms(0), self.lost.put)
        self._gathering = threading.Thread(target=self._gather, daemon=True)
        self._gathering.start()
        self._open = ExitStack()

    def _gather(self) -> None:
        with suppress(OSError):  # closed while it waits
            self.leader.gather()

    def terms(self, host_id: int, **changes: Any) -> GroupTerms:
        return GroupTerms(
            address=self.address,
            num_hosts=self.num_hosts,
            host_id=host_id,
            settings=SETTINGS | changes,
        )

    def follower(self, host_id: int, on_lost: Callable[[str], None] | None = None) -> Follower:
        follower = Follower(self.terms(host_id), on_lost or self.lost.put)
        self._open.callback(follower.close)
        return follower

    def joined(self) -> list[Follower]:
        """All followers, in step."""
        followers = [self.follower(i) for i in range(1, self.num_hosts)]
        threads = [threading.Thread(target=one.join) for one in followers]
        for thread in threads:
            thread.start()
        for thread in [*threads, self._gathering]:
            thread.join(20)
            assert not thread.is_alive()
        return followers

    def close(self) -> None:
        self.leader.close()
        self._open.close()
