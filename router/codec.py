"""Between the router's plain values and the services' messages; nothing else knows their fields.

Repeated numbers are taken out by `[:]`: half the time of a walk over them.
"""

from __future__ import annotations

from collections.abc import Sequence

from canopy.v1 import draft_pb2, types_pb2, verify_pb2
from common.tracing import Trace
from common.types import (
    Drafting,
    ErrorCode,
    SamplingParams,
    SequenceState,
    TopLogprobs,
    TreeShape,
)
from router.messages import (
    Close,
    DraftAttach,
    DraftCommand,
    DraftEvent,
    DraftExtend,
    DraftOpen,
    Evicted,
    Preempted,
    Rollback,
    RoundResult,
    SequenceFailed,
    StateReport,
    TreeReady,
    VerifiedAhead,
    VerifyAcknowledge,
    VerifyAttach,
    VerifyCommand,
    VerifyEvent,
    VerifyOpen,
    VerifyTree,
    VerifyTreeAhead,
)
from router.trees import Tree

# -- to the services


def encode_verify(command: VerifyCommand) -> verify_pb2.VerifyCommand:
    message = verify_pb2.VerifyCommand(
        sequence_id=command.sequence_id, epoch=command.epoch, acked_round=command.acked_round
    )
    match command:
        case VerifyTree():
            body = message.verify_tree
            body.round, body.kv_len = command.round, command.kv_len
            fill_tree(body.tree, command.tree)
        case VerifyAcknowledge():
            message.acknowledge.SetInParent()
        case VerifyTreeAhead():
            ahead = message.tree_ahead
            ahead.round, ahead.kv_len = command.round, command.kv_len
            fill_tree(ahead.tree, command.tree)
            ahead.most.CopyFrom(_shape(command.most))
        case VerifyOpen():
            message.open.CopyFrom(_verify_open(command))
        case VerifyAttach():
            message.attach.SetInParent()
            if command.features_from is not None:
                message.attach.features_from = command.features_from
        case Rollback():
            message.rollback.committed_len = command.committed_len
            message.rollback.round = command.round
        case Close():
            message.close.SetInParent()
    return message


def _verify_open(command: VerifyOpen) -> verify_pb2.VerifyOpen:
    return verify_pb2.VerifyOpen(
        tokens=command.tokens,
        num_prompt_tokens=command.num_prompt_tokens,
        sampling=_verify_sampling(command.sampling),
        stop_token_ids=command.stop_token_ids,
        max_total_tokens=command.max_total_tokens,
        round=command.round,
        wants_features=command.wants_features,
        logprobs=command.sampling.logprobs,
        top_logprobs=command.sampling.top_logprobs,
        prompt_logprobs=command.prompt_logprobs,
        cache_salt=command.cache_salt,
        choice_index=command.choice_index,
        fork_of=command.fork_of or b"",
        runs_on=command.runs_on,
        draft_ahead=command.draft_ahead,
        trace=_trace(command.trace),
    )


def encode_draft(command: DraftCommand) -> draft_pb2.DraftCommand:
    message = draft_pb2.DraftCommand(
        sequence_id=command.sequence_id, epoch=command.epoch, acked_round=command.acked_round
    )
    match command:
        case DraftExtend():
            body = message.extend
            body.round, body.base_len = command.round, command.base_len
            body.tokens.extend(command.tokens)
            if command.tree is not None:
                body.tree.CopyFrom(_shape(command.tree))
            body.ahead = command.ahead
            if command.verified_ahead is not None:
                body.verified_ahead = command.verified_ahead
        case DraftOpen():
            message.open.tokens.extend(command.tokens)
            message.open.sampling.CopyFrom(_sampling(command.sampling))
            message.open.tree.CopyFrom(_shape(command.tree))
            message.open.max_total_tokens = command.max_total_tokens
            message.open.features_from = command.features_from
            message.open.cache_salt = command.cache_salt
            message.open.choice_index = command.choice_index
            message.open.trace.CopyFrom(_trace(command.trace))
        case DraftAttach():
            message.attach.SetInParent()
        case Rollback():
            message.rollback.committed_len = command.committed_len
            message.rollback.round = command.round
        case Close():
            message.close.SetInParent()
    return message


def _trace(trace: Trace) -> types_pb2.TraceContext:
    return types_pb2.TraceContext(request_id=trace.request_id, traceparent=trace.traceparent)


def fill_tree(message: types_pb2.DraftTree, tree: Tree) -> None:
    message.tokens.extend(tree.tokens)
    message.parents.extend(tree.parents)
    message.scores.extend(tree.scores)


