"""A head's normalised description: one form for every layout, and where each choice is from.

Sizes: H hidden size of the head, Ht of the target, k captured states, K draft vocabulary, V target
vocabulary.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

import numpy as np

from models.config import MODEL_AXIS, check_shares
from models.layers import AttentionSpec, DType
from models.rope import RopeConfig


class FeatureKind(enum.StrEnum):
    """What of the target the head is fed."""

    AUX = "aux"  # the residual stream entering captured layers
    LAST = "last"  # the last hidden state, after the target's final norm


class FuseNorm(enum.StrEnum):
    """What is normed before fc."""

    NONE = "none"
    JOINT = "joint"  # one RMSNorm over the k states side by side
    PER_STATE = "per_state"  # one RMSNorm for each state


class TableSource(enum.StrEnum):
    """Whose embedding or lm_head the head uses."""

    HEAD = "head"
    TARGET = "target"


class AuxReading(enum.StrEnum):
    """What the layer ids in a head's config mean."""

    BOUNDARIES = "boundaries"  # id b: the stream entering layer b
    OUTPUTS = "outputs"  # id i: the stream leaving layer i, which is boundary i + 1


@dataclass(frozen=True, slots=True)
class Choice:
    """Why a field has its value. `assumed`: the files do not say; check when acceptance is low."""

    field: str
    value: str
    source: str
    assumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOverrides:
    """What an operator decides against, or in want of, the head's own files."""

    boundaries: tuple[int, ...] | None = None
    aux_reading: AuxReading | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """An EAGLE-3 head. Hashable, so that it may be a static argument of jit.

    `boundaries` ascend; empty for FeatureKind.LAST, and in a description made without a target
    where the files leave them open. `embedding_layers[i]`: layer i is fed [embedding, hidden] (2H)
    and not hidden alone. `windows[i]`: tokens layer i sees back, itself included; None: all.

    All sizes are the whole head's; with `num_shards` > 1 the properties named `local_` are those of
    one chip, and the modules must run inside a `shard_map` over MODEL_AXIS (models/sharding.py).
    """

    layout: str
    hidden_size: int
    target_hidden_size: int
    num_states: int
    feature_kind: FeatureKind
    boundaries: tuple[int, ...]
    has_fc: bool
    fc_bias: bool
    fuse_norm: FuseNorm
    embedding_layers: tuple[bool, ...]
    windows: tuple[int | None, ...]
    attention: AttentionSpec
    mlp_size: int
    mlp_bias: bool
    norm_eps: float
    norm_before_residual: bool
    norm_output: bool
    rope: RopeConfig
    draft_vocab_size: int
    target_vocab_size: int
    embedding_source: TableSource
    lm_head_source: TableSource
    dtype: DType = dataclasses.field(default_factory=lambda: np.dtype(np.float32))
    provenance: tuple[Choice, ...] = dataclasses.field(default=(), compare=False, repr=False)
    num_shards: int = 1

    @property
    def axis(self) -> str | None:
        """The mesh axis to sum over, None on a single chip."""
        return MODEL_AXIS if self.num_shards > 1 else None

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def local_kv_heads(self) -> int:
        return max(1, self.num_kv_heads // self.num_shards)

    @property
    def stored_kv_heads(self) -> int:
        """KV heads of all chips' pages together: repeated where chips are more than heads."""
        return self.local_kv_heads * self.num_shards

    @property
    def local_attention(self) -> AttentionSpec:
        return dataclasses.replace(
            self.attention,
            num_heads=self.attention.num_heads // self.num_shards,
            num_kv_heads=self.local_kv_heads,
            axis=self.axis,
        )

    @property
    def local_mlp_size(self) -> int:
        return self.mlp_size // self.num_shards

    @property
    def local_draft_vocab_size(self) -> int:
        """Rows of the lm_head on a chip; the last chips' may end in padding."""
        return -(-self.draft_vocab_size // self.num_shards)

    @property
    def local_target_vocab_size(self) -> int:
        """Rows of the embedding on a chip, likewise."""
        return -(-self.target_vocab_size // self.num_shards)

    @property
    def local_feature_size(self) -> int:
        """Features that a chip's part of fc reads."""
        return self.feature_size // self.num_shards

    @property
    def num_layers(self) -> int:
        return len(self.embedding_layers)

    @property
    def feature_size(self) -> int:
        """F: numbers in one row of features."""
        return self.num_states * self.target_hidden_size

    @property
    def attention_scale(self) -> float:
        """What q·k is multiplied by before the softmax."""
        return float(self.attention.head_dim**-0.5)

    @property
    def kv_bytes_per_token(self) -> int:
        """On all chips together."""
        spec = self.attention
        return self.num_layers * self.stored_kv_heads * 2 * spec.head_dim * self.dtype.itemsize

    def with_shards(self, num_shards: int) -> HeadConfig:
        """For so many chips. Raises ModelError unless each gets an equal share."""
        parts = {"attention heads": self.attention.num_heads, "MLP width": self.mlp_size}
        if self.has_fc:
            parts["features"] = self.feature_size
        check_shares(num_shards, "head", parts, self.num_kv_heads)
        return dataclasses.replace(self, num_shards=num_shards)
