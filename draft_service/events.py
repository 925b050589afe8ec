"""What the draft machine says, as plain frozen values. `codec.py` puts them on the wire.

Every event names the stream it goes to: trees and evictions to the owner of the sequence, errors
and answers to whoever asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from common.messages import BaseEvent
from common.messages import Closed as Closed
from common.messages import Failed as Failed
from common.messages import StateReport as StateReport
from common.types import DraftTree


@dataclass(frozen=True, slots=True, kw_only=True)
class GrownTree:
    """The tree of a round, within the shape asked for; kept until it is acknowledged or superseded.

    `committed_len`: tokens with the root, which is the last of them. `ahead`: nobody waited for it.
    """

    round: int
    committed_len: int
    tree: DraftTree
    step_seconds: float = 0.0
    queue_seconds: float = 0.0
    ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeReady(BaseEvent):
    grown: GrownTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted(BaseEvent):
    """Put out for want of pages or memory; open it again to go on drafting."""


Event: TypeAlias = StateReport | TreeReady | Failed | Evicted | Closed
