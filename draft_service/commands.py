"""What a router can ask of the draft machine, as plain frozen values. `codec.py` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from common.messages import NO_ROUND as NO_ROUND
from common.messages import BaseCommand
from common.messages import Close as Close
from common.messages import Rollback as Rollback
from common.tracing import UNTRACED, Trace
from common.types import TreeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Open(BaseCommand):
    """Begins a sequence with all its committed tokens, at least one.

    `features_from`: rows of earlier positions never come. `tree` None: the engine's full shape.
    `temperature` and `seed`: the target's, to order candidates with its noise; 0: greedy.
    `cache_salt`: pages are shared among sequences with the same.
    """

    tokens: tuple[int, ...]
    max_total_tokens: int
    features_from: int = 0
    tree: TreeShape | None = None
    temperature: float = 0.0
    seed: int = 0
    cache_salt: bytes = b""
    trace: Trace = UNTRACED


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach(BaseCommand):
    """Takes the sequence over after a reconnect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend(BaseCommand):
    """Newly committed tokens (perhaps none) and a wish for the tree of `round`.

    `base_len`: committed tokens before these. `tree` None: the shape of Open. `ahead`: nobody waits
    for the tree, which is for rounds to come. `verified_ahead`: position of the root of the tree
    ahead that the round before came from; None: it was the root alone, or another tree.
    """

    round: int
    base_len: int
    tokens: tuple[int, ...]
    tree: TreeShape | None = None
    ahead: bool = False
    verified_ahead: int | None = None


Command: TypeAlias = Open | Attach | Extend | Rollback | Close
