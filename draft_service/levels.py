"""How many levels of a tree are grown: those that pay, or those that come in time.

**For the next round**, which waits for its tree, a level costs t seconds whatever comes of it; a
token costs a sequence s seconds. A level below nodes that the target reaches with chance p emits at
most p tokens more, so it is grown while

    mean of p over the step's sequences > t / s

p is the sum of the frontier's chances, which the device knows (draft_service/expand.py); t was
measured before the first request; s is the mean time between two wishes of a sequence over the
tokens that came in it, so everything that a round costs is in it.

**Ahead of a round** nobody waits, but a tree that comes a round later is used from m tokens deeper,
m a round's mean tokens. One is wished for at every round's end, T seconds apart; with D levels it
is sent c + D·t later (c: queue, features and the rest of the step), and is of use to rounds that
begin R or more after that. So it is there for the n-th round that begins after its wish if

    D ≤ (n·T − R − c) / t          and the next tree is not behind this one if  D ≤ T / t

and has nodes left for it if D ≥ n·m + 1. Taken are the most levels for the smallest n that allows
so many; where none does, those that fit in T. R, the way to verify, is not known here, but verify
says which tree each round came from: a tree that would have led to the round and was passed over
although it was sent R or more before raises R by T / 16, one that was used lowers it by a twentieth
of that. So about one tree in twenty is late.

Deterministic, without a clock: times are arguments.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

WEIGHT = 1 / 32  # of the newest round in the running means
MAX_MEANS = 4.0  # a longer round counts as so many mean ones: a client may have paused
LATE = 1 / 16  # rounds that a late tree adds to the way
HASTE = 1 / 4  # rounds by which what a late tree says is believed at one time
LATE_SHARE = 1 / 20  # of trees, where the way is known
TOO_LONG = 1 / 4  # of what the way is too long by, taken off
MOST_ROUNDS = 8  # that trees ahead may be behind

LevelSeconds = Sequence[tuple[int, float]]
"""Of a level, by sequences of a step, rising."""


@dataclass(slots=True)
class _Rounds:
    """Running means of a round's seconds and tokens; 0: none was seen."""

    seconds: float = 0.0
    tokens: float = 0.0

    def note(self, seconds: float, num_tokens: int) -> None:
        if num_tokens < 1 or seconds <= 0:
            return
        if not self.seconds:
            self.seconds, self.tokens = seconds, float(num_tokens)
            return
        seconds = min(seconds, MAX_MEANS * self.seconds)
        self.seconds += (seconds - self.seconds) * WEIGHT
        self.tokens += (num_tokens - self.tokens) * WEIGHT


class LevelRule:
    def __init__(self, level_seconds: LevelSeconds = (), ahead_seconds: LevelSeconds = ()) -> None:
        """Of trees for the next round and of those ahead; none: all levels are grown."""
        self._seconds, self._ahead_seconds = level_seconds, ahead_seconds
        self._waiting, self._ahead = _Rounds(), _Rounds()
        self._grown_seconds = 0.0  # c
        self._way_seconds = 0.0  # R

    def note_round(self, seconds: float, num_tokens: int, *, ahead: bool) -> None:
        """A sequence wished again, `seconds` after it did before, with `num_tokens` new tokens;
        `ahead`: of a round that waited for no tree."""
        (self._ahead if ahead else self._waiting).note(seconds, num_tokens)

    def least_reach(self, num_sequences: int) -> float:
        """Below this chance of being reached a level is not grown; 0: all are."""
        each, rounds = level_seconds(self._seconds, num_sequences), self._waiting
        return each * rounds.tokens / rounds.seconds if rounds.seconds else 0.0

    # -- trees ahead

    def note_grown_ahead(self, seconds: float, num_levels: int, num_sequences: int) -> None:
        """A tree ahead was sent, `seconds` after it was wished for."""
        rest = seconds - num_levels * level_seconds(self._ahead_seconds, num_sequences)
        if not self._grown_seconds:
            self._grown_seconds = max(0.0, rest)
        self._grown_seconds += (max(0.0, rest) - self._grown_seconds) * WEIGHT

    def note_way(self, used: float | None, passed_over: Sequence[float]) -> None:
        """A round began so many seconds after the tree that it came from was sent, if it came from
        one, and after others that led to it, too, and were newer."""
        step = LATE * self._ahead.seconds
        longest = max(passed_over, default=-1.0)
        if longest >= self._way_seconds:
            # It was not there after so long; the way is no shorter, but for a stall.
            self._way_seconds = min(longest, self._way_seconds + HASTE * self._ahead.seconds) + step
        elif used is not None:
            too_long = max(0.0, self._way_seconds - max(0.0, used))
            self._way_seconds -= TOO_LONG * too_long + LATE_SHARE * step
        most = MOST_ROUNDS * self._ahead.seconds
        self._way_seconds = min(most, max(0.0, self._way_seconds))

    def levels_ahead(self, num_sequences: int) -> int | None:
        """Levels of trees ahead; None: no bound is known."""
        each, rounds = level_seconds(self._ahead_seconds, num_sequences), self._ahead
        if not each or not rounds.seconds:
            return None
        most = max(1, int(rounds.seconds / each))
        for behind in range(1, MOST_ROUNDS + 1):
            left = behind * rounds.seconds - self._way_seconds - self._grown_seconds
            levels = min(most, int(left / each))
            if levels >= math.ceil(behind * rounds.tokens) + 1:
                return levels
        return most


def level_seconds(measured: LevelSeconds, num_sequences: int) -> float:
    """Of a step's level, as measured for the next larger number of sequences."""
    if not measured:
        return 0.0
    sizes = [size for size, _ in measured]
    return measured[min(bisect_left(sizes, num_sequences), len(sizes) - 1)][1]
