"""What fits a TPU slice: the whole verify step compiled ahead of time for it, from sizes alone.

    python -m benchmarks.fit --model llama-3.1-8b --chip v5e:2x2
    python -m benchmarks.fit --model DIRECTORY --chip v6e:2x4 --context 32768 --rows 256

Needs libtpu, no TPU and no weights. First a step of two layers is compiled: it shows what is needed
beside weights and KV. Then the whole one, with the largest KV pool that this leaves room for, which
the compiler must accept; minutes for a large model. Nothing is run: bytes are the compiler's, and
nothing is said about speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from dataclasses import dataclass
from typing import Any

from benchmarks import aot  # first: it tells jax that no TPU is here

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.model_configs import CONFIGS, named_config
from kernels.adjust_logits.types import SlotState
from kernels.backend import Backend
from kernels.chips import Chip, chip_by_name
from kernels.kv_layout import pages_bytes, pages_shape
from models.config import MODEL_AXIS, TargetConfig
from models.sharding import (
    PAGES_SPEC,
    VOCABULARY_SPEC,
    global_shape,
    parameter_spec,
    split_over,
)
from models.target import parameter_shapes
from models.trees import unflatten
from verify_service.batch import Bucket
from verify_service.engine import EngineConfig
from verify_service.program import (
    OUTPUT_SPECS,
    STATE_SPECS,
    DeviceState,
    StepOutput,
    StepParts,
    verify_step,
)

GIB = 1 << 30
HBM_GIB = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 96}
"""Of one jax device, as vendors state it; on tpu7x a device is one of the chip's two cores."""

RESERVED_SHARE = 0.03
"""Of HBM, left to the runtime and to fragmentation. The compiler itself refuses what is beyond its
own limit (15.75 of v5e's 16 GiB)."""

FIRST_PAGES = 64
FIRST_LAYERS = 2


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the step must hold."""

    context: int  # tokens of the longest sequence
    batch: int  # sequences in one step
    nodes: int  # tree nodes of each, root included
    rows: int  # of the step: nodes and prefill together
    page_size: int


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One compiled step; bytes of one chip."""

    program: aot.Program
    num_pages: int
    pages: int
    weights: int
    seconds: float

    @property
    def peak(self) -> int:
        return self.program.peak_bytes

    @property
    def beside(self) -> int:
        """Beyond weights and pages."""
        return self.peak - self.weights - self.pages


def compile_step(
    target: TargetConfig, chip: Chip, mesh: Mesh, load: Load, num_pages: int
) -> Compiled:
    """The step of one bucket. Raises what the compiler raises if it does not fit."""
    config = EngineConfig(
        num_pages=num_pages,
        page_size=load.page_size,
        max_sequences=load.batch,
        max_context_len=load.context,
        max_tree_nodes=load.nodes,
        max_rows=load.rows,
        backend=Backend.PALLAS,
        chip=chip,
    )
    bucket = Bucket(load.rows, min(load.rows, load.batch * load.nodes))
    parts = StepParts(
        target=target, shape=config.shape, bucket=bucket, backend=config.backend, chip=chip
    )
    local = parameter_shapes(target)
    shape = pages_shape(
        num_layers=target.num_layers,
        num_pages=num_pages,
        kv_heads=target.stored_kv_heads,
        page_size=load.page_size,
        head_dim=target.head_dim,
    )
    slots = (load.batch, target.stored_vocab_size)

    def step(pages: Any, seen: Any, bias: Any, buffer: Any, *leaves: Any) -> StepOutput:
        def run(params: Any, state: DeviceState, buffer: jax.Array) -> StepOutput:
            return verify_step(parts, params, state, buffer)

        params = unflatten(dict(zip(local, leaves, strict=True)))
        specs = unflatten({path: parameter_spec(path) for path in local})
        over: Any = mesh.abstract_mesh if target.num_shards > 1 else None
        split = split_over(over, run, (specs, STATE_SPECS, aot.WHOLE), OUTPUT_SPECS)
        output: StepOutput = split(params, DeviceState(pages, SlotState(seen, bias)), buffer)
        return output

    begun = time.monotonic()
    program = aot.compile_for(
        mesh,
        step,
        [
            aot.Argument(shape, target.dtype, PAGES_SPEC),
            aot.Argument(slots, jnp.int32, VOCABULARY_SPEC),
            aot.Argument(slots, jnp.float32, VOCABULARY_SPEC),
            aot.Argument((config.shape.packing(bucket).size,), jnp.int32),
            *(
                aot.Argument(global_shape(target, p, s), target.dtype, parameter_spec(p))
                for p, s in local.items()
            ),
        ],
        donate=(0, 1, 2),
    )
    return Compiled(
        program=program,
        num_pages=num_pages,
        pages=pages_bytes(shape, target.dtype) // target.num_shards,
        weights=weights_bytes(target),
        seconds=time.monotonic() - begun,
    )


