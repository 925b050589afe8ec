"""Token ids in, text out, one token at a time, whole characters only.

The pieces that `push` and `finish` return, put together, are the tokenizer's own decoding of all
ids (special tokens skipped), but for the bytes of a character that the last token left unfinished:
those never come out. Held back is only what may still be part of a character:

- Byte-level BPE (each token is bytes): the first bytes of a UTF-8 character.
- Byte fallback (tokens `<0xE4>` among words): the current run of such tokens, because its decoder
  turns the *whole* run into U+FFFD when any byte of it is wrong.
- Any other decoder: tokens whose decoding ends with U+FFFD, at most three.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 3  # a UTF-8 character has at most four bytes, so at most three unfinished tokens
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    """The decoding of one sequence."""

    def push(self, token_id: int) -> str:
        """The text that this token makes final; may be empty."""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """The text that they make final, one after the other."""

    def finish(self) -> str:
        """What is still held and whole. Call once, after the last token."""


class Decoding:
    """How a tokenizer decodes: read once, shared by all sequences. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> None:
        """`decoder`: that entry of tokenizer.json."""
        self._tokenizer = tokenizer
        kinds = _decoder_kinds(decoder)
        self._byte_level = kinds == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in kinds
        added = tokenizer.get_added_tokens_decoder()
        self._skipped = frozenset(id_ for id_, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._fallback_bytes: dict[int, int | None] = {}

    def detokenizer(self) -> Detokenizer:
        if self._byte_level:
            return _ByteLevelDetokenizer(self)
        return _WindowDetokenizer(self)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def is_skipped(self, token_id: int) -> bool:
        """Whether decoding passes this token over: special, or no token at all (padding rows)."""
        return token_id in self._skipped or self._tokenizer.id_to_token(token_id) is None

    def token_bytes(self, token_id: int) -> bytes:
        """Byte-level BPE: what this token stands for; nothing where decoding skips it."""
        known = self._bytes.get(token_id)
        if known is None:
            token = None if self.is_skipped(token_id) else self._tokenizer.id_to_token(token_id)
            known = self._bytes[token_id] = _byte_level_bytes(token or "")
        return known

    def fallback_byte(self, token_id: int) -> int | None:
        """Byte fallback: the byte that this token stands for; None for a word."""
        if not self._byte_fallback:
            return None
        if token_id not in self._fallback_bytes:
            match = _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "")
            self._fallback_bytes[token_id] = int(match[1], 16) if match else None
        return self._fallback_bytes[token_id]


class _ByteLevelDetokenizer:
    """A UTF-8 decoder that is fed each token's bytes."""

    def __init__(self, decoding: Decoding) -> None:
        self._token_bytes = decoding.token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._token_bytes(token_id))

    def push_all(self, token_ids: Sequence[int]) -> str:
        return self._decode(b"".join(map(self._token_bytes, token_ids)))

    def finish(self) -> str:
        return ""  # what the decoder still holds is an unfinished character


class _WindowDetokenizer:
    """Decodes a window of the latest tokens, and gives what it has beyond the time before.

    `_window` starts with tokens whose text is out already, since decoders treat the first token of
    a text unlike the others (the leading space).
    """

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._window: list[int] = []
        self._num_out = 0  # tokens of the window whose text is out
        self._out = ""  # their text
        self._run = bytearray()  # bytes of the byte-fallback run at the window's end

    def push(self, token_id: int) -> str:
        if self._decoding.is_skipped(token_id):
            return ""
        self._window.append(token_id)
        byte = self._decoding.fallback_byte(token_id)
        if byte is not None:
            self._run.append(byte)
            return ""  # a later byte may still spoil the whole run
        text = self._decoding.decode(self._window)
        held = len(self._window) - self._num_out
        if not self._run and text.endswith(REPLACEMENT) and held <= _MAX_HELD_TOKENS:
            return ""
        self._run.clear()
        return self._give(text)

    def push_all(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        text = self._decoding.decode(self._window)
        if self._run:
            unfinished = _unfinished_length(bytes(self._run))
            whole = self._window[: len(self._window) - unfinished]
            text = self._decoding.decode(whole) if unfinished else text
        elif len(self._window) > self._num_out:
            text = text.rstrip(REPLACEMENT)
        return self._give(text)

    def _give(self, text: str) -> str:
        fresh = text[len(self._out) :]
        # The tokens just given begin the next window: one token of context, its text known.
        self._window = self._window[self._num_out :] or self._window
        self._out = self._decoding.decode(self._window)
        self._num_out = len(self._window)
        return fresh


def _unfinished_length(run: bytes) -> int:
    """How many bytes at the end of `run` begin a character; 0 if `run` is broken earlier."""
    try:
        run.decode()
    except UnicodeDecodeError as error:
        at_the_end = error.end == len(run) and error.reason == "unexpected end of data"
        return len(run) - error.start if at_the_end else 0
    return 0


def _decoder_kinds(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [kind for part in decoder["decoders"] for kind in _decoder_kinds(part)]
    return [decoder["type"]]


def _byte_characters() -> dict[str, int]:
    """Byte-level BPE writes bytes as printable characters: printable Latin-1 as itself, the others
    in order from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF = _byte_characters()


def _byte_level_bytes(token: str) -> bytes:
    """A token with a character outside the table (an added one) stands for its own UTF-8 bytes."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()
