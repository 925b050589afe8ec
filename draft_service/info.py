"""What a draft service says of itself on connect, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.tensors import FeatureDtype
from common.types import TreeShape

PROTOCOL_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftInfo:
    """`target`: the fields of canopy.v1.TargetIdentity, of the target whose tables are borrowed.
    `feature_kind`: "aux" or "last"; `row_width`: values in a feature row. `fused_by`:
    `models.eagle3.fusing_hash` of the head, if rows are to be fused already; empty: as captured.
    """

    head_name: str
    target: Mapping[str, Any]
    feature_kind: str
    boundaries: tuple[int, ...]
    feature_dtype: FeatureDtype
    row_width: int
    max_context_len: int
    max_tree: TreeShape
    max_sequences: int
    draft_ahead: bool = False
    fused_by: str = ""
