"""Sizes of a draft engine: what its programs hold, and how its trees grow."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from common.types import TreeShape
from draft_service.batch import Bucket
from kernels.backend import Backend
from kernels.chips import Chip
from models.eagle3 import HeadConfig

EXTEND_ROWS = (32, 128, 512, 2048)
"""Row buckets of steps that only extend, up to max_extend_rows."""

MAX_WIDTH = 32
"""Nodes of a level at most: beyond these a level costs more than it finds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadShape:
    """Trees for rounds to come: as wide as the step's sequences let them be.

    `top_k`: children of a node below the root, whose children are as many as a level is wide.
    `max_rows`: nodes of a level that the head runs on, over all sequences of a step.
    """

    max_depth: int = 8
    max_nodes: int = 128
    top_k: int = 8
    max_rows: int = 64

    def width(self, num_sequences: int, least: int) -> int:
        """F, nodes of a sequence's level: the largest power of two that fits, in [least, 32]."""
        each = self.max_rows // num_sequences
        return max(least, min(MAX_WIDTH, 1 << max(0, each.bit_length() - 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine; counts of pairs unless the name says otherwise."""

    num_pages: int
    page_size: int
    max_context_len: int  # of one sequence
    tree: TreeShape = field(default_factory=TreeShape)
    max_sequences: int = 8  # in one step
    max_draft_rows: int = 8  # of one sequence, in a step that drafts
    max_extend_rows: int = 512  # in a step that only extends
    fused_features: bool = False  # rows come fused, as `head_fuse` would give them
    ahead: AheadShape | None = None  # None: no such programs
    min_rows: int = 1  # 8 on TPU: one-row matrix products take another, slower path there
    backend: Backend = Backend.XLA
    chip: Chip | None = None

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.max_context_len // self.page_size)

    def buckets(self) -> tuple[Bucket, ...]:
        """Every bucket that a step may take, smallest first within each kind."""
        sizes, size = [self.max_sequences], 1
        while size < self.max_sequences:
            sizes.append(size)
            size *= 2
        drafting = [Bucket(b, b * self.max_draft_rows, True) for b in sorted(sizes)]
        if self.ahead is not None:
            drafting += [replace(bucket, ahead=True) for bucket in drafting]
        rows = sorted({min(r, self.max_extend_rows) for r in EXTEND_ROWS})
        return (*drafting, *(Bucket(self.max_sequences, r, False) for r in rows))

    def growth(self, bucket: Bucket) -> tuple[TreeShape, int]:
        """The trees that the bucket's program grows, and their width."""
        tree, ahead = self.tree, self.ahead
        if not bucket.ahead or ahead is None:
            return tree, tree.top_k
        width = ahead.width(bucket.num_sequences, tree.top_k)
        top_k = min(ahead.top_k, width)
        return TreeShape(max_depth=ahead.max_depth, top_k=top_k, max_nodes=ahead.max_nodes), width

    def validate(self, head: HeadConfig) -> None:
        """Raises ValueError naming field, value and limit."""
        shape = self.tree
        if not 1 <= shape.top_k <= head.draft_vocab_size:
            raise ValueError(
                f"top_k: {shape.top_k} is outside [1, {head.draft_vocab_size}],"
                " the draft vocabulary"
            )
        if shape.max_depth < 1:
            raise ValueError(f"max_depth: {shape.max_depth} is below 1")
        if shape.max_nodes < 2:
            raise ValueError(f"max_nodes: {shape.max_nodes} is below 2, the root and one child")
        for bucket in filter(lambda bucket: bucket.drafts, self.buckets()):
            grown, width = self.growth(bucket)
            if width > head.draft_vocab_size:
                raise ValueError(
                    f"ahead_rows: {width} nodes of a level are more than the draft vocabulary's"
                    f" {head.draft_vocab_size} tokens; lower it"
                )
            narrowest = min((w for w in head.windows if w is not None), default=None)
            named = 32 * ancestor_words(grown, width)
            if narrowest is not None and narrowest <= named:
                raise ValueError(
                    f"attention_window_tokens: {narrowest} must exceed {named}, which trees of"
                    f" {width} nodes a level and depth {grown.max_depth} take; raise it, or lower"
                    f" {'ahead_rows or ahead_depth' if bucket.ahead else 'top_k or max_depth'}"
                )
        if self.min_rows > shape.top_k:
            raise ValueError(
                f"top_k: {shape.top_k} is below {self.min_rows}, the fewest rows that this device"
                " multiplies well; raise it"
            )


def num_tree_rows(shape: TreeShape, width: int) -> int:
    """Nodes that the head runs on: all levels of `width` but the deepest."""
    return max(1, shape.max_depth - 1) * width


def ancestor_words(shape: TreeShape, width: int) -> int:
    """Words of ancestor bits that name them."""
    return -(-num_tree_rows(shape, width) // 32)
