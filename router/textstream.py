"""From token ids to the text that a client may see: whole characters, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.detokenizer import Detokenizer
from router.stops import StopStrings


@dataclass(frozen=True, slots=True)
class TextStep:
    """Of some tokens: `text` to show, how many tokens count, the stop string that matched.

    `num_tokens` is less than what was pushed only if a stop string ended within the block.
    """

    text: str
    num_tokens: int
    matched: str | None


class TextStream:
    """The detokenizer and the stop strings of one generation, fed block by block."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop_strings: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stop_strings)
        self._has_stops = bool(stop_strings)

    def push(self, token_ids: Sequence[int]) -> TextStep:
        """Token by token where stop strings are to be found, else the block at once."""
        if not self._has_stops:
            return TextStep(self._detokenizer.push(token_ids), len(token_ids), None)
        text = ""
        for count, token in enumerate(token_ids, start=1):
            released = self._stops.push(self._detokenizer.push([token]))
            text += released.text
            if released.matched is not None:
                return TextStep(text, count, released.matched)
        return TextStep(text, len(token_ids), None)

    def finish(self) -> TextStep:
        """What was held back; a stop string completed by it still counts."""
        released = self._stops.push(self._detokenizer.flush())
        if released.matched is not None:
            return TextStep(released.text, 0, released.matched)
        return TextStep(released.text + self._stops.flush(), 0, None)
