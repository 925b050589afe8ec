"""Prefill rows beside running sequences: as many as delay those by a bounded factor.

A chunk's time grows with what it attends to: 48 rows of a prompt's beginning cost little, the same
rows behind 8,000 others may cost many plain steps. So the rows follow the measured curve:

    T(with the chunk) <= max_slowdown * T(roots alone)

Row buckets are padded, so a chunk fills its bucket; the smallest is always taken, or a long prompt
would never come in.
"""

from __future__ import annotations

from verify_service.step_cost import StepCurve


class PrefillPace:
    def __init__(self, curve: StepCurve, max_slowdown: float) -> None:
        """`max_slowdown`: of a step by its prefill rows; at least 1."""
        self._curve, self._max_slowdown = curve, max_slowdown

    def rows(self, most: int, *, num_roots: int, root_kv_tokens: int, prompt_kv_tokens: int) -> int:
        """At most `most` prefill rows, at least 1, for a step with `num_roots` others.

        `root_kv_tokens`: in pages, of all those; `prompt_kv_tokens`: of the prompt that is longest
        in pages among those that come in.
        """
        spare = [int(rows) - num_roots for rows in self._curve.rows]
        choices = sorted({min(rows, most) for rows in spare if rows > 0} | {most})
        plain = self._seconds(num_roots, root_kv_tokens, num_roots)
        bare = self._seconds(num_roots, 0, 1)
        allowed = choices[0]
        for rows in choices[1:]:
            added = self._seconds(num_roots + rows, prompt_kv_tokens, 1) - bare
            if added > (self._max_slowdown - 1) * plain:
                break
            allowed = rows
        return allowed

    def _seconds(self, num_rows: int, num_kv_tokens: int, num_sequences: int) -> float:
        return float(self._curve.seconds(num_rows, num_kv_tokens, num_sequences))
