"""Whether router, verify and draft fit, and what they can do together.

Compared once per connection, before any sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from canopy.v1 import draft_pb2, types_pb2, verify_pb2
from canopy.v1.types_pb2 import FeatureDtype, FeatureKind
from common.types import TreeShape
from router.config import RouterConfig
from router.drafting import DraftSettings
from router.generation import Served
from router.machine import MachineSettings
from router.tokenizer import ModelTokenizer

PROTOCOL_VERSION = 2
_NO_LIMIT = 1 << 31
TARGET_FIELDS = (
    *("vocab_size", "padded_vocab_size", "tokenizer_hash", "hidden_size", "weights_hash"),
)


def check_verify(info: verify_pb2.GetVerifyInfoResponse, tokenizer: ModelTokenizer) -> str | None:
    """The mismatch between router and verify in words with the remedy, or None."""
    if info.protocol_version != PROTOCOL_VERSION:
        return _version("verify", info.protocol_version)
    theirs = info.target.tokenizer_hash
    if theirs != tokenizer.tokenizer_hash:
        return (
            f"tokenizer_hash: verify's model has {theirs[:12] or 'none'}, the router's"
            f" {tokenizer.tokenizer_hash[:12]}; give both the same model directory"
        )
    return None


def check_same_target(
    before: verify_pb2.GetVerifyInfoResponse, after: verify_pb2.GetVerifyInfoResponse
) -> str | None:
    """A verify that comes back with another model must not go on with sequences of the old one."""
    for field in TARGET_FIELDS:
        was, now = getattr(before.target, field), getattr(after.target, field)
        if was != now:
            return (
                f"{field}: verify came back with {now!r}, it had {was!r}; start the router anew to"
                " serve the new model"
            )
    return None


def check_pair(
    verify: verify_pb2.GetVerifyInfoResponse, draft: draft_pb2.GetDraftInfoResponse
) -> str | None:
    """The first mismatch between verify and draft in words with the remedy, or None."""
    if draft.protocol_version != PROTOCOL_VERSION:
        return _version("draft", draft.protocol_version)
    for field in TARGET_FIELDS:
        ours, theirs = getattr(verify.target, field), getattr(draft.target, field)
        if ours != theirs:
            return (
                f"{field}: verify's target has {ours!r}, the draft's head is set up for {theirs!r};"
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
    if made.fused_by != needed.fused_by:
        return _fusing(made.fused_by, needed.fused_by)
    if made.row_width != needed.row_width:
        return f"feature width: verify sends {made.row_width}, the head takes {needed.row_width}"
    if made.dtype != needed.dtype:
        return (
            f"feature dtype: verify sends {FeatureDtype.Name(made.dtype)}, the draft expects"
            f" {FeatureDtype.Name(needed.dtype)}; set the same on both"
        )
    return None


def _fusing(made: str, needed: str) -> str:
    """In words: verify and draft do not agree on who fuses features, or by which head."""
    if not needed:
        return (
            f"features: verify sends them fused by head {made[:12]}, the draft takes captured ones;"
            " start the draft with --features fused, or verify with --features captured"
        )
    if not made:
        return (
            f"features: verify sends captured ones, the draft takes them fused by head"
            f" {needed[:12]}; start verify with --features fused and the draft's head, or the draft"
            " with --features captured"
        )
    return (
        f"fusing head: verify fuses features by {made[:12]} (norms and fc), the draft's head has"
        f" {needed[:12]}; give both the same head, or start both with --features captured"
    )


def _version(role: str, theirs: int) -> str:
    return (
        f"protocol version: the router speaks {PROTOCOL_VERSION}, {role} {theirs};"
        " run the same release of both"
    )


def served(
    config: RouterConfig,
    tokenizer: ModelTokenizer,
    verifies: Sequence[verify_pb2.GetVerifyInfoResponse],
    drafts: Sequence[draft_pb2.GetDraftInfoResponse],
) -> Served:
    """The limits of requests: what every replica can hold, so that any may take a sequence over.

    `verifies`: at least one. A draft not met yet bounds nothing.
    """
    nodes = max(1, min(verify.max_tree_nodes for verify in verifies))
    most = TreeShape(max_depth=max(1, nodes - 1), top_k=nodes, max_nodes=nodes)
    for draft in drafts:
        most = _smaller(most, draft.max_tree)
    context_len = min(verify.max_context_len for verify in verifies)
    unasked = config.default_tree
    return Served(
        model_name=config.served_name,
        vocab_size=verifies[0].target.vocab_size,
        max_context_len=min(context_len, config.max_total_tokens or context_len),
        stop_token_ids=tokenizer.stop_token_ids,
        default_max_tokens=config.default_max_tokens,
        max_tree=most,
        default_tree=TreeShape(
            max_depth=min(unasked.max_depth or most.max_depth, most.max_depth),
            top_k=min(unasked.top_k or most.top_k, most.top_k),
            max_nodes=min(unasked.max_nodes or most.max_nodes, most.max_nodes),
        ),
        max_choices=min(config.max_choices, config.max_running),
    )


def machine_settings(
    config: RouterConfig,
    verifies: Sequence[verify_pb2.GetVerifyInfoResponse],
    drafts: Sequence[draft_pb2.GetDraftInfoResponse],
) -> MachineSettings:
    """How rounds are run: as every replica can. `verifies`: at least one."""
    draft = None
    if config.draft:
        kinds = [info.features.kind for info in drafts]
        draft = DraftSettings(
            needs_features=kinds != [FeatureKind.FEATURE_KIND_NONE] * max(1, len(kinds)),
            max_context_len=min(
                (i.max_context_len or _NO_LIMIT for i in drafts), default=_NO_LIMIT
            ),
            deadline_seconds=config.tree_seconds,
            catch_up_tokens=config.catch_up_tokens,
            draft_ahead=_draft_ahead(verifies, drafts),
        )
    return MachineSettings(
        draft=draft,
        max_tree_nodes=min(info.max_tree_nodes for info in verifies),
        verify_lost_seconds=config.verify_lost_seconds,
    )


def _draft_ahead(
    verifies: Sequence[verify_pb2.GetVerifyInfoResponse],
    drafts: Sequence[draft_pb2.GetDraftInfoResponse],
) -> bool:
    """Whether trees are grown ahead where verify advises it: every replica must do its part."""
    can_verify = all(info.max_ahead_nodes for info in verifies)
    return can_verify and bool(drafts) and all(info.draft_ahead for info in drafts)


def _smaller(shape: TreeShape, limit: types_pb2.TreeShape) -> TreeShape:
    """Field by field; what the limit leaves unset does not limit."""
    return TreeShape(
        max_depth=min(shape.max_depth, limit.max_depth or shape.max_depth),
        top_k=min(shape.top_k, limit.top_k or shape.top_k),
        max_nodes=min(shape.max_nodes, limit.max_nodes or shape.max_nodes),
    )
