"""The kernels' programs as abstract calls: one list for `pytest -m aot` and `make prove`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from benchmarks.aot import WHOLE, Argument
from kernels.backend import Backend
from kernels.build_tree.api import build_tree
from kernels.chips import Chip
from kernels.kv_commit.api import kv_commit
from kernels.sample_and_accept.api import sample_and_accept
from kernels.sample_and_accept.types import SamplerParams
from kernels.tree_attention.api import tree_attention

SPLIT_HEADS = PartitionSpec(None, "model")  # type: ignore[no-untyped-call]
SPLIT_PAGES = PartitionSpec(None, None, "model")  # type: ignore[no-untyped-call]
I32, F32, U32 = jnp.int32, jnp.float32, jnp.uint32


@dataclass(frozen=True, kw_only=True)
class Model:
    """What one chip holds of a model, and a usual load. `nodes`: tree nodes per sequence."""

    name: str
    kv_heads: int
    group: int
    head_dim: int
    num_layers: int
    vocab_size: int  # rows of the lm_head on one chip
    nodes: int
    batch: int
    context: int = 8192
    page_size: int = 128
    num_pages: int = 512
    window: int | None = None
    dtype: Any = jnp.bfloat16

    @property
    def rows(self) -> int:
        return self.batch * self.nodes


MODELS = (
    Model(
        name="Llama-3.1-8B on 4 chips",
        kv_heads=2,
        group=4,
        head_dim=128,
        num_layers=32,
        vocab_size=128256,
        nodes=32,
        batch=16,
    ),
    Model(
        name="Llama-3.3-70B on 8 chips",
        kv_heads=1,
        group=8,
        head_dim=128,
        num_layers=80,
        vocab_size=128256,
        nodes=16,
        batch=16,
        page_size=256,
        num_pages=128,
    ),
    Model(
        name="Qwen3-8B on 4 chips",
        kv_heads=2,
        group=4,
        head_dim=128,
        num_layers=36,
        vocab_size=151936,
        nodes=16,
        batch=64,
    ),
    Model(
        name="Qwen3-32B on 8 chips",
        kv_heads=1,
        group=8,
        head_dim=128,
        num_layers=64,
        vocab_size=151936,
        nodes=32,
        batch=8,
        context=32768,
        page_size=256,
        num_pages=128,
    ),
    Model(
        name="SmolLM2-135M",
        kv_heads=3,
        group=3,
        head_dim=64,
        num_layers=30,
        vocab_size=49152,
        nodes=16,
        batch=4,
    ),
    Model(
        name="Llama-3.1-8B on 1 chip, context 131072",
        kv_heads=8,
        group=4,
        head_dim=128,
        num_layers=2,
        vocab_size=128256,
        nodes=64,
        batch=1,
        context=131072,
        num_pages=1100,
    ),
    Model(
        name="SmolLM2-135M, float32, window",
        kv_heads=3,
        group=3,
        head_dim=64,
        num_layers=2,
        vocab_size=49152,
        nodes=16,
        batch=4,
        window=512,
        dtype=jnp.float32,
    ),
    Model(
        name="head_dim 256",
        kv_heads=2,
        group=4,
        head_dim=256,
        num_layers=2,
        vocab_size=32000,
        nodes=16,
        batch=4,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function over abstract arguments; `donate`: which of them it may overwrite."""

    function: Callable[..., Any]
    arguments: list[Argument]
    donate: tuple[int, ...] = ()


def pages_argument(model: Model, spec: PartitionSpec = WHOLE) -> Argument:
    shape = (
        model.num_layers,
        model.num_pages,
        model.kv_heads,
        model.page_size,
        2 * model.head_dim,
    )
    return Argument(shape, model.dtype, spec)


