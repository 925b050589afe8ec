"""A raw GenerateRequest becomes a validated `Generation`, or a RequestError with field and remedy.

Whatever a request asks for is honoured or refused; nothing is silently ignored.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

from canopy.v1 import generation_pb2 as pb
from canopy.v1 import types_pb2
from common.types import SamplingParams, TreeShape
from router.tokenizer import Message, ModelTokenizer, TemplateError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_REQUEST_ID_CHARS = 128


class ErrorKind(enum.Enum):
    """Which gRPC status a refused request gets; the mapping is in `router.status`."""

    INVALID = "invalid"
    NOT_FOUND = "not found"
    UNIMPLEMENTED = "unimplemented"
    ALREADY_EXISTS = "already exists"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


class RequestError(Exception):
    """A request refused or ended: `field` ("": none is to blame), what is wrong, how to mend it."""

    def __init__(self, field_name: str, message: str, kind: ErrorKind = ErrorKind.INVALID) -> None:
        super().__init__(f"{field_name}: {message}" if field_name else message)
        self.field = field_name
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the served pair can do; taken from the services' info and the router's own settings."""

    model_name: str
    context_len: int  # tokens
    vocab_size: int
    default_max_tokens: int
    max_tree: TreeShape
    default_tree: TreeShape
    can_speculate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One valid request: everything that the round loop needs."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    speculate: bool
    tree: TreeShape
    max_tokens: int
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]  # the model's own and the request's; empty with ignore_eos
    return_token_ids: bool = False
    return_trace: bool = False
    return_pick_margins: bool = False
    return_prompt_ids: bool = False
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def max_total_tokens(self) -> int:
        return len(self.prompt_ids) + self.max_tokens


def parse(request: pb.GenerateRequest, tokenizer: ModelTokenizer, limits: Limits) -> Generation:
    """Raises RequestError for the first thing wrong; costs nothing but the check."""
    if request.model and request.model != limits.model_name:
        raise RequestError(
            "model",
            f"{request.model!r} is not served here; use {limits.model_name!r} or leave it empty",
            ErrorKind.NOT_FOUND,
        )
    _refuse_what_is_not_built(request)
    if len(request.request_id) > MAX_REQUEST_ID_CHARS:
        raise RequestError(
            "request_id",
            f"{len(request.request_id)} characters; at most {MAX_REQUEST_ID_CHARS}",
        )
    sampling = _sampling(request.sampling)
    prompt_ids = _prompt_ids(request, tokenizer, limits)
    options = request.return_options
    return Generation(
        request_id=request.request_id or secrets.token_hex(8),
        prompt_ids=prompt_ids,
        sampling=sampling,
        speculate=_speculates(request.speculation, limits),
        tree=_tree(request.speculation, limits),
        max_tokens=_max_tokens(request, len(prompt_ids), limits),
        stop_strings=_stop_strings(request),
        stop_token_ids=_stop_token_ids(request, tokenizer, limits),
        return_token_ids=options.token_ids,
        return_trace=options.trace,
        return_pick_margins=options.pick_margins,
        return_prompt_ids=options.prompt_token_ids,
    )


def _refuse_what_is_not_built(request: pb.GenerateRequest) -> None:
    for name, asked in _unbuilt(request):
        if asked:
            raise RequestError(name, "not built yet; leave it unset", ErrorKind.UNIMPLEMENTED)
    if request.HasField("n") and request.n == 0:
        raise RequestError("n", "0 choices asked for; must be 1")


def _unbuilt(request: pb.GenerateRequest) -> Iterator[tuple[str, bool]]:
    sampling = request.sampling
    yield "n", request.n > 1
    yield "logprobs", request.logprobs
    yield "top_logprobs", request.top_logprobs > 0
    yield "sampling.presence_penalty", sampling.presence_penalty != 0
    yield "sampling.frequency_penalty", sampling.frequency_penalty != 0
    yield (
        "sampling.repetition_penalty",
        sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1,
    )
    yield "sampling.logit_bias", len(sampling.logit_bias) > 0
    yield "sampling.min_tokens", sampling.min_tokens > 0


def _sampling(raw: types_pb2.SamplingParams) -> SamplingParams:
    params = SamplingParams(
        temperature=raw.temperature if raw.HasField("temperature") else 0.0,
        top_k=raw.top_k,
        top_p=raw.top_p if raw.HasField("top_p") else 1.0,
        min_p=raw.min_p,
        seed=raw.seed if raw.HasField("seed") else secrets.randbits(64),
        ignore_eos=raw.ignore_eos,
    )
    try:
        params.validate()
    except ValueError as error:
        name, _, message = str(error).partition(": ")
        raise RequestError(f"sampling.{name}", message) from error
    return params


