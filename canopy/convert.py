"""Between the client's values and the public protocol; the only protobuf of the client."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import grpc
from google.protobuf.message import Message as ProtoMessage
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from canopy.results import (
    CanopyError,
    Chunk,
    Completion,
    FinishReason,
    Generation,
    Message,
    Options,
    Prompt,
    Round,
    Speculation,
    Timings,
    TopLogprobs,
)
from canopy.v1 import generation_pb2 as pb
from canopy.v1.types_pb2 import TokenLogprobs

_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)

_FINISH = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_ABORTED: FinishReason.ABORTED,
}


def to_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """Only what is set goes over; the server holds the defaults and refuses what it must."""
    request = pb.GenerateRequest(
        return_options=pb.ReturnOptions(
            token_ids=options.token_ids, trace=options.trace, pick_margins=options.pick_margins
        ),
    )
    _set_prompt(request, prompt)
    _set(request, "request_id", options.request_id)
    _set(request, "cache_salt", options.cache_salt)
    _set(request, "model", options.model)
    with _named("stop", options.stop):
        request.stop.extend(options.stop)
    for token in options.stop_token_ids:
        with _named("stop_token_ids", token):
            request.stop_token_ids.append(token)
    _set(request, "n", options.n)
    _set(request, "max_tokens", options.max_tokens)
    for name in _SAMPLING:
        _set(request.sampling, name, getattr(options, name))
    for token, bias in options.logit_bias.items():
        with _named("logit_bias", (token, bias)):
            request.sampling.logit_bias[token] = bias
    _set(request, "prompt_logprobs", options.prompt_logprobs)
    if options.logprobs or options.top_logprobs:
        request.logprobs = True
        _set(request, "top_logprobs", options.top_logprobs)
    speculation = {
        "enabled": options.speculation,
        "max_depth": options.max_depth,
        "top_k": options.tree_top_k,
        "max_tree_nodes": options.max_tree_nodes,
    }
    for name, value in speculation.items():
        _set(request.speculation, name, value)
    return request


def _set(message: ProtoMessage, name: str, value: object) -> None:
    if value is not None:
        with _named(name, value):
            setattr(message, name, value)


@contextmanager
def _named(name: str, value: object) -> Iterator[None]:
    """Says which field cannot hold its value; protobuf's own errors do not."""
    try:
        yield
    except (ValueError, TypeError) as error:
        message = f"{name}: {reprlib.repr(value)} does not fit the field ({error})"
        raise CanopyError("INVALID_ARGUMENT", message, name) from None


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        with _named("text", prompt):
            request.text = prompt
        return
    if prompt and isinstance(prompt[0], Message):
        turns = [m for m in prompt if isinstance(m, Message)]
        with _named("chat.messages", prompt):
            request.chat.messages.extend(
                pb.ChatMessage(role=turn.role, content=turn.content) for turn in turns
            )
        return
    request.token_ids.SetInParent()  # an empty list is still this kind of prompt
    for token in prompt:
        with _named("token_ids", token):
            request.token_ids.ids.append(token)  # type: ignore[arg-type]  # a mixed list raises


def to_event(response: pb.GenerateResponse) -> Chunk | Completion:
    if response.HasField("completion"):
        return _to_completion(response.completion)
    chunk = response.chunk
    return Chunk(
        text=chunk.text,
        token_ids=tuple(chunk.token_ids),
        pick_margins=tuple(chunk.pick_margins),
        logprobs=tuple(chunk.logprobs),
        top_logprobs=_top_logprobs(chunk.top_logprobs),
        prompt_logprobs=tuple(chunk.prompt_logprobs),
        prompt_top_logprobs=_top_logprobs(chunk.prompt_top_logprobs),
        round=_to_round(chunk.trace) if chunk.HasField("trace") else None,
        choice_index=chunk.choice_index,
    )


def _top_logprobs(places: Iterable[TokenLogprobs]) -> tuple[TopLogprobs, ...]:
    return tuple(tuple(zip(place.tokens, place.logprobs, strict=True)) for place in places)


