"""Whether a draft and a verify service fit: compared once per connection, before any sequence."""

from __future__ import annotations

from canopy.v1 import draft_pb2, verify_pb2
from canopy.v1.types_pb2 import FeatureDtype, FeatureKind
from router.tokenizer import ModelTokenizer

PROTOCOL_VERSION = 1


def check_verify(info: verify_pb2.GetVerifyInfoResponse, tokenizer: ModelTokenizer) -> str | None:
    """The mismatch between router and verify in words with the remedy, or None."""
    if info.protocol_version != PROTOCOL_VERSION:
        return _version("verify", info.protocol_version)
    theirs = info.target.tokenizer_hash
    if theirs and theirs != tokenizer.tokenizer_hash:
        return (
            f"tokenizer_hash: verify's model has {theirs[:12]}, the router's"
            f" {tokenizer.tokenizer_hash[:12]}; give both the same model directory"
        )
    return None


def check_pair(
    verify: verify_pb2.GetVerifyInfoResponse, draft: draft_pb2.GetDraftInfoResponse
) -> str | None:
    """The first mismatch between verify and draft in words with the remedy, or None."""
    if draft.protocol_version != PROTOCOL_VERSION:
        return _version("draft", draft.protocol_version)
    for field in (
        "vocab_size",
        "padded_vocab_size",
        "tokenizer_hash",
        "hidden_size",
        "weights_hash",
    ):
        ours, theirs = getattr(verify.target, field), getattr(draft.target, field)
        if ours != theirs:
            return (
                f"{field}: verify's target has {ours}, the draft's head is set up for {theirs};"
                " give both services the same target"
            )
    made, needed = verify.features, draft.features
    if needed.kind == FeatureKind.FEATURE_KIND_NONE:
        return None
    if made.kind != needed.kind:
        return (
            f"feature kind: verify sends {FeatureKind.Name(made.kind)}, the head needs"
            f" {FeatureKind.Name(needed.kind)}; start verify with the head's own settings"
        )
    if list(made.boundaries) != list(needed.boundaries):
        return (
            f"captured boundaries: verify sends {list(made.boundaries)}, the head needs"
            f" {list(needed.boundaries)}; start verify with the head's boundaries"
        )
    if made.row_width != needed.row_width:
        return f"feature width: verify sends {made.row_width}, the head takes {needed.row_width}"
    if made.dtype != needed.dtype:
        return (
            f"feature dtype: verify sends {FeatureDtype.Name(made.dtype)}, the draft expects"
            f" {FeatureDtype.Name(needed.dtype)}; set the same on both"
        )
    return None


def _version(role: str, theirs: int) -> str:
    return (
        f"protocol version: the router speaks {PROTOCOL_VERSION}, {role} {theirs};"
        " run the same release of both"
    )
