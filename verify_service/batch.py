"""A step's works laid out for the device: flattened rows, padded here and nowhere else.

T rows (all blocks one behind the other), N logit rows (the trees' nodes, roots included), B slots
of sequences, P pages of a sequence, W words of ancestor bits, S stop tokens, M words of a node's
token mask, C candidates of a block that follows another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.packing import Field, Packing
from verify_service.follow_up import FollowUp, places_of
from verify_service.step import SequenceWork

ROW_BUCKETS = (1, 8, 16, 32, 64, 256, 1024)
"""Each is a set of programs to compile and keep; on a CPU a few dozen MiB (SmolLM2, measured)."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The padded sizes of one compiled program."""

    num_rows: int  # T
    num_nodes: int  # N
    mask_words: int = 0  # M; 0: the program has no masks


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """The sizes that all programs of an engine share."""

    max_sequences: int  # B
    pages_per_sequence: int  # P
    ancestor_words: int  # W
    max_stop_tokens: int  # S
    max_depth: int  # most accepted nodes of a round
    max_ahead_nodes: int = 0  # C; 0: no block can follow another

    def packing(self, bucket: Bucket) -> Packing:
        """The one transfer of a step in this bucket."""
        b, t, n = self.max_sequences, bucket.num_rows, bucket.num_nodes
        masks = [Field("token_mask", (n, bucket.mask_words), "uint32")] if bucket.mask_words else []
        return Packing(
            Field("tokens", (t,)),
            Field("positions", (t,)),
            Field("row_sequence", (t,)),
            Field("row_is_causal", (t,)),  # 1: committed whatever is picked
            Field("ancestors", (t, self.ancestor_words), "uint32"),
            Field("node_rows", (n,)),  # the row of each node
            Field("node_parents", (n,)),  # as a node; -1 at roots
            Field("node_sequence", (n,)),  # -1 in padding
            Field("starts", (b + 1,)),
            Field("kv_lens", (b,)),
            Field("num_causal", (b,)),
            Field("page_table", (b, self.pages_per_sequence)),
            Field("num_copies", (1,)),
            Field("copy_from", (b,)),  # pages; the first num_copies count
            Field("copy_to", (b,)),
            Field("stop_tokens", (b, self.max_stop_tokens)),  # -1 padded
            Field("temperature", (b,), "float32"),
            Field("top_k", (b,)),
            Field("top_p", (b,), "float32"),
            Field("min_p", (b,), "float32"),
            Field("seed_lo", (b,), "uint32"),
            Field("seed_hi", (b,), "uint32"),
            Field("slot", (b,)),  # where penalties and biases are kept
            Field("presence", (b,), "float32"),
            Field("frequency", (b,), "float32"),
            Field("repetition", (b,), "float32"),
            Field("has_bias", (b,)),
            Field("min_position", (b,)),  # no stop token is picked for positions below
            Field("num_prompt", (b,)),
            Field("num_logprobs", (b,)),  # -1: none; 0: of the picks; more: of so many beside
            Field("scored", (n,)),  # the prompt's token that follows the node's row
            Field("num_scored_top", (n,)),  # -1: not wanted; 0: its own; more: so many beside
            *masks,  # bits: the tokens that may follow the node (verify_service/token_masks.py)
            *self._ahead(),
        )

    def _ahead(self) -> list[Field]:
        """What blocks that follow are resolved from (verify_service/resolve.py)."""
        b, c = self.max_sequences, self.max_ahead_nodes
        if not c:
            return []
        return [
            Field("follows", (b,)),  # its place among the works of the step before; -1: none
            Field("follow_depth", (b,)),  # most nodes below the new root
            Field("ahead_tokens", (b, c)),  # the candidates, rooted at the root before
            Field("ahead_depths", (b, c)),  # 0: the root, and padding
            Field("ahead_entered", (b, c)),
            Field("ahead_left", (b, c)),
        ]

    def results(self) -> Packing:
        """The one transfer back, beside features and what few ask for. D: most accepted nodes."""
        b, d = self.max_sequences, self.max_depth
        return Packing(
            Field("accepted", (b, d)),
            Field("num_accepted", (b,)),
            Field("emitted", (b, d + 1)),
            Field("margins", (b, d + 1), "float32"),
            Field("logprobs", (b, d + 1), "float32"),
        )


