"""The feature rows of one sequence that wait on the host for their turn, and a few that had it.

Rows are addressed by position and come in any order: gaps wait, rows already known are ignored.

    recent (kept for a redo)    waiting, contiguous          gap    waiting
    [next - recent_rows, next)  [next, available_until)      ....   [...)
                                ^ next: the first row that is not in the head's KV
"""

from __future__ import annotations

import numpy as np

from draft_service.step import FeatureArray


class FeatureStore:
    def __init__(self, first: int, recent_rows: int) -> None:
        """`first`: position of the first row that will come."""
        self._rows: dict[int, FeatureArray] = {}
        self._recent_rows = recent_rows
        self._row_bytes = 0
        self._num_waiting = 0
        self.first = first
        self.next = first
        self.available_until = first

    @property
    def num_available(self) -> int:
        """Rows that can be fed now."""
        return self.available_until - self.next

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of rows that no step has fed yet, those behind a gap included."""
        return self._num_waiting * self._row_bytes

    @property
    def _oldest_recent(self) -> int:
        return max(self.first, self.next - self._recent_rows)

    def put(self, position: int, rows: FeatureArray) -> int:
        """Keeps the rows from `position` on that are not known yet; returns how many those were."""
        self._row_bytes = int(rows[:1].nbytes)
        fresh = 0
        for p in range(max(position, self.next), position + rows.shape[0]):
            if p not in self._rows:
                self._rows[p] = rows[p - position]
                fresh += 1
        self._num_waiting += fresh
        self._advance()
        return fresh

    def take(self, position: int, num_rows: int) -> FeatureArray:
        """Rows [num_rows, F] from `position` on, all of which are there. They stay until `fed`."""
        return np.stack([self._rows[p] for p in range(position, position + num_rows)])

    def has(self, position: int) -> bool:
        return position in self._rows

    def fed(self, until: int) -> None:
        """Notes that the rows below `until` are in the KV; forgets all but the recent of them."""
        until = max(self.next, until)
        # Rows that the prefix cache held never came here.
        self._num_waiting -= sum(p in self._rows for p in range(self.next, until))
        oldest_before, self.next = self._oldest_recent, until
        for p in range(oldest_before, self._oldest_recent):
            self._rows.pop(p, None)
        for p in range(self._oldest_recent, self.next):
            row = self._rows.get(p)
            if row is not None and row.base is not None:
                self._rows[p] = row.copy()  # a view would keep its whole piece alive
        self._advance()

    def feed_again(self, position: int) -> None:
        """Notes that rows from `position` on, all of them still kept, are to be fed once more."""
        self._num_waiting += max(0, self.next - position)
        self.next = min(self.next, position)

    def cut(self, end: int) -> None:
        """Forgets rows from position `end` on: they come again."""
        end = max(end, self.first)
        self._rows = {p: row for p, row in self._rows.items() if p < end}
        self.next = min(self.next, end)
        self._num_waiting = sum(p >= self.next for p in self._rows)
        self.available_until = min(self.available_until, end)
        self._advance()

    def _advance(self) -> None:
        until = max(self.available_until, self.next)
        while until in self._rows:
            until += 1
        self.available_until = until
