"""A raw request → a validated `Generation`, or a RequestError with field, value, limit and remedy.

Whatever is asked is honoured or refused; nothing is silently ignored. Two steps with the tokenizer
between them: `check` is cheap and touches no text; `complete` takes the prompt's tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from canopy.v1 import generation_pb2
from common.types import SamplingParams, TreeShape
from router.errors import ErrorKind, RequestError
from router.generation import Generation, Returns, Served

MAX_REQUEST_ID_CHARACTERS = 128
MAX_CACHE_SALT_BYTES = 256
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_CHAT_MESSAGES = 4096

_NOT_IN_SAMPLING = ("logprobs", "top_logprobs", "prompt_logprobs")
"""Options of a request that stand beside its `sampling`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One of the three is set, and not empty. A message has `role` and `content`."""

    text: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    token_ids: tuple[int, ...] | None = None

    @property
    def num_characters(self) -> int:
        """That must be encoded."""
        return len(self.text or "") + sum(len(m["content"]) for m in self.messages or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """A request of which everything but the prompt's length is known to be right."""

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    max_tokens: int | None
    stop_strings: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    tree: TreeShape | None
    returns: Returns
    cache_salt: bytes
    num_choices: int = 1


def check(request: generation_pb2.GenerateRequest, served: Served) -> CheckedRequest:
    """Raises RequestError for the first thing that is wrong."""
    if request.model and request.model != served.model_name:
        raise RequestError(
            "model",
            f"{request.model!r} is not served here; send {served.model_name!r}, or leave it empty",
            ErrorKind.NOT_FOUND,
        )
    sampling = _sampling(request, served)
    max_tokens = request.max_tokens if request.HasField("max_tokens") else None
    if max_tokens == 0:
        raise RequestError("max_tokens", "0; ask for at least 1, or leave it unset")
    return CheckedRequest(
        request_id=_request_id(request.request_id),
        prompt=_prompt(request, served),
        sampling=sampling,
        max_tokens=max_tokens,
        stop_strings=_stop_strings(request.stop),
        stop_token_ids=_stop_token_ids(request.stop_token_ids, sampling, served),
        tree=_tree(request.speculation, served),
        returns=Returns(
            token_ids=request.return_options.token_ids,
            trace=request.return_options.trace,
            pick_margins=request.return_options.pick_margins,
            prompt_token_ids=request.return_options.prompt_token_ids,
        ),
        cache_salt=_cache_salt(request.cache_salt),
        num_choices=_num_choices(request, served),
    )


def complete(checked: CheckedRequest, prompt_tokens: Sequence[int], served: Served) -> Generation:
    """Raises RequestError if the prompt is empty or the context too short."""
    length, context = len(prompt_tokens), served.max_context_len
    if length == 0:
        raise RequestError("prompt", "has no tokens; send some text, messages or token_ids")
    if length >= context:
        raise RequestError(
            "prompt",
            f"{length} tokens leave no room in the context of {context}; send at most"
            f" {context - 1}",
        )
    room = context - length
    max_tokens = checked.max_tokens
    if max_tokens is None:
        max_tokens = min(room, served.default_max_tokens)
    if max_tokens > room:
        raise RequestError(
            "max_tokens",
            f"{max_tokens} and a prompt of {length} tokens are beyond the context of {context};"
            f" ask for at most {room}",
        )
    least = checked.sampling.min_tokens
    if least > max_tokens:
        raise RequestError(
            "sampling.min_tokens",
            f"{least} is above max_tokens, {max_tokens}; ask for at most that many",
        )
    return Generation(
        request_id=checked.request_id,
        prompt_tokens=tuple(prompt_tokens),
        sampling=checked.sampling,
        max_total_tokens=length + max_tokens,
        stop_strings=checked.stop_strings,
        stop_token_ids=checked.stop_token_ids,
        tree=checked.tree,
        returns=checked.returns,
        cache_salt=checked.cache_salt,
    )


def _request_id(request_id: str) -> str:
    if not request_id:
        return secrets.token_hex(16)
    if len(request_id) > MAX_REQUEST_ID_CHARACTERS or not request_id.isprintable():
        printable = "" if request_id.isprintable() else ", not all of them printable"
        raise RequestError(
            "request_id",
            f"{len(request_id)} characters{printable}; send at most {MAX_REQUEST_ID_CHARACTERS}"
            " printable ones, or none, and one is made",
        )
    return request_id


def _cache_salt(salt: str) -> bytes:
    encoded = salt.encode()
    if len(encoded) > MAX_CACHE_SALT_BYTES:
        raise RequestError(
            "cache_salt", f"{len(encoded)} bytes; send at most {MAX_CACHE_SALT_BYTES}"
        )
    return encoded


