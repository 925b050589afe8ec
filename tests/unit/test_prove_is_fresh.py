"""The stored result of `make prove` belongs to the sources as they are, and keeps its limits."""

from __future__ import annotations

from benchmarks import prove
from benchmarks.prove_entries import ROOT, SOURCES, entries, problems


def test_every_entry_is_there_of_these_sources_and_within_its_limits() -> None:
    found = prove.complaints(prove.load())
    assert not found, "\n".join(found)


def test_every_pattern_names_a_file() -> None:
    for patterns in SOURCES.values():
        for pattern in patterns:
            assert list(ROOT.glob(pattern)), pattern


def test_a_broken_limit_is_seen() -> None:
    stored = prove.load()
    for kind, spoilt in (
        ("attention schedule", {"ratio": 2.0}),
        ("kv_commit", {"temp_bytes": 10**12}),
        ("kv_commit", {"alias_bytes": 0}),
        ("verify step", {"longest_sort": 10**6}),
        ("draft step", {"copied_pages": True}),
        ("int8 draft step", {"widened_weights": ["bf16[4096,32000]"]}),
        ("int8 level schedule", {"over_int8_hbm": 1.3}),
        ("tree_attention", {"moved_over_least": 1.2}),
        ("split sampling", {"largest_collective": 10**9}),
    ):
        entry = next(e for e in entries() if e.kind == kind)
        assert not problems(entry, stored[entry.name])
        assert problems(entry, {**stored[entry.name], **spoilt}), (kind, spoilt)
