"""The CPU's own matrix product against XLA's, on every weight of a target, by rows.

    python -m benchmarks.cpu_matmul --rows 1,4,8,16,64,512

All of the target's matrices are multiplied one after the other, as a step does, so that none stays
in cache; both ways in turn, medians. `own` is kernels/cpu_matmul on packed weights, `xla` is
x @ w as XLA makes it, `gigabytes_per_second` what `own` reads of weights. The last line is JSON.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.serving import add_model_arguments, model_and_head, print_report
from common.entry import run_program
from common.errors import StartupError
from kernels.cpu_matmul.api import is_available, packed_matmul
from kernels.cpu_matmul.packing import pack
from models.config import TargetConfig, read_target_config
from models.target import parameter_shapes


def matrix_shapes(target: TargetConfig) -> list[tuple[int, ...]]:
    """[in, out] of a target's matrices, experts left out, in the order they are run."""
    kernels = [shape for path, shape in parameter_shapes(target).items() if path[-1] == "kernel"]
    return [*kernels, (target.hidden_size, target.vocab_size)]


def products(
    multiply: Callable[[jax.Array, jax.Array, int], jax.Array], shapes: list[tuple[int, ...]]
) -> Any:
    """A program that makes every product; each waits for the one before it."""

    def run(rows: jax.Array, weights: list[jax.Array]) -> jax.Array:
        total = jnp.zeros((rows.shape[0], 1), jnp.float32)
        for (k, n), weight in zip(shapes, weights, strict=True):
            x = rows[:, :k] + total * jnp.float32(1e-9)
            total = multiply(x, weight, n)[:, :1]
        return total

    return jax.jit(run)


def run(arguments: argparse.Namespace) -> int:
    if not is_available():
        raise StartupError("this machine has no product of our own: see the log")
    model, _ = model_and_head(arguments)
    shapes = matrix_shapes(read_target_config(model))
    random = np.random.default_rng(0)
    plain = [jnp.asarray(random.standard_normal(s, dtype=np.float32)) for s in shapes]
    packed = [pack(weight) for weight in plain]
    ways = {
        "own": (products(packed_matmul, shapes), packed),
        "xla": (products(lambda x, w, _: x @ w, shapes), plain),
    }
    num_bytes = sum(int(weight.nbytes) for weight in plain)
    found = {}
    for num_rows in (int(text) for text in arguments.rows.split(",")):
        rows = jnp.ones((num_rows, max(k for k, _ in shapes)), jnp.float32)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(arguments.rounds + 1):
            for name, (program, weights) in ways.items():
                begun = time.perf_counter()
                program(rows, weights).block_until_ready()
                seconds[name].append(time.perf_counter() - begun)
        medians = {name: float(np.median(times[1:])) for name, times in seconds.items()}
        found[num_rows] = {
            "milliseconds": {name: round(1e3 * median, 2) for name, median in medians.items()},
            "xla_over_own": round(medians["xla"] / medians["own"], 2),
            "gigabytes_per_second": round(num_bytes / medians["own"] / 1e9, 1),
        }
        print(f"{num_rows:4} rows: {found[num_rows]}", flush=True)
    report = {"benchmark": "cpu_matmul", "megabytes": num_bytes // 10**6, "by_rows": found}
    print_report(report, arguments)
    return 0


def main() -> int:
    return run(_arguments())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,512", help="[%(default)s]")
    parser.add_argument(
        "--rounds", type=int, default=11, help="of each, both in turn [%(default)s]"
    )
    add_model_arguments(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run_program("benchmarks.cpu_matmul", main))
