"""Keys of KV pages by content: which tokens a page's rows were computed from, and for whom.

    key 0 = H(H(salt), block 0)    key i = H(key i-1, block i)

so that equal keys mean equal tokens from the very first on, under the same salt. Block i holds the
tokens of positions [i·page_size, (i+1)·page_size + lookahead). SHA-256: nobody can make up tokens
that have the key of somebody else's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


class PageKeys:
    """The keys of one sequence's full pages, made as they are asked for."""

    def __init__(self, page_size: int, salt: bytes = b"", lookahead: int = 0) -> None:
        """`lookahead`: later tokens that a page's rows depend on, beside those before its end."""
        self._page_size = page_size
        self._lookahead = lookahead
        self._first = hashlib.sha256(salt).digest()
        self._keys: list[bytes] = []

    def has_salt_of(self, other: PageKeys) -> bool:
        """Whether rows of one may be the other's."""
        return self._first == other._first

    def of(self, tokens: Sequence[int], num_pages: int) -> list[bytes]:
        """Keys of the first `num_pages` pages of a sequence that begins with `tokens`.

        `tokens` may have grown since the last call; of a sequence that was cut, say so (`cut`).
        Raises ValueError when there are not enough of them.
        """
        needed = num_pages * self._page_size + self._lookahead if num_pages else 0
        if len(tokens) < needed:
            raise ValueError(f"tokens: {len(tokens)} of them; {num_pages} pages need {needed}")
        for page in range(len(self._keys), num_pages):
            first = page * self._page_size
            block = tokens[first : first + self._page_size + self._lookahead]
            before = self._keys[-1] if self._keys else self._first
            self._keys.append(hashlib.sha256(before + np.array(block, "<i4").tobytes()).digest())
        return self._keys[:num_pages]

    def cut(self, num_tokens: int) -> None:
        """The sequence was cut to its first `num_tokens`."""
        del self._keys[max(0, num_tokens - self._lookahead) // self._page_size :]
