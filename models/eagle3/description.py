"""A head's normalised description: one form for every layout, and where each choice is from.

Sizes: H hidden size of the head, Ht of the target, k captured states, K draft vocabulary, V target
vocabulary.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

import numpy as np

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
        spec = self.attention
        return self.num_layers * spec.num_kv_heads * 2 * spec.head_dim * self.dtype.itemsize
