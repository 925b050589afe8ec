"""What one caller may take of the router, so that the others are served too.

A caller is who a token's name, a token, or a gateway's word says (`common.callers`); those without
any are one caller together. A generation counts once for each of its choices, from admission to
its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.callers import Caller
from router.errors import ErrorKind, Failure, GenerationError, RequestError

RETRY_SECONDS = 1.0
TENANT_LIMITS = ("running", "waiting")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """`max_running`: generations at once, 0: no limit; `own` has other numbers for some names.
    `max_waiting`: of these, those without a token yet, which others queue behind; 0: no limit.
    """

    max_running: int = 0
    own: dict[str, int]
    max_waiting: int = 0

    def running(self, caller: Caller) -> int:
        return self.own.get(caller.name, self.max_running) if caller.name else self.max_running


class Tenants:
    """Who runs how many. `on_refusal` is told the caller and which of TENANT_LIMITS."""

    def __init__(self, limits: TenantLimits, on_refusal: Callable[[Caller, str], None]) -> None:
        self._limits, self._on_refusal = limits, on_refusal
        self._running: dict[Caller, int] = {}

    def enter(self, caller: Caller, count: int, num_waiting: Callable[[Caller], int]) -> None:
        """Counts `count` generations more. Raises GenerationError, nothing counted, if they are too
        many now, RequestError if they always are. `num_waiting`: of the caller's, those without a
        token.
        """
        has, most = self._running.get(caller, 0), self._limits.running(caller)
        if most and count > most:
            message = f"{count} choices, and this caller may have {most} at one time; ask for fewer"
            raise RequestError("n", message)
        if most and has + count > most:
            raise self._refusal(caller, "running", has, count, most)
        most = self._limits.max_waiting
        if most and (has := num_waiting(caller)) + count > most:
            raise self._refusal(caller, "waiting", has, count, most)
        self._running[caller] = self._running.get(caller, 0) + count

    def leave(self, caller: Caller, count: int) -> None:
        left = self._running[caller] - count
        if left:
            self._running[caller] = left
        else:
            del self._running[caller]

    def _refusal(
        self, caller: Caller, limit: str, has: int, count: int, most: int
    ) -> GenerationError:
        self._on_refusal(caller, limit)
        who = f"tenant {caller.name!r}" if caller.name else "this caller"
        state = "run" if limit == "running" else "wait for a first token"
        message = (
            f"{has} generations of {who} {state} and {count} more are asked for; it may have {most}"
            " at one time; try again later"
        )
        return GenerationError(Failure(ErrorKind.RESOURCE_EXHAUSTED, message, RETRY_SECONDS))


def parse_own(limits: Sequence[str]) -> dict[str, int]:
    """Of `NAME=NUMBER` each. Raises ValueError."""
    own = {}
    for text in limits:
        name, _, number = text.partition("=")
        if not name or not number.isdigit():
            raise ValueError(f"{text!r} is no limit; give NAME=NUMBER, 0 for none")
        own[name] = int(number)
    return own
