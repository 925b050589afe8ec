"""TPU generations by their figures. Kernels choose block sizes from this table and from nothing
else.

A program compiled ahead of time for one chip on a machine that holds another (or none) must come
out the same, so the device that the process happens to see is never asked.

VMEM per core: as the compiler reports it. HBM bandwidth per chip: vendor figures. Clock: peak
bf16 rate over MXU operations per cycle; no library exposes it.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One generation. `cores` that a jax device spans share `hbm_bytes_per_second`."""

    name: str
    topology: str  # smallest topology name that the ahead-of-time compiler takes
    vmem_bytes: int  # per core
    smem_bytes: int  # per core
    hbm_bytes_per_second: float  # per chip
    cores: int  # tensor cores per chip
    clock_hz: float
    mxu_width: int  # rows and columns of one matrix unit

    @property
    def matrix_units(self) -> int:
        """Of a core: four of 128 x 128, or two of 256 x 256."""
        return 512 // self.mxu_width

    @property
    def hbm_bytes_per_core_cycle(self) -> float:
        """Bytes that HBM brings one core in one of its cycles."""
        return self.hbm_bytes_per_second / self.cores / self.clock_hz


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            topology="v4:2x2x1",
            vmem_bytes=16 * MIB,
            smem_bytes=MIB,
            hbm_bytes_per_second=1228e9,
            cores=2,
            clock_hz=1.05e9,
            mxu_width=128,
        ),
        Chip(
            name="v5e",
            topology="v5e:1x1",
            vmem_bytes=128 * MIB,
            smem_bytes=MIB,
            hbm_bytes_per_second=819e9,
            cores=1,
            clock_hz=1.50e9,
            mxu_width=128,
        ),
        Chip(
            name="v5p",
            topology="v5p:2x2x1",
            vmem_bytes=64 * MIB,
            smem_bytes=MIB,
            hbm_bytes_per_second=2765e9,
            cores=2,
            clock_hz=1.75e9,
            mxu_width=128,
        ),
        Chip(
            name="v6e",
            topology="v6e:1x1",
            vmem_bytes=128 * MIB,
            smem_bytes=MIB,
            hbm_bytes_per_second=1640e9,
            cores=1,
            clock_hz=1.75e9,
            mxu_width=256,
        ),
        Chip(
            name="tpu7x",
            topology="tpu7x:2x2x1",
            vmem_bytes=64 * MIB,
            smem_bytes=MIB,
            hbm_bytes_per_second=7380e9,
            cores=2,
            clock_hz=2.2e9,
            mxu_width=256,
        ),
    )
}


def chip_by_name(name: str) -> Chip:
    """Raises ValueError that lists the names, for a name not in the table."""
    if name not in CHIPS:
        raise ValueError(f"chip: {name!r} is none of {', '.join(CHIPS)}")
    return CHIPS[name]
