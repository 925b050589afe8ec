"""What a draft step costs, part by part, beside the bare matrix products that it cannot do without.

    python -m benchmarks.draft_step --head DIR --target DIR --max-depth 5 --top-k 4 --prefix 256

All parts are timed in turns within one run, so that a busy machine slows them alike; the least and
the median of each are printed, in milliseconds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from common.types import TreeShape
from draft_service.engine import DeviceEngine, EngineConfig
from draft_service.scoring import lay_out, score
from draft_service.step import SequenceWork
from models.eagle3 import HeadConfig, load_head
from models.layers import Linear, Params

PAGE_SIZE = 16


def main() -> None:
    arguments = _arguments()
    head, params = load_head(arguments.head, arguments.target)
    laid_out = lay_out(params)  # the floor gets the engine's own layout
    shape = TreeShape(
        max_depth=arguments.max_depth, top_k=arguments.top_k, max_nodes=arguments.max_nodes
    )
    engine = DeviceEngine(
        head,
        params,
        EngineConfig(
            num_pages=arguments.batch * arguments.context // PAGE_SIZE,
            page_size=PAGE_SIZE,
            max_context_len=arguments.context,
            tree=shape,
            max_sequences=arguments.batch,
            max_draft_rows=arguments.max_draft_tokens,
        ),
    )
    drafting, extending = (_works(engine, arguments, drafts) for drafts in (True, False))
    k = arguments.batch * arguments.top_k
    out = jnp.ones((k, head.hidden_size), jnp.float32)
    floor = jax.jit(_matrix_products(head, shape, arguments))
    products = jax.jit(_vocabulary_products(head, shape))
    choices = jax.jit(_choices(shape))
    logits = jnp.asarray(
        np.random.default_rng(0).normal(size=(k, head.draft_vocab_size)), jnp.float32
    )
    parts: dict[str, Callable[[], Any]] = {
        "step": lambda: engine.run(drafting),
        "extend_only": lambda: engine.run(extending),
        "floor_products": lambda: floor(laid_out).block_until_ready(),
        "vocabulary_products": lambda: products(laid_out, out).block_until_ready(),
        "vocabulary_choices": lambda: choices(logits).block_until_ready(),
    }
    times = _time_in_turns(parts, arguments.rounds)
    report: dict[str, Any] = {
        "benchmark": "draft_step",
        "settings": {name: str(value) for name, value in vars(arguments).items()},
        "device": jax.devices()[0].device_kind,
        "milliseconds_least": {name: round(min(t), 3) for name, t in times.items()},
        "milliseconds_median": {name: round(float(np.median(t)), 3) for name, t in times.items()},
    }
    least = report["milliseconds_least"]
    report["step_over_floor"] = round(least["step"] / least["floor_products"], 3)
    for name, t in times.items():
        print(f"{name:22} least {min(t):8.3f} ms   median {np.median(t):8.3f} ms")
    print(json.dumps(report))


def _works(engine: DeviceEngine, arguments: argparse.Namespace, drafts: bool) -> list[SequenceWork]:
    """Sequences of `prefix` pairs in pages and `new_tokens` to feed."""
    random = np.random.default_rng(1)
    pages = arguments.context // PAGE_SIZE
    n = arguments.new_tokens
    return [
        SequenceWork(
            sequence_id=bytes([i]),
            tokens=random.integers(0, 1000, n).astype(np.int32),
            features=random.normal(size=(n, engine.head.feature_size)).astype(np.float32),
            kv_len=arguments.prefix,
            page_ids=np.arange(i * pages, (i + 1) * pages, dtype=np.int32),
            drafts=drafts,
        )
        for i in range(arguments.batch)
    ]


def _matrix_products(
    head: HeadConfig, shape: TreeShape, arguments: argparse.Namespace
) -> Callable[[Params], jax.Array]:
    """Every product with a weight that a step makes, on as many rows, and nothing else."""
    rows = arguments.batch * arguments.max_draft_tokens
    k = arguments.batch * shape.top_k
    spec = head.attention
    kv_size = spec.num_kv_heads * spec.head_dim
    sizes = {"q": spec.num_heads * spec.head_dim, "k": kv_size, "v": kv_size}

    def layers(params: Params, x: jax.Array) -> jax.Array:
        for i in range(head.num_layers):
            attention, mlp = params[f"layer_{i}"]["attention"], params[f"layer_{i}"]["mlp"]
            both = jnp.concatenate([x, x], axis=1) if head.embedding_layers[i] else x
            q, kk, v = (_product(both, attention[name], size) for name, size in sizes.items())
            mixed = q + jnp.pad(kk + v, ((0, 0), (0, q.shape[1] - kk.shape[1])))
            x = x + _product(mixed, attention["o"], head.hidden_size)
            gate, up = (_product(x, mlp[name], head.mlp_size) for name in ("gate", "up"))
            x = x + _product(gate * up, mlp["down"], head.hidden_size)
        scaled: jax.Array = x * jnp.float32(1e-3)
        return scaled

    def scores(params: Params, x: jax.Array) -> jax.Array:
        logits = score(head, params, x)
        mixed: jax.Array = x + logits[:, : x.shape[1]] * jnp.float32(1e-3)
        return mixed

    def run(params: Params) -> jax.Array:
        x = jnp.ones((rows, head.feature_size), jnp.float32)
        x = _product(x, params["fuse"]["fc"], head.hidden_size) if head.has_fc else x
        x = x[:, : head.hidden_size]
        x = layers(params, x)
        first = scores(params, x[: arguments.batch])
        x = jnp.resize(first, (k, first.shape[1]))

        def level(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return scores(params, layers(params, x)), None

        return lax.scan(level, x, None, length=shape.max_depth - 1)[0]

    return run


def _product(x: jax.Array, weights: Params, size: int) -> jax.Array:
    """x times a `Linear`'s kernel, however it lies."""
    linear = Linear(size, use_bias=False, dtype=np.dtype(np.float32))
    y: Any = linear.apply({"params": weights}, x)
    product: jax.Array = y
    return product


