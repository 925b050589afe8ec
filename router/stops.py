"""Stop strings: found wherever they end, in one token or across many, and never shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Released:
    """`text` may be shown. `matched`: the stop string that ended the text, or None."""

    text: str
    matched: str | None = None


class StopStrings:
    """Holds back the end of the text as long as it may be the beginning of a stop string."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""

    def push(self, text: str) -> Released:
        """The earliest match in the text ends it; of several at one place the longest."""
        self._held += text
        found = [(self._held.find(s), -len(s), s) for s in self._strings if s in self._held]
        if found:
            place, _, string = min(found)
            released, self._held = self._held[:place], ""
            return Released(released, string)
        keep = self._possible_start()
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return Released(released)

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        text, self._held = self._held, ""
        return text

    def _possible_start(self) -> int:
        """Characters at the end of the held text that begin some stop string."""
        longest = max((len(s) for s in self._strings), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(s.startswith(tail) for s in self._strings):
                return length
        return 0
