"""How many levels of a tree are grown: those that pay.

A level costs t seconds, whatever comes of it; a token costs a sequence s seconds. A level below
nodes that the target reaches with chance p emits at most p tokens more, so it is grown while

    mean of p over the step's sequences > t / s

p is the sum of the frontier's chances, which the device knows (draft_service/expand.py); t was
measured before the first request; s is the mean time between two wishes of a sequence over the
tokens that came in it, so everything that a round costs is in it.

Trees ahead are grown while verify works: they may have as many levels as fit in the time that a
round spends away from the draft, or in less of it: how much of that time is the network's is not
known here, so the share falls with each tree that was right and came too late, and rises slowly.

Deterministic, without a clock: times are arguments.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

WEIGHT = 1 / 32  # of the newest round in the running means
LATE, IN_TIME = 0.9, 1.02  # factors on the share of trees ahead
LEAST_SHARE = 0.1
MAX_MEANS = 4.0  # a longer round counts as so many mean ones: a client may have paused


class LevelRule:
    def __init__(self, level_seconds: Sequence[tuple[int, float]] = ()) -> None:
        """`level_seconds`: of a level, by sequences of a step, rising; none: all levels pay."""
        self._sizes = [size for size, _ in level_seconds]
        self._seconds = [seconds for _, seconds in level_seconds]
        self._round_seconds = 0.0
        self._round_tokens = 0.0
        self._away_seconds = 0.0
        self._share = 1.0

    def note_round(self, seconds: float, num_tokens: int, drafting_seconds: float) -> None:
        """A sequence wished again, `seconds` after it did before, with `num_tokens` new tokens;
        `drafting_seconds` of them had gone by when its tree was sent."""
        if num_tokens < 1 or seconds <= 0:
            return
        if not self._round_seconds:
            self._round_seconds, self._round_tokens = seconds, float(num_tokens)
            self._away_seconds = seconds - drafting_seconds
            return
        seconds = min(seconds, MAX_MEANS * self._round_seconds)
        away = max(0.0, seconds - drafting_seconds)
        self._round_seconds += (seconds - self._round_seconds) * WEIGHT
        self._round_tokens += (num_tokens - self._round_tokens) * WEIGHT
        self._away_seconds += (away - self._away_seconds) * WEIGHT

    def note_ahead(self, in_time: bool) -> None:
        """A round came to an outcome that a tree was sent for; whether verify had it in time."""
        factor = IN_TIME if in_time else LATE
        self._share = min(1.0, max(LEAST_SHARE, self._share * factor))

    def least_reach(self, num_sequences: int) -> float:
        """Below this chance of being reached a level is not grown; 0: all are."""
        if not self._round_seconds:
            return 0.0
        return self.level_seconds(num_sequences) * self._round_tokens / self._round_seconds

    def levels_ahead(self, num_sequences: int, num_guessed: int) -> int | None:
        """Levels of trees ahead, below `num_guessed` tokens; None: no bound is known."""
        each = self.level_seconds(num_sequences)
        if not each or not self._round_seconds:
            return None
        return max(1, int(self._share * self._away_seconds / each) - num_guessed)

    def level_seconds(self, num_sequences: int) -> float:
        """Of a step's level, as measured for the next larger number of sequences."""
        if not self._sizes:
            return 0.0
        return self._seconds[min(bisect_left(self._sizes, num_sequences), len(self._sizes) - 1)]
