"""The hosts of a slice, as one group: the leader hands out what each step is fed, others follow.

Every host holds its part of the weights and pages, and runs the same programs in the same order;
jax joins their devices (models/device.py). What differs from step to step is one packed array of
some kilobytes, made by the leader's machine. It travels beside jax, on a TCP connection from each
follower to the leader: a broadcast over the devices would cost a program more per step, and would
leave followers blocked in a collective for as long as nobody asks for anything.

The same connections say who is alive. A group is whole or over: when any host is gone, or has
failed, all of them end, for a sharded model cannot go on without a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.device_config import DeviceConfig
from common.errors import StartupError

PING_SECONDS = 1.0
SILENCE_SECONDS = 20.0
"""A host that says nothing for so long is gone; one whose process ended is noticed at once."""

END_SECONDS = 10.0
"""For the followers to go, at the end."""

REPORT_SECONDS = 30.0
"""Between two lines of log that say for whom this host waits."""

_OWN_SETTINGS = {
    *("host_id", "host", "port", "metrics_port", "reflection", "max_message_bytes", "token_file"),
    *("tls_cert", "tls_key", "tls_client_ca", "log_format", "log_level", "parent_pid"),
    *("drain_seconds", "compile_cache", "model", "head", "target"),
}
"""Those that may differ from host to host. What the directories hold is compared when loaded."""


class GroupLost(StartupError):
    """A host of the slice is gone: none can go on."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; all hosts of a slice end together: start them again")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTerms:
    """A host's place in its group. `settings`: what must be the same on all of them."""

    address: tuple[str, int]
    num_hosts: int
    host_id: int
    settings: Mapping[str, Any]


def terms_of(config: DeviceConfig) -> GroupTerms:
    return GroupTerms(
        address=config.group_address,
        num_hosts=config.num_hosts,
        host_id=config.host_id,
        settings=config.model_dump(mode="json", exclude=_OWN_SETTINGS),
    )


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The fields that are not the same, with both values; empty if all are."""
    return ", ".join(
        f"{name}: {theirs.get(name)!r} there, {ours.get(name)!r} here"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    )