def pack(
    works: Sequence[SequenceWork],
    shape: BatchShape,
    bucket: Bucket,
    before: Mapping[int, int] | None = None,
) -> npt.NDArray[np.int32]:
    """The buffer of `shape.packing(bucket)`; the works lie in their order, slot i = work i.

    `before`: where the step before had each of its slots, for works that follow. Of their blocks,
    `positions` are the rows' own numbers and `node_parents` the tree's first node until the device
    resolves them.
    """
    packing = shape.packing(bucket)
    buffer = np.zeros(packing.size, np.int32)
    v = packing.views(buffer)
    v["node_sequence"][:] = -1
    v["node_parents"][:] = -1
    v["stop_tokens"][:] = -1
    v["top_p"][:] = 1.0
    v["repetition"][:] = 1.0
    v["num_logprobs"][:] = -1
    v["num_scored_top"][:] = -1
    if bucket.mask_words:
        v["token_mask"][:] = 0xFFFFFFFF
    if shape.max_ahead_nodes:
        v["follows"][:] = -1
    row = 0
    for work, nodes in zip(works, scored_nodes(works), strict=True):
        if work.num_scored:
            v["node_rows"][nodes] = np.arange(row, row + work.num_scored)
            v["scored"][nodes] = work.scored
            v["num_scored_top"][nodes] = work.sampling.prompt_logprobs or 0
        row += work.num_rows
    row = node = 0
    for slot, work in enumerate(works):
        n, causal = work.num_rows, work.num_causal
        rows = slice(row, row + n)
        v["row_sequence"][rows] = slot
        v["row_is_causal"][row : row + causal] = 1
        if work.follows is None:
            v["tokens"][rows] = work.tokens
            v["positions"][rows] = work.kv_len + _offsets(work)
            v["ancestors"][row + causal : row + n] = _ancestor_words(work, shape.ancestor_words)
        else:
            v["positions"][rows] = np.arange(n)
            _pack_ahead(v, slot, work.follows, (before or {})[work.slot])
        if work.samples:
            root = row + causal - 1
            count = work.num_nodes
            v["node_rows"][node : node + count] = np.arange(root, root + count)
            parents = 0 if work.follows is not None else work.parents[causal:] - (causal - 1)
            v["node_parents"][node + 1 : node + count] = parents + node
            v["node_sequence"][node : node + count] = slot
            if work.token_mask is not None:
                v["token_mask"][node : node + count] = work.token_mask
            node += count
        _pack_sequence(v, slot, work)
        row += n
        v["starts"][slot + 1] = row
    v["starts"][len(works) + 1 :] = row
    copies = [work.page_copy for work in works if work.page_copy is not None]
    v["num_copies"][0] = len(copies)
    for i, (source, target) in enumerate(copies):
        v["copy_from"][i], v["copy_to"][i] = source, target
    return buffer


def _pack_ahead(
    v: dict[str, npt.NDArray[np.generic]], slot: int, follows: FollowUp, before: int
) -> None:
    n = follows.tree.num_nodes
    v["follows"][slot] = before
    v["follow_depth"][slot] = follows.max_depth
    v["ahead_tokens"][slot, :n] = follows.tree.tokens
    v["ahead_depths"][slot, :n], v["ahead_entered"][slot, :n], v["ahead_left"][slot, :n] = (
        places_of(follows.tree)
    )


def scored_nodes(works: Sequence[SequenceWork]) -> list[slice]:
    """Where the scored rows of each work stand among the nodes: behind all trees."""
    if not any(work.num_scored for work in works):
        return [slice(0, 0)] * len(works)
    places = []
    first = sum(work.num_nodes for work in works)
    for work in works:
        places.append(slice(first, first + work.num_scored))
        first += work.num_scored
    return places


def _pack_sequence(v: dict[str, npt.NDArray[np.generic]], slot: int, work: SequenceWork) -> None:
    v["kv_lens"][slot] = work.kv_len
    v["num_causal"][slot] = work.num_causal
    v["page_table"][slot, : work.page_ids.size] = work.page_ids
    sampling = work.sampling
    if not sampling.ignore_eos:
        v["stop_tokens"][slot, : len(work.stop_tokens)] = work.stop_tokens
    v["temperature"][slot] = sampling.temperature
    v["top_k"][slot] = min(sampling.top_k, 2**31 - 1)
    v["top_p"][slot] = sampling.top_p
    v["min_p"][slot] = sampling.min_p
    v["seed_lo"][slot] = sampling.seed & 0xFFFFFFFF
    v["seed_hi"][slot] = sampling.seed >> 32
    _pack_options(v, slot, work)


def _pack_options(v: dict[str, npt.NDArray[np.generic]], slot: int, work: SequenceWork) -> None:
    sampling, history = work.sampling, work.history
    v["slot"][slot] = work.slot
    v["presence"][slot] = sampling.presence_penalty
    v["frequency"][slot] = sampling.frequency_penalty
    v["repetition"][slot] = sampling.repetition_penalty
    v["has_bias"][slot] = bool(sampling.logit_bias)
    if history is not None:
        v["num_prompt"][slot] = history.num_prompt_tokens
        if sampling.min_tokens:
            least = history.num_prompt_tokens + sampling.min_tokens
            v["min_position"][slot] = min(least, 2**31 - 1)
    if sampling.logprobs:
        v["num_logprobs"][slot] = sampling.top_logprobs


def _offsets(work: SequenceWork) -> npt.NDArray[np.int32]:
    """Position of each row of a block relative to its first."""
    offsets = np.arange(work.num_rows, dtype=np.int32)
    offsets[work.num_causal :] = work.tree_depths()
    offsets[work.num_causal :] += work.num_causal - 1
    return offsets


def _ancestor_words(work: SequenceWork, num_words: int) -> npt.NDArray[np.uint32]:
    """uint32 [tree nodes below the root, W]: bit k stands for block row num_causal + k."""
    causal = work.num_causal
    if work.num_rows == causal:
        return np.zeros((0, num_words), np.uint32)
    masks: list[int] = []  # of any length; Python's own numbers, for numpy's are slow
    for node, parent in enumerate(work.parents[causal:].tolist()):
        above = masks[parent - causal] if parent >= causal else 0
        masks.append(above | 1 << node)
    words = [
        [mask >> shift & 0xFFFFFFFF for shift in range(0, 32 * num_words, 32)] for mask in masks
    ]
    return np.array(words, np.uint32)
