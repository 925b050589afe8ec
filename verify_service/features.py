"""A sequence's recent aux features, kept on the host until its receiver has them, and for replay.

The window is the only place where features wait: the receiver's credit pulls rows out of it
(`FeatureWindow.take`), so that a slow receiver costs no memory beyond the window. Old rows fall out
at the back; a draft that never got them accepts a little less.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any]  # [num_rows, F], float32 or bfloat16


class FeatureWindow:
    """Rows of consecutive positions [start, end), of which [next_position, end) are still to be
    sent.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._chunks: deque[tuple[int, Rows]] = deque()
        self.start = 0
        self.end = 0
        self.next_position = 0
        self._borrowed_until = 0  # rows below are another's as well

    @property
    def num_waiting(self) -> int:
        return self.end - self.next_position

    def append(self, position: int, rows: Rows) -> None:
        """Adds rows from `position` on. Rows below `end` are known already and skipped.

        Raises ValueError on a gap: the engine computes every position in turn.
        """
        if position > self.end:
            raise ValueError(f"features jump from position {self.end} to {position}")
        fresh = rows[self.end - position :]
        if not fresh.shape[0]:
            return
        # A few rows must not keep a whole step's array alive.
        is_small_part = fresh.base is not None and fresh.base.nbytes > 2 * fresh.nbytes
        self._chunks.append((self.end, np.array(fresh) if is_small_part else fresh))
        self.end += fresh.shape[0]
        self._trim()

    def borrow(self, position: int, rows: Rows) -> None:
        """Like `append`, with rows that are kept elsewhere anyway: until they are sent they do not
        count against the bound.
        """
        self._borrowed_until = max(self._borrowed_until, position + rows.shape[0])
        self.append(position, rows)

    def take_over(self, other: FeatureWindow, end: int) -> None:
        """Adds the rows below `end` that `other` holds, by reference, to those that are here. If
        rows between the two are missing, it begins anew behind them.
        """
        if other.start > self.end:
            self._chunks.clear()
            self.start = self.end = self.next_position = min(other.start, end)
        for position, chunk in other._chunks:
            rows = chunk[max(0, self.end - position) : max(0, end - position)]
            if rows.shape[0]:
                self.borrow(self.end, rows)

    def rows(self, position: int, num_rows: int) -> Rows | None:
        """The rows from `position` on; None unless all of them are still held."""
        end = position + num_rows
        if position < self.start or end > self.end:
            return None
        parts: list[Rows] = []
        for first, chunk in reversed(self._chunks):  # what is asked for is mostly at the end
            if first < end:
                parts.append(chunk[max(0, position - first) : end - first])
            if first <= position:
                break
        return parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])

    def cut(self, end: int) -> None:
        """Forgets rows from position `end` on: the sequence was cut there."""
        while self._chunks and self._chunks[-1][0] >= end:
            self._chunks.pop()
        if self._chunks:
            position, chunk = self._chunks[-1]
            self._chunks[-1] = (position, chunk[: end - position])
        self.end = min(self.end, end)
        self._borrowed_until = min(self._borrowed_until, end)
        self.start = min(self.start, self.end)
        self.next_position = min(self.next_position, self.end)

    def rewind(self, position: int) -> None:
        """Sends again from `position`, or from the oldest row still held."""
        self.next_position = min(self.end, max(self.start, position))

    def take(self, max_rows: int) -> tuple[int, Rows] | None:
        """The next rows to send, at most `max_rows` and from one chunk; None if none wait."""
        if max_rows < 1 or not self.num_waiting:
            return None
        for position, chunk in reversed(self._chunks):  # what waits is mostly at the end
            if position <= self.next_position:
                first = self.next_position - position
                rows = chunk[first : first + max_rows]
                self.next_position += rows.shape[0]
                if self._borrowed_until > position:
                    self._trim()
                return position + first, rows
        raise AssertionError("rows wait but no chunk holds them")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; 0 while nothing is held."""
        return int(self._chunks[-1][1][:1].nbytes) if self._chunks else 0

    @property
    def _surplus(self) -> int:
        """Rows beyond the bound."""
        unsent = max(0, self._borrowed_until - max(self.start, self.next_position))
        return self.end - self.start - self._max_rows - unsent

    def _trim(self) -> None:
        while (surplus := self._surplus) > 0:
            position, chunk = self._chunks[0]
            if chunk.shape[0] <= surplus:
                self._chunks.popleft()
                self.start = position + chunk.shape[0]
            elif surplus >= max(1, self._max_rows // 8):  # seldom, since it copies what stays
                self._chunks[0] = (position + surplus, np.array(chunk[surplus:]))
                self.start = position + surplus
            else:
                break
        self.next_position = max(self.next_position, self.start)