def _prompt_ids(
    request: pb.GenerateRequest, tokenizer: ModelTokenizer, limits: Limits
) -> tuple[int, ...]:
    kinds = [name for name in ("text", "chat", "token_ids") if request.HasField(name)]
    if len(kinds) != 1:
        said = " and ".join(kinds) or "none"
        raise RequestError("prompt", f"{said} set; set exactly one of text, chat and token_ids")
    kind = kinds[0]
    if kind == "token_ids":
        ids = tuple(request.token_ids.ids)
        for index, token in enumerate(ids):
            if token >= limits.vocab_size:
                raise RequestError(
                    f"token_ids.ids[{index}]", f"{token} is outside [0, {limits.vocab_size})"
                )
    elif kind == "text":
        ids = tuple(tokenizer.encode(request.text))
    else:
        ids = tuple(_chat_ids(request.chat, tokenizer))
    if not ids:
        raise RequestError(kind, "the prompt is empty; it must have at least one token")
    return ids


def _chat_ids(chat: pb.ChatMessages, tokenizer: ModelTokenizer) -> list[int]:
    if not chat.messages:
        raise RequestError("chat.messages", "empty; send at least one message")
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise RequestError(
                f"chat.messages[{index}].role", "empty; use system, user or assistant"
            )
    try:
        return tokenizer.encode_chat([Message(m.role, m.content) for m in chat.messages])
    except TemplateError as error:
        raise RequestError("chat", str(error)) from error


def _max_tokens(request: pb.GenerateRequest, num_prompt_tokens: int, limits: Limits) -> int:
    room = limits.context_len - num_prompt_tokens
    if room < 1:
        raise RequestError(
            "prompt",
            f"{num_prompt_tokens} tokens leave no room in the context of {limits.context_len};"
            f" shorten it to at most {limits.context_len - 1}",
        )
    if not request.HasField("max_tokens"):
        return min(room, limits.default_max_tokens)
    if request.max_tokens < 1:
        raise RequestError("max_tokens", "0; must be at least 1")
    if request.max_tokens > room:
        raise RequestError(
            "max_tokens",
            f"{request.max_tokens} and {num_prompt_tokens} prompt tokens exceed the context of"
            f" {limits.context_len}; at most {room} with this prompt",
        )
    return int(request.max_tokens)


def _stop_strings(request: pb.GenerateRequest) -> tuple[str, ...]:
    if len(request.stop) > MAX_STOP_STRINGS:
        raise RequestError("stop", f"{len(request.stop)} strings; at most {MAX_STOP_STRINGS}")
    for index, string in enumerate(request.stop):
        if not 0 < len(string) <= MAX_STOP_STRING_CHARS:
            raise RequestError(
                f"stop[{index}]",
                f"{len(string)} characters; must be 1 to {MAX_STOP_STRING_CHARS}",
            )
    return tuple(request.stop)


def _stop_token_ids(
    request: pb.GenerateRequest, tokenizer: ModelTokenizer, limits: Limits
) -> tuple[int, ...]:
    if len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            "stop_token_ids", f"{len(request.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS}"
        )
    for index, token in enumerate(request.stop_token_ids):
        if token >= limits.vocab_size:
            raise RequestError(
                f"stop_token_ids[{index}]", f"{token} is outside [0, {limits.vocab_size})"
            )
    if request.sampling.ignore_eos:
        if request.stop_token_ids:
            raise RequestError(
                "stop_token_ids", "contradict sampling.ignore_eos; leave one of the two unset"
            )
        return ()
    return tuple(dict.fromkeys((*tokenizer.stop_token_ids, *request.stop_token_ids)))


def _speculates(raw: pb.SpeculationParams, limits: Limits) -> bool:
    enabled = raw.enabled if raw.HasField("enabled") else True
    return enabled and limits.can_speculate


def _tree(raw: pb.SpeculationParams, limits: Limits) -> TreeShape:
    most, usual = limits.max_tree, limits.default_tree
    return TreeShape(
        max_depth=_bounded(raw, "max_depth", usual.max_depth, most.max_depth),
        top_k=_bounded(raw, "top_k", usual.top_k, most.top_k),
        max_nodes=_bounded(raw, "max_tree_nodes", usual.max_nodes, most.max_nodes),
    )


def _bounded(raw: pb.SpeculationParams, name: str, usual: int, most: int) -> int:
    if not raw.HasField(name):
        return min(usual, most)
    value = int(getattr(raw, name))
    if not 1 <= value <= most:
        raise RequestError(f"speculation.{name}", f"{value} is outside [1, {most}]")
    return value
