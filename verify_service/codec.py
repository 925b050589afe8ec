"""Between wire messages and the machine's commands and events: the only code that knows both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from canopy.v1 import types_pb2, verify_pb2
from common.noise_key import seed_of_choice
from common.sequence_codec import (
    SEQUENCE_ID_BYTES,
    Head,
    decode_commands,
    encode_error,
    encode_state,
    head_of,
    invalid,
    unknown_command,
    wire_tree,
)
from common.tensors import FeaturePiece
from common.tracing import Trace
from common.types import DraftTree, SamplingParams, TopLogprobs, TreeShape
from verify_service.checks import MAX_AHEAD_NODES
from verify_service.commands import (
    Acknowledge,
    Attach,
    Close,
    Command,
    Open,
    ReplayFeatures,
    Rollback,
    TreeAhead,
    VerifyTree,
)
from verify_service.events import Closed, Event, Failed, Preempted, RoundDone, StateReport
from verify_service.info import PROTOCOL_VERSION, VerifyInfo


def decode_request(
    stream: int, request: verify_pb2.VerifyRequest
) -> tuple[list[Command], list[Failed]]:
    """The frame's commands, and an error for each that could not be read."""
    return decode_commands(stream, request.commands, _command)


def encode_events(events: Iterable[Event]) -> verify_pb2.VerifyResponse:
    return verify_pb2.VerifyResponse(events=[_event(event) for event in events])


def encode_info(info: VerifyInfo) -> verify_pb2.GetVerifyInfoResponse:
    kind = "AUX" if info.boundaries else "NONE"
    return verify_pb2.GetVerifyInfoResponse(
        protocol_version=PROTOCOL_VERSION,
        target=types_pb2.TargetIdentity(**info.identity),
        features=types_pb2.FeatureSpec(
            kind=f"FEATURE_KIND_{kind}",
            boundaries=info.boundaries,
            dtype=f"FEATURE_DTYPE_{info.feature_dtype.name}",
            row_width=info.row_width,
            fused_by=info.fused_by,
        ),
        max_context_len=info.max_context_len,
        max_tree_nodes=info.max_tree_nodes,
        max_sequences=info.max_sequences,
        page_size_tokens=info.page_size_tokens,
        num_pages=info.num_pages,
        max_ahead_nodes=MAX_AHEAD_NODES,
        step_times=[
            verify_pb2.StepTime(
                num_tokens=point.num_tokens,
                num_kv_tokens=point.num_kv_tokens,
                num_sequences=point.num_sequences,
                seconds=point.seconds,
            )
            for point in info.step_times
        ],
    )


def encode_pieces(pieces: Iterable[FeaturePiece]) -> verify_pb2.ReceiveFeaturesResponse:
    return verify_pb2.ReceiveFeaturesResponse(
        blocks=[
            types_pb2.FeatureBlock(
                sequence_id=piece.sequence_id,
                epoch=piece.epoch,
                position=piece.position,
                num_rows=piece.num_rows,
                row_width=piece.row_width,
                dtype=f"FEATURE_DTYPE_{piece.dtype.name}",
                data=piece.data,
            )
            for piece in pieces
        ]
    )


def _command(message: verify_pb2.VerifyCommand) -> Command:
    head = head_of(message)
    match message.WhichOneof("command"):
        case "open":
            return _open(head, message.open)
        case "attach":
            known = message.attach.HasField("features_from")
            return Attach(**head, features_from=message.attach.features_from if known else None)
        case "verify_tree":
            body = message.verify_tree
            tree = _tree(body.tree, body.round)
            return VerifyTree(**head, round=body.round, kv_len=body.kv_len, tree=tree)
        case "rollback":
            cut = message.rollback
            return Rollback(**head, committed_len=cut.committed_len, round=cut.round)
        case "close":
            return Close(**head)
        case "tree_ahead":
            ahead = message.tree_ahead
            tree = _tree(ahead.tree, ahead.round)
            most = _shape(ahead.most) if ahead.HasField("most") else None
            return TreeAhead(**head, round=ahead.round, kv_len=ahead.kv_len, tree=tree, most=most)
        case "acknowledge":
            return Acknowledge(**head)
        case "replay_features":
            return ReplayFeatures(**head, position=message.replay_features.position)
        case _:
            raise unknown_command()


