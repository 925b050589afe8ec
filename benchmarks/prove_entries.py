"""What `make prove` proves: the list of entries, the sources each depends on, and their limits.

Imports neither jax nor libtpu: CI checks the stored result with it.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "prove.json"

NOT_COMPILED = (
    "*/reference.py",
    "*/shapes.py",
    "kernels/tree_attention/xla.py",
    "kernels/tree_attention/plan.py",
    "kernels/build_tree/xla.py",
    "kernels/cpu_matmul/*.py",
)
"""In no program for TPU: oracles, lists, and the forms for the CPU."""

_SHARED = ("kernels/backend.py", "kernels/checks.py", "kernels/chips.py")
_PROGRAMS = ("benchmarks/aot.py", "benchmarks/programs.py", *_SHARED)
_SCHEDULES = ("benchmarks/aot.py", "benchmarks/tpu_static.py", "benchmarks/static_schedule.py")
_STEPS = (
    "benchmarks/aot.py",
    "benchmarks/steps.py",
    "kernels/**/*.py",
    "models/layers.py",
    "models/rope.py",
    "models/row_major.py",
    "models/trees.py",
)

_DRAFT_STEP = (
    *_STEPS,
    "models/eagle3/module.py",
    "models/eagle3/description.py",
    "draft_service/batch.py",
    "draft_service/engine.py",
    "draft_service/expand.py",
    "draft_service/feature_words.py",
    "draft_service/scoring.py",
    "draft_service/shared_noise.py",
    "draft_service/sizes.py",
)

SOURCES: dict[str, tuple[str, ...]] = {
    "attention schedule": (*_SCHEDULES, *_SHARED, "kernels/tree_attention/*.py"),
    "sampling schedule": (
        *_SCHEDULES,
        *_SHARED,
        "kernels/sample_and_accept/*.py",
        "kernels/noise.py",
    ),
    "tree_attention": (*_PROGRAMS, "kernels/tree_attention/*.py"),
    "kv_commit": (*_PROGRAMS, "kernels/kv_commit/*.py", "kernels/kv_layout.py"),
    "sample_and_accept": (*_PROGRAMS, "kernels/sample_and_accept/*.py", "kernels/noise.py"),
    "split sampling": (*_PROGRAMS, "kernels/sample_and_accept/*.py", "kernels/noise.py"),
    "build_tree": (*_PROGRAMS, "kernels/build_tree/*.py"),
    "verify step": (
        *_STEPS,
        "models/config.py",
        "models/decoder.py",
        "models/experts.py",
        "models/sharding.py",
        "models/target.py",
        "verify_service/batch.py",
        "verify_service/program.py",
        "verify_service/resolve.py",
    ),
    "draft step": _DRAFT_STEP,
    "int8 draft step": (*_DRAFT_STEP, "draft_service/int8.py"),
    "int8 level schedule": (
        "benchmarks/aot.py",
        "benchmarks/head_static.py",
        "benchmarks/static_schedule.py",
        "draft_service/int8.py",
        "kernels/chips.py",
    ),
}
"""Kind of entry -> the files whose code is in what it compiles, or makes the call."""

CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")

# Chip, KV heads, group, head_dim, nodes, page size, most cycles per HBM cycle.
RATIOS: tuple[tuple[str, int, int, int, int, int, float], ...] = (
    ("v5e", 8, 4, 128, 32, 128, 0.70),
    ("v6e", 8, 4, 128, 32, 128, 0.85),
    ("v5p", 8, 4, 128, 32, 128, 1.00),
    ("v5e", 2, 4, 128, 32, 128, 0.80),
    ("v6e", 2, 4, 128, 32, 128, 1.00),
    ("v6e", 1, 8, 128, 16, 256, 1.10),
    ("v5e", 3, 3, 64, 16, 128, 1.20),
)

MODELS = (
    "Llama-3.1-8B on 4 chips",
    "Llama-3.3-70B on 8 chips",
    "Qwen3-8B on 4 chips",
    "Qwen3-32B on 8 chips",
    "SmolLM2-135M",
    "Llama-3.1-8B on 1 chip, context 131072",
    "SmolLM2-135M, float32, window",
    "head_dim 256",
)
"""Names in `programs.MODELS`, in its order."""

SERVED = (MODELS[4], *MODELS[:4])
"""Names in `steps.SERVED`, in its order."""

GREEDY_RATIO = {"v4": 0.9, "v5e": 0.5, "v5p": 0.7, "v6e": 0.8}
"""Most cycles of the pass that greedy rows take, over those in which HBM brings the logits."""

INT8_LEVEL_ROWS = 64
INT8_LEVEL_RATIO = 1.2
"""Most cycles of a level's int8 products, as XLA makes them, over those in which HBM brings
them."""

MOST_MOVED = 1.05
"""HBM bytes of an attention call over the least."""

MOST_COLLECTIVES = 12
"""All-reduces and all-gathers in the program of split sampling, each branch's counted."""


