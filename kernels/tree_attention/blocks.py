"""Block sizes of the tree attention kernel: a pure function of the chip and of the call's
shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from kernels.chips import MIB, Chip
from kernels.tree_attention.compute import LANES, Heads

BLOCK_PIECE = 128
"""Rows of a sequence's block (its new K/V rows) taken at a time: one register of score lanes."""

ROW_ALIGN = 16
"""A DMA from the middle of an array starts at a whole tile of rows (8, or 16 packed)."""

_KV_BLOCK_BYTES = 2 * MIB
_SPARE_BYTES = 5 * MIB
"""What the compiler takes beside the scratch, as seen: much of v4's 16 MiB, little of others'."""
_MEGACORE = ("v4", "v5p")  # generations whose jax device spans both cores of a chip


@dataclass(frozen=True)
class Blocks:
    """Sizes of one compiled kernel.

    `keys`: prefix tokens per KV block, a multiple of the page size and of 128. `piece`: tokens at
    a time in a sequence's last, partial block. `tiles`: query tiles compiled, ascending; a tile of
    n rows takes the first that holds them. `num_cores`: cores that share a call.
    """

    keys: int
    piece: int
    tiles: tuple[int, ...]
    num_cores: int
    vmem_limit_bytes: int

    @property
    def tile(self) -> int:
        """Query rows (tokens) of the largest tile: how sequences are cut."""
        return self.tiles[-1]


def staging_rows(heads: Heads, tile: int) -> int:
    """Rows of `Scratch.staging`; a register of them where nothing is turned through it."""
    return tile * heads.padded_q_heads if heads.turned_by_strides else 8


def vmem_bytes(heads: Heads, keys: int, tile: int, num_words: int) -> int:
    """VMEM of the kernel's scratch for the given sizes."""
    item = int(jnp.dtype(heads.dtype).itemsize)
    rows = tile * heads.group
    width = max(heads.q_width, LANES)
    padded_heads = -(-heads.q_heads // 16) * 16
    kv = 2 * heads.kv_heads * keys * heads.row_width * item
    softmax = heads.kv_heads * rows * (keys * (4 + item) + 3 * LANES * 4 + width * (4 + item))
    queries = 5 * tile * padded_heads * max(heads.head_dim, LANES) * item  # q twice, o three times
    staging = 2 * staging_rows(heads, tile) * max(heads.head_dim, LANES) * 4
    block = 4 * heads.kv_heads * BLOCK_PIECE * heads.row_width * item
    bits = 2 * tile * max(num_words, 8) * LANES * 4
    return kv + softmax + queries + staging + block + bits


def choose_blocks(
    chip: Chip,
    heads: Heads,
    *,
    page_size: int,
    pages_per_sequence: int,
    num_rows: int,
    num_words: int,
) -> Blocks:
    """Block sizes for a call of `num_rows` q rows.

    KV blocks of about 2 MiB: enough bytes in flight to hide a block's fixed costs, small enough for
    two of them and two scratch arrays of scores. Halved until VMEM holds all. Raises ValueError if
    nothing fits.
    """
    step = max(page_size, LANES)  # page sizes are powers of two
    item = jnp.dtype(heads.dtype).itemsize
    row_bytes = heads.kv_heads * heads.row_width * item
    tiles = tuple(t for t in (8, 16, 32, 64) if t == 8 or t // 2 < num_rows)
    budget = chip.vmem_bytes - max(int(chip.vmem_bytes * 0.15), _SPARE_BYTES)
    longest = -(-pages_per_sequence * page_size // step) * step
    while True:
        keys = step
        while (
            keys * 2 * row_bytes <= _KV_BLOCK_BYTES
            and keys < longest
            and vmem_bytes(heads, keys * 2, tiles[-1], num_words) <= budget
        ):
            keys *= 2
        if vmem_bytes(heads, keys, tiles[-1], num_words) <= budget:
            break
        if len(tiles) == 1:
            raise ValueError(
                f"{heads.kv_heads} KV heads of {heads.head_dim} with {heads.group} query heads each"
                f" need {vmem_bytes(heads, keys, tiles[-1], num_words)} bytes of VMEM at the"
                f" smallest block; {chip.name} has {chip.vmem_bytes}; split the heads over chips"
            )
        tiles = tiles[:-1]
    piece = LANES
    while piece * 4 <= keys and keys % (piece * 2) == 0 and piece * row_bytes * 4 < _KV_BLOCK_BYTES:
        piece *= 2
    return Blocks(
        keys=keys,
        piece=piece,
        tiles=tiles,
        num_cores=2 if chip.name in _MEGACORE else 1,
        vmem_limit_bytes=int(chip.vmem_bytes * 0.95),
    )
