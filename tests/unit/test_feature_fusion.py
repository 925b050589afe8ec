"""What of a head a fusing verify loads, and who it then is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from model_files import load_golden, write_model, write_target

from common.errors import StartupError
from models.checkpoint import TensorEntry
from models.eagle3 import HeadOverrides, fusing_hash, load_fusing_head, load_head, open_head
from models.eagle3.bundle import write_bundle
from models.target_tables import read_target_facts
from verify_service.config import VerifyConfig

pytestmark = pytest.mark.heads

GOLDENS = {
    "head_llama": {"fc.weight"},
    "head_fc_norm": {"fc.weight", "fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"},
    "head_norm_before_fc": {"fc.weight", "input_norm.weight"},
}


def opened(head: Path, target: Path) -> Any:
    return open_head(head, read_target_facts(target), HeadOverrides(), np.float32)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    write_target(tmp_path / "target", num_layers=12)
    return tmp_path / "target"


def write_head(directory: Path, name: str, **changed: float) -> Path:
    """A golden head; `changed`: what is added to the tensors whose names end so."""
    raw, weights, _ = load_golden(name)
    for end, difference in changed.items():
        (found,) = (key for key in weights if key.endswith(f"{end}.weight"))
        weights[found] = weights[found] + np.float32(difference)
    return write_model(directory, raw, weights)


@pytest.mark.parametrize("name", GOLDENS)
def test_only_the_tensors_that_fuse_are_read(
    tmp_path: Path, target: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = write_head(tmp_path / "head", name)
    config, params = load_head(head, target)
    config_too, tensors = opened(head, target)
    read: list[str] = []
    whole = TensorEntry.read

    def note(entry: TensorEntry) -> Any:
        read.append(entry.name)
        return whole(entry)

    monkeypatch.setattr(TensorEntry, "read", note)
    fusing = load_fusing_head(config_too, tensors)
    assert set(read) == GOLDENS[name]
    assert fusing.config == config
    assert set(fusing.params) == {"fuse"}
    jax.tree.map(np.testing.assert_array_equal, fusing.params["fuse"], params["fuse"])


def test_hash_is_of_what_fuses_and_of_nothing_else(tmp_path: Path, target: Path) -> None:
    name = "head_norm_before_fc"
    found = fusing_hash(*opened(write_head(tmp_path / "head", name), target))
    other_layers = write_head(tmp_path / "layers", name, down_proj=1.0)
    assert fusing_hash(*opened(other_layers, target)) == found
    for end in ("fc", "input_norm"):
        assert fusing_hash(*opened(write_head(tmp_path / end, name, **{end: 1.0}), target)) != found
    write_bundle(tmp_path / "head", target, tmp_path / "bundle")
    shutil.rmtree(target)
    assert fusing_hash(*opened(tmp_path / "bundle", tmp_path / "bundle")) == found


def test_fusing_without_a_head_is_refused() -> None:
    with pytest.raises(StartupError, match=r"features: fused, and no head .* set head to"):
        VerifyConfig.load(["--model", "m", "--features", "fused"], environ={})