def _to_round(trace: pb.RoundTrace) -> Round:
    *texts, bonus_text = trace.token_texts
    return Round(
        number=trace.round,
        tokens=tuple(trace.tree.tokens),
        parents=(-1, *trace.tree.parents[1:]),
        scores=tuple(trace.tree.scores),
        texts=tuple(texts),
        accepted_nodes=tuple(trace.accepted_nodes),
        bonus_token=trace.bonus_token,
        bonus_text=bonus_text,
        draft_seconds=trace.draft_seconds,
        verify_seconds=trace.verify_seconds,
    )


def _to_completion(completion: pb.GenerateCompletion) -> Completion:
    kind = completion.WhichOneof("matched_stop")
    timings, stats = completion.timings, completion.speculation
    return Completion(
        request_id=completion.request_id,
        finish_reason=_FINISH[completion.finish_reason],
        matched_stop=getattr(completion, kind) if kind else None,
        num_prompt_tokens=completion.usage.num_prompt_tokens,
        num_completion_tokens=completion.usage.num_completion_tokens,
        num_cached_prompt_tokens=completion.usage.num_cached_prompt_tokens,
        seed=completion.seed,
        timings=Timings(
            total=timings.total_seconds,
            queue=timings.queue_seconds,
            time_to_first_token=timings.time_to_first_token_seconds,
            draft=timings.draft_seconds,
            verify=timings.verify_seconds,
            transport=timings.transport_seconds,
            router=timings.router_seconds,
            decode=timings.decode_seconds,
        ),
        speculation=Speculation(
            num_rounds=stats.num_rounds,
            num_drafted=stats.num_drafted,
            num_accepted=stats.num_accepted,
            num_emitted=stats.num_emitted,
            num_root_only_rounds=stats.num_root_only_rounds,
            num_drafted_per_depth=tuple(stats.num_drafted_per_depth),
            num_accepted_per_depth=tuple(stats.num_accepted_per_depth),
            acceptance_length=stats.acceptance_length,
        ),
        choice_index=completion.choice_index,
    )


def to_generation(events: list[Chunk | Completion]) -> Generation:
    """A whole answer from a whole stream. Raises CanopyError if it has no end, or several."""
    generations = to_generations(events)
    if len(generations) > 1:
        message = f"n: {len(generations)} choices came; ask for them with generate_choices"
        raise CanopyError("INVALID_ARGUMENT", message, "n")
    return generations[0]


def to_generations(events: list[Chunk | Completion]) -> list[Generation]:
    """Each choice of a whole stream, in order. Raises CanopyError if one has no end."""
    by_choice: dict[int, list[Chunk]] = {}
    completions: dict[int, Completion] = {}
    for event in events:
        if isinstance(event, Completion):
            completions[event.choice_index] = event
        else:
            by_choice.setdefault(event.choice_index, []).append(event)
    if not completions or not by_choice.keys() <= completions.keys():
        raise CanopyError("DATA_LOSS", "the stream ended without a completion")
    return [_join(by_choice.get(i, []), done) for i, done in sorted(completions.items())]


def _join(chunks: list[Chunk], completion: Completion) -> Generation:
    return Generation(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        pick_margins=tuple(margin for chunk in chunks for margin in chunk.pick_margins),
        completion=completion,
        logprobs=tuple(value for chunk in chunks for value in chunk.logprobs),
        top_logprobs=tuple(place for chunk in chunks for place in chunk.top_logprobs),
        prompt_logprobs=tuple(value for chunk in chunks for value in chunk.prompt_logprobs),
        prompt_top_logprobs=tuple(place for chunk in chunks for place in chunk.prompt_top_logprobs),
        rounds=tuple(chunk.round for chunk in chunks if chunk.round is not None),
    )


def to_error(error: grpc.RpcError) -> CanopyError:
    """Code, message, the bad field and the advised pause, as far as the server says them."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    bad_field, retry_seconds = "", None
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(request) and request.field_violations:
            bad_field = request.field_violations[0].field
        elif detail.Unpack(retry):
            retry_seconds = retry.retry_delay.ToMilliseconds() / 1000
    return CanopyError(error.code().name, error.details() or "", bad_field, retry_seconds)
