"""Whole verify and draft steps, compiled for TPU with the Pallas kernels inside: pages stay in
place, no weight is copied, nothing sorts a vocabulary. `make prove` has more models."""

from __future__ import annotations

import math

import pytest
from jax.sharding import Mesh

pytest.importorskip("libtpu", reason="the compiler for TPU; pip install '.[tpu]'")

from benchmarks import programs, steps
from benchmarks.aot import compile_for, mesh_for
from draft_service.engine import AheadShape
from kernels.chips import CHIPS

pytestmark = pytest.mark.aot

SMOLLM2, LLAMA_ON_4, *_ = steps.SERVED


def check(step: steps.Step, mesh: Mesh) -> None:
    call = step.call
    program = compile_for(mesh, call.function, call.arguments, donate=call.donate)
    assert program.operations("custom-call")
    assert program.alias_bytes >= step.pages_bytes
    assert program.temp_bytes <= step.temp_limit_bytes, "pages or weights are copied"
    assert program.largest_result("sort") < step.vocab_size
    assert not steps.copied_weights(step, program)
    weights = {tuple(sorted(shape)) for shape in step.weights}
    copies = {tuple(sorted(shape)) for shape in program.result_shapes("copy", in_hbm=True)}
    assert all(math.prod(shape) < step.pages_bytes // 4 for shape in copies - weights)
    assert not steps.widened_weights(step, program)


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e"])
def test_verify_step_on_one_chip(chip: str) -> None:
    step = steps.verify(SMOLLM2.with_layers(4), CHIPS[chip], None)
    check(step, mesh_for(CHIPS[chip]))


def test_verify_step_split_over_four_chips() -> None:
    mesh = mesh_for(CHIPS["v5e"], 4)
    step = steps.verify(LLAMA_ON_4.with_layers(3), CHIPS["v5e"], mesh)
    check(step, mesh)


def test_draft_step_of_trees_ahead() -> None:
    most = AheadShape(max_rows=32 * SMOLLM2.sequences)
    step = steps.draft(SMOLLM2, CHIPS["v5e"], ahead=most)
    check(step, mesh_for(CHIPS["v5e"]))


def test_draft_step_in_int8_split_over_four_chips() -> None:
    mesh = mesh_for(CHIPS["v5e"], 4)
    check(steps.draft(LLAMA_ON_4, CHIPS["v5e"], mesh, int8=True), mesh)


def test_split_sampling_exchanges_no_logits() -> None:
    mesh = mesh_for(CHIPS["v6e"], 4)
    call = programs.split_acceptance(programs.MODELS[1], mesh)
    program = compile_for(mesh, call.function, call.arguments)
    collectives = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    assert 1 <= sum(len(program.operations(name)) for name in collectives) <= 12
    largest = max(program.largest_result(name) for name in collectives)
    assert largest <= 40 * programs.MODELS[1].rows
