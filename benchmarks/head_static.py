"""`python -m benchmarks.head_static --chip v6e --rows 8,64 [--inputs 4096 --outputs 32000]`

Cycles of a head's product with int8 weights (`draft_service/int8.py`), as XLA schedules it, over
those in which HBM brings the int8 bytes once. It converts within the product, window by window: a
window's cycles times the windows. Nothing is run: no TPU is needed, and no figure here is a
measured time. Without --inputs: all products of a level of the 8B head, and their sum.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from typing import Any

from benchmarks.static_schedule import compile_and_read
from kernels.chips import CHIPS

LEVEL = ((8192, 4096), (8192, 1024), (8192, 1024), (4096, 4096), (4096, 14336), (4096, 14336),
         (14336, 4096), (4096, 32000))  # fmt: skip
"""[in, out] of what a level multiplies by: a head of Llama-3.1-8B; q, k, v, o, gate, up, down, and
the output table of 32,000 draft tokens."""

LM_HEAD = LEVEL[-1]


def compile_product(chip_name: str, rows: int, inputs: int, outputs: int) -> None:
    """One product. Raises ValueError if the weights are widened outside it."""
    import jax.numpy as jnp

    from benchmarks.aot import Argument, compile_for_chip
    from draft_service.int8 import scaled_product

    arguments = [
        Argument((rows, inputs), jnp.bfloat16),
        Argument((inputs, outputs), jnp.int8),
        Argument((outputs,), jnp.float32),
    ]
    program = compile_for_chip(chip_name, scaled_product, arguments)
    if re.search(rf"(bf16|f32)\[{inputs},{outputs}\]", program.text):
        raise ValueError(f"[{inputs}, {outputs}]: widened outside the product")


def report(chip_name: str, rows: int, inputs: int, outputs: int) -> dict[str, Any]:
    """`ratio`: below 1 the product waits for HBM."""
    chip = CHIPS[chip_name]
    sizes = [str(size) for size in (rows, inputs, outputs)]
    command = ["benchmarks.head_static", "--chip", chip_name, "--compile", *sizes]
    schedule = compile_and_read(command, "convolution_multiply_fusion")
    window = schedule.hottest()
    # A matrix operation of the table is one row by one unit's square of weights.
    operations = rows * inputs * outputs / chip.mxu_width**2
    windows = math.ceil(operations / window.used["MATMUL"])
    hbm_cycles = inputs * outputs / chip.hbm_bytes_per_core_cycle
    return {
        "chip": chip_name,
        "rows": rows,
        "inputs": inputs,
        "outputs": outputs,
        "windows": windows,
        "cycles": windows * window.cycles,
        "hbm_cycles": round(hbm_cycles),
        "ratio": round(windows * window.cycles / hbm_cycles, 3),
        "push_share": round(
            window.used["MATPUSH"] / (schedule.capacity["MATPUSH"] * window.cycles), 2
        ),
    }


def level(chip_name: str, rows: int) -> dict[str, Any]:
    """All products of a level, each the longer of its cycles and HBM's; the same for bfloat16 bytes
    over HBM alone."""
    found = {size: report(chip_name, rows, *size) for size in dict.fromkeys(LEVEL)}
    cycles = sum(max(found[size]["cycles"], found[size]["hbm_cycles"]) for size in LEVEL)
    hbm = sum(found[size]["hbm_cycles"] for size in LEVEL)
    return {
        "chip": chip_name,
        "rows": rows,
        "products": {f"{i}x{o}": found[i, o]["ratio"] for i, o in found},
        "cycles": cycles,
        "over_int8_hbm": round(cycles / hbm, 3),
        "over_bfloat16_hbm": round(cycles / hbm / 2, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.head_static", description=__doc__)
    parser.add_argument("--chip", choices=sorted(CHIPS), default="v5e")
    parser.add_argument("--rows", default="8,64", help="of one step's level [%(default)s]")
    parser.add_argument("--inputs", type=int, help="of one product, with --outputs [a level]")
    parser.add_argument("--outputs", type=int)
    parser.add_argument("--compile", type=int, nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile:
        compile_product(arguments.chip, *arguments.compile)
        return
    for rows in (int(number) for number in arguments.rows.split(",")):
        if arguments.inputs and arguments.outputs:
            found = report(arguments.chip, rows, arguments.inputs, arguments.outputs)
        else:
            found = level(arguments.chip, rows)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
