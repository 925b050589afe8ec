"""Which sequences may stand in a step that is launched while the step before it still runs.

A sequence of the running step may:
- with its next prefill rows, for all of them are known;
- with the round that follows the one that runs, if verify begins that by itself (`runs_on`, and the
  way is not to wait for trees), and no command, nor a lost stream, waits for the running one;
- if, with both rounds as deep as they can be, its tokens and its pages suffice. Nobody is put out
  for it, and it leaves off as soon as an older sequence finds no room: what is launched cannot be
  put out, and the oldest must always go on;
- if no more than `max_unacknowledged` results would then be kept, counting those of the running
  round and of the one that follows. With three, that is the acknowledgement of the round before
  the last that ended: the result that a router just gets need not be answered within the step that
  runs. A stream that pauses stops after three rounds, and none of their tokens is lost.

Should the running round end the sequence, what follows it is void. It writes K/V behind the
committed tokens only, where whoever goes on writes before he reads; pages and slot stay the
sequence's until it has retired, and commands that take over wait for that.
"""

from __future__ import annotations

from common.types import Drafting
from verify_service.blocks import Block, Launched
from verify_service.draft_gate import DraftGate, FixedWay
from verify_service.following import FollowingRound
from verify_service.in_flight import InFlight
from verify_service.limits import VerifyLimits
from verify_service.residency import Residency
from verify_service.sequences import VerifySequence


class Followers:
    def __init__(
        self,
        limits: VerifyLimits,
        residency: Residency,
        gate: DraftGate | FixedWay,
        in_flight: InFlight,
    ) -> None:
        self._limits, self._residency = limits, residency
        self._gate, self._in_flight = gate, in_flight

    @property
    def are_there(self) -> bool:
        """Whether a round may be planned behind one that runs."""
        return any(self._room(launched) >= 0 for launched in self._before())

    def rounds(self, youngest: float) -> list[Block]:
        """Of sequences no younger than that, by arrival; pages up to the new roots are theirs."""
        blocks = []
        for launched in self._before():
            sequence, room = launched.sequence, self._room(launched)
            if room < 0 or sequence.arrival > youngest:
                continue
            if self._residency.extend(sequence, rows_below(launched)):
                following = self._following(sequence, launched, room)
                block = Block(sequence, 1, 0, before=launched, following=following)
                blocks.append(block)
        return blocks

    def chunks(self, youngest: float) -> list[Block]:
        """The same of prompts: blocks without rows yet, their pages reserved before."""
        return [
            Block(
                launched.sequence, 0, launched.work.kv_len + launched.work.num_rows, None, launched
            )
            for launched in self._before()
            if launched.is_chunk
            and self._is_free(launched.sequence)
            and launched.sequence.arrival <= youngest
            and not launched.sequence.scores_prompt  # how much of that is left is not known yet
        ]

    def _before(self) -> list[Launched]:
        if not self._limits.max_ahead_nodes:
            return []
        return sorted(self._in_flight.only_step(), key=lambda block: block.sequence.arrival)

    @staticmethod
    def _is_free(sequence: VerifySequence) -> bool:
        return not (sequence.closed or sequence.deferred or sequence.orphaned_since is not None)

    def _room(self, launched: Launched) -> int:
        """Nodes that the round behind this one could accept; -1 where none may be begun."""
        sequence = launched.sequence
        if launched.is_chunk or launched.is_void or launched.round is None:
            return -1
        waits = not sequence.runs_on or self._gate.drafting is Drafting.SYNCHRONOUS
        full = len(sequence.results) + 2 > self._limits.max_unacknowledged
        if waits or full or not self._is_free(sequence):
            return -1
        most = sequence.committed_len + launched.work.max_depth + 1
        return max(-1, sequence.max_total_tokens - most - 1)

    def _following(self, sequence: VerifySequence, launched: Launched, room: int) -> FollowingRound:
        """Candidates are the newest tree ahead that is here; a later one serves later rounds."""
        way, ahead = self._gate.drafting, sequence.ahead
        if way is not Drafting.AHEAD or not sequence.draft_ahead or ahead is None:
            return FollowingRound.root_only(sequence.tokens[-1], way)
        assert launched.round is not None
        limits = self._limits
        depth = min(room, limits.max_tree_depth)
        return FollowingRound.of(
            ahead, launched.round.tree, depth, limits.max_tree_nodes, limits.max_ahead_nodes
        )


def rows_below(launched: Launched) -> int:
    """Rows that a sequence needs in pages up to the root of the round behind this one."""
    return launched.sequence.committed_len + launched.work.max_depth + 1
