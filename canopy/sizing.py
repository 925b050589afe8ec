"""How many draft slices a verify slice needs, and how many of both a load: arithmetic alone.

With L tokens/s to serve and an acceptance length of A tokens per round, L/A rounds/s have to be
verified and drafted. A verify step takes T_v(B) for B sequences, a draft step T_d(B_d) for B_d. At
a utilisation u of each slice:

    verify slices = ceil( (L/A) / (u * B   / T_v(B))   )
    draft slices  = ceil( (L/A) / (u * B_d / T_d(B_d)) )
    drafts per verify = (T_d(B_d) / B_d) / (T_v(B) / B)
    round = T_v + T_d + T_net;  time per token = round / A;  in flight = B * round / T_v

Step times are measured curves where they are given. Else they are the larger of two bounds, over
an efficiency e, plus a fixed time per launch t:

    T_v(B) = max( (W + B*C*kv) / (n*BW), 2*P*B*N / (n*F) ) / e + t
    T_d(B) = D passes of the head, each as above with its own W, P, kv and k nodes for N

W bytes of weights read, P numbers in them, C tokens of context, kv bytes of K and V per token, n
chips with BW bytes/s and F operations/s, N nodes of a tree, D levels, k nodes kept per level. What
a slice's chips say to each other is not in there, but for what e leaves.

Of the batches that fit memory and the time per token, the plan takes the smallest that comes within
2 % of the most tokens per chip: beyond it only the wait grows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from canopy.step_times import Slice, Speculation, StepTime, Weights

MEMORY_SHARE = 0.9
"""Of a slice's memory that weights and KV may take; the rest is the step's own."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """What one choice of B comes to. Seconds, tokens/s; `drafts_per_verify`: slices."""

    batch: int
    draft_batch: int
    verify_seconds: float
    draft_seconds: float
    round_seconds: float
    token_seconds: float  # a reader's time per token
    in_flight: int  # sequences that keep a verify slice busy
    kv_share: float  # of what weights leave of the slice's memory
    verify_rounds_per_second: float  # of one slice
    draft_rounds_per_second: float

    @property
    def drafts_per_verify(self) -> float:
        return self.verify_rounds_per_second / self.draft_rounds_per_second

    @property
    def fits(self) -> bool:
        return self.kv_share <= 1.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """Everything that a plan is made from."""

    verify: Slice
    draft: Slice
    verify_seconds: StepTime
    plain_seconds: StepTime  # verify's, for roots alone
    draft_seconds: StepTime
    target: Weights
    speculation: Speculation
    context: int  # tokens of a sequence, on average
    net_seconds: float
    load: float  # tokens/s
    utilisation: float
    max_token_seconds: float
    max_draft_batch: int = 64
    max_batch: int = 512


@dataclass(frozen=True, kw_only=True)
class Plan:
    point: Point
    verify_slices: int
    draft_slices: int
    tokens_per_second: float  # that the slices can serve, at the utilisation
    per_chip: float  # tokens/s and chip with speculation, every chip counted
    plain_per_chip: float  # the same with roots alone and no draft
    plain_slices: int

    @property
    def gain(self) -> float:
        """Above 1, speculation serves more per chip than the same chips would without."""
        return self.per_chip / self.plain_per_chip


def point(task: Task, batch: int) -> Point:
    draft_batch = min(batch, task.max_draft_batch)
    verify, draft = task.verify_seconds(batch), task.draft_seconds(draft_batch)
    whole = verify + draft + task.net_seconds
    in_flight = math.ceil(batch * whole / verify)
    room = MEMORY_SHARE * task.verify.memory_bytes
    room -= task.target.held_params * task.target.bytes_per_number
    kv = in_flight * task.context * task.target.kv_bytes_per_token
    return Point(
        batch=batch,
        draft_batch=draft_batch,
        verify_seconds=verify,
        draft_seconds=draft,
        round_seconds=whole,
        token_seconds=whole / task.speculation.acceptance_length,
        in_flight=in_flight,
        kv_share=kv / room if room > 0 else math.inf,
        verify_rounds_per_second=batch / verify,
        draft_rounds_per_second=draft_batch / draft,
    )


def points(task: Task) -> list[Point]:
    return [point(task, 1 << power) for power in range(task.max_batch.bit_length())]


def make_plan(task: Task) -> Plan:
    """The largest steps that memory and the time per token allow. Raises ValueError if none do."""
    fitting = [p for p in points(task) if p.fits]
    if not fitting:
        gib = task.target.held_params * task.target.bytes_per_number / (1 << 30)
        raise ValueError(
            f"model: {gib:.1f} GiB of weights leave no room for KV on {task.verify.name}; take a"
            " larger slice"
        )
    quick = [p for p in fitting if p.token_seconds <= task.max_token_seconds]
    if not quick:
        raise ValueError(
            f"max_token_ms: {1000 * fitting[0].token_seconds:.2f} is the least that"
            f" {task.verify.name} with {task.draft.name} gives; raise it, or take larger slices"
        )
    best = max(_per_chip(task, p) for p in quick)
    chosen = next(p for p in quick if _per_chip(task, p) >= 0.98 * best)
    rounds = task.load / task.speculation.acceptance_length
    verify = rounds / (task.utilisation * chosen.verify_rounds_per_second)
    draft = rounds / (task.utilisation * chosen.draft_rounds_per_second)
    chips = verify * task.verify.num_chips + draft * task.draft.num_chips
    plain_rate = _plain_rate(task)
    return Plan(
        point=chosen,
        verify_slices=math.ceil(verify),
        draft_slices=math.ceil(draft),
        tokens_per_second=task.load * min(math.ceil(verify) / verify, math.ceil(draft) / draft),
        per_chip=task.load / chips,
        plain_per_chip=task.utilisation * plain_rate / task.verify.num_chips,
        plain_slices=math.ceil(task.load / (task.utilisation * plain_rate)),
    )


def _per_chip(task: Task, p: Point) -> float:
    """Rounds/s and chip where both kinds of slices are fully used."""
    chips = task.verify.num_chips + p.drafts_per_verify * task.draft.num_chips
    return p.verify_rounds_per_second / chips


def _plain_rate(task: Task) -> float:
    """Tokens/s of a verify slice with roots alone, under the same limits."""
    best = 0.0
    for power in range(task.max_batch.bit_length()):
        batch = 1 << power
        seconds = task.plain_seconds(batch)
        whole = seconds + task.net_seconds
        room = MEMORY_SHARE * task.verify.memory_bytes
        room -= task.target.held_params * task.target.bytes_per_number
        kv = batch * whole / seconds * task.context * task.target.kv_bytes_per_token
        if kv <= room and (batch == 1 or whole <= task.max_token_seconds):
            best = max(best, batch / seconds)
    return best
