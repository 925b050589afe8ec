"""Whether a step should wait for sequences that are on their way back with their next round.

Sequences that came at different times fall into groups: while one group's step runs, the other's
next rounds arrive, and so on for good. Where a step of all costs less than two steps of some, that
wastes the device: roots of two groups take twice the time of roots of one. At the end of a step a
group can be waited for, once; from then on all go together. With groups A and B, a step's seconds
T and seconds d that a sequence is away, from its result to its next round, a round of all takes

    together  T(A and B) + d            apart  max(T(A) + T(B), max(T(A), T(B)) + d)

and the step waits if together gives more tokens a second, each with its own best number of nodes
(`TreeBudget.best_step`); trees that are not here yet count as those that are. Apart is better where
drafting takes as long as a step: then one group's draft hides behind the other's step.

d is learnt as mean and deviation, of rounds that were asked to have a tree and of others. A
sequence that is overdue is not waited for, so a wrong guess costs one wait, and what comes late
raises the mean until nothing is waited for.

Deterministic, without a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from verify_service.budget import TreeBudget
from verify_service.sequences import PendingRound

NEWEST_WEIGHT = 1 / 8
DEVIATIONS = 2.0  # beyond the mean, a sequence is overdue
MOST_OF_MEAN = 4.0  # a longer absence is a client's pause
LEAST_GAIN = 1.02  # in tokens a second
COMPANY_SHARE = 0.2  # of a prefill step's seconds, to wait for those it would hold up
MOST_GROUPS = 4  # looked at; later ones are not waited for


@dataclass(slots=True)
class _Absence:
    """Seconds."""

    mean: float
    deviation: float

    def note(self, seconds: float) -> None:
        seconds = min(seconds, MOST_OF_MEAN * self.mean)
        off = seconds - self.mean
        self.mean += off * NEWEST_WEIGHT
        self.deviation += (abs(off) - self.deviation) * NEWEST_WEIGHT

    @property
    def longest(self) -> float:
        return self.mean + DEVIATIONS * self.deviation


@dataclass(frozen=True, slots=True)
class Away:
    """A sequence that had its result at `since` and has no next round here yet."""

    since: float
    asked_tree: bool


class Gathering:
    def __init__(self, budget: TreeBudget) -> None:
        self._budget = budget
        self._absences: dict[bool, _Absence] = {}  # by whether a tree was asked for

    def note_return(self, away: Away, now: float) -> None:
        """A sequence is back."""
        seconds = max(1e-6, now - away.since)
        known = self._absences.get(away.asked_tree)
        if known is None:
            self._absences[away.asked_tree] = _Absence(seconds, seconds / 2)
        else:
            known.note(seconds)

    def wait_until(
        self,
        ready: Sequence[PendingRound],
        away: Sequence[Away],
        now: float,
        *,
        max_rows: int,
        num_kv_tokens: int,
    ) -> float:
        """When to look again: `now` where nothing is worth waiting for. Those who ended in one
        step are waited for together.
        """
        expected = sorted(each for each in map(self._expected, away) if each.due > now)
        if not ready or not expected:
            return now
        best, until, longest = LEAST_GAIN, now, 0.0
        step = self._budget.best_step(ready, max_rows=max_rows, num_kv_tokens=num_kv_tokens)
        ends = [n for n, (a, b) in enumerate(pairwise(expected), 1) if b.due > a.due]
        for count in [*ends, len(expected)][:MOST_GROUPS]:
            due = expected[count - 1].due
            longest = max(longest, expected[count - 1].mean)
            gain = _gain(step, len(ready), count, longest, due - now)
            if gain > best:
                best, until = gain, due
        return until

    def company_until(self, away: Sequence[Away], now: float, step_seconds: float) -> float:
        """When to begin a step of prefill alone, of `step_seconds`: all who are away would wait for
        its end, so it waits for them if that takes a small part of its time; else `now`.
        """
        due = max((each.due for each in map(self._expected, away)), default=now)
        return due if now < due <= now + COMPANY_SHARE * step_seconds else now

    def _expected(self, away: Away) -> _Expected:
        known = self._absences.get(away.asked_tree)
        if known is None:
            return _Expected(0.0, 0.0)
        return _Expected(away.since + known.longest, known.mean)


class _Expected(NamedTuple):
    """When a sequence is overdue, and how long such sequences are away."""

    due: float
    mean: float


def _gain(
    step: Callable[[int, float], tuple[float, float]],
    num_ready: int,
    num_more: int,
    absence: float,
    wait: float,
) -> float:
    """Tokens a second of all together, over those of two groups apart."""
    absence = max(absence, wait)
    tokens, seconds = step(num_ready + num_more, absence)
    together = tokens / (seconds + absence)
    tokens_here, here = step(num_ready, 0.0)
    tokens_there, there = step(num_more, 0.0)
    apart = (tokens_here + tokens_there) / max(here + there, max(here, there) + absence)
    return together / apart
