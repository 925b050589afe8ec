"""The verify service's settings."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from common.config import IntList
from common.device_config import DeviceConfig
from verify_service.batch import ROW_BUCKETS

MAX_CANDIDATES = 128
"""Of a tree ahead, for a round whose root is not known: most of what a draft grows by default."""


class VerifyConfig(DeviceConfig):
    """Settings of the verify service: the target model, which checks draft trees."""

    SERVICE: ClassVar[str] = "verify"

    port: int = Field(50052, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    model: Path = Field(description="Directory of the target, or its Hugging Face id, owner/name.")
    head: Path | None = Field(
        None, description="Directory of the draft's head: captures the boundaries that it needs."
    )
    boundaries: IntList = Field(
        (), description="Captured boundaries, as 2,15,27; overrides --head. Neither: defaults."
    )
    features: Literal["captured", "fused"] = Field(
        "captured",
        description="What a draft is sent: captured: the boundaries side by side; fused: what the"
        " norms and fc of --head make of them, mostly a third. Every draft then needs that head and"
        " --features fused.",
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Of weights and KV.")
    page_size_tokens: int = Field(16, ge=1, le=1024, description="Tokens of a KV page.")
    kv_pool_tokens: int = Field(
        8192, ge=16, description="Tokens that all KV pages together hold, rounded up to pages."
    )
    max_context_tokens: int = Field(
        2048, ge=2, description="Longest sequence, prompt included; at most the model's own."
    )
    max_sequences: int = Field(16, ge=1, le=1024, description="Sequences on the device at a time.")
    max_waiting_sequences: int = Field(
        256, ge=0, le=65536, description="Sequences beyond those; more are refused for now."
    )
    max_step_tokens: int = Field(
        64, ge=8, le=1024, description="Rows of a step: 8, 16, 32 and so on up to 1024."
    )
    row_buckets: IntList = Field(
        ROW_BUCKETS, description="Rows that steps are padded to; one program is compiled for each."
    )
    max_prefill_tokens: int = Field(
        48, ge=1, le=1024, description="Prefill rows of a step while other sequences decode."
    )
    max_prefill_slowdown: float = Field(
        8.0,
        ge=0,
        description="A step may take so many times longer for its prefill rows while other"
        " sequences decode, by measured times; fewer rows then come in. 0: no bound.",
    )
    max_tree_nodes: int = Field(64, ge=1, le=128, description="Nodes of a tree, root included.")
    max_tree_depth: int = Field(16, ge=1, le=64, description="Deeper nodes are cut.")
    tree_budget: Literal["auto", "full"] = Field(
        "auto",
        description="Nodes that are verified; auto: as pays by measured times; full: whole trees.",
    )
    drafting: Literal["auto", "none", "synchronous", "ahead"] = Field(
        "auto",
        description="How rounds are drafted: none: roots alone; synchronous: each waits for its"
        " tree; ahead: none waits, trees are grown for rounds to come; auto: as pays by measured"
        " times, or synchronous with tree_budget full.",
    )
    async_scheduling: Literal["auto", "on", "off"] = Field(
        "auto",
        description="A step is launched while the one before still runs, where rounds do not wait"
        " for trees: the device then chooses what the next round verifies, and never waits for the"
        " host. auto: on a TPU; a CPU works for both at once and gains nothing. off: one at a"
        " time.",
    )
    feature_window_tokens: int = Field(
        2048, ge=64, le=1 << 20, description="Feature rows kept per sequence, to send and replay."
    )
    prefix_cache: bool = Field(
        True, description="Full KV pages are shared by sequences that begin with the same tokens."
    )
    cached_feature_tokens: int = Field(
        65536,
        ge=0,
        description="Feature rows kept on the host for shared pages; without them, sequences that"
        " are drafted for compute shared tokens again.",
    )
    grace_seconds: float = Field(
        30.0, ge=0, le=3600, description="Sequences of a lost router are kept this long."
    )
    pause_seconds: float = Field(
        0.5, ge=0, le=3600, description="Paused for longer, a sequence may be put out first."
    )
    gather_seconds: float = Field(
        0.0005,
        ge=0,
        le=1,
        description="With tree_budget full, a step waits this long for sequences about to come"
        " back; auto waits as long as pays by measured times.",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.features == "fused" and self.head is None:
            raise ValueError(
                "features: fused, and no head to fuse them by; set head to the draft's head, or"
                " features to captured"
            )
        if self.max_step_tokens & (self.max_step_tokens - 1):
            raise ValueError(
                f"max_step_tokens: {self.max_step_tokens} is no power of two; set 128, 256, 512 or"
                " 1024"
            )
        if self.max_sequences + self.max_prefill_tokens > self.max_step_tokens:
            raise ValueError(
                f"max_step_tokens: {self.max_step_tokens} is below max_sequences"
                f" ({self.max_sequences}) + max_prefill_tokens ({self.max_prefill_tokens}); raise"
                " it, or lower one of the two"
            )
        return self

    @property
    def waits_for_trees(self) -> bool:
        """Whether rounds always do."""
        auto = "synchronous" if self.tree_budget == "full" else "auto"
        return (auto if self.drafting == "auto" else self.drafting) == "synchronous"

    @property
    def max_ahead_nodes(self) -> int:
        """Candidates of a round that is launched before its root is known; 0: none is."""
        wanted = self.async_scheduling == "on" or (
            self.async_scheduling == "auto" and self.platform == "tpu"
        )
        if self.waits_for_trees or not wanted:
            return 0
        return 1 if self.drafting == "none" else MAX_CANDIDATES

    @property
    def num_pages(self) -> int:
        return -(-self.kv_pool_tokens // self.page_size_tokens)
