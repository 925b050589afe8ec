"""What is compiled before a service serves: explicit tables, several programs at a time."""

from __future__ import annotations

import threading

import pytest

from common.types import TreeShape
from draft_service.engine import EngineConfig as DraftConfig
from models import device
from models.device import compile_all
from verify_service.engine import EngineConfig as VerifyConfig

VERIFY = {
    "num_pages": 64, "page_size": 16, "max_sequences": 16, "max_context_len": 512,
    "max_tree_nodes": 16,
}  # fmt: skip
ON_CPU = [(1, 1), (8, 8), (16, 16), (32, 32), (64, 64), (256, 16), (256, 64), (256, 256)]


def table(config: VerifyConfig) -> list[tuple[int, int]]:
    return [(bucket.num_rows, bucket.num_nodes) for bucket in config.buckets()]


def test_verifys_buckets_are_flattened_rows_and_nodes() -> None:
    assert table(VerifyConfig(**VERIFY)) == ON_CPU
    few = VerifyConfig(**VERIFY | {"row_buckets": (8, 64), "max_rows": 1024, "max_sequences": 4})
    assert table(few) == [(8, 8), (64, 64), (1024, 16), (1024, 64)]


def test_on_tpu_no_step_has_fewer_than_eight_rows() -> None:
    assert table(VerifyConfig(**VERIFY, min_rows=8)) == ON_CPU[1:]


def test_drafts_buckets_are_sequences_and_rows() -> None:
    tree = TreeShape(max_depth=3, top_k=3, max_nodes=12)
    config = DraftConfig(
        num_pages=64, page_size=16, max_context_len=512, tree=tree, max_sequences=6,
        max_draft_rows=8, max_extend_rows=256,
    )  # fmt: skip
    found = [(b.num_sequences, b.num_rows) for b in config.buckets() if b.drafts]
    assert found == [(1, 8), (2, 16), (4, 32), (6, 48)]
    found = [(b.num_sequences, b.num_rows) for b in config.buckets() if not b.drafts]
    assert found == [(6, 32), (6, 128), (6, 256)]


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "MAX_COMPILES", 2)
    monkeypatch.setattr(device.os, "cpu_count", lambda: 2)


@pytest.mark.usefixtures("two_cores")
def test_programs_are_compiled_side_by_side() -> None:
    meeting, told = threading.Barrier(2), list[tuple[int, int]]()
    compile_all(lambda _: meeting.wait(20), range(6), lambda *of: told.append(of))
    assert told == [(i, 6) for i in range(1, 7)]


@pytest.mark.usefixtures("two_cores")
def test_a_program_that_cannot_be_compiled_ends_the_warm_up() -> None:
    begun: list[int] = []

    def compile_one(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise RuntimeError("no memory")
        threading.Event().wait(0.1)

    with pytest.raises(RuntimeError, match="no memory"):
        compile_all(compile_one, range(50), None)
    assert len(begun) < 50