def _vocabulary_products(
    head: HeadConfig, shape: TreeShape
) -> Callable[[Params, jax.Array], jax.Array]:
    def run(params: Params, out: jax.Array) -> jax.Array:
        def level(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            logits = score(head, params, x)
            return x + logits[:, : x.shape[1]] * jnp.float32(1e-3), None

        return lax.scan(level, out, None, length=shape.max_depth - 1)[0]

    return run


def _choices(shape: TreeShape) -> Callable[[jax.Array], jax.Array]:
    def run(logits: jax.Array) -> jax.Array:
        def level(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            best, _ids = lax.top_k(x, shape.top_k)
            total = jax.nn.logsumexp(x, axis=1, keepdims=True)
            return x + total * jnp.float32(1e-6), best

        return lax.scan(level, logits, None, length=shape.max_depth - 1)[1]

    return run


def _time_in_turns(parts: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in parts}
    for part in parts.values():
        part()
    for _ in range(rounds):
        for name, part in parts.items():
            begun = time.perf_counter()
            part()
            times[name].append(1e3 * (time.perf_counter() - begun))
    return times


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--head", type=Path, required=True, help="head's directory")
    parser.add_argument("--target", type=Path, required=True, help="target's directory")
    parser.add_argument("--max-depth", type=int, default=5)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--max-nodes", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1, help="sequences in the step")
    parser.add_argument("--prefix", type=int, default=256, help="pairs in pages, per sequence")
    parser.add_argument("--new-tokens", type=int, default=3, help="pairs fed, per sequence")
    parser.add_argument("--max-draft-tokens", type=int, default=8, help="rows compiled for them")
    parser.add_argument("--context", type=int, default=2048, help="longest sequence, tokens")
    parser.add_argument("--rounds", type=int, default=100)
    return parser.parse_args()


if __name__ == "__main__":
    main()