def _open(head: Head, body: verify_pb2.VerifyOpen) -> Open:
    if body.fork_of and len(body.fork_of) != SEQUENCE_ID_BYTES:
        message = f"fork_of: {len(body.fork_of)} bytes; must be {SEQUENCE_ID_BYTES}, or empty"
        raise invalid(message, body.round)
    return Open(
        **head,
        tokens=tuple(body.tokens),
        num_prompt_tokens=body.num_prompt_tokens,
        sampling=_sampling(body),
        stop_tokens=tuple(body.stop_token_ids),
        max_total_tokens=body.max_total_tokens,
        round=body.round,
        wants_features=body.wants_features,
        cache_salt=body.cache_salt,
        fork_of=body.fork_of,
        trace=Trace(body.trace.request_id, body.trace.traceparent),
        runs_on=body.runs_on,
        draft_ahead=body.draft_ahead,
    )


def _sampling(body: verify_pb2.VerifyOpen) -> SamplingParams:
    """Ranges are checked with the command (`checks.check_open`)."""
    params = body.sampling
    sampling = SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        min_p=params.min_p,
        seed=seed_of_choice(params.seed, body.choice_index),
        ignore_eos=params.ignore_eos,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=(
            params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
        ),
        logit_bias=tuple(sorted(params.logit_bias.items())),
        min_tokens=params.min_tokens,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        prompt_logprobs=body.prompt_logprobs if body.HasField("prompt_logprobs") else None,
    )
    if not sampling.is_greedy and not params.HasField("seed"):
        raise invalid(
            "sampling.seed: unset at a temperature above 0; the router chooses one", body.round
        )
    return sampling


def _tree(body: types_pb2.DraftTree, round_: int) -> DraftTree:
    try:
        tokens = np.array(body.tokens, np.int64)
        parents = np.array(body.parents, np.int64)
        if max(tokens.max(initial=0), parents.max(initial=0)) >= 2**31:
            raise ValueError("tree: a token or parent is 2**31 or more")
        narrow = parents.astype(np.int32)
        narrow[:1] = -1  # parents[0] means nothing on the wire
        return DraftTree(tokens.astype(np.int32), narrow, np.array(body.scores, np.float32))
    except ValueError as error:
        raise invalid(str(error), round_) from error


def _shape(body: types_pb2.TreeShape) -> TreeShape:
    """What is not set is not bounded here."""
    most = TreeShape.unbounded()
    return TreeShape(
        max_depth=body.max_depth if body.HasField("max_depth") else most.max_depth,
        top_k=body.top_k if body.HasField("top_k") else most.top_k,
        max_nodes=body.max_nodes if body.HasField("max_nodes") else most.max_nodes,
    )


def _top(place: TopLogprobs) -> types_pb2.TokenLogprobs:
    return types_pb2.TokenLogprobs(
        tokens=[token for token, _ in place], logprobs=[logprob for _, logprob in place]
    )


def _event(event: Event) -> verify_pb2.VerifyEvent:
    message = verify_pb2.VerifyEvent(sequence_id=event.sequence_id, epoch=event.epoch)
    match event:
        case StateReport():
            message.state.CopyFrom(encode_state(event.state))
        case RoundDone():
            result = event.result
            drafting: Any = int(result.drafting)  # stubs want the enum, which is an int
            message.result.CopyFrom(
                verify_pb2.VerifyResult(
                    round=result.round,
                    kv_len=result.kv_len,
                    tokens=result.tokens,
                    pick_margins=result.margins,
                    num_nodes=result.num_nodes,
                    accepted_nodes=result.accepted_nodes,
                    logprobs=result.logprobs,
                    top_logprobs=[_top(place) for place in result.top_logprobs],
                    step_seconds=result.step_seconds,
                    queue_seconds=result.queue_seconds,
                    drafting=drafting,
                    next_begun=result.next_begun,
                    num_cached_tokens=result.num_cached_tokens,
                    prompt_logprobs=result.prompt_logprobs,
                    prompt_top_logprobs=[_top(place) for place in result.prompt_top_logprobs],
                )
            )
            if result.ahead is not None:
                message.result.ahead.kv_len = result.ahead.kv_len
                message.result.ahead.tree.CopyFrom(wire_tree(result.ahead.tree))
        case Failed():
            message.error.CopyFrom(encode_error(event))
        case Preempted():
            message.preempted.SetInParent()
        case Closed():
            message.closed.SetInParent()
    return message
