"""What a validated request asks for, and what the served pair can do: frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from common.tracing import UNTRACED, Trace
from common.types import SamplingParams, TreeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Returns:
    """What a chunk carries beside text."""

    token_ids: bool = False
    trace: bool = False
    pick_margins: bool = False
    prompt_token_ids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request that can be served as it stands, or one choice of it.

    `stop_token_ids`: where it ends, the model's own first (none of these with ignore_eos). `tree`
    None: no speculation asked for. `max_total_tokens`: prompt and answer.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    max_total_tokens: int
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    tree: TreeShape | None = None
    returns: Returns = Returns()
    cache_salt: bytes = b""
    choice_index: int = 0
    trace: Trace = UNTRACED


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The limits that a request is held against: of verify, and of the configuration.

    `max_tree`: the most that a request may ask for; `default_tree`: what it gets unasked; both
    within what verify takes.
    """

    model_name: str
    vocab_size: int
    max_context_len: int
    stop_token_ids: tuple[int, ...]
    default_max_tokens: int
    max_tree: TreeShape
    default_tree: TreeShape
    max_choices: int = 1
