"""The stored proof belongs to the kernels as they are."""

from __future__ import annotations

import json

from benchmarks import prove


def test_stored_proof_was_made_from_these_sources() -> None:
    assert prove.is_fresh(), "kernels or their benchmarks changed: run `make prove`"


def test_stored_proof_meets_its_aims() -> None:
    schedules = json.loads(prove.RESULT.read_text())["schedules"]
    assert len(schedules) == len(prove.RATIOS)
    assert all(found["ratio"] <= found["aim"] for found in schedules)
