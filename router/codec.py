"""Between the router's plain values and protobuf; nothing else knows the messages' fields."""

from __future__ import annotations

import numpy as np

from canopy.v1 import draft_pb2, generation_pb2, types_pb2, verify_pb2
from common.types import DraftTree, ErrorCode, SamplingParams, SequenceState, TreeShape
from router import actions as act
from router.requests import Generation
from router.stats import GenerationStats
from router.tokenizer import ModelTokenizer

# -- to the services ---------------------------------------------------------------------------


def encode_verify(
    sequence_id: bytes, command: act.VerifyCommand, generation: Generation
) -> verify_pb2.VerifyCommand:
    message = verify_pb2.VerifyCommand(
        sequence_id=sequence_id, epoch=command.epoch, acked_round=command.acked_round
    )
    match command:
        case act.OpenVerify():
            message.open.tokens.extend(command.tokens)
            message.open.num_prompt_tokens = command.num_prompt_tokens
            message.open.sampling.CopyFrom(_sampling(generation.sampling))
            message.open.stop_token_ids.extend(generation.stop_token_ids)
            message.open.max_total_tokens = generation.max_total_tokens
            message.open.round = command.round
            message.open.wants_features = command.wants_features
        case act.SendTree():
            message.verify_tree.round = command.round
            message.verify_tree.kv_len = command.kv_len
            _fill_tree(message.verify_tree.tree, command.tree)
        case act.AttachVerify():
            message.attach.SetInParent()
        case act.ReplayFeatures():
            message.replay_features.position = command.position
        case act.CloseVerify():
            message.close.SetInParent()
    return message


def encode_draft(
    sequence_id: bytes, command: act.DraftCommand, generation: Generation
) -> draft_pb2.DraftCommand:
    message = draft_pb2.DraftCommand(sequence_id=sequence_id, epoch=command.epoch)
    match command:
        case act.OpenDraft():
            message.open.tokens.extend(command.tokens)
            message.open.sampling.CopyFrom(_sampling(generation.sampling))
            message.open.tree.CopyFrom(_shape(generation.tree))
            message.open.max_total_tokens = generation.max_total_tokens
            message.open.features_from = command.features_from
        case act.ExtendDraft():
            if command.round > 0:
                message.acked_round = command.round - 1
            message.extend.round = command.round
            message.extend.base_len = command.base_len
            message.extend.tokens.extend(command.tokens)
            message.extend.tree.CopyFrom(_shape(command.tree))
        case act.CloseDraft():
            message.close.SetInParent()
    return message


def _sampling(params: SamplingParams) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        ignore_eos=params.ignore_eos,
    )


def _shape(tree: TreeShape) -> types_pb2.TreeShape:
    return types_pb2.TreeShape(max_depth=tree.max_depth, top_k=tree.top_k, max_nodes=tree.max_nodes)


def _fill_tree(message: types_pb2.DraftTree, tree: DraftTree) -> None:
    message.tokens.extend(tree.tokens.tolist())
    message.parents.extend(
        np.maximum(tree.parents, 0).tolist()
    )  # the root's parent is 0 on the wire
    message.scores.extend(tree.scores.tolist())


# -- from the services -------------------------------------------------------------------------


def decode_verify(event: verify_pb2.VerifyEvent) -> act.Event | None:
    """None for a kind of event that this version does not know."""
    match event.WhichOneof("event"):
        case "result":
            result = event.result
            return act.RoundResult(
                epoch=event.epoch,
                round=result.round,
                kv_len=result.kv_len,
                tokens=tuple(result.tokens),
                pick_margins=tuple(result.pick_margins),
                num_nodes=result.num_nodes,
                accepted_nodes=tuple(result.accepted_nodes),
                step_seconds=result.step_seconds,
                queue_seconds=result.queue_seconds,
            )
        case "state":
            return act.StateKnown(epoch=event.epoch, state=_state(event.state))
        case "error":
            return _failure(event.epoch, event.error)
        case "preempted":
            return act.Paused(epoch=event.epoch)
        case "closed":
            return act.Closed(epoch=event.epoch)
    return None


def decode_draft(event: draft_pb2.DraftEvent) -> act.Event | None:
    """None for a kind of event that this version does not know; ValueError for a broken tree."""
    match event.WhichOneof("event"):
        case "tree":
            ready = event.tree
            return act.TreeReady(
                epoch=event.epoch,
                round=ready.round,
                committed_len=ready.committed_len,
                tree=_tree(ready.tree),
                step_seconds=ready.step_seconds,
                queue_seconds=ready.queue_seconds,
            )
        case "state":
            return act.StateKnown(epoch=event.epoch, state=_state(event.state))
        case "error":
            return _failure(event.epoch, event.error)
        case "evicted":
            return act.Paused(epoch=event.epoch)
        case "closed":
            return act.Closed(epoch=event.epoch)
    return None


