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
from attention_oracle import Sequence, make_step, oracle
from interpreted import failing_on_faults, small_blocks
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from sampling_cases import params_of, random_logits, roots_call, tree_call
from test_kernels_adjust_logits import VOCAB, stop_tokens
from test_kernels_adjust_logits import make as options_case

from kernels.adjust_logits.api import adjust_logits, count_tokens
from kernels.adjust_logits.types import SlotState
from kernels.backend import Backend
from kernels.chips import CHIPS
from kernels.kv_commit.api import kv_commit
from kernels.sample_and_accept.api import sample_and_accept
from kernels.sample_and_accept.types import Accepted
from kernels.token_logprobs.api import token_logprobs
from kernels.tree_attention.api import tree_attention
from kernels.tree_attention.call import tree_attention_pallas

jax.config.update("jax_numpy_dtype_promotion", "strict")

MESH = Mesh(np.array(jax.devices()), ("model",))
BY_HEAD = {"q": P(None, "model"), "block_kv": P(None, "model"), "pages": P(None, None, "model")}


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
    names = list(arrays)

    def run(*values: Any) -> Any:
        named = dict(zip(names, values, strict=True))
        return tree_attention(**named, scale=step.scale, backend=Backend.XLA)

    specs = tuple(BY_HEAD.get(name, P()) for name in names)
    got = split(run, specs, P(None, "model"))(*arrays.values())
    want = jax.jit(run)(*arrays.values())
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def interpreted_attention() -> None:
    """The Pallas kernel, a KV head a device; races and leaked semaphores fail. That it compiles for
    TPU inside shard_map without a collective is tests/aot's.
    """
    step = make_step(
        np.random.default_rng(0),
        [Sequence(40, 1, 3), Sequence(0, 5)],
        kv_heads=len(jax.devices()),
        group=1,
        head_dim=128,
        page_size=32,
    )
    arrays = {k: jnp.asarray(v) for k, v in step.arrays.items()}
    names = list(arrays)

    def run(*values: Any) -> Any:
        return tree_attention_pallas(
            **dict(zip(names, values, strict=True)),
            scale=step.scale,
            window=None,
            chip=CHIPS["v5e"],
            blocks=small_blocks(),
            interpret=pltpu.InterpretParams(detect_races=True),
        )

    specs = tuple(BY_HEAD.get(name, P()) for name in names)
    with failing_on_faults():
        got = np.asarray(split(run, specs, P(None, "model"))(*arrays.values()))
    np.testing.assert_allclose(got, oracle(step), rtol=0, atol=2e-5)


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


def options() -> None:
    """Penalties, biases, least lengths and counting: every bit as on one device."""
    columns, state, host_options, paths = options_case()
    options = jax.tree.map(jnp.asarray, host_options)
    pad = -VOCAB % len(jax.devices())
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.normal(0, 3, (len(paths) + 1, VOCAB)), jnp.float32)
    wide = P(None, "model")

    def run(axis: str | None, logits: Any, state: SlotState) -> tuple[Any, SlotState]:
        adjusted = adjust_logits(
            logits, **columns, state=state, options=options, stop_tokens=stop_tokens(),
            max_depth=4, vocab_axis=axis, backend=Backend.XLA,
        )  # fmt: skip
        counted = count_tokens(
            state, options, columns["tokens"], columns["positions"], columns["node_sequence"],
            columns["node_sequence"] >= 0, vocab_axis=axis, backend=Backend.XLA,
        )  # fmt: skip
        return adjusted, counted

    want = jax.jit(functools.partial(run, None))(logits, state)
    assert not np.array_equal(want[0], logits)
    assert not np.array_equal(want[1].seen, state.seen)
    padded = jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, 0), (0, pad))), (logits, state))
    got = split(functools.partial(run, "model"), (wide, wide), wide)(*padded)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:, :VOCAB], b), got, want)


def logprobs() -> None:
    """Of picks and of the likeliest, with ties, over a vocabulary that ends within a share."""
    rng = np.random.default_rng(3)
    vocab, rows = 61, 12
    logits = jnp.asarray(rng.integers(-6, 6, (rows, vocab)), jnp.float32)
    visited = jnp.asarray([[0, 2, 3], [4, -1, -1], [5, 6, -1], [-1, -1, -1]], jnp.int32)
    picks = jnp.asarray([[7, 1, 60], [3, -1, -1], [31, 2, -1], [-1, -1, -1]], jnp.int32)
    pad = ((0, 0), (0, -vocab % len(jax.devices())))
    padded = jnp.pad(logits, pad, constant_values=-jnp.inf)

    def run(axis: str | None, logits: Any, wanted: Any) -> Any:
        return token_logprobs(
            logits, visited, picks, wanted, max_top=20, vocab_axis=axis, backend=Backend.XLA
        )

    whole = jax.jit(functools.partial(run, None))
    shares = split(functools.partial(run, "model"), (P(None, "model"), P()), P())
    for wanted in ([20, -1, 0, 4], [0, -1, -1, 0], [-1] * 4):
        asked = jnp.asarray(wanted, jnp.int32)
        want, got = whole(logits, asked), shares(padded, asked)
        np.testing.assert_array_equal(got.top_tokens, want.top_tokens)
        np.testing.assert_allclose(got.top, want.top, atol=1e-6)
        np.testing.assert_allclose(got.picked, want.picked, atol=1e-6)


if __name__ == "__main__":
    options()
    logprobs()
    sampling(ties=True, masked=False)
    sampling(ties=False, masked=True)
    walks()
    commit()
    attention()
    if len(jax.devices()) == 2:
        interpreted_attention()
