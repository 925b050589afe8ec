"""Ahead-of-time compilation for TPU on a machine without one, and what a compiled program shows.

Needs libtpu (`pip install canopy-spec[tpu]`). Nothing here runs a kernel.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # compilers share no device: no lock
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server to ask for a TPU's place

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels.chips import CHIPS, Chip
from models.row_major import ROW_MAJOR

LARGER_TOPOLOGIES = {"v5e": ("v5e:2x2", "v5e:2x4"), "v6e": ("v6e:2x2", "v6e:2x4")}
"""Where the smallest topology has one chip: names with four and with eight."""


WHOLE = PartitionSpec()  # type: ignore[no-untyped-call]
"""On every device the whole array."""


@dataclass(frozen=True)
class Argument:
    """An abstract argument: shape, dtype, over which mesh axis each dimension is split, and whether
    it is laid by rows (models/row_major.py), not as the compiler would choose."""

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec = WHOLE
    row_major: bool = False


@dataclass(frozen=True)
class Program:
    """What the compiler says of one program, per device, in bytes."""

    text: str
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    peak_bytes: int

    def collectives(self) -> dict[str, dict[str, int]]:
        """By kind: how many stand in the program, and bytes of their results on one chip.

        Those within a conditional count, though they may not run.
        """
        found: dict[str, dict[str, int]] = {}
        for kind in COLLECTIVES:
            lines = self.operations(kind) + self.operations(f"{kind}-start")
            if lines:
                sizes = [_result_bytes(line, kind) for line in lines]
                found[kind] = {"count": len(lines), "bytes": sum(sizes)}
        return found

    def operations(self, name: str) -> list[str]:
        """Lines of optimised HLO whose operation is `name`, e.g. "sort", "copy", "all-gather"."""
        return re.findall(rf"^.* = .*? {name}\(.*$", self.text, re.MULTILINE)

    def result_shapes(self, name: str, *, in_hbm: bool = False) -> list[tuple[int, ...]]:
        """Shapes of all arrays that operations `name` make; `in_hbm`: but for those in VMEM, which
        are fetched there to be used."""
        shapes: list[tuple[int, ...]] = []
        for line in self.operations(name):
            result = line.split(" = ", 1)[1].split(f" {name}(", 1)[0]
            if in_hbm and "S(1)" in result:
                continue
            arrays = re.findall(r"\w+\[([\d,]*)\]", result)
            shapes += [tuple(int(d) for d in dims.split(",") if d) for dims in arrays]
        return shapes

    def largest_result(self, name: str) -> int:
        """Elements of the largest array that an operation `name` makes; 0 without one."""
        return max((int(np.prod(s)) for s in self.result_shapes(name)), default=0)


COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)

_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}


def _result_bytes(line: str, kind: str) -> int:
    """Of a collective's result; of a `-start`, which names its operand as well, the larger half."""
    head = line.split(" = ", 1)[1].split(f" {kind}", 1)[0]
    sizes = [
        _WIDTHS[dtype] * int(np.prod([int(n) for n in dims.split(",") if n] or [1]))
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", head)
        if dtype in _WIDTHS
    ]
    return max(sizes) if f"{kind}-start" in line else sum(sizes)


def libtpu_version() -> str:
    """Of the compiler."""
    return metadata.version("libtpu")


def mesh_of(topology: str, axis: str) -> Mesh:
    """All devices of a slice, as v5e:2x2, along one axis. Raises ValueError for an unknown name."""
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # the compiler's own kinds differ by version
        raise ValueError(f"chip: {topology!r} is no slice that the compiler knows") from error
    return Mesh(np.array(devices), (axis,))


def mesh_for(chip: Chip, num_devices: int = 1) -> Mesh:
    """A mesh ("model",) of `num_devices` devices of `chip`, none of them present."""
    name = chip.topology
    if num_devices > 1:
        four, eight = LARGER_TOPOLOGIES.get(chip.name, (name, name))
        name = four if num_devices <= 4 else eight
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    if len(devices) < num_devices:
        raise ValueError(f"num_devices: {name} has {len(devices)}, not {num_devices}")
    return Mesh(np.array(devices[:num_devices]), ("model",))


def compile_for(
    mesh: Mesh,
    function: Callable[..., Any],
    arguments: Sequence[Argument],
    *,
    donate: tuple[int, ...] = (),
) -> Program:
    """Compiles `function` for the mesh's chips. Raises what the compiler raises (VMEM, layout,
    ...).
    """
    abstract = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=_format(mesh, a))  # type: ignore[no-untyped-call]
        for a in arguments
    ]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(function, donate_argnums=donate).trace(*abstract)
        lowered = traced.lower(lowering_platforms=("tpu",))
    compiled, text = _compile_with_text(lowered)
    memory = compiled.memory_analysis()
    return Program(
        text=text,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
    )


def _format(mesh: Mesh, argument: Argument) -> Format | NamedSharding:
    sharding = NamedSharding(mesh, argument.spec)
    return Format(ROW_MAJOR, sharding) if argument.row_major else sharding


def _compile_with_text(lowered: Any) -> tuple[Any, str]:
    """The compiled program and its optimised HLO, as the compiler itself writes it down.

    `as_text()` of jax 0.10.2 cannot parse what libtpu 0.0.52 compiles for v5p and v6e
    ("async-update instruction should have 1 operands but sees 3").
    """
    with tempfile.TemporaryDirectory(prefix="hlo-") as directory:
        options = {"xla_dump_to": directory, "xla_dump_hlo_as_text": True}
        compiled = lowered.compile(compiler_options=options)
        (path,) = Path(directory).glob("*.after_optimizations.txt")
        return compiled, path.read_text()


def compile_for_chip(
    chip_name: str,
    function: Callable[..., Any],
    arguments: Sequence[Argument],
    *,
    donate: tuple[int, ...] = (),
) -> Program:
    """`compile_for` on one device of the chip of that name."""
    return compile_for(mesh_for(CHIPS[chip_name]), function, arguments, donate=donate)