def _sampling(params: SamplingParams) -> types_pb2.SamplingParams:
    """`ignore_eos` stays behind: the stop tokens that are sent are those that hold."""
    return types_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
    )


def _verify_sampling(params: SamplingParams) -> types_pb2.SamplingParams:
    """With the options that a draft's guesses need not know."""
    message = _sampling(params)
    message.presence_penalty = params.presence_penalty
    message.frequency_penalty = params.frequency_penalty
    message.repetition_penalty = params.repetition_penalty
    message.logit_bias.update(params.logit_bias)
    message.min_tokens = params.min_tokens
    return message


def _shape(tree: TreeShape) -> types_pb2.TreeShape:
    return types_pb2.TreeShape(max_depth=tree.max_depth, top_k=tree.top_k, max_nodes=tree.max_nodes)


# -- from the services


def decode_verify(event: verify_pb2.VerifyEvent) -> VerifyEvent | None:
    """None for what needs no answer: Closed, or a kind that this version does not know."""
    match event.WhichOneof("event"):
        case "result":
            body = event.result
            return RoundResult(
                *(event.sequence_id, event.epoch, body.round, body.kv_len),
                *(body.tokens[:], body.pick_margins[:]),
                *(body.num_nodes, body.accepted_nodes[:]),
                *(body.step_seconds, body.queue_seconds),
                body.logprobs[:],
                _top_logprobs(body.top_logprobs),
                _DRAFTING.get(body.drafting, Drafting.SYNCHRONOUS),
                body.next_begun,
                _verified_ahead(body),
                num_cached_tokens=body.num_cached_tokens,
                prompt_logprobs=body.prompt_logprobs[:],
                prompt_top_logprobs=_top_logprobs(body.prompt_top_logprobs),
            )
        case "state":
            return StateReport(event.sequence_id, event.epoch, _state(event.state))
        case "error":
            return _failed(event.sequence_id, event.epoch, event.error)
        case "preempted":
            return Preempted(event.sequence_id, event.epoch)
    return None


def decode_draft(event: draft_pb2.DraftEvent) -> DraftEvent | None:
    """None for what needs no answer: Closed, or a kind that this version does not know."""
    match event.WhichOneof("event"):
        case "tree":
            body = event.tree
            return TreeReady(
                *(event.sequence_id, event.epoch, body.round, body.committed_len),
                *(_tree(body.tree), body.step_seconds, body.queue_seconds),
            )
        case "state":
            return StateReport(event.sequence_id, event.epoch, _state(event.state))
        case "error":
            return _failed(event.sequence_id, event.epoch, event.error)
        case "evicted":
            return Evicted(event.sequence_id, event.epoch)
    return None


_DRAFTING = {int(way): way for way in Drafting}


def _verified_ahead(body: verify_pb2.VerifyResult) -> VerifiedAhead | None:
    if not body.HasField("ahead"):
        return None
    return VerifiedAhead(body.ahead.kv_len, _tree(body.ahead.tree))


def _tree(tree: types_pb2.DraftTree) -> Tree:
    return Tree(tree.tokens[:], tree.parents[:], tree.scores[:])


def _failed(sequence_id: bytes, epoch: int, error: types_pb2.SequenceError) -> SequenceFailed:
    try:
        code = ErrorCode(error.code)
    except ValueError:  # the code of a newer service
        code = ErrorCode.INTERNAL
    return SequenceFailed(sequence_id, epoch, code, error.message, error.round, _state(error.state))


def _top_logprobs(places: Sequence[types_pb2.TokenLogprobs]) -> tuple[TopLogprobs, ...]:
    if not places:  # nearly always
        return ()
    return tuple(tuple(zip(place.tokens, place.logprobs, strict=False)) for place in places)


def _state(state: types_pb2.SequenceState) -> SequenceState:
    return SequenceState(
        epoch=state.epoch,
        next_round=state.next_round,
        committed_len=state.committed_len,
        kv_len=state.kv_len,
    )


_VALUE_BYTES = {types_pb2.FEATURE_DTYPE_FLOAT32: 4, types_pb2.FEATURE_DTYPE_BFLOAT16: 2}


def num_data_bytes(block: types_pb2.FeatureBlock) -> int:
    """Length of `block.data` as its shape says: asking for the data itself would copy it."""
    return block.num_rows * block.row_width * _VALUE_BYTES.get(block.dtype, 4)
