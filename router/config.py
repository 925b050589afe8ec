"""The router's settings."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from common.config import ServiceConfig
from common.types import TreeShape


class RouterConfig(ServiceConfig):
    """Settings of the router: the public API, between clients, draft and verify."""

    SERVICE: ClassVar[str] = "router"

    port: int = Field(50051, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    model: Path = Field(
        description="Directory with the target's tokenizer.json and config.json; no weights."
    )
    model_name: str = Field("", description="Name that clients ask for; empty: the directory's.")
    verify: str = Field(description="Address of the verify service, host:port.")
    draft: str = Field(
        "", description="Address of the draft service, host:port; empty: root-only decoding."
    )
    max_running: int = Field(
        256, ge=1, le=65536, description="Generations at once; more are refused for now."
    )
    max_total_tokens: int = Field(
        0, ge=0, description="Most tokens of prompt and output; 0: what the services can hold."
    )
    default_max_tokens: int = Field(
        512, ge=1, description="Tokens to generate where a request says nothing."
    )
    tree_depth: int = Field(5, ge=1, le=32, description="Default depth of trees.")
    tree_top_k: int = Field(4, ge=1, le=64, description="Default children considered per node.")
    tree_nodes: int = Field(12, ge=1, le=128, description="Default nodes of a tree, root included.")
    tree_seconds: float = Field(
        1.0, gt=0, le=60, description="Wait for a tree before a round goes without one."
    )
    max_buffered_chunks: int = Field(
        64, ge=1, le=65536, description="Chunks kept for a slow client before its sequence pauses."
    )
    verify_lost_seconds: float = Field(
        30.0, gt=0, le=3600, description="Running generations wait this long for a lost verify."
    )

    @property
    def default_tree(self) -> TreeShape:
        return TreeShape(
            max_depth=self.tree_depth, top_k=self.tree_top_k, max_nodes=self.tree_nodes
        )

    @property
    def served_name(self) -> str:
        return self.model_name or self.model.resolve().name