@dataclass(frozen=True)
class Entry:
    """`index`: into the list that its kind goes through; `chip`: by name."""

    kind: str
    index: int
    chip: str
    what: str

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.what}, {self.chip}"


@functools.cache
def entries() -> tuple[Entry, ...]:
    """All of them, the quick kinds first."""
    found = [
        Entry("attention schedule", i, chip, f"{heads} KV heads, {group}, {dim}, T={nodes}")
        for i, (chip, heads, group, dim, nodes, _, _) in enumerate(RATIOS)
    ]
    found += [Entry("sampling schedule", 0, chip, "128256 tokens") for chip in GREEDY_RATIO]
    for index, model in enumerate(MODELS):
        found += [Entry("tree_attention", index, chip, model) for chip in CHIPS]
        for kind in ("kv_commit", "sample_and_accept", "build_tree"):
            found.append(Entry(kind, index, "v5e", model))
    found += [Entry("split sampling", i, ("v5e", "v6e")[i], MODELS[i]) for i in (0, 1)]
    for kind in ("verify step", "draft step"):
        for index, model in enumerate(SERVED):
            chip = "v6e" if "8 chips" in model else "v5e"
            found.append(Entry(kind, index, chip, model))
    found += [Entry("verify step", 0, chip, SERVED[0]) for chip in ("v5p", "v6e")]
    for index, chip in ((1, "v5e"), (2, "v6e")):
        found.append(Entry("int8 draft step", index, chip, SERVED[index]))
        found.append(Entry("int8 level schedule", 0, chip, f"{INT8_LEVEL_ROWS} rows"))
    return tuple(found)


@functools.cache
def source_hash(kind: str) -> str:
    """Of the files of a kind, and their names."""
    digest = hashlib.sha256()
    paths = {path for pattern in SOURCES[kind] for path in ROOT.glob(pattern)}
    for path in sorted(paths):
        name = path.relative_to(ROOT).as_posix()
        if not any(fnmatch.fnmatch(name, pattern) for pattern in NOT_COMPILED):
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def problems(entry: Entry, found: dict[str, Any]) -> list[str]:
    """Limits that an entry's figures break."""
    wrong = []
    if entry.kind == "attention schedule" and found["ratio"] > RATIOS[entry.index][-1]:
        wrong.append(f"ratio {found['ratio']} is above {RATIOS[entry.index][-1]}")
    if entry.kind == "sampling schedule" and found["greedy_ratio"] > GREEDY_RATIO[entry.chip]:
        wrong.append(f"greedy pass: {found['greedy_ratio']}, above {GREEDY_RATIO[entry.chip]}")
    pages = found.get("pages_bytes", 0)
    if pages and found["temp_bytes"] > found["temp_limit_bytes"]:
        limit = found["temp_limit_bytes"]
        wrong.append(f"{found['temp_bytes']} bytes of temporaries, above {limit}")
    if found.get("donated") and found["alias_bytes"] < pages:
        wrong.append("pages are not updated in place")
    if found.get("copied_weights"):
        wrong.append(f"weights are copied: {found['copied_weights']}")
    if found.get("widened_weights"):
        wrong.append(f"int8 weights are widened in HBM: {found['widened_weights']}")
    if found.get("over_int8_hbm", 0) > INT8_LEVEL_RATIO:
        wrong.append(f"{found['over_int8_hbm']} of HBM's cycles, above {INT8_LEVEL_RATIO}")
    if found.get("copied_pages"):
        wrong.append("pages are copied")
    if found.get("longest_sort", 0) >= found.get("vocab_size", 32000):
        wrong.append("a sort as large as a vocabulary")
    if found.get("moved_over_least", 1.0) > MOST_MOVED:
        wrong.append(f"moves {found['moved_over_least']} of the least bytes")
    if entry.kind == "split sampling":
        if found["num_collectives"] > MOST_COLLECTIVES:
            wrong.append(f"{found['num_collectives']} collectives")
        if found["largest_collective"] * 64 > found["logits"]:
            wrong.append("a collective that carries logits")
    return [f"{entry.name}: {text}" for text in wrong]
