"""What a client asks and gets: plain frozen values, no protobuf in sight."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat; roles as the model's template knows them: system, user, assistant."""

    role: str
    content: str


Prompt = str | Sequence[int] | Sequence[Message]
"""Text as it stands, token ids, or a chat for the model's own template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to generate. None: the server's default, as named in protos/canopy/v1."""

    n: int | None = None  # choices
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by token id
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    speculation: bool | None = None
    max_depth: int | None = None
    tree_top_k: int | None = None
    max_tree_nodes: int | None = None
    model: str = ""
    request_id: str = ""
    cache_salt: str = ""  # only requests with the same share what was computed for a prompt
    # what to return beside the text
    token_ids: bool = False
    trace: bool = False
    pick_margins: bool = False
    logprobs: bool = False
    top_logprobs: int = 0  # of so many likeliest tokens; sets logprobs
    prompt_logprobs: int | None = None  # of the prompt's tokens, and of so many likeliest at each


TopLogprobs = tuple[tuple[int, float], ...]
"""(token, log-probability) of the likeliest tokens at one place, best first."""


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round as it happened. `parents[0]` is -1; `texts` are those of the nodes."""

    number: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]
    texts: tuple[str, ...]
    accepted_nodes: tuple[int, ...]
    bonus_token: int
    bonus_text: str
    draft_seconds: float
    verify_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Text that is final: whole characters, perhaps none."""

    text: str
    token_ids: tuple[int, ...] = ()
    pick_margins: tuple[float, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()  # from the second token on, in the first chunk
    prompt_top_logprobs: tuple[TopLogprobs, ...] = ()
    round: Round | None = None
    choice_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds; draft to router are sums over rounds, as the router saw them."""

    total: float
    queue: float
    time_to_first_token: float
    draft: float
    verify: float
    transport: float
    router: float
    decode: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What speculation did. `acceptance_length`: emitted tokens per round, the first left out.
    `…_per_depth[d]`: rounds that verified, or accepted, a node at depth d + 1.
    """

    num_rounds: int
    num_drafted: int
    num_accepted: int
    num_emitted: int
    num_root_only_rounds: int
    acceptance_length: float
    num_drafted_per_depth: tuple[int, ...] = ()
    num_accepted_per_depth: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """How a generation ended; always the last of its choice."""

    request_id: str
    finish_reason: FinishReason
    matched_stop: str | int | None
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_prompt_tokens: int  # of the prompt, found computed already
    seed: int
    timings: Timings
    speculation: Speculation
    choice_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A whole answer, or one choice of it."""

    text: str
    token_ids: tuple[int, ...]
    pick_margins: tuple[float, ...]
    completion: Completion
    rounds: tuple[Round, ...] = field(default=(), repr=False)
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: tuple[float, ...] = ()
    prompt_top_logprobs: tuple[TopLogprobs, ...] = ()


class CanopyError(Exception):
    """A call failed. `code` is the gRPC status's name; `field` names a bad field of the request."""

    def __init__(
        self, code: str, message: str, bad_field: str = "", retry_seconds: float | None = None
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.field = bad_field
        self.retry_seconds = retry_seconds
