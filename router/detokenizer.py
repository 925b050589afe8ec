"""Token ids to text as they come, never emitting part of a character.

A token may hold part of a character (byte-level BPE, byte fallback), and decoding may depend on
the tokens before it (a leading space that is stripped at the start). So a short window of
earlier tokens is decoded twice, with and without the new ones; the difference is the new text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"
MAX_PENDING_TOKENS = 8
"""A character has at most 4 bytes; more tokens than this without a whole one stay broken."""


class Detokenizer:
    """Feed token ids with `push`; what it returns, joined, and then `flush`, is the whole text."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._window = 0  # first id that is decoded
        self._emitted = 0  # ids whose text is out
        self._text_len = 0  # characters of the window's text that are out

    def push(self, token_ids: Sequence[int]) -> str:
        """New whole characters; empty while the last one is unfinished."""
        self._ids.extend(token_ids)
        text = self._decode(self._ids[self._window :])
        if text.endswith(BROKEN) and len(self._ids) - self._emitted <= MAX_PENDING_TOKENS:
            return ""
        return self._take(text)

    def flush(self) -> str:
        """What is left at the end, broken characters as U+FFFD."""
        return self._take(self._decode(self._ids[self._window :]))

    def _take(self, text: str) -> str:
        new = text[self._text_len :]
        # The window begins at the ids emitted last, whose text ended on a whole character.
        self._window, self._emitted = self._emitted, len(self._ids)
        self._text_len = len(self._decode(self._ids[self._window : self._emitted]))
        return new
