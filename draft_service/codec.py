"""Between wire messages and the machine's commands and events: the only code here that knows both.

Of `Open.sampling` temperature and seed are read, for the target's noise: guesses are right or wrong
by the target's pick, whatever the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from canopy.v1 import draft_pb2, types_pb2
from common.noise_key import seed_of_choice
from common.sequence_codec import (
    decode_commands,
    encode_error,
    encode_state,
    head_of,
    unknown_command,
)
from common.tensors import FeatureDtype, FeaturePiece, join_piece
from common.tracing import Trace
from common.types import DraftTree, FeatureRows, TreeShape
from draft_service.commands import Attach, Close, Command, Extend, Open, Rollback
from draft_service.events import Closed, Event, Evicted, Failed, StateReport, TreeReady
from draft_service.info import PROTOCOL_VERSION, DraftInfo


def decode_request(
    stream: int, request: draft_pb2.DraftRequest, shape: TreeShape
) -> tuple[list[Command], list[Failed]]:
    """The frame's commands, and an error for each that could not be read.

    `shape`: the engine's, for the fields of a tree shape that are not set.
    """
    return decode_commands(stream, request.commands, partial(_command, shape=shape))


def encode_events(events: Iterable[Event]) -> draft_pb2.DraftResponse:
    return draft_pb2.DraftResponse(events=[_event(event) for event in events])


def encode_info(info: DraftInfo) -> draft_pb2.GetDraftInfoResponse:
    tree = info.max_tree
    return draft_pb2.GetDraftInfoResponse(
        protocol_version=PROTOCOL_VERSION,
        head_name=info.head_name,
        target=types_pb2.TargetIdentity(**info.target),
        features=types_pb2.FeatureSpec(
            kind=f"FEATURE_KIND_{info.feature_kind.upper()}",
            boundaries=info.boundaries,
            dtype=f"FEATURE_DTYPE_{info.feature_dtype.name}",
            row_width=info.row_width,
            fused_by=info.fused_by,
        ),
        max_context_len=info.max_context_len,
        max_tree=types_pb2.TreeShape(
            max_depth=tree.max_depth, top_k=tree.top_k, max_nodes=tree.max_nodes
        ),
        max_sequences=info.max_sequences,
        draft_ahead=info.draft_ahead,
    )


def decode_features(block: types_pb2.FeatureBlock) -> FeatureRows:
    """The rows of a block, as a view of its bytes. Raises ValueError naming the field."""
    dtype = FeatureDtype(int(block.dtype))
    piece = FeaturePiece(
        sequence_id=block.sequence_id,
        epoch=block.epoch,
        position=block.position,
        num_rows=block.num_rows,
        row_width=block.row_width,
        dtype=dtype,
        data=block.data,
    )
    return join_piece(piece)


def _command(message: draft_pb2.DraftCommand, shape: TreeShape) -> Command:
    head = head_of(message)
    match message.WhichOneof("command"):
        case "open":
            opened, sampling = message.open, message.open.sampling
            return Open(
                **head,
                tokens=tuple(opened.tokens),
                max_total_tokens=opened.max_total_tokens,
                features_from=opened.features_from,
                cache_salt=opened.cache_salt,
                tree=_shape(opened.tree, shape) if opened.HasField("tree") else None,
                temperature=sampling.temperature if sampling.HasField("seed") else 0.0,
                seed=seed_of_choice(sampling.seed, opened.choice_index),
                trace=Trace(opened.trace.request_id, opened.trace.traceparent),
            )
        case "attach":
            return Attach(**head)
        case "extend":
            body = message.extend
            return Extend(
                **head,
                round=body.round,
                base_len=body.base_len,
                tokens=tuple(body.tokens),
                tree=_shape(body.tree, shape) if body.HasField("tree") else None,
                ahead=body.ahead,
                verified_ahead=body.verified_ahead if body.HasField("verified_ahead") else None,
            )
        case "rollback":
            cut = message.rollback
            return Rollback(**head, committed_len=cut.committed_len, round=cut.round)
        case "close":
            return Close(**head)
        case _:
            raise unknown_command()


def _shape(body: types_pb2.TreeShape, default: TreeShape) -> TreeShape:
    return TreeShape(
        max_depth=body.max_depth if body.HasField("max_depth") else default.max_depth,
        top_k=body.top_k if body.HasField("top_k") else default.top_k,
        max_nodes=body.max_nodes if body.HasField("max_nodes") else default.max_nodes,
    )


def _event(event: Event) -> draft_pb2.DraftEvent:
    message = draft_pb2.DraftEvent(sequence_id=event.sequence_id, epoch=event.epoch)
    match event:
        case StateReport():
            message.state.CopyFrom(encode_state(event.state))
        case TreeReady():
            message.tree.CopyFrom(_tree(event))
        case Failed():
            message.error.CopyFrom(encode_error(event))
        case Evicted():
            message.evicted.SetInParent()
        case Closed():
            message.closed.SetInParent()
    return message


def _tree(event: TreeReady) -> draft_pb2.DraftTreeReady:
    grown = event.grown
    return draft_pb2.DraftTreeReady(
        round=grown.round,
        committed_len=grown.committed_len,
        tree=_wire_tree(grown.tree),
        step_seconds=grown.step_seconds,
        queue_seconds=grown.queue_seconds,
    )


def _wire_tree(tree: DraftTree) -> types_pb2.DraftTree:
    parents = tree.parents.tolist()
    parents[0] = 0  # means nothing on the wire
    return types_pb2.DraftTree(
        tokens=tree.tokens.tolist(), parents=parents, scores=tree.scores.tolist()
    )
