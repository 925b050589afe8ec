"""What it costs a TPU to fill in blocks that follow the step before, by the compiler's schedule.

    python -m benchmarks.resolve_static --chip v5e --batch 16 --rows 256 --candidates 128

Compiles that stage alone (verify_service/resolve.py) and counts the bundles, which are cycles, of
every operation in it; bodies of loops once, and apart. Memory stalls are not in them. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from benchmarks.aot import Argument, compile_for_chip, libtpu_version
from kernels.chips import CHIPS
from verify_service.batch import BatchShape, Bucket
from verify_service.resolve import LastRound, resolve

MAX_DEPTH = 8
RESOLVED = (
    "tokens",
    "positions",
    "ancestors",
    "row_is_causal",
    "kv_lens",
    "node_parents",
    "node_sequence",
)
_FILE = re.compile(r"\d+-(?P<name>.+?)-\d+-packed-bundles-post-ra\.txt")
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s*(?:[A-Z]{2})?\s*:\s*(>*)\s*\{", re.MULTILINE)


def compile_stage(chip: str, batch: int, rows: int, candidates: int) -> None:
    """As a program of its own, which gives the fields that it fills in."""
    shape = BatchShape(
        max_sequences=batch,
        pages_per_sequence=1,
        ancestor_words=1,
        max_stop_tokens=1,
        max_depth=MAX_DEPTH,
        max_ahead_nodes=candidates,
    )
    fields = {
        field.name: Argument(field.shape, jnp.dtype(field.dtype))
        for field in shape.packing(Bucket(rows, rows)).fields
    }
    names = list(fields)

    def run(emitted: Any, kv_lens: Any, *arrays: Any) -> Any:
        x = resolve(dict(zip(names, arrays, strict=True)), LastRound(emitted, kv_lens))
        return [x[name] for name in RESOLVED]

    last = [Argument((batch, MAX_DEPTH + 1), jnp.int32), Argument((batch,), jnp.int32)]
    compile_for_chip(chip, run, [*last, *fields.values()])


def read_bundles(directory: Path) -> dict[str, Counter[bool]]:
    """Of each operation: bundles outside loops (False) and in them (True)."""
    found = {}
    for path in sorted(directory.iterdir()):
        name = _FILE.fullmatch(path.name)
        if name and not name["name"].startswith(("<", "TLP")):  # a program's frame
            text = path.read_text()
            found[name["name"]] = Counter(bool(depth) for depth in _BUNDLE.findall(text))
    return found


def main() -> None:
    arguments = _arguments()
    sizes = (arguments.batch, arguments.rows, arguments.candidates)
    if arguments.compile_only:
        compile_stage(arguments.chip, *sizes)
        return
    with tempfile.TemporaryDirectory(prefix="resolve-") as directory:
        flags = f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true"
        subprocess.run(
            [sys.executable, "-m", "benchmarks.resolve_static", *sys.argv[1:], "--compile-only"],
            env={**os.environ, "LIBTPU_INIT_ARGS": flags},  # read once, so a process of its own
            capture_output=True,
            check=True,
        )
        operations = read_bundles(Path(directory))
    total = sum(operations.values(), Counter[bool]())
    for name, count in sorted(operations.items(), key=lambda item: -item[1].total())[:8]:
        print(f"{name}: {count[False]} bundles, {count[True]} in loops")
    result = {
        "benchmark": "resolve_static",
        "chip": arguments.chip,
        "libtpu": libtpu_version(),
        **{name: getattr(arguments, name) for name in ("batch", "rows", "candidates")},
        "operations": len(operations),
        "bundles": total[False],
        "bundles_of_loop_bodies": total[True],
        "microseconds_loops_once": round(total.total() / CHIPS[arguments.chip].clock_hz * 1e6, 2),
    }
    print(json.dumps(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--chip", choices=[*CHIPS], default="v5e")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step")
    parser.add_argument("--rows", type=int, default=256, help="rows of a step, all of them nodes")
    parser.add_argument("--candidates", type=int, default=128, help="of each sequence")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
