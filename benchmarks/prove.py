"""`make prove`: compiles kernels and whole steps for real shapes and TPU generations, and reads the
kernels' schedules. No TPU is needed and none is timed.

`benchmarks/results/prove.json` holds one entry a shape, with the hash of the sources that it
depends on. Only entries whose sources changed are made anew, one process each, and every one is
stored as soon as it is there: an interrupted run goes on where it was. `--check` compiles nothing
and fails if an entry is missing, stale or breaks a limit; so does
`tests/unit/test_prove_is_fresh.py`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.metadata
import json
import multiprocessing
import sys
import time
from typing import Any

from benchmarks.prove_entries import RESULT, ROOT, Entry, entries, problems, source_hash


def load() -> dict[str, Any]:
    """Entry name -> what was stored for it; empty without a file."""
    if not RESULT.exists():
        return {}
    stored: dict[str, Any] = json.loads(RESULT.read_text())["entries"]
    return stored


def stale(stored: dict[str, Any]) -> list[Entry]:
    """Entries that are missing or were made from other sources."""
    return [e for e in entries() if stored.get(e.name, {}).get("sources") != source_hash(e.kind)]


def complaints(stored: dict[str, Any]) -> list[str]:
    """What `--check` fails for: stale entries, and limits that a stored one breaks."""
    old = stale(stored)
    found = [f"{entry.name}: missing or of other sources; run `make prove`" for entry in old]
    fresh = [entry for entry in entries() if entry not in old]
    return found + [text for e in fresh for text in problems(e, stored[e.name])]


def make(entry: Entry) -> dict[str, Any]:
    """One entry's figures, in a process of its own. Raises what the compiler raises."""
    from benchmarks.prove_run import run

    begun = time.monotonic()
    return {**run(entry), "seconds": round(time.monotonic() - begun, 1)}


def write(stored: dict[str, Any]) -> None:
    import jax

    versions = {"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")}
    names = [entry.name for entry in entries()]
    kept = {name: stored[name] for name in names if name in stored}
    RESULT.parent.mkdir(exist_ok=True)
    # One line an entry: a changed shape is a changed line.
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(kept[name])}" for name in kept)
    RESULT.write_text(f'{{"versions": {json.dumps(versions)},\n "entries": {{\n{lines}\n}}}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.prove", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compile nothing")
    parser.add_argument("--workers", type=int, default=2, help="compilers side by side")
    parser.add_argument("--only", default="", help="entries whose names contain this")
    arguments = parser.parse_args()
    stored = load()
    if arguments.check:
        found = complaints(stored)
        if found:
            sys.exit("\n".join(found))
        return
    todo = [entry for entry in stale(stored) if arguments.only in entry.name]
    print(f"{len(todo)} of {len(entries())} entries to make", file=sys.stderr, flush=True)
    failed = []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        arguments.workers, mp_context=context, max_tasks_per_child=1
    ) as pool:
        waiting = {pool.submit(make, e): (e, source_hash(e.kind)) for e in todo}
        for done in concurrent.futures.as_completed(waiting):
            entry, sources = waiting[done]
            try:
                result = done.result()
            except Exception as error:  # any failure to compile is this entry's result
                failed.append(f"{entry.name}: {str(error)[:500]}")
                continue
            stored[entry.name] = {"sources": sources, **result}
            write(stored)
            failed += problems(entry, stored[entry.name])
            print(entry.name, json.dumps(result), file=sys.stderr, flush=True)
    if failed:
        sys.exit("\n".join(failed))
    print(json.dumps({"result": str(RESULT.relative_to(ROOT)), "made": len(todo)}))


if __name__ == "__main__":
    main()
