"""How rounds should be drafted, by what each way has given.

    rate = tokens / seconds from a sequence's last result to this one, over all sequences

There are three ways (`common.types.Drafting`): roots alone, trees that are waited for, and trees
grown ahead, for which nothing waits. A rate is kept of each, and the best way is asked for with
every result. The budget decides how much of a tree a step verifies; here is decided whether and how
to draft, with everything that it costs: the draft, its queue, the network, the longer step, the
rounds that find no tree. Nothing is modelled, only measured.

A rate says little about another load, so they are kept per doubling of the sequences on the
device; a load not met before begins with what its neighbour knows, which new rounds soon outweigh.

At first each way is tried twice. Later, ways that are not used are not learnt of. So a share of all
seconds is put aside, and when that pays for what a try is expected to lose, all sequences take
another way for a few rounds, which then weigh at least a quarter of all that was known of it, and a
few more as long as these say that it is the best now; the others take turns. This bounds what
probing costs, and it is the way back when the text, the draft or the load has changed, or a first
judgement was wrong. Rounds differ by more tokens than ways do by rate, so a try of a few rounds
would tell nothing; nor do the first with trees ahead: none has come yet, and how many levels come
in time is still learnt (draft_service/levels.py).

Deterministic, without a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.types import Drafting

PROBE_SHARE = 0.005
EARLY_PROBE_SHARE = 0.02  # while little is known: a first judgement is of few rounds
EARLY_ROUNDS = 256  # at a load
LEAST_PROBE_ROUNDS = 32
FIRST_TRIES = 2  # of each way: when the first are made, caches are cold and levels not learnt
MOST_KNOWN = 4  # probes that what is known of a way weighs at most where it is tried again
PROBE_ROUNDS_PER_SEQUENCE = 2
SETTLING_ROUNDS_PER_SEQUENCE = 5  # before trees ahead arrive as they will; not counted
LEAST_LOSS = 0.1  # of a probe, as a share of its seconds: changing over costs something by itself
MEMORY_ROUNDS = 256.0  # at least; four of each sequence
INHERITED_ROUNDS = 2.0  # what a neighbour's rates weigh at a new load
MOST_OF_MEAN = 4.0  # a round longer than so many mean ones was not waiting for us alone


@dataclass(slots=True)
class _Rate:
    """Sums that forget: `rounds` never exceeds the memory."""

    rounds: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def value(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    def add(self, tokens: int, seconds: float, memory: float) -> None:
        if self.rounds >= 1.0:
            seconds = min(seconds, MOST_OF_MEAN * self.seconds / self.rounds)
        keep = min(1.0, (memory - 1.0) / max(self.rounds, 1e-9))
        self.rounds = self.rounds * keep + 1.0
        self.tokens = self.tokens * keep + tokens
        self.seconds = self.seconds * keep + seconds

    def weighing(self, most_rounds: float) -> _Rate:
        """The same rate, of no more than so many rounds."""
        share = min(1.0, most_rounds / max(self.rounds, 1e-9))
        return _Rate(self.rounds * share, self.tokens * share, self.seconds * share)


@dataclass(slots=True)
class _Load:
    rates: dict[Drafting, _Rate]
    saved_seconds: float = 0.0  # sequence-seconds, for the next probe
    num_rounds: int = 0
    tried: list[Drafting] = field(default_factory=list)  # ways, the one tried last at the end
    num_tries: dict[Drafting, int] = field(default_factory=dict)


class DraftGate:
    """Begins with trees that are waited for, then tries the other ways."""

    def __init__(self) -> None:
        self._way = Drafting.SYNCHRONOUS
        self._offers_ahead = False
        self._probe_left = 0  # rounds of the probe under way
        self._probe = _Rate()  # of that probe alone
        self._settling_left = 0  # rounds before those of the way taken count
        self._loads: dict[int, _Load] = {}
        self.num_probes = 0

    @property
    def drafting(self) -> Drafting:
        return self._way

    def offer_ahead(self, offered: bool) -> None:
        """Whether trees ahead can be had for those who are here now."""
        self._offers_ahead = offered
        if not offered and self._way is Drafting.AHEAD:
            self._way, self._probe_left, self._settling_left = Drafting.SYNCHRONOUS, 0, 0

    def note_round(self, way: Drafting, tokens: int, seconds: float, num_sequences: int) -> None:
        """A round that took the way it was asked to.

        `seconds`: since the sequence's result before. `num_sequences`: on the device.
        """
        load = self._load(num_sequences)
        if way is self._way and self._settling_left > 0:
            self._settling_left -= 1
            return
        memory = max(MEMORY_ROUNDS, 4.0 * num_sequences)
        load.rates[way].add(tokens, seconds, memory)
        load.num_rounds += 1
        early = load.num_rounds <= EARLY_ROUNDS
        load.saved_seconds += (EARLY_PROBE_SHARE if early else PROBE_SHARE) * seconds
        if way is self._way:
            self._probe.add(tokens, seconds, memory)
            self._choose(load, num_sequences)

    def _choose(self, load: _Load, num_sequences: int) -> None:
        probe = max(LEAST_PROBE_ROUNDS, PROBE_ROUNDS_PER_SEQUENCE * num_sequences)
        ended = self._probe_left == 1
        self._probe_left = max(0, self._probe_left - 1)
        if self._probe_left:
            return
        others = [
            way
            for way in Drafting
            if way is not self._way and (self._offers_ahead or way is not Drafting.AHEAD)
        ]
        here = load.rates[self._way]
        unknown = [way for way in others if load.num_tries.get(way, 0) < FIRST_TRIES]
        best = max(others, key=lambda way: load.rates[way].value)
        # The one that was not tried for longest.
        next_try = min(others, key=lambda way: _turn(load.tried, way))
        settling = _settling(next_try, num_sequences)
        if unknown:
            if here.rounds >= probe or load.tried:
                first = min(unknown, key=lambda way: load.num_tries.get(way, 0))
                self._begin_probe(load, first, probe, num_sequences)
        elif load.rates[best].value > here.value:
            if ended and self._probe.value > load.rates[best].value:
                self._probe_left, self._probe = probe, _Rate()  # is it so much better by now?
                return
            load.saved_seconds = 0.0
            self._take(best, num_sequences)
        elif load.saved_seconds >= self._loss(here, load.rates[next_try], probe + settling):
            load.saved_seconds = 0.0
            self._begin_probe(load, next_try, probe, num_sequences)

    def _take(self, way: Drafting, num_sequences: int) -> None:
        self._way, self._settling_left = way, _settling(way, num_sequences)

    def _begin_probe(self, load: _Load, way: Drafting, num_rounds: int, num_sequences: int) -> None:
        self._take(way, num_sequences)
        self._probe_left, self._probe = num_rounds, _Rate()
        load.rates[way] = load.rates[way].weighing(MOST_KNOWN * num_rounds)
        load.num_tries[way] = load.num_tries.get(way, 0) + 1
        load.tried = [*(each for each in load.tried if each is not way), way]
        self.num_probes += 1

    @staticmethod
    def _loss(here: _Rate, there: _Rate, num_rounds: int) -> float:
        """Sequence-seconds that `num_rounds` the other way are expected to lose."""
        share = max(LEAST_LOSS, 1.0 - there.value / max(here.value, 1e-9))
        return num_rounds * (there.seconds / there.rounds) * share

    def _load(self, num_sequences: int) -> _Load:
        key = num_sequences.bit_length()
        if key not in self._loads:
            nearest = min(self._loads, key=lambda known: abs(known - key), default=None)
            near = self._loads[nearest] if nearest is not None else _Load({})
            self._loads[key] = _Load(
                {way: near.rates.get(way, _Rate()).weighing(INHERITED_ROUNDS) for way in Drafting},
                num_tries=dict(near.num_tries) or {self._way: 1},
            )
        return self._loads[key]


class FixedWay:
    """One way whatever it gives: what `DraftGate` answers, without its judgement."""

    num_probes = 0

    def __init__(self, drafting: Drafting = Drafting.SYNCHRONOUS) -> None:
        self.drafting = drafting

    def offer_ahead(self, offered: bool) -> None:
        pass

    def note_round(self, way: Drafting, tokens: int, seconds: float, num_sequences: int) -> None:
        pass


def _settling(way: Drafting, num_sequences: int) -> int:
    """Rounds after a change to it that tell nothing yet."""
    return SETTLING_ROUNDS_PER_SEQUENCE * num_sequences if way is Drafting.AHEAD else 0


def _turn(tried: list[Drafting], way: Drafting) -> int:
    return tried.index(way) if way in tried else -1