def attention(model: Model, chip: Chip, num_heads_shards: int = 1) -> Call:
    """`num_heads_shards` > 1: the arguments of a `shard_map` over that many chips' heads."""
    head, pages_spec = WHOLE, WHOLE
    if num_heads_shards > 1:
        head, pages_spec = SPLIT_HEADS, SPLIT_PAGES
    kv_heads = model.kv_heads * num_heads_shards
    pages = pages_argument(model)
    pages_shape = (*pages.shape[:2], kv_heads, *pages.shape[3:])
    words = -(-model.nodes // 32)

    def call(*arrays: Any) -> Any:
        return tree_attention(
            *arrays,
            scale=model.head_dim**-0.5,
            window=model.window,
            backend=Backend.PALLAS,
            chip=chip,
        )

    return Call(
        function=call,
        arguments=[
            Argument((model.rows, kv_heads * model.group, model.head_dim), model.dtype, head),
            Argument((model.rows, kv_heads, 2 * model.head_dim), model.dtype, head),
            Argument(pages_shape, model.dtype, pages_spec),
            Argument((), I32),
            Argument((model.batch, model.context // model.page_size), I32),
            Argument((model.batch,), I32),
            Argument((model.batch + 1,), I32),
            Argument((model.batch + 1,), I32),
            Argument((model.batch,), I32),
            Argument((model.rows, words), U32),
            Argument((model.batch,), I32),
        ],
    )


def commit(model: Model) -> Call:
    rows = model.rows
    return Call(
        function=lambda *arrays: kv_commit(*arrays, backend=Backend.XLA),
        arguments=[
            pages_argument(model),
            Argument((model.num_layers, rows, model.kv_heads, 2 * model.head_dim), model.dtype),
            Argument((model.batch, model.context // model.page_size), I32),
            Argument((rows,), I32),
            Argument((rows,), I32),
            Argument((rows,), jnp.bool_),
        ],
        donate=(0,),
    )


def acceptance(model: Model, chip: Chip | None = None, *, masked: bool = False) -> Call:
    """Sampling and walk: the Pallas kernel for `chip`, XLA's form without one."""
    rows, batch = model.rows, model.batch
    backend = Backend.XLA if chip is None else Backend.PALLAS

    def call(logits: Any, tokens: Any, parents: Any, at: Any, owner: Any, *rest: Any) -> Any:
        return sample_and_accept(
            logits,
            tokens,
            parents,
            at,
            owner,
            SamplerParams(*rest[:6]),
            rest[6],
            rest[7] if masked else None,
            max_depth=8,
            backend=backend,
            chip=chip,
        )

    columns = [Argument((rows,), I32)] * 4
    params = [Argument((batch,), dtype) for dtype in (F32, I32, F32, F32, U32, U32)]
    logits = Argument((rows, model.vocab_size), F32)
    mask = [Argument((rows, model.vocab_size), jnp.bool_)] if masked else []
    return Call(
        function=call,
        arguments=[logits, *columns, *params, Argument((batch, 4), I32), *mask],
    )


def split_acceptance(model: Model, mesh: Mesh) -> Call:
    """Sampling and walk with the vocabulary split over `mesh`'s only axis."""
    (axis,) = mesh.axis_names

    def call(logits: Any, *rest: Any) -> Any:
        tokens, parents, positions, owner, *params, stops = rest
        return sample_and_accept(
            logits,
            tokens,
            parents,
            positions,
            owner,
            SamplerParams(*params),
            stops,
            max_depth=8,
            vocab_axis=axis,
            backend=Backend.XLA,
        )

    whole = acceptance(model)
    wide = PartitionSpec(None, axis)  # type: ignore[no-untyped-call]
    logits = Argument((model.rows, model.vocab_size), F32, wide)
    specs = (wide, *[WHOLE] * (len(whole.arguments) - 1))
    split = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=WHOLE, check_vma=False)
    return Call(function=split, arguments=[logits, *whole.arguments[1:]])


def tree(model: Model, pool: int = 8 + 5 * 64, backend: Backend = Backend.XLA) -> Call:
    """A pool of eight children of the root and five levels of eight children for eight nodes."""
    columns = [Argument((model.batch, pool), dtype) for dtype in (F32, I32, I32)]
    return Call(
        function=lambda *arrays: build_tree(
            *arrays, num_nodes=model.nodes, max_depth=6, backend=backend
        ),
        arguments=[*columns, Argument((model.batch,), I32)],
    )
