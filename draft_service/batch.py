"""A step's works laid out for the device: flattened pairs, padded here and nowhere else.

R rows (all works' pairs one behind the other), B slots of sequences, P pages of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from common.packing import Field, Packing
from common.types import DraftTree
from draft_service.feature_words import put_rows
from draft_service.step import SequenceWork

Int32Buffer = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Bucket:
    """The padded sizes of one compiled program."""

    num_sequences: int  # B
    num_rows: int  # R
    drafts: bool
    ahead: bool = False  # drafts trees of `EngineConfig.ahead`

    def packing(self, pages_per_sequence: int, num_last_rows: int, feature_words: int) -> Packing:
        """The step's one transfer. `num_last_rows`: B, or more on TPU; `feature_words`: of a row
        (draft_service/feature_words.py).
        """
        b, r = self.num_sequences, self.num_rows
        return Packing(
            Field("tokens", (r,)),
            Field("positions", (r,)),  # place of the pair in its sequence's KV
            Field("row_sequence", (r,)),
            Field("num_live", (2,)),  # sequences, rows
            Field("starts", (b + 1,)),
            Field("kv_lens", (b,)),
            Field("last_rows", (num_last_rows,)),
            Field("page_table", (b, pages_per_sequence)),
            Field("seed_lo", (b,), "uint32"),
            Field("seed_hi", (b,), "uint32"),
            Field("temperature", (b,), "float32"),
            Field("pick_positions", (b,)),  # of the tokens picked at the roots
            Field("max_levels", (b,)),
            Field("least_reach", (b,), "float32"),
            Field("num_copies", (1,)),
            Field("copy_from", (b,)),  # pages; the first num_copies count
            Field("copy_to", (b,)),
            Field("features", (r, feature_words), "uint32"),
        )


def pack(works: Sequence[SequenceWork], packing: Packing, bucket: Bucket) -> Int32Buffer:
    """The buffer of `packing`, slot i = work i."""
    buffer = np.zeros(packing.size, np.int32)
    v = packing.views(buffer)
    features: Any = v["features"]
    row = 0
    for slot, work in enumerate(works):
        n = work.num_rows
        rows = slice(row, row + n)
        v["tokens"][rows] = work.tokens
        v["positions"][rows] = np.arange(work.kv_len, work.kv_len + n)
        v["row_sequence"][rows] = slot
        v["kv_lens"][slot] = work.kv_len
        v["page_table"][slot, : work.page_ids.size] = work.page_ids
        put_rows(work.features, features[rows])
        row += n
        v["starts"][slot + 1] = row
        if bucket.drafts:
            v["last_rows"][slot] = row - 1
        v["max_levels"][slot] = work.max_levels
        v["least_reach"][slot] = work.least_reach
        if work.noise is not None:
            v["seed_lo"][slot] = work.noise.seed & 0xFFFFFFFF
            v["seed_hi"][slot] = work.noise.seed >> 32
            v["temperature"][slot] = work.noise.temperature
            v["pick_positions"][slot] = work.noise.pick_position
    v["starts"][len(works) + 1 :] = row
    v["num_live"][:] = (len(works), row)
    copies = [work.page_copy for work in works if work.page_copy is not None]
    v["num_copies"][0] = len(copies)
    for i, (source, target) in enumerate(copies):
        v["copy_from"][i], v["copy_to"][i] = source, target
    return buffer


def tree_columns(num_nodes: int) -> int:
    """Columns of a packed tree: tokens, parents, scores' bits, number of nodes."""
    return 3 * num_nodes + 1


def unpack_tree(row: Int32Buffer, num_nodes: int) -> DraftTree:
    """A tree from its packed row int32 [3·num_nodes + 1]; owns its memory."""
    count = int(row[-1])
    tokens, parents, scores = row[:-1].reshape(3, num_nodes)[:, :count].copy()
    return DraftTree(tokens, parents, scores.view(np.float32))
