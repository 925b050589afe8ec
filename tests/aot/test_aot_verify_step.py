"""The whole verify step, compiled for TPU with the Pallas attention inside: pages stay in place."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("libtpu", reason="the compiler for TPU; pip install '.[tpu]'")

from benchmarks.aot import Argument, compile_for_chip
from kernels.adjust_logits.types import SlotState
from kernels.backend import Backend
from kernels.chips import CHIPS
from kernels.kv_layout import pages_bytes, pages_shape
from models.config import TargetConfig
from models.rope import RopeConfig
from models.target import parameter_shapes, unflatten
from verify_service.batch import Bucket
from verify_service.engine import EngineConfig
from verify_service.program import DeviceState, StepParts, verify_step

pytestmark = pytest.mark.aot

SMOLLM2 = TargetConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    num_layers=4,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    mlp_size=1536,
    norm_eps=1e-5,
    rope=RopeConfig(theta=1e5),
    tied_embeddings=True,
    max_positions=8192,
    windows=(None,) * 4,
    dtype=np.dtype(jnp.bfloat16),
    boundaries=(1, 2, 3),
)


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_verify_step_copies_neither_pages_nor_sorts_a_vocabulary(chip: str) -> None:
    config = EngineConfig(
        num_pages=512,
        page_size=128,
        max_sequences=4,
        max_context_len=8192,
        max_tree_nodes=16,
        max_depth=8,
        backend=Backend.PALLAS,
        chip=CHIPS[chip],
    )
    bucket = Bucket(64, 64)
    parts = StepParts(
        target=SMOLLM2,
        shape=config.shape,
        bucket=bucket,
        backend=config.backend,
        chip=config.chip,
    )
    shapes = parameter_shapes(SMOLLM2)
    shape = pages_shape(num_layers=4, num_pages=512, kv_heads=3, page_size=128, head_dim=64)
    size = pages_bytes(shape, jnp.bfloat16)

    def run(pages: Any, seen: Any, bias: Any, buffer: Any, *leaves: Any) -> Any:
        params = unflatten(dict(zip(shapes, leaves, strict=True)))
        return verify_step(parts, params, DeviceState(pages, SlotState(seen, bias)), buffer)

    slots = (config.max_sequences, SMOLLM2.vocab_size)

    program = compile_for_chip(
        chip,
        run,
        [
            Argument(shape, jnp.bfloat16),
            Argument(slots, jnp.int32),
            Argument(slots, jnp.float32),
            Argument((config.shape.packing(bucket).size,), jnp.int32),
            *[Argument(s, jnp.bfloat16) for s in shapes.values()],
        ],
        donate=(0, 1, 2),
    )
    assert program.alias_bytes >= size + 8 * slots[0] * slots[1]
    assert program.temp_bytes < size / 4, "pages or weights are copied"
    assert program.largest_result("sort") < SMOLLM2.vocab_size
