"""Addresses of replicas: HOST:PORT is one, dns:HOST:PORT is every address that the name has now.

A headless Service of Kubernetes is such a name: one address for each of its pods, and their number
changes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from common.log import get_logger

PREFIX = "dns:"

_logger = get_logger("router.names")

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""HOST:PORT of each address of a name; raises OSError."""


@dataclass(frozen=True, slots=True)
class Name:
    """A name of many replicas."""

    host: str
    port: int

    @property
    def text(self) -> str:
        return f"{PREFIX}{self.host}:{self.port}"


def parse_name(address: str) -> Name | None:
    """The name in a configured address; None: it is a plain one."""
    if not address.startswith(PREFIX):
        return None
    host, _, port = address.removeprefix(PREFIX).rpartition(":")
    return Name(host, int(port))


def is_address(address: str) -> bool:
    """Whether it is HOST:PORT, with or without the prefix."""
    host, _, port = address.removeprefix(PREFIX).rpartition(":")
    return bool(host) and port.isdigit() and 0 < int(port) <= 65535


async def resolve(host: str, port: int) -> list[str]:
    """By the system's resolver. Of a name with addresses of both kinds, those of the kind that it
    puts first: a replica must not be taken for two.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [where[0] for family, _, _, _, where in found if family == found[0][0]]
    bracketed = (f"[{address}]" if ":" in str(address) else address for address in addresses)
    return [f"{address}:{port}" for address in dict.fromkeys(bracketed)]


class Names:
    """What each name stands for at the moment. A name that cannot be resolved keeps what it had."""

    def __init__(self, names: list[Name], resolve: Resolve = resolve) -> None:
        self._resolve = resolve
        self._addresses: dict[Name, list[str]] = {name: [] for name in names}
        self._failing: set[Name] = set()

    def __len__(self) -> int:
        return len(self._addresses)

    def addresses(self, name: Name) -> list[str]:
        return self._addresses[name]

    async def refresh(self) -> None:
        for name in self._addresses:
            try:
                self._addresses[name] = await self._resolve(name.host, name.port)
            except OSError as error:
                if name not in self._failing:
                    _logger.warning("name not resolved", name=name.text, reason=str(error))
                self._failing.add(name)
            else:
                self._failing.discard(name)
