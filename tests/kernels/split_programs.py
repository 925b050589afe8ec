"""Run in a process of its own with several devices forced on the host (`test_split_over_chips`
sets the flag, which jax reads once): the ops inside `shard_map` against the same calls on one
device.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_oracle import Sequence, make_step
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from sampling_cases import params_of, random_logits, roots_call, tree_call

from kernels.backend import Backend
from kernels.kv_commit.api import kv_commit
from kernels.sample_and_accept.api import sample_and_accept
from kernels.sample_and_accept.types import Accepted
from kernels.tree_attention.api import tree_attention

jax.config.update("jax_numpy_dtype_promotion", "strict")

MESH = Mesh(np.array(jax.devices()), ("model",))


def split(function: Any, in_specs: Any, out_specs: Any) -> Any:
    return jax.jit(
        jax.shard_map(function, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )


def sampling(*, ties: bool, masked: bool) -> None:
    """Picks, margins and logprobs, with every kind of request side by side."""
    rng = np.random.default_rng(0)
    rows, vocab = 48, 1024
    wanted = [
        {
            "temperature": float(rng.choice([0.0, 0.3, 1.0, 2.5])),
            "top_k": int(rng.choice([0, 1, 7, 64, 2000])),
            "top_p": float(rng.choice([1.0, 0.95, 0.6, 1e-6])),
            "min_p": float(rng.choice([0.0, 0.05, 0.5])),
            "seed_lo": int(rng.integers(0, 2**32)),
        }
        for _ in range(rows)
    ]
    logits = random_logits(rng, rows, vocab, ties=ties)
    logits[3, 700], logits[4], logits[5, 1] = np.nan, -np.inf, np.inf
    call = roots_call(logits, rng.integers(0, 9999, rows), wanted)
    compare_samples(call, 0, rng.random((rows, vocab)) < 0.9 if masked else None)


def walks() -> None:
    rng = np.random.default_rng(1)
    trees = {k: jnp.asarray(v) for k, v in tree_call(rng, 40, 3, 8).items()}
    settings = [{"temperature": t, "seed_lo": i, "top_k": 3} for i, t in enumerate((0.0, 0.7, 1.0))]
    compare_samples(trees | {"params": params_of(*settings)}, 12, None)


def compare_samples(call: dict[str, Any], max_depth: int, mask: Any) -> None:
    names = list(call)
    arrays = [*call.values(), *([] if mask is None else [jnp.asarray(mask)])]
    options = {"max_depth": max_depth, "want_logprobs": True, "backend": Backend.XLA}

    def run(axis: str | None, *values: Any) -> Accepted:
        named = dict(zip(names, values, strict=False))
        token_mask = None if mask is None else values[-1]
        return sample_and_accept(**named, token_mask=token_mask, vocab_axis=axis, **options)

    wide = P(None, "model")
    specs = tuple(wide if name == "logits" else P() for name in names)
    specs += () if mask is None else (wide,)
    got = split(functools.partial(run, "model"), specs, P())(*arrays)
    want = jax.jit(functools.partial(run, None))(*arrays)
    assert np.asarray(want.num_accepted).max() > 0 or max_depth == 0
    near = np.asarray(want.emitted_margins) < 1e-3
    same = np.asarray(got.emitted) == np.asarray(want.emitted)
    assert (same | near).all(), (got.emitted, want.emitted)
    if not near[np.asarray(want.emitted) >= 0].any():
        np.testing.assert_array_equal(got.accepted, want.accepted)
    for name in ("emitted_margins", "emitted_logprobs"):
        ours, theirs = np.asarray(getattr(got, name)), np.asarray(getattr(want, name))
        np.testing.assert_allclose(ours[same], theirs[same], rtol=1e-3, atol=1e-3, err_msg=name)


def attention() -> None:
    """KV heads split: every chip its own pages, rows and queries."""
    step = make_step(
        np.random.default_rng(0),
        [Sequence(200, 1, 9), Sequence(0, 5), Sequence(131, 1)],
        kv_heads=4,
        group=2,
        head_dim=128,
        page_size=32,
    )
    arrays = {k: jnp.asarray(v) for k, v in step.arrays.items()}
    heads = {"q": P(None, "model"), "block_kv": P(None, "model"), "pages": P(None, None, "model")}
    names = list(arrays)

    def run(*values: Any) -> Any:
        named = dict(zip(names, values, strict=True))
        return tree_attention(**named, scale=step.scale, backend=Backend.XLA)

    specs = tuple(heads.get(name, P()) for name in names)
    got = split(run, specs, P(None, "model"))(*arrays.values())
    want = jax.jit(run)(*arrays.values())
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def commit() -> None:
    rng = np.random.default_rng(0)
    pages = jnp.asarray(rng.normal(size=(2, 6, 4, 8, 16)), jnp.float32)
    rows = jnp.asarray(rng.normal(size=(2, 5, 4, 16)), jnp.float32)
    small = (
        jnp.asarray([[0, 3], [5, 1]], jnp.int32),
        jnp.asarray([0, 0, 1, 1, 7], jnp.int32),
        jnp.asarray([0, 9, 3, 8, 0], jnp.int32),
        jnp.asarray([True, True, True, True, False]),
    )
    run = functools.partial(kv_commit, backend=Backend.XLA)
    heads = P(None, None, "model")
    got = split(run, (heads, heads, P(), P(), P(), P()), heads)(pages, rows, *small)
    np.testing.assert_array_equal(got, jax.jit(run)(pages, rows, *small))


if __name__ == "__main__":
    sampling(ties=True, masked=False)
    sampling(ties=False, masked=True)
    walks()
    commit()
    # XLA's form alone: the interpreter's callbacks wait for each other where devices are as many as
    # cores. That the kernel compiles inside shard_map, without a collective, is tests/aot's.
    attention()
