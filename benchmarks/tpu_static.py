"""`python -m benchmarks.tpu_static --chip v5e --kernel tree_attention [--kv-heads 8 ...] --json`

Cycles of the attention kernel's hot body per KV block, from the compiler's static schedule, over
the cycles in which HBM brings that block; the same for jax's own ragged paged attention kernel.
With `--kernel sample_and_accept --vocab 128256`: cycles of the sampling kernel's passes over eight
rows of logits, over the cycles in which HBM brings them.

Nothing is run: no TPU is needed, and no figure here is a measured time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any

from benchmarks.static_schedule import Loop, Schedule, compile_and_read
from kernels.chips import CHIPS
from kernels.sample_and_accept.rows import CHUNK, SMALL_CHUNK

KERNELS = ("tree_attention", "sample_and_accept")


@dataclass(frozen=True)
class Shape:
    """One call: `batch` sequences of `nodes` tree nodes over `context` prefix tokens, per chip."""

    kv_heads: int
    group: int
    head_dim: int
    nodes: int
    page_size: int
    keys: int | None  # KV block; None: chosen by kernels.tree_attention.blocks
    batch: int = 8
    context: int = 8192


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.tpu_static", description=__doc__)
    parser.add_argument("--chip", choices=sorted(CHIPS), default="v5e")
    parser.add_argument("--kernel", choices=KERNELS, default=KERNELS[0])
    parser.add_argument("--vocab", type=int, default=128256, help="tokens, of sample_and_accept")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4, help="query heads per KV head")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--nodes", type=int, default=32, help="tree nodes per sequence")
    parser.add_argument("--page-size", type=int, default=128)
    parser.add_argument("--keys", type=int, help="tokens per KV block")
    parser.add_argument("--no-jax", action="store_true", help="leave jax's kernel out")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--compile", choices=["ours", "jax"], help=argparse.SUPPRESS)
    return parser.parse_args()


def compile_ours(chip_name: str, shape: Shape) -> int:
    """Compiles one tile variant; returns the keys per KV block."""
    import jax.numpy as jnp

    from benchmarks.aot import Argument, compile_for_chip
    from kernels.tree_attention.blocks import choose_blocks
    from kernels.tree_attention.call import tree_attention_pallas
    from kernels.tree_attention.compute import Heads

    chip, bf16, i32 = CHIPS[chip_name], jnp.bfloat16, jnp.int32
    q_heads, rows = shape.kv_heads * shape.group, shape.batch * shape.nodes
    per_sequence, words = shape.context // shape.page_size, -(-shape.nodes // 32)
    heads = Heads(shape.kv_heads, shape.group, shape.head_dim, 1.0, bf16, chip.matrix_units)
    blocks = choose_blocks(
        chip,
        heads,
        page_size=shape.page_size,
        pages_per_sequence=per_sequence,
        num_rows=rows,
        num_words=words,
    )
    tile = next((t for t in blocks.tiles if t >= shape.nodes), blocks.tile)
    blocks = dataclasses.replace(blocks, tiles=(tile,), keys=shape.keys or blocks.keys)

    def call(*arrays: Any) -> Any:
        scale = shape.head_dim**-0.5
        return tree_attention_pallas(*arrays, scale=scale, window=None, chip=chip, blocks=blocks)

    row = (shape.kv_heads, shape.page_size, 2 * shape.head_dim)
    compile_for_chip(
        chip_name,
        call,
        [
            Argument((rows, q_heads, shape.head_dim), bf16),
            Argument((rows, shape.kv_heads, 2 * shape.head_dim), bf16),
            Argument((2, 512, *row), bf16),
            Argument((), i32),
            Argument((shape.batch, per_sequence), i32),
            Argument((shape.batch,), i32),
            Argument((shape.batch + 1,), i32),
            Argument((shape.batch + 1,), i32),
            Argument((shape.batch,), i32),
            Argument((rows, words), jnp.uint32),
            Argument((shape.batch,), i32),
        ],
    )
    return blocks.keys


def compile_jax(chip_name: str, shape: Shape) -> int:
    """jax's kernel with the same queries per tile and 512 keys per block (causal, no tree)."""
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    from benchmarks.aot import Argument, compile_for_chip

    rows, pages = shape.batch * shape.nodes, 512 // shape.page_size

    def call(*arrays: Any) -> Any:
        return ragged_paged_attention(
            *arrays,
            sm_scale=shape.head_dim**-0.5,
            num_kv_pages_per_block=pages,
            num_queries_per_block=shape.nodes,
            vmem_limit_bytes=int(CHIPS[chip_name].vmem_bytes * 0.9),
        )

    page = (512, shape.page_size, 2 * shape.kv_heads, shape.head_dim)
    compile_for_chip(
        chip_name,
        call,
        [
            Argument((rows, shape.kv_heads * shape.group, shape.head_dim), jnp.bfloat16),
            Argument(page, jnp.bfloat16),
            Argument((shape.batch,), jnp.int32),
            Argument((shape.batch, shape.context // shape.page_size), jnp.int32),
            Argument((shape.batch + 1,), jnp.int32),
            Argument((1,), jnp.int32),
        ],
    )
    return pages * shape.page_size


def _hot(schedule: Schedule, loop: Loop, keys: int, chip_name: str, shape: Shape) -> dict[str, Any]:
    hbm = keys * shape.kv_heads * 2 * shape.head_dim * 2
    hbm_cycles = hbm / CHIPS[chip_name].hbm_bytes_per_core_cycle
    spills = loop.used.get("VSTORE:SPILL", 0) + loop.used.get("VLOAD:FILL", 0)
    moves = loop.used.get("VSTORE", 0) + loop.used.get("VLOAD", 0)
    return {
        "keys_per_block": keys,
        "hot_cycles": loop.cycles,
        "hbm_cycles": round(hbm_cycles),
        "ratio": round(loop.cycles / hbm_cycles, 3),
        "page_issue_cycles": loop.issue_cycles,
        "empty_share": round(loop.empty / loop.cycles, 3),
        "mxu_share": round(loop.used["MATMUL"] / (schedule.capacity["MATMUL"] * loop.cycles), 3),
        "spill_share": round(spills / max(moves, 1), 3),
    }


def report(chip_name: str, shape: Shape, with_jax: bool) -> dict[str, Any]:
    """The figures of both kernels; each compiled in a process of its own."""
    command = ["benchmarks.tpu_static", "--chip", chip_name]
    for name in ("kv_heads", "group", "head_dim", "nodes", "page_size", "keys"):
        if getattr(shape, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(shape, name))]
    schedule = compile_and_read([*command, "--compile", "ours"], "tree_attention")
    hot = schedule.hottest()
    sequences = schedule.loops(hot.depth - 1)
    sequence = max(sequences, key=lambda loop: loop.used.get("MATMUL", 0))
    pieces = [x for x in schedule.loops(hot.depth) if x.used.get("MATMUL") and x != hot]
    ours = _hot(schedule, hot, _keys(chip_name, shape), chip_name, shape)
    ours["fixed_cycles_per_sequence"] = sequence.cycles - sequence.issue_cycles
    ours["tail_cycles_per_piece"] = pieces[-1].cycles if pieces else None
    result = {"chip": chip_name, "kernel": "tree_attention", **dataclasses.asdict(shape)} | ours
    if with_jax:
        try:
            other = compile_and_read(
                [*command, "--compile", "jax"], "ragged_paged_attention_kernel"
            )
            figures = _hot(other, other.hottest(), 512, chip_name, shape)
        except RuntimeError as error:  # some shapes it is not made for
            figures = {"refused": refusal(str(error))}
        result["jax_ragged_paged_attention"] = figures
    return result


def refusal(output: str) -> str:
    """The last error that a failed run names; its last line if it names none."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return (named or lines or ["no output"])[-1]


def compile_sampling(chip_name: str, vocab: int) -> None:
    from benchmarks import programs
    from benchmarks.aot import compile_for_chip

    model = dataclasses.replace(programs.MODELS[0], vocab_size=vocab)
    call = programs.acceptance(model, CHIPS[chip_name])
    compile_for_chip(chip_name, call.function, call.arguments)


def report_sampling(chip_name: str, vocab: int) -> dict[str, Any]:
    """Cycles of each pass over eight rows, in the order of the kernel's code; loops that hold a
    loop are the searches, whose figure is that of one round's rest.

    `greedy`: the only pass of rows without sampling. `noise`: the one with most vector work.
    """
    command = ["benchmarks.tpu_static", "--chip", chip_name, "--kernel", "sample_and_accept"]
    command += ["--vocab", str(vocab), "--compile", "ours"]
    schedule = compile_and_read(command, "sample_rows")
    loops = sorted([*schedule.loops(2), *schedule.loops(3)], key=lambda loop: loop.start)
    passes = [loop for loop in loops if loop.used.get("VLOAD", 0) >= 8]
    noise = max(passes, key=lambda loop: loop.used.get("VALU", 0))
    big, small = (-(-vocab // size) for size in (CHUNK, SMALL_CHUNK))
    hbm_cycles = 8 * vocab * 4 / CHIPS[chip_name].hbm_bytes_per_core_cycle
    greedy, search = passes[0].cycles * big, [p for p in passes if p.depth == 3]
    return {
        "chip": chip_name,
        "kernel": "sample_and_accept",
        "vocab": vocab,
        "hbm_cycles": round(hbm_cycles),
        "greedy_cycles": greedy,
        "greedy_ratio": round(greedy / hbm_cycles, 3),
        "noise_cycles": noise.cycles * small,
        "top_k_round_cycles": search[0].cycles * big,
        "top_p_round_cycles": search[1].cycles * big,
        "pass_cycles_per_turn": [p.cycles for p in passes],
    }


def _keys(chip_name: str, shape: Shape) -> int:
    if shape.keys is not None:
        return shape.keys
    import jax.numpy as jnp

    from kernels.tree_attention.blocks import choose_blocks
    from kernels.tree_attention.compute import Heads

    chip = CHIPS[chip_name]
    bf16, units = jnp.bfloat16, chip.matrix_units
    return choose_blocks(
        chip,
        Heads(shape.kv_heads, shape.group, shape.head_dim, 1.0, bf16, units),
        page_size=shape.page_size,
        pages_per_sequence=shape.context // shape.page_size,
        num_rows=shape.batch * shape.nodes,
        num_words=-(-shape.nodes // 32),
    ).keys


def main() -> None:
    arguments = _arguments()
    shape = Shape(
        kv_heads=arguments.kv_heads,
        group=arguments.group,
        head_dim=arguments.head_dim,
        nodes=arguments.nodes,
        page_size=arguments.page_size,
        keys=arguments.keys,
    )
    if arguments.kernel == "sample_and_accept":
        if arguments.compile:
            compile_sampling(arguments.chip, arguments.vocab)
            return
        found = report_sampling(arguments.chip, arguments.vocab)
        print(json.dumps(found) if arguments.json else json.dumps(found, indent=2))
        return
    if arguments.compile:
        compiled = compile_ours if arguments.compile == "ours" else compile_jax
        compiled(arguments.chip, shape)
        return
    result = report(arguments.chip, shape, not arguments.no_jax)
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
