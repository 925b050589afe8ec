"""Which tokens may follow a node: bits, as they go to the device, where mask_share.py unpacks them.

Token t is bit t % 32 of word t // 32, as libraries for grammars pack them. A set bit allows the
token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WORD_BITS = 32

MaskWords = npt.NDArray[np.uint32]
"""[nodes, num_mask_words(V)]"""


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // WORD_BITS)


def pack_mask(allowed: npt.NDArray[np.bool_]) -> MaskWords:
    """Of bool [nodes, V]."""
    nodes, vocab_size = allowed.shape
    padded = np.zeros((nodes, num_mask_words(vocab_size) * WORD_BITS), bool)
    padded[:, :vocab_size] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view("<u4")


def check_mask(mask: MaskWords, num_nodes: int, vocab_size: int) -> None:
    """Raises ValueError for a shape that does not fit, and for a node that nothing may follow."""
    shape = (num_nodes, num_mask_words(vocab_size))
    if mask.shape != shape or mask.dtype != np.uint32:
        raise ValueError(
            f"token_mask: {mask.dtype} {mask.shape} must be uint32 {shape}: a row for each node,"
            f" a bit for each of {vocab_size} tokens"
        )
    last = mask[:, -1] & np.uint32(0xFFFFFFFF >> (-vocab_size % WORD_BITS))
    barred = ~(mask[:, :-1].any(axis=1) | (last != 0))
    if barred.any():
        raise ValueError(f"token_mask: no token may follow node {int(barred.argmax())}")
