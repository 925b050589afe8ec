"""What verify says of itself when a router connects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.tensors import FeatureDtype
from verify_service.step import StepPoint

PROTOCOL_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyInfo:
    """`identity`: fields of canopy.v1.TargetIdentity by name. `boundaries` empty: no features.
    `fused_by`: `models.eagle3.fusing_hash` of the head that fuses them; empty: as captured.
    """

    identity: dict[str, Any]
    boundaries: tuple[int, ...]
    feature_dtype: FeatureDtype
    row_width: int
    max_context_len: int
    max_tree_nodes: int
    max_sequences: int
    page_size_tokens: int
    num_pages: int
    step_times: tuple[StepPoint, ...] = ()
    fused_by: str = ""
