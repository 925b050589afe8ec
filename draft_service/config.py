"""The draft service's settings."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from common.config import IntList
from common.device_config import DeviceConfig
from common.types import TreeShape

_TREE = TreeShape()


class DraftConfig(DeviceConfig):
    """Settings of the draft service: an EAGLE-3 head, which grows trees of likely tokens."""

    SERVICE: ClassVar[str] = "draft"

    port: int = Field(50053, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    head: Path = Field(description="Directory of the head, or a bundle.")
    target: Path | None = Field(
        None,
        description="Directory of the target, of which only the embedding and perhaps the lm_head"
        " are read. Not set: the head's directory, which then must be a bundle.",
    )
    boundaries: IntList = Field(
        (), description="Captured boundaries, as 2,15,27, where the head's files are wrong."
    )
    aux_reading: Literal["", "boundaries", "outputs"] = Field(
        "",
        description="What the layer ids in the head's files mean: boundaries (streams that enter"
        " the layers) or outputs (those that leave them); empty: as the files say.",
    )
    features: Literal["captured", "fused"] = Field(
        "captured",
        description="What comes from verify, by its own setting of this name: captured: boundaries,"
        " which the head fuses; fused: by the same head's norms and fc already.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Of weights, KV and features; the features' as verify sends them."
    )
    weights: Literal["auto", "native", "int8"] = Field(
        "auto",
        description="native: the matrices in --dtype; int8: in 8 bits with a scale for each output,"
        " half of bfloat16's bytes a level; auto: int8 on a TPU, and on a CPU that multiplies it as"
        " it is, in float32 on one device.",
    )
    max_depth: int = Field(
        _TREE.max_depth, ge=1, le=16, description="Levels of a tree below its root."
    )
    top_k: int = Field(
        _TREE.top_k, ge=1, le=32, description="Children per node, and nodes kept per level."
    )
    max_nodes: int = Field(
        _TREE.max_nodes, ge=2, le=128, description="Nodes of a tree, root included."
    )
    levels: Literal["auto", "all"] = Field(
        "auto",
        description="Levels of a tree that are grown; auto: while the chance of reaching the next"
        " one is worth its time, as measured; all: max_depth.",
    )
    attention_window_tokens: int = Field(
        0,
        ge=0,
        description="The head attends to so many tokens back, if its files name no fewer;"
        " 0: to all. At long contexts its reads cost more than its weights.",
    )
    shared_noise: bool = Field(
        True, description="Order candidates with the noise that the target samples with."
    )
    draft_ahead: bool = Field(
        False,
        description="Grow trees for rounds to come where verify wishes so: they are wider and"
        " deeper, and no round waits for them.",
    )
    ahead_rows: int = Field(
        64,
        ge=1,
        le=4096,
        description="Nodes of a level of trees ahead, of all sequences of a step together: as many"
        " as cost the device little more than a few. A sequence has top_k to 32.",
    )
    ahead_depth: int = Field(8, ge=1, le=16, description="Levels of a tree ahead, at most.")
    ahead_top_k: int = Field(
        8, ge=1, le=32, description="Children of a node of a tree ahead, below its root."
    )
    ahead_nodes: int = Field(128, ge=2, le=256, description="Nodes of a tree ahead, with the root.")
    page_size_tokens: int = Field(16, ge=1, le=1024, description="Tokens of a KV page.")
    kv_pool_tokens: int = Field(
        32768, ge=16, description="Tokens that all KV pages together hold, rounded up to pages."
    )
    max_context_tokens: int = Field(2048, ge=2, description="Longest sequence, prompt included.")
    max_sequences: int = Field(64, ge=1, le=4096, description="Sequences held at a time.")
    max_step_sequences: int = Field(8, ge=1, le=256, description="Sequences in one step.")
    max_draft_tokens: int = Field(
        8, ge=1, le=64, description="New tokens of a sequence that fit into a step that drafts."
    )
    max_extend_tokens: int = Field(
        512, ge=32, le=4096, description="New tokens in a step that only extends."
    )
    recent_feature_rows: int = Field(
        32, ge=1, le=4096, description="Feature rows kept per sequence to draft after a rollback."
    )
    feature_memory_bytes: int = Field(
        64 << 20, ge=4 << 20, description="Feature rows that may wait, of all sequences."
    )
    prefix_cache: bool = Field(
        True, description="Full KV pages are shared by sequences that begin with the same tokens."
    )
    grace_seconds: float = Field(
        30.0, ge=0, le=3600, description="Sequences of a lost router are kept this long."
    )
    gather_seconds: float = Field(
        0.001, ge=0, le=1, description="A step waits this long for features that are on their way."
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        most = self.top_k + (self.max_depth - 1) * self.top_k**2 + 1
        if self.max_nodes > most:
            raise ValueError(
                f"max_nodes: {self.max_nodes} is beyond the {most} nodes that max_depth"
                f" {self.max_depth} and top_k {self.top_k} can give; lower it, or raise one of them"
            )
        return self

    @property
    def num_pages(self) -> int:
        return -(-self.kv_pool_tokens // self.page_size_tokens)

    @property
    def target_directory(self) -> Path:
        return self.head if self.target is None else self.target

    @property
    def tree(self) -> TreeShape:
        return TreeShape(max_depth=self.max_depth, top_k=self.top_k, max_nodes=self.max_nodes)