def _failure(epoch: int, error: types_pb2.SequenceError) -> act.CommandFailed:
    try:
        code = ErrorCode(error.code)
    except ValueError:  # a newer service's code
        code = ErrorCode.INTERNAL
    return act.CommandFailed(
        epoch=epoch,
        code=code,
        message=error.message,
        round=error.round,
        state=_state(error.state),
    )


def _state(state: types_pb2.SequenceState) -> SequenceState:
    return SequenceState(
        epoch=state.epoch,
        next_round=state.next_round,
        committed_len=state.committed_len,
        kv_len=state.kv_len,
    )


def _tree(message: types_pb2.DraftTree) -> DraftTree:
    tree = DraftTree(
        tokens=np.array(message.tokens, np.int64).astype(np.int32),
        parents=np.array(message.parents, np.int64).astype(np.int32),
        scores=np.array(message.scores, np.float32),
    )
    if tree.num_nodes:
        tree.parents[0] = -1
    tree.validate(vocab_size=2**31 - 1, max_nodes=max(1, tree.num_nodes))
    return tree


# -- to the client -----------------------------------------------------------------------------

_REASONS = {
    "stop": generation_pb2.FINISH_REASON_STOP,
    "length": generation_pb2.FINISH_REASON_LENGTH,
    "aborted": generation_pb2.FINISH_REASON_ABORTED,
}


def encode_chunk(
    emit: act.Emit, generation: Generation, tokenizer: ModelTokenizer, *, first: bool
) -> generation_pb2.GenerateResponse:
    response = generation_pb2.GenerateResponse()
    chunk = response.chunk
    chunk.request_id = generation.request_id
    chunk.text = emit.text
    if generation.return_token_ids:
        chunk.token_ids.extend(emit.token_ids)
    if generation.return_pick_margins:
        chunk.pick_margins.extend(emit.pick_margins)
    if first and generation.return_prompt_ids:
        chunk.prompt_token_ids.extend(generation.prompt_ids)
    if emit.trace is not None:
        _fill_trace(chunk.trace, emit.trace, tokenizer)
    return response


def _fill_trace(
    message: generation_pb2.RoundTrace, trace: act.RoundTrace, tokenizer: ModelTokenizer
) -> None:
    message.round = trace.round
    _fill_tree(message.tree, trace.tree)
    message.accepted_nodes.extend(trace.accepted_nodes)
    message.bonus_token = trace.bonus_token
    shown = [*trace.tree.tokens.tolist(), trace.bonus_token]
    message.token_texts.extend(tokenizer.token_text(token) for token in shown)
    message.draft_seconds = trace.draft_seconds
    message.verify_seconds = trace.verify_seconds


def encode_completion(
    finish: act.Finish, generation: Generation, now: float
) -> generation_pb2.GenerateResponse:
    response = generation_pb2.GenerateResponse()
    done = response.completion
    done.request_id = generation.request_id
    done.finish_reason = _REASONS[finish.reason]
    if finish.stop_string is not None:
        done.stop_string = finish.stop_string
    if finish.stop_token_id is not None:
        done.stop_token_id = finish.stop_token_id
    stats = finish.stats
    done.usage.num_prompt_tokens = stats.num_prompt_tokens
    done.usage.num_completion_tokens = stats.num_completion_tokens
    done.seed = generation.sampling.seed
    _fill_timings(done.timings, stats, now)
    _fill_speculation(done.speculation, stats)
    return response


def _fill_timings(timings: generation_pb2.Timings, stats: GenerationStats, now: float) -> None:
    timings.total_seconds = now - stats.started
    timings.queue_seconds = stats.queue_seconds
    timings.time_to_first_token_seconds = stats.time_to_first_token_seconds
    timings.draft_seconds = stats.draft_seconds
    timings.verify_seconds = stats.verify_seconds
    timings.transport_seconds = stats.transport_seconds
    timings.decode_seconds = stats.decode_seconds
    elsewhere = stats.draft_seconds + stats.verify_seconds + stats.transport_seconds
    timings.router_seconds = max(0.0, stats.decode_seconds - elsewhere)


def _fill_speculation(message: generation_pb2.SpeculationStats, stats: GenerationStats) -> None:
    message.num_rounds = stats.num_rounds
    message.num_drafted = stats.num_drafted
    message.num_accepted = stats.num_accepted
    message.num_emitted = stats.num_emitted
    message.num_drafted_per_depth.extend(stats.per_depth(stats.drafted_per_depth))
    message.num_accepted_per_depth.extend(stats.per_depth(stats.accepted_per_depth))
    message.num_emitted_histogram.extend(stats.histogram())
    message.num_rollbacks = stats.num_rollbacks
    message.num_root_only_rounds = stats.num_root_only_rounds
    message.acceptance_length = stats.acceptance_length
