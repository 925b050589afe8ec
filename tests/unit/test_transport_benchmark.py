"""benchmarks.transport: its kinds of frame, its figures per token, and the head that it takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import transport, transport_frames
from common.errors import StartupError


def test_another_model_needs_a_head_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"none comes with Canopy for .*; name one with --head"):
        transport.main(["--model", str(tmp_path)])


def test_every_kind_of_frame_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_frames, "SECONDS_PER_FIGURE", 0.01)
    figures = transport_frames.measure_frames(3, 16, 1728)
    kinds = {"trees to verify", "results", "extends", "trees from draft", "features"}
    assert {figure["kind"] for figure in figures} == kinds
    for figure in figures:
        assert figure["bytes"] > 0 < figure["send_us"] * figure["receive_us"]
    (features,) = (figure for figure in figures if figure["kind"] == "features")
    assert features["bytes"] > 3 * transport_frames.NUM_EMITTED * 1728 * 4  # float32 rows
