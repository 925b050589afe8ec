"""Which sequences verify holds, and who owns them: `common.fencing`, with waiting and crowds."""

from __future__ import annotations

from common.fencing import Registry
from verify_service.limits import VerifyLimits
from verify_service.residency import Residency
from verify_service.sequences import VerifySequence


class VerifyRegistry(Registry[VerifySequence]):
    def __init__(self, limits: VerifyLimits, residency: Residency) -> None:
        super().__init__(limits.grace_seconds, residency.put_out)
        self._limits = limits

    @property
    def num_owned(self) -> int:
        """Sequences whose stream is there."""
        return sum(s.orphaned_since is None for s in self._sequences.values())

    def waiting(self) -> list[VerifySequence]:
        """Sequences with a round to run and no slot, oldest first, orphans last."""
        waiting = [s for s in self._sequences.values() if not s.is_resident and s.pending]
        return sorted(waiting, key=lambda s: (s.orphaned_since is not None, s.arrival))

    @property
    def has_ready(self) -> bool:
        return any(s.is_ready for s in self._sequences.values())

    def disconnect(self, stream: int, now: float) -> None:
        """Its sequences become orphans; of too many, those go that were orphaned first."""
        super().disconnect(stream, now)
        orphans = [s for s in self._sequences.values() if s.orphaned_since is not None]
        surplus = len(orphans) - self._limits.max_open_sequences
        if surplus > 0:
            orphans.sort(key=lambda s: (s.orphaned_since or 0.0, s.arrival))
            for sequence in orphans[:surplus]:
                self.forget(sequence)

    def _keeps(self, sequence: VerifySequence) -> bool:
        """What waits behind a running step; what is in flight alone is freed when that retires."""
        return bool(sequence.deferred)
