"""Every kernel compiled once per TPU generation, by the real compiler, without a TPU.

VMEM or SMEM overflow and unsupported layouts are compile errors here. Nothing is run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec

pytest.importorskip("libtpu", reason="the compiler for TPU; pip install '.[tpu]'")

from benchmarks import programs
from benchmarks.aot import Program, compile_for, compile_for_chip, mesh_for
from kernels.chips import CHIPS

pytestmark = pytest.mark.aot

SMALL = dataclasses.replace(programs.MODELS[0], num_layers=2, num_pages=64, batch=2, nodes=8)


def _compile(chip: str, call: programs.Call) -> Program:
    return compile_for_chip(chip, call.function, call.arguments, donate=call.donate)


def _pages_bytes(model: programs.Model) -> int:
    pages = programs.pages_argument(model)
    size = 2 if pages.dtype == jax.numpy.bfloat16 else 4
    for axis in pages.shape:
        size *= axis
    return size


@pytest.mark.parametrize("chip", CHIPS)
def test_attention_compiles_and_copies_no_pages(chip: str) -> None:
    program = _compile(chip, programs.attention(SMALL, CHIPS[chip]))
    assert program.operations("custom-call")
    assert program.temp_bytes < _pages_bytes(SMALL) / 8


@pytest.mark.parametrize("chip", CHIPS)
def test_commit_is_in_place(chip: str) -> None:
    program = _compile(chip, programs.commit(SMALL))
    assert program.alias_bytes >= _pages_bytes(SMALL)
    assert program.temp_bytes < _pages_bytes(SMALL) / 8


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("build", [programs.acceptance, programs.tree])
def test_xla_sampling_and_tree_building_never_sort_a_vocabulary(chip: str, build: Any) -> None:
    model = dataclasses.replace(SMALL, vocab_size=32000)
    program = _compile(chip, build(model))
    assert program.largest_result("sort") < model.vocab_size


@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "token mask"])
@pytest.mark.parametrize("chip", CHIPS)
def test_sampling_kernel_compiles_at_the_largest_vocabulary_and_copies_no_logits(
    chip: str, masked: bool
) -> None:
    model = dataclasses.replace(SMALL, batch=16, vocab_size=151936)
    program = _compile(chip, programs.acceptance(model, CHIPS[chip], masked=masked))
    assert program.operations("custom-call")
    # A mask is turned into bytes on the way, a quarter of the logits.
    assert program.temp_bytes < model.rows * model.vocab_size * (1.2 if masked else 0.1)
    assert program.largest_result("sort") == 0


def test_attention_splits_over_kv_heads_without_a_collective() -> None:
    mesh = mesh_for(CHIPS["v5e"], 4)
    call = programs.attention(SMALL, CHIPS["v5e"], num_heads_shards=4)
    specs = tuple(argument.spec for argument in call.arguments)
    sharded = jax.shard_map(
        call.function,
        mesh=mesh.abstract_mesh,
        in_specs=specs,
        out_specs=PartitionSpec(None, "model"),
        check_vma=False,
    )
    program = compile_for(mesh, sharded, call.arguments)
    for collective in ("all-reduce", "all-gather", "all-to-all", "collective-permute"):
        assert not program.operations(collective)
    assert program.temp_bytes < _pages_bytes(SMALL) / 8


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_layers": 1, "num_pages": 4096, "kv_heads": 8},  # a draft head
        {"num_layers": 80, "kv_heads": 1, "batch": 32},  # 70B on 8 chips
        {"num_layers": 36, "kv_heads": 2, "batch": 128},
    ],
    ids=str,
)
def test_commit_is_in_place_where_a_scatter_of_whole_rows_copies_all_pages(sizes: Any) -> None:
    model = dataclasses.replace(SMALL, **sizes)
    program = _compile("v5e", programs.commit(model))
    assert program.temp_bytes < _pages_bytes(model) / 64
