"""What is found of emitted tokens."""

from __future__ import annotations

from typing import NamedTuple

import jax


class TokenLogprobs(NamedTuple):
    """Of B sequences and the places of their paths, D + 1 = root and accepted nodes.

    picked      float32 [B, D + 1]; 0 padded and where not wanted
    top_tokens  int32 [B, D + 1, K], likeliest first; -1 padded and where none are wanted
    top         float32 [B, D + 1, K], theirs
    """

    picked: jax.Array
    top_tokens: jax.Array
    top: jax.Array
