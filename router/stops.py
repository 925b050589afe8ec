"""Stop strings over streamed text: the text ends before the first of them.

"First" is the one that is complete first, character by character; of two complete at one place, the
longer. So the outcome never depends on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feeds on pieces of text, gives back what is safe to show.

    Held back is only the longest end of the text that could be the start of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: none of them empty."""
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    @property
    def any(self) -> bool:
        return bool(self._stops)

    def push(self, piece: str) -> str:
        """The text that is safe now. Once `matched` is set, the text has ended."""
        if not self._stops:
            return piece
        if not piece:
            return ""
        text = self._held + piece
        match = self._first_match(text)
        if match is not None:
            start, self.matched = match
            self._held = ""
            return text[:start]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held: no more text comes, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None  # end, start, stop: the smallest wins
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string starts."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