def weights_bytes(target: TargetConfig) -> int:
    """Of one chip."""
    numbers = sum(int(np.prod(shape)) for shape in parameter_shapes(target).values())
    return numbers * target.dtype.itemsize


def first_layers(target: TargetConfig) -> TargetConfig:
    """The same target, cut to its first layers; boundaries as many as before, or all there are."""
    count = min(FIRST_LAYERS, target.num_layers)
    boundaries = range(min(len(target.boundaries), count + 1))
    return dataclasses.replace(
        target,
        num_layers=count,
        windows=target.windows[:count],
        sparse_layers=target.sparse_layers[:count],
        boundaries=tuple(boundaries),
    )


def expected_beside(small: Compiled, target: TargetConfig, load: Load) -> int:
    """Bytes of a chip beside weights and pages, of all layers: new K/V rows grow with them, once as
    they are made and once stacked for the commit.
    """
    row = target.local_kv_heads * 2 * target.head_dim * target.dtype.itemsize
    return small.beside + 2 * (target.num_layers - FIRST_LAYERS) * load.rows * row


def report(model: str, topology: str, load: Load, dtype: str) -> dict[str, Any]:
    """All figures. Raises ModelError and ValueError for what cannot be, and what the compiler
    raises if the whole step does not fit after all.
    """
    chip = chip_by_name(topology.partition(":")[0])
    mesh = aot.mesh_of(topology, MODEL_AXIS)
    target = named_config(model, jnp.dtype(dtype)).with_shards(mesh.size)
    small = compile_step(first_layers(target), chip, mesh, load, FIRST_PAGES)
    weights = weights_bytes(target)
    token = target.kv_bytes_per_token // target.num_shards
    room = int(HBM_GIB[chip.name] * GIB * (1 - RESERVED_SHARE))
    num_pages = (room - weights - expected_beside(small, target, load)) // (token * load.page_size)
    result: dict[str, Any] = {
        "benchmark": "fit",
        "model": model,
        "topology": topology,
        "chips": mesh.size,
        "dtype": dtype,
        **dataclasses.asdict(load),
        "weights_bytes_per_chip": weights,
        "kv_bytes_per_token_and_chip": token,
        "versions": {"jax": jax.__version__, "libtpu": aot.libtpu_version()},
    }
    if num_pages * load.page_size < load.context:
        return result | {"fits": False, "why": "no room for one sequence of this context"}
    full = compile_step(target, chip, mesh, load, num_pages)
    tokens = num_pages * load.page_size
    contexts = [2048 << i for i in range(7) if 2048 << i <= target.max_positions]
    return result | {
        "fits": True,
        "peak_bytes_per_chip": full.peak,
        "kv_pool_bytes_per_chip": full.pages,
        "temp_bytes_per_chip": full.program.temp_bytes,
        "peak_over_weights_and_kv": round(full.peak / (full.weights + full.pages), 4),
        "kv_pool_tokens": tokens,
        "largest_batch_by_context": {str(c): tokens // c for c in contexts if tokens >= c},
        "collectives": full.program.collectives(),
        "compile_seconds": round(full.seconds, 1),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", required=True, help=f"a directory, or {', '.join(CONFIGS)}")
    parser.add_argument("--chip", required=True, help="a slice, as v5e:2x2, v6e:2x4, v5p:2x2x1")
    parser.add_argument("--context", type=int, default=8192, help="[%(default)s]")
    parser.add_argument("--batch", type=int, default=16, help="sequences a step [%(default)s]")
    parser.add_argument("--nodes", type=int, default=16, help="of each tree [%(default)s]")
    parser.add_argument("--rows", type=int, default=256, help="rows a step [%(default)s]")
    parser.add_argument("--page-size", type=int, default=128, help="tokens [%(default)s]")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    load = Load(
        context=arguments.context,
        batch=arguments.batch,
        nodes=arguments.nodes,
        rows=arguments.rows,
        page_size=arguments.page_size,
    )
    result = report(arguments.model, arguments.chip, load, arguments.dtype)
    for name, value in result.items():
        shown = f"{value / GIB:.3f} GiB" if name.endswith("_per_chip") else value
        print(f"{name:32} {shown}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
