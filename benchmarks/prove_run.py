"""How each kind of `make prove`'s entries is made: compile, and read what the compiler says."""

from __future__ import annotations

import math
import re
from typing import Any

import jax.numpy as jnp

from benchmarks import programs, steps
from benchmarks.aot import Argument, Program, compile_for, compile_for_chip, mesh_for
from benchmarks.head_static import level
from benchmarks.prove_entries import INT8_LEVEL_ROWS, RATIOS, Entry
from benchmarks.tpu_static import Shape, report, report_sampling
from kernels.backend import Backend
from kernels.chips import CHIPS

LAYERS = 4
"""Of a large model's step that is compiled: layers are alike, and eighty take the better part of an
hour. SmolLM2 is compiled whole."""

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def run(entry: Entry) -> dict[str, Any]:
    """The figures of an entry. Raises what the compiler raises."""
    if entry.kind == "attention schedule":
        return _attention_schedule(entry.index)
    if entry.kind == "sampling schedule":
        return report_sampling(entry.chip, vocab=128256)
    if entry.kind == "split sampling":
        return _split_sampling(entry)
    if entry.kind == "int8 level schedule":
        return level(entry.chip, INT8_LEVEL_ROWS)
    if entry.kind.endswith(" step"):
        return _step(entry)
    return _kernel(entry)


def _attention_schedule(index: int) -> dict[str, Any]:
    chip, kv_heads, group, head_dim, nodes, page_size, _ = RATIOS[index]
    shape = Shape(kv_heads, group, head_dim, nodes, page_size, None)
    return report(chip, shape, with_jax=head_dim == 128)


def _bytes(argument: Argument) -> int:
    return math.prod(argument.shape) * int(jnp.dtype(argument.dtype).itemsize)


def _figures(program: Program) -> dict[str, Any]:
    peak = program.argument_bytes + program.output_bytes + program.temp_bytes - program.alias_bytes
    return {
        "temp_bytes": program.temp_bytes,
        "peak_bytes": peak,
        "alias_bytes": program.alias_bytes,
        "longest_sort": _longest_sort(program),
    }


def _longest_sort(program: Program) -> int:
    """The most elements that are sorted against each other; 0 without a sort."""
    longest = 0
    for line in program.operations("sort"):
        (axis,) = map(int, re.findall(r"dimensions=\{(\d+)\}", line))
        shapes = re.findall(r"\w+\[([\d,]+)\]", line.split(" = ", 1)[1].split(" sort(", 1)[0])
        longest = max([longest, *(int(shape.split(",")[axis]) for shape in shapes)])
    return longest


def attention_bytes(model: programs.Model) -> tuple[int, int]:
    """HBM bytes of one call by count, all prefixes full: moved, and what no kernel could do
    without.

    Moved beyond the least: the 512 bytes of each row's ancestor bits, block rows rounded up to 128
    and written once more head-major, page table rows, and further reads of a prefix for sequences
    of more than one tile.
    """
    item = int(jnp.dtype(model.dtype).itemsize)
    row = model.kv_heads * 2 * model.head_dim * item
    seen = min(model.context, model.window or model.context)
    prefix = model.batch * seen * row
    queries = 2 * model.rows * model.kv_heads * model.group * model.head_dim * item
    new = model.rows * row
    tiles = -(-model.nodes // 64)
    blocks = model.batch * tiles * (-(-(model.nodes + 15) // 128) * 128) * row
    # Of a window's first and last page all rows come.
    whole_pages = 2 * model.page_size * row * model.batch if model.window else 0
    small = model.rows * 512 + model.batch * model.context // model.page_size * 4
    moved = prefix * tiles + queries + 2 * new + blocks + small + whole_pages
    return moved, prefix + queries + new


def _kernel(entry: Entry) -> dict[str, Any]:
    model, chip = programs.MODELS[entry.index], CHIPS[entry.chip]
    if model.name != entry.what:
        raise ValueError(f"{entry.name}: programs.MODELS[{entry.index}] is {model.name}")
    pages = _bytes(programs.pages_argument(model))
    call = {
        "tree_attention": lambda: programs.attention(model, chip),
        "kv_commit": lambda: programs.commit(model),
        "sample_and_accept": lambda: programs.acceptance(model, chip),
        "build_tree": lambda: programs.tree(model, backend=Backend.PALLAS),
    }[entry.kind]()
    program = compile_for_chip(chip.name, call.function, call.arguments, donate=call.donate)
    found = _figures(program)
    if entry.kind in ("tree_attention", "kv_commit"):
        found |= {"pages_bytes": pages, "temp_limit_bytes": pages // 8}
        found["donated"] = bool(call.donate)
    if entry.kind == "sample_and_accept":
        logits = _bytes(call.arguments[0])
        found |= {"pages_bytes": logits, "temp_limit_bytes": logits // 8}
    if entry.kind == "tree_attention":
        moved, least = attention_bytes(model)
        found |= {"moved_bytes": moved, "least_bytes": least}
        found["window"] = model.window
        if model.window is None:
            found["moved_over_least"] = round(moved / least, 4)
    return found


def _split_sampling(entry: Entry) -> dict[str, Any]:
    model = programs.MODELS[entry.index]
    chips = (4, 8)[entry.index]
    mesh = mesh_for(CHIPS[entry.chip], chips)
    call = programs.split_acceptance(model, mesh)
    program = compile_for(mesh, call.function, call.arguments)
    found = _figures(program)
    found["logits"] = math.prod(call.arguments[0].shape) // chips
    found["num_collectives"] = sum(len(program.operations(c)) for c in COLLECTIVES)
    found["largest_collective"] = max(program.largest_result(c) for c in COLLECTIVES)
    return found


def _step(entry: Entry) -> dict[str, Any]:
    served = steps.SERVED[entry.index]
    if served.name != entry.what:
        raise ValueError(f"{entry.name}: steps.SERVED[{entry.index}] is {served.name}")
    verify, chip = entry.kind == "verify step", CHIPS[entry.chip]
    if verify and served.target.num_shards > 1:
        served = served.with_layers(LAYERS)
    num_chips = served.target.num_shards if verify else 1
    mesh = mesh_for(chip, num_chips)
    if verify:
        step = steps.verify(served, chip, mesh if num_chips > 1 else None)
    else:
        step = steps.draft(served, chip, int8=entry.kind == "int8 draft step")
    program = compile_for(mesh, step.call.function, step.call.arguments, donate=step.call.donate)
    copied = steps.copied_weights(step, program)
    in_hbm = {tuple(sorted(shape)) for shape in program.result_shapes("copy", in_hbm=True)}
    weights = {tuple(sorted(shape)) for shape in step.weights}
    size = step.pages_bytes // 2
    return {
        **_figures(program),
        "layers": served.target.num_layers if verify else 1,
        "pages_bytes": step.pages_bytes,
        "temp_limit_bytes": step.temp_limit_bytes,
        "donated": True,
        "vocab_size": step.vocab_size,
        "copied_weights": [list(s) for s in copied],
        "widened_weights": steps.widened_weights(step, program),
        "copied_pages": any(math.prod(shape) >= size for shape in in_hbm if shape not in weights),
        "collectives": {
            c: [len(program.operations(c)), program.largest_result(c)]
            for c in COLLECTIVES
            if program.operations(c)
        },
    }
