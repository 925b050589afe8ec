"""One generation's text: detokenizer and stop strings in a row, fed with emitted tokens."""

from __future__ import annotations

from collections.abc import Sequence

from router.detokenizer import Detokenizer
from router.stops import StopStrings


class OutputText:
    """`push` and `finish` return text that is final: never revised, never a broken character."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings) -> None:
        self._detokenizer = detokenizer
        self._stops = stops

    @property
    def matched_stop(self) -> str | None:
        """The stop string before which the text ended."""
        return self._stops.matched

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """`may_stop` False: no stop string is looked for in this token's text; only of the first
        tokens, before any text was held back.
        """
        text = self._detokenizer.push(token_id)
        return self._stops.push(text) if may_stop else text

    def push_all(self, token_ids: Sequence[int]) -> str | None:
        """Several tokens at one time; None, and nothing done, where stop strings are to be looked
        for: then it matters which token completes one.
        """
        return None if self._stops.any else self._detokenizer.push_all(token_ids)

    def finish(self) -> str:
        """What was held back. Nothing once a stop string has matched."""
        if self._stops.matched is not None:
            return ""
        text = self._stops.push(self._detokenizer.finish())
        return text if self._stops.matched is not None else text + self._stops.finish()
