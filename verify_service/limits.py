"""What the verify machine may hold and plan. Every refusal names one of these."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyLimits:
    """Counts of tokens unless the name says otherwise."""

    vocab_size: int
    max_context_len: int
    max_tree_nodes: int  # root included
    max_tree_depth: int  # below the root; deeper nodes are cut
    max_sequences: int  # slots: sequences that hold pages at one time
    max_waiting_sequences: int
    page_size: int
    num_pages: int
    max_step_tokens: int  # rows of one step
    max_prefill_tokens: int  # of them, prefill rows while other sequences decode
    max_stop_tokens: int = 8
    max_ahead_nodes: int = 0  # candidates of a round launched before its root is known; 0: none is
    feature_window_tokens: int = 2048
    prefix_cache: bool = True
    cached_feature_tokens: int = 65536  # feature rows kept of published pages
    grace_seconds: float = 30.0  # for Attach after a stream went, and for tombstones
    pause_seconds: float = 0.5  # after that long without a round a sequence may be put out first

    def __post_init__(self) -> None:
        if self.max_sequences + self.max_prefill_tokens > self.max_step_tokens:
            raise ValueError(
                f"max_step_tokens: {self.max_step_tokens} is below max_sequences"
                f" ({self.max_sequences}) + max_prefill_tokens ({self.max_prefill_tokens});"
                " raise it, or lower one of the two, so that every root fits beside a prefill chunk"
            )
        if self.max_prefill_tokens < 1:
            raise ValueError(f"max_prefill_tokens: {self.max_prefill_tokens} is below 1")

    @property
    def max_unacknowledged(self) -> int:
        """Results kept per sequence: one more where a round may be launched behind one that runs
        (verify_service/followers.py).
        """
        return 3 if self.max_ahead_nodes else 2

    @property
    def max_open_sequences(self) -> int:
        """Of routers that are there; orphans are as many again at most."""
        return self.max_sequences + self.max_waiting_sequences

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many KV rows."""
        return -(-num_tokens // self.page_size)