def _prompt(request: generation_pb2.GenerateRequest, served: Served) -> Prompt:
    """The one kind of prompt that is set."""
    kinds = [name for name in ("text", "chat", "token_ids") if request.HasField(name)]
    if len(kinds) != 1:
        found = " and ".join(kinds) + " are set" if kinds else "not set"
        raise RequestError("prompt", f"{found}; send exactly one of text, chat or token_ids")
    match kinds[0]:
        case "chat":
            return Prompt(messages=_messages(request.chat.messages))
        case "token_ids":
            return Prompt(token_ids=_token_ids(request.token_ids.ids, served))
    if not request.text:
        raise RequestError("text", "the prompt is empty; send at least one character")
    return Prompt(text=request.text)


def _messages(messages: Sequence[generation_pb2.ChatMessage]) -> tuple[dict[str, str], ...]:
    if not messages:
        raise RequestError("chat.messages", "the prompt is empty; send at least one message")
    if len(messages) > MAX_CHAT_MESSAGES:
        raise RequestError(
            "chat.messages", f"{len(messages)} messages; send at most {MAX_CHAT_MESSAGES}"
        )
    for index, message in enumerate(messages):
        if not message.role:
            raise RequestError(
                f"chat.messages[{index}].role", "empty; send system, user or assistant"
            )
    return tuple({"role": message.role, "content": message.content} for message in messages)


def _token_ids(ids: Sequence[int], served: Served) -> tuple[int, ...]:
    if not ids:
        raise RequestError("token_ids", "the prompt is empty; send at least one token id")
    highest = max(ids)
    if highest >= served.vocab_size:
        raise RequestError(
            f"token_ids.ids[{list(ids).index(highest)}]",
            f"{highest} is outside the vocabulary [0, {served.vocab_size}); encode the prompt with"
            " this model's tokenizer",
        )
    return tuple(ids)


def _sampling(request: generation_pb2.GenerateRequest, served: Served) -> SamplingParams:
    params = request.sampling
    given = {
        name: getattr(params, name)
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "ignore_eos", "min_tokens"),
            *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        )
        if params.HasField(name)
    }
    for token in params.logit_bias:
        if token >= served.vocab_size:
            raise RequestError(
                "sampling.logit_bias",
                f"token {token} is outside the vocabulary [0, {served.vocab_size}); leave it out",
            )
    sampling = SamplingParams(
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
        logit_bias=tuple(sorted(params.logit_bias.items())),
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        prompt_logprobs=(request.prompt_logprobs if request.HasField("prompt_logprobs") else None),
        **given,
    )
    try:
        sampling.validate()
    except ValueError as error:
        field, _, message = str(error).partition(": ")
        prefix = "" if field in _NOT_IN_SAMPLING else "sampling."
        remedy = "; send a value within" if "outside" in message else ""
        raise RequestError(f"{prefix}{field}", f"{message}{remedy}") from None
    return sampling


def _stop_strings(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError("stop", f"{len(stops)} strings; send at most {MAX_STOP_STRINGS}")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_STRING_CHARACTERS:
            raise RequestError(
                f"stop[{index}]",
                f"{len(stop)} characters; send 1 to {MAX_STOP_STRING_CHARACTERS}, or leave it out",
            )
    return tuple(dict.fromkeys(stops))


def _stop_token_ids(
    ids: Sequence[int], sampling: SamplingParams, served: Served
) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError("stop_token_ids", f"{len(ids)} ids; send at most {MAX_STOP_TOKEN_IDS}")
    for index, id_ in enumerate(ids):
        if id_ >= served.vocab_size:
            raise RequestError(
                f"stop_token_ids[{index}]",
                f"{id_} is outside the vocabulary [0, {served.vocab_size}); leave it out",
            )
    own = () if sampling.ignore_eos else served.stop_token_ids
    return tuple(dict.fromkeys((*own, *ids)))


def _tree(params: generation_pb2.SpeculationParams, served: Served) -> TreeShape | None:
    """The tree to ask the draft for; None: root-only rounds were asked for."""
    most, unasked = served.max_tree, served.default_tree
    chosen = {}
    for name, shape_name in (
        ("max_depth", "max_depth"),
        ("top_k", "top_k"),
        ("max_tree_nodes", "max_nodes"),
    ):
        limit = getattr(most, shape_name)
        value = getattr(params, name) if params.HasField(name) else getattr(unasked, shape_name)
        if not 1 <= value <= limit:
            raise RequestError(
                f"speculation.{name}",
                f"{value} is outside [1, {limit}]; to switch speculation off send enabled = false",
            )
        chosen[shape_name] = value
    enabled = params.enabled if params.HasField("enabled") else True
    return TreeShape(**chosen) if enabled and chosen["max_nodes"] > 1 else None


def _num_choices(request: generation_pb2.GenerateRequest, served: Served) -> int:
    choices = request.n if request.HasField("n") else 1
    if not 1 <= choices <= served.max_choices:
        raise RequestError(
            "n", f"{choices} choices; send 1 to {served.max_choices}, or leave it unset"
        )
    return choices
