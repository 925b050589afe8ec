"""The EAGLE-3 draft head: description, published layouts, loading, running, making."""

from models.eagle3.description import (
    AuxReading,
    Choice,
    FeatureKind,
    FuseNorm,
    HeadConfig,
    HeadOverrides,
    TableSource,
)
from models.eagle3.fusing import FusingHead, fusing_hash, load_fusing_head
from models.eagle3.loader import load_head, open_head
from models.eagle3.module import head_embed, head_forward, head_fuse, head_logits

__all__ = [
    "AuxReading",
    "Choice",
    "FeatureKind",
    "FuseNorm",
    "FusingHead",
    "HeadConfig",
    "HeadOverrides",
    "TableSource",
    "fusing_hash",
    "head_embed",
    "head_forward",
    "head_fuse",
    "head_logits",
    "load_fusing_head",
    "load_head",
    "open_head",
]
