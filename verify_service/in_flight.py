"""Which blocks were launched and not retired, slot by slot."""

from __future__ import annotations

from collections.abc import Iterator

from verify_service.blocks import Launched
from verify_service.sequences import VerifySequence
from verify_service.step import SequenceWork


class InFlight:
    def __init__(self) -> None:
        self._by_slot: dict[int, list[Launched]] = {}  # oldest first

    def __len__(self) -> int:
        """Sequences."""
        return len(self._by_slot)

    def __iter__(self) -> Iterator[Launched]:
        return (launched for blocks in self._by_slot.values() for launched in blocks)

    def add(self, launched: Launched) -> None:
        launched.sequence.num_in_flight += 1
        self._by_slot.setdefault(launched.work.slot, []).append(launched)

    def land(self, work: SequenceWork) -> Launched:
        """Takes it out: it has ended."""
        blocks = self._by_slot[work.slot]
        launched = next(block for block in blocks if block.work is work)
        blocks.remove(launched)
        if not blocks:
            del self._by_slot[work.slot]
        launched.sequence.num_in_flight -= 1
        return launched

    def behind(self, sequence: VerifySequence) -> Launched | None:
        """What runs of a sequence yet, the oldest."""
        return next(iter(self._by_slot.get(sequence.slot, [])), None)

    def only_step(self) -> list[Launched]:
        """The blocks of the step in flight; none if there are several."""
        blocks = list(self)
        return blocks if len({block.step for block in blocks}) == 1 else []
