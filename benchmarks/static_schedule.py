"""Reads the compiler's own schedule of a kernel: bundles are cycles, waiting ones included.

libtpu writes, when LIBTPU_INIT_ARGS asks for it, the packed bundles after register allocation and a
table of slot use, one row a bundle. Memory stalls are not in it: whoever uses these figures sets
the HBM time beside them.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s*(?:[A-Z]{2})?\s*:\s*(>*)\s*\{")
_LABELLED = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+[A-Z]{2}\s*:")
_BRANCH = re.compile(r"sbr\.\w+ \(!?%\w+\) target bundleno = (\d+)")
_DMA = re.compile(r"= dma\.(?!done)\w+")
_TO_SMEM = re.compile(r"= dma\.\w+_to_smem")
_DELAY_SLOTS = 4


@dataclass(frozen=True)
class Block:
    """A basic block: its loop depth, cycles, empty cycles, slots used by unit, and DMAs started:
    0 if one of them fills SMEM, for then they are a work item's inputs and no pages."""

    start: int
    depth: int
    cycles: int
    empty: int
    used: dict[str, int]
    dmas: int


@dataclass(frozen=True)
class Loop:
    """A loop without the loops inside it.

    `cycles`: one turn, counting of several blocks that start page DMAs (alternatives) the longest.
    `issue_cycles`: that block.
    """

    depth: int
    start: int
    cycles: int
    issue_cycles: int
    empty: int
    used: dict[str, int]


@dataclass(frozen=True)
class Schedule:
    """All blocks of a kernel in order; `capacity`: slots of each unit in a bundle."""

    capacity: dict[str, int]
    blocks: list[Block]

    def loops(self, depth: int) -> list[Loop]:
        """The loops of that depth, in order; the kernel's straight code is depth 0's only one."""
        runs: list[list[Block]] = [[]]
        for block in self.blocks:
            if block.depth < depth:
                runs.append([])
            elif block.depth == depth:
                runs[-1].append(block)
        return [_as_loop(run) for run in runs if run]

    def hottest(self) -> Loop:
        """The loop, of any depth, with the most matrix work in one turn."""
        deepest = max(block.depth for block in self.blocks)
        loops = [loop for depth in range(deepest + 1) for loop in self.loops(depth)]
        return max(loops, key=lambda loop: loop.used.get("MATMUL", 0))


def _as_loop(blocks: list[Block]) -> Loop:
    issuing = [b for b in blocks if b.dmas > 1 and "MATMUL" not in _busy(b)]
    longest = max(issuing, key=lambda b: b.cycles, default=None)
    counted = [b for b in blocks if b not in issuing or b is longest]
    used: dict[str, int] = {}
    for block in counted:
        for unit, count in block.used.items():
            used[unit] = used.get(unit, 0) + count
    return Loop(
        depth=blocks[0].depth,
        start=blocks[0].start,
        cycles=sum(b.cycles for b in counted),
        issue_cycles=longest.cycles if longest else 0,
        empty=sum(b.empty for b in counted),
        used=used,
    )


def _busy(block: Block) -> set[str]:
    return {unit for unit, count in block.used.items() if count}


def parse(bundles: str, utilization: str) -> Schedule:
    """From the texts of the two files. Raises ValueError if they do not belong together."""
    texts: list[str] = []
    depths: list[int] = []
    starts = {0}
    for line in bundles.splitlines():
        match = _BUNDLE.match(line)
        if match:
            if _LABELLED.match(line):
                starts.add(len(texts))
            texts.append(line)
            depths.append(len(match[1]))
        elif texts:
            texts[-1] += line
    for index, text in enumerate(texts):
        for branch in _BRANCH.finditer(text):
            starts.update((int(branch[1]), index + 1 + _DELAY_SLOTS))
    header, rows = utilization.split("== UTILIZATION:")
    units, sizes = (line for line in header.splitlines() if line.strip() and "==" not in line)
    names = [unit.strip() for unit in units.split(",")]
    table = [[int(n) for n in row.split()] for row in rows.splitlines() if row.strip()]
    if len(table) != len(texts):
        raise ValueError(f"{len(texts)} bundles but {len(table)} rows of slot use")
    edges = [*sorted(s for s in starts if s < len(texts)), len(texts)]
    blocks = []
    for begin, end in itertools.pairwise(edges):
        slots = table[begin:end]
        blocks.append(
            Block(
                start=begin,
                depth=max(depths[begin:end]),
                cycles=end - begin,
                empty=sum(not any(row) for row in slots),
                used={n: sum(row[i] for row in slots) for i, n in enumerate(names)},
                dmas=_page_dmas(texts[begin:end]),
            )
        )
    return Schedule(dict(zip(names, (int(n) for n in sizes.split()), strict=True)), blocks)


def _page_dmas(texts: list[str]) -> int:
    if any(_TO_SMEM.search(text) for text in texts):
        return 0
    return sum(len(_DMA.findall(text)) for text in texts)


def compile_and_read(command: Sequence[str], kernel: str) -> Schedule:
    """Runs `python -m command...`, which compiles a program, and reads the schedule of its
    `kernel`.

    A process of its own, since libtpu reads its flags once. Raises RuntimeError with its output.
    """
    directory = tempfile.mkdtemp(prefix="schedule-")
    flags = f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true"
    try:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            env={**os.environ, "LIBTPU_INIT_ARGS": flags},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        return parse(
            _only(directory, f"*-{kernel}*-packed-bundles-post-ra.txt"),
            _only(directory, f"*-{kernel}*pre-delay_hlo-static-per-bundle-utilization.txt"),
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _only(directory: str, pattern: str) -> str:
    found = [p for p in Path(directory).glob(pattern) if "schedule-analysis" not in p.name]
    if len(found) != 1:
        raise RuntimeError(f"{pattern}: {len(found)} files, one expected")
    return found[0].read_text()
