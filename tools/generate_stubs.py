"""Generates the gRPC stubs and their types from protos/ into a directory (default: the repository).

Usage: python tools/generate_stubs.py [--out DIR]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> None:
    """Writes `canopy/v1/*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` below `out`."""
    protos = sorted((ROOT / "protos").glob("canopy/v1/*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}"]
    command += [f"--python_out={out}", f"--grpc_python_out={out}", f"--pyi_out={out}"]
    subprocess.run([*command, *map(str, protos)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT)
    generate(parser.parse_args().out)


if __name__ == "__main__":
    main()
