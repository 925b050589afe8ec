"""What a generation's state machine asks for and is told: plain values, no protobuf.

The router's own reading of the wire: `router.codec` makes frames of commands, and events of frames.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.types import DraftTree, ErrorCode, SequenceState, TreeShape
from router.requests import RequestError
from router.stats import GenerationStats

# To verify. Every command carries the verify link's epoch and the last round whose result is here.


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCommand:
    epoch: int
    acked_round: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenVerify(VerifyCommand):
    tokens: tuple[int, ...]
    num_prompt_tokens: int
    round: int
    wants_features: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachVerify(VerifyCommand):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTree(VerifyCommand):
    round: int
    kv_len: int
    tree: DraftTree


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFeatures(VerifyCommand):
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseVerify(VerifyCommand):
    pass


# To draft.


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCommand:
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDraft(DraftCommand):
    tokens: tuple[int, ...]
    features_from: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendDraft(DraftCommand):
    round: int
    base_len: int
    tokens: tuple[int, ...]
    tree: TreeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseDraft(DraftCommand):
    pass


# To the client.


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrace:
    """One round for those who watch: the nodes verified, the path taken, the bonus token."""

    round: int
    tree: DraftTree
    accepted_nodes: tuple[int, ...]
    bonus_token: int
    draft_seconds: float
    verify_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    text: str
    token_ids: tuple[int, ...]
    pick_margins: tuple[float, ...]
    trace: RoundTrace | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """`reason` is "stop", "length" or "aborted"."""

    reason: str
    stop_string: str | None
    stop_token_id: int | None
    stats: GenerationStats


@dataclass(frozen=True, slots=True)
class Fail:
    error: RequestError


Action = VerifyCommand | DraftCommand | Emit | Finish | Fail


# Events from the services.


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKnown:
    """Open, Attach or Rollback performed, or already so."""

    epoch: int
    state: SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    epoch: int
    round: int
    kv_len: int
    tokens: tuple[int, ...]
    pick_margins: tuple[float, ...]
    num_nodes: int
    accepted_nodes: tuple[int, ...]
    step_seconds: float
    queue_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeReady:
    epoch: int
    round: int
    committed_len: int
    tree: DraftTree
    step_seconds: float
    queue_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFailed:
    epoch: int
    code: ErrorCode
    message: str
    round: int
    state: SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """Verify: preempted; the pending round still runs. Draft: evicted, gone."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    epoch: int


Event = StateKnown | RoundResult | TreeReady | CommandFailed | Paused | Closed
