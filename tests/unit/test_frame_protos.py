"""The committed stubs are what the protos say, and the protos keep buf's rules."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_committed_stubs_are_current(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/generate_stubs.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)
    made = {path.name: path.read_text() for path in (tmp_path / "canopy/v1").iterdir()}
    committed = {
        path.name: path.read_text()
        for path in (ROOT / "canopy/v1").glob("*_pb2*")
        if path.suffix in {".py", ".pyi"}
    }
    assert made.keys() == committed.keys()
    stale = [name for name, text in made.items() if committed[name] != text]
    assert not stale, f"{stale} differ from protos/; run `make protos`"


def test_protos_pass_buf_lint() -> None:
    buf = Path(sys.executable).with_name("buf")
    found = str(buf) if buf.exists() else shutil.which("buf")
    if found is None:
        pytest.fail("buf is missing; install the test extra (its buf-bin package)")
    result = subprocess.run(
        [found, "lint", str(ROOT / "protos")], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr
