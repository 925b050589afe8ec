"""`make prove`: compiles the kernels for real shapes on every TPU generation and reads their
schedules.

Writes `benchmarks/results/prove.json`, keyed by a hash of the sources; `--check` only compares the
hash, and fails if kernels changed since. Some twenty minutes on two cores. No TPU is needed and
none is timed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "prove.json"
SOURCES = (
    "kernels/**/*.py",
    "benchmarks/aot.py",
    "benchmarks/programs.py",
    "benchmarks/prove.py",
    "benchmarks/static_schedule.py",
    "benchmarks/tpu_static.py",
)
PLAIN_ON = "v5e"
"""Where the ops without a Pallas form are compiled at real sizes; `tests/aot` has all chips."""

NO_PROGRAM = ("reference.py", "shapes.py")  # oracles and lists: in no compiled program

# Chip, KV heads, group, head_dim, nodes, page size, and the most cycles per HBM cycle that is
# accepted.
RATIOS: tuple[tuple[str, int, int, int, int, int, float], ...] = (
    ("v5e", 8, 4, 128, 32, 128, 0.70),
    ("v6e", 8, 4, 128, 32, 128, 0.85),
    ("v5p", 8, 4, 128, 32, 128, 1.00),
    ("v5e", 2, 4, 128, 32, 128, 0.80),
    ("v6e", 2, 4, 128, 32, 128, 1.00),
    ("v6e", 1, 8, 128, 16, 256, 1.10),
    ("v5e", 3, 3, 64, 16, 128, 1.20),
)


def source_hash() -> str:
    """Of every file that a result depends on, and their names."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            if path.name in NO_PROGRAM:
                continue
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def is_fresh() -> bool:
    """Whether the stored result was made from the sources as they are."""
    if not RESULT.exists():
        return False
    return bool(json.loads(RESULT.read_text())["sources"] == source_hash())


def _bytes(argument: Any) -> int:
    import jax.numpy as jnp

    size = int(jnp.dtype(argument.dtype).itemsize)
    for axis in argument.shape:
        size *= axis
    return size


def attention_bytes(model: Any) -> dict[str, float]:
    """HBM bytes of one call by count, all prefixes full, and what no kernel could do without.

    Moved beyond the least: the 512 bytes of each row's ancestor bits, block rows rounded up to 128
    and written once more head-major, whole last pages, page table rows, and further reads of a
    prefix for sequences of more than one tile.
    """
    import jax.numpy as jnp

    item = int(jnp.dtype(model.dtype).itemsize)
    row = model.kv_heads * 2 * model.head_dim * item
    prefix = model.batch * model.context * row
    queries = 2 * model.rows * model.kv_heads * model.group * model.head_dim * item
    new = model.rows * row
    least = prefix + queries + new
    tiles = -(-model.nodes // 64)
    blocks = model.batch * tiles * (-(-(model.nodes + 15) // 128) * 128) * row
    small = model.rows * 512 + model.batch * model.context // model.page_size * 4
    moved = prefix * tiles + queries + 2 * new + blocks + small
    return {"least": least, "moved": moved, "share": round(moved / least, 4)}


def prove_program(name: str, chip: str, call: Any, pages_bytes: int) -> dict[str, Any]:
    """Compiles one call; asserts that pages are neither copied nor sorted over."""
    from benchmarks.aot import compile_for_chip

    program = compile_for_chip(chip, call.function, call.arguments, donate=call.donate)
    peak = program.argument_bytes + program.output_bytes + program.temp_bytes - program.alias_bytes
    result = {
        "program": name,
        "chip": chip,
        "temp_bytes": program.temp_bytes,
        "peak_bytes": peak,
        "alias_bytes": program.alias_bytes,
        "largest_sort": program.largest_result("sort"),
        "largest_copy": program.largest_result("copy"),
    }
    if pages_bytes and program.temp_bytes * 8 > pages_bytes:
        raise AssertionError(f"{name} on {chip}: {program.temp_bytes} bytes of temporaries")
    if call.donate and program.alias_bytes < pages_bytes:
        raise AssertionError(f"{name} on {chip}: pages are not updated in place")
    if program.largest_result("sort") >= 32000:
        raise AssertionError(f"{name} on {chip}: a sort over a vocabulary")
    return result


def prove_model(index: int, chip_name: str) -> list[dict[str, Any]]:
    """The programs of one model on one chip."""
    from benchmarks import programs
    from kernels.chips import CHIPS

    model, chip = programs.MODELS[index], CHIPS[chip_name]
    pages = _bytes(programs.pages_argument(model))
    calls = {"tree_attention": (programs.attention(model, chip), pages)}
    if chip_name == PLAIN_ON:
        calls["kv_commit"] = (programs.commit(model), pages)
        calls["sample_and_accept"] = (programs.acceptance(model), 0)
        calls["build_tree"] = (programs.tree(model), 0)
    results = []
    for kernel, (call, limit) in calls.items():
        found = prove_program(f"{kernel}, {model.name}", chip_name, call, limit)
        if kernel == "tree_attention":
            found["bytes"] = attention_bytes(model)
        results.append(found)
        print(json.dumps(found), file=sys.stderr, flush=True)
    return results


def prove_programs(workers: int) -> list[dict[str, Any]]:
    from benchmarks import programs
    from kernels.chips import CHIPS

    jobs = [(index, chip) for index in range(len(programs.MODELS)) for chip in CHIPS]
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers) as pool:
        return [found for part in pool.starmap(prove_model, jobs, 1) for found in part]


def prove_ratios() -> list[dict[str, Any]]:
    from benchmarks.tpu_static import Shape, report

    results = []
    for chip, kv_heads, group, head_dim, nodes, page_size, limit in RATIOS:
        shape = Shape(kv_heads, group, head_dim, nodes, page_size, None)
        found = report(chip, shape, with_jax=head_dim == 128) | {"aim": limit}
        if found["ratio"] > limit:
            raise AssertionError(f"{chip} {shape}: ratio {found['ratio']} is above {limit}")
        results.append(found)
        print(json.dumps(found), file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.prove", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare hashes only")
    parser.add_argument("--workers", type=int, default=2, help="compilers side by side")
    arguments = parser.parse_args()
    workers: int = arguments.workers
    if arguments.check:
        if not is_fresh():
            sys.exit(f"{RESULT.relative_to(ROOT)} was made from other sources: run `make prove`")
        return
    sources = source_hash()
    import jax

    result = {
        "sources": sources,
        "jax": jax.__version__,
        "libtpu": importlib.metadata.version("libtpu"),
        "schedules": prove_ratios(),
        "programs": prove_programs(workers),
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
