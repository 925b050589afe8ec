"""What a client is sent: chunks and the completion, from plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from canopy.v1 import generation_pb2, types_pb2
from common.types import TopLogprobs
from router.actions import Emitted, Finished, FinishReason, RoundTrace
from router.codec import fill_tree
from router.generation import Generation
from router.machine import GenerationMachine
from router.statistics import Clock, RoundStatistics
from router.tokenizer import ModelTokenizer

Response: TypeAlias = generation_pb2.GenerateResponse

_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: generation_pb2.FINISH_REASON_ABORTED,
}


def encode_chunk(
    emitted: Sequence[Emitted], generation: Generation, tokenizer: ModelTokenizer, *, first: bool
) -> Response:
    """One chunk of several rounds' tokens; at most one of them, the last, has a trace."""
    response = generation_pb2.GenerateResponse()
    chunk, returns = response.chunk, generation.returns
    chunk.request_id, chunk.choice_index = generation.request_id, generation.choice_index
    chunk.text = "".join(part.text for part in emitted)
    for part in emitted:
        if returns.token_ids:
            chunk.token_ids.extend(part.tokens)
        if returns.pick_margins:
            chunk.pick_margins.extend(part.pick_margins)
        chunk.logprobs.extend(part.logprobs)
        chunk.top_logprobs.extend(map(_top_logprobs, part.top_logprobs))
        chunk.prompt_logprobs.extend(part.prompt_logprobs)
        chunk.prompt_top_logprobs.extend(map(_top_logprobs, part.prompt_top_logprobs))
        if part.trace is not None:
            _fill_trace(chunk.trace, part.trace, tokenizer)
    if first and returns.prompt_token_ids:
        chunk.prompt_token_ids.extend(generation.prompt_tokens)
    return response


def _top_logprobs(place: TopLogprobs) -> types_pb2.TokenLogprobs:
    return types_pb2.TokenLogprobs(
        tokens=[token for token, _ in place], logprobs=[logprob for _, logprob in place]
    )


def encode_completion(finished: Finished, machine: GenerationMachine, now: float) -> Response:
    response = generation_pb2.GenerateResponse()
    done, generation = response.completion, machine.generation
    done.request_id, done.choice_index = generation.request_id, generation.choice_index
    done.finish_reason = _REASONS[finished.reason]
    if finished.stop_string is not None:
        done.stop_string = finished.stop_string
    if finished.stop_token_id is not None:
        done.stop_token_id = finished.stop_token_id
    done.usage.num_prompt_tokens = len(generation.prompt_tokens)
    done.usage.num_completion_tokens = machine.num_emitted
    done.usage.num_cached_prompt_tokens = machine.statistics.num_cached_tokens
    done.seed = generation.sampling.seed
    _fill_timings(done.timings, machine.clock, now)
    _fill_speculation(done.speculation, machine.statistics)
    return response


def _fill_trace(
    message: generation_pb2.RoundTrace, trace: RoundTrace, tokenizer: ModelTokenizer
) -> None:
    message.round = trace.round
    fill_tree(message.tree, trace.tree)
    message.accepted_nodes.extend(trace.accepted_nodes)
    message.bonus_token = trace.bonus_token
    message.token_texts.extend(
        tokenizer.token_text(token) for token in (*trace.tree.tokens, trace.bonus_token)
    )
    message.draft_seconds = trace.draft_seconds
    message.verify_seconds = trace.verify_seconds


def _fill_timings(timings: generation_pb2.Timings, clock: Clock, now: float) -> None:
    timings.total_seconds = now - clock.started
    timings.queue_seconds = clock.queue_seconds
    timings.time_to_first_token_seconds = clock.time_to_first_token_seconds
    timings.draft_seconds = clock.draft_seconds
    timings.verify_seconds = clock.verify_seconds
    timings.transport_seconds = clock.transport_seconds
    timings.router_seconds = clock.router_seconds(now)
    timings.decode_seconds = clock.decode_seconds


def _fill_speculation(
    message: generation_pb2.SpeculationStats, statistics: RoundStatistics
) -> None:
    message.num_rounds = statistics.num_rounds
    message.num_drafted = statistics.num_drafted
    message.num_accepted = statistics.num_accepted
    message.num_emitted = statistics.num_emitted
    message.num_drafted_per_depth.extend(statistics.num_drafted_per_depth)
    message.num_accepted_per_depth.extend(statistics.num_accepted_per_depth)
    message.num_emitted_histogram.extend(statistics.num_emitted_histogram)
    message.num_rollbacks = statistics.num_rollbacks
    message.num_root_only_rounds = statistics.num_root_only_rounds
    message.acceptance_length = statistics.acceptance_length
