"""What the draft machine may hold and plan. Read once at start; every refusal names one of
these.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.types import TreeShape
from draft_service.levels import LevelSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """Counts of tokens (pairs) unless the name says otherwise."""

    vocab_size: int
    feature_size: int  # values in a feature row
    max_context_len: int
    tree: TreeShape  # what the engine grows; requests may ask for less
    max_sequences: int
    page_size: int
    num_pages: int
    max_step_sequences: int  # sequences in one step
    max_draft_rows: int  # pairs of one sequence in a step that drafts
    max_extend_rows: int  # pairs in a step that only extends
    shared_noise: bool = True  # candidates are ordered with the target's noise
    level_seconds: LevelSeconds = ()  # none: grow all
    ahead: TreeShape | None = None  # the most of a tree ahead; None: none are grown
    ahead_level_seconds: LevelSeconds = ()
    recent_rows: int = 32  # feature rows kept behind the KV, to draft again after a Rollback
    max_waiting_bytes: int = 64 << 20  # feature rows that wait for tokens, gaps or a step
    prefix_cache: bool = True
    grace_seconds: float = 30.0  # for Attach after a stream went, and for tombstones

    def __post_init__(self) -> None:
        for name in (
            "max_sequences", "max_step_sequences", "max_draft_rows", "max_extend_rows",
            "page_size", "num_pages", "recent_rows",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")

    def pages_for(self, num_pairs: int) -> int:
        """Pages that hold so many KV rows."""
        return -(-num_pairs // self.page_size)
