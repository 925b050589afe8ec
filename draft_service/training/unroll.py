"""Training-time test: the head run K steps on its own states, all anchor rows at once.

Row t is an anchor: a draft that starts from pair t = (token t+1, feature t). In step 0 every row
reads the true features. In step k row t stands for pair t+k, reads token t+1+k and its own state
of step k-1, and predicts token t+2+k. It sees, exactly as a draft grown from t would,

    step-0 keys of columns <= t   (true features)
    its own keys of steps 1..k    (drafted states)

so no row sees another row's drafted states. Position of row t in step k is t + k.

Columns: a batch is [B, P + S]: prompts end at column P, responses start there (see `BatchPlan`).
Anchors are columns P-2 .. P+S-3, R = S of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from draft_service.training.network import (
    HeadShape,
    Params,
    fuse,
    run_layer,
)

MASKED = -1e30


@dataclass
class _LayerKeys:
    """One layer's keys and values: all columns of step 0, then one array per later step."""

    prefix: tuple[jax.Array, jax.Array] | None = None  # [B, C, kv_heads, D] each
    own: list[tuple[jax.Array, jax.Array]] = field(default_factory=list)  # [B, R, kv_heads, D]


def unroll(
    shape: HeadShape,
    params: Params,
    embedding: jax.Array,
    tokens: jax.Array,
    features: jax.Array,
    starts: jax.Array,
    prompt_columns: int,
    num_steps: int,
) -> Iterator[jax.Array]:
    """Yields the head's output float32 [B, R, H] of steps 0 .. num_steps-1.

    `embedding` [V, H]; `tokens` int32 [B, C + num_steps] with C = P + S - 2 columns of pairs
    (column c pairs token c+1 with feature c), padded on the right; `features` [B, C, F];
    `starts` int32 [B]: the first real column of each sequence.
    """
    columns = features.shape[1]
    first = prompt_columns - 2  # the first anchor
    keys = [_LayerKeys() for _ in range(shape.num_layers)]
    column = jnp.arange(columns)
    real = column[None, :] >= starts[:, None]
    hidden = fuse(shape, params, features)
    embed = embedding[tokens[:, 1 : columns + 1]]
    for layer in range(shape.num_layers):
        skipped = first if layer == shape.num_layers - 1 else 0
        hidden = run_layer(
            shape,
            layer,
            params["layers"][layer],
            embed,
            hidden,
            column,
            partial(_attend_prefix, keys[layer], real, skipped),
            skipped,
        )
    yield hidden
    anchors = column[first:]
    for step in range(1, num_steps):
        embed = embedding[tokens[:, first + 1 + step : columns + 1 + step]]
        for layer in range(shape.num_layers):
            hidden = run_layer(
                shape,
                layer,
                params["layers"][layer],
                embed,
                hidden,
                anchors + step,
                partial(_attend_own, keys[layer], real, first),
            )
        yield hidden


def _attend_prefix(
    keys: _LayerKeys, real: jax.Array, first_query: int, q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
    """Step 0: causal attention over the columns; keeps them for the later steps."""
    keys.prefix = (k, v)
    scores = _scores(q, k, real, first_query)
    return _weigh(jax.nn.softmax(scores, axis=-1), v).reshape(q.shape)


def _attend_own(
    keys: _LayerKeys, real: jax.Array, first_query: int, q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
    """Step k: step-0 columns up to the row, and the row's own keys, this step's included."""
    assert keys.prefix is not None  # step 0 came first
    keys.own.append((k, v))
    prefix_k, prefix_v = keys.prefix
    grouped = _group(q, k.shape[2])
    scale = q.shape[-1] ** -0.5
    own_scores = [
        jnp.einsum("brkgd,brkd->bkgr", grouped, own_k)[..., None] * scale for own_k, _ in keys.own
    ]
    scores = jnp.concatenate([_scores(q, prefix_k, real, first_query), *own_scores], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)
    columns = prefix_k.shape[1]
    out = _weigh(weights[..., :columns], prefix_v)
    for index, (_, own_v) in enumerate(keys.own):
        share = weights[..., columns + index].transpose(0, 3, 1, 2)[..., None]
        out = out + share * own_v[:, :, :, None, :]
    return out.reshape(q.shape)


def _group(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """[B, R, heads, D] → [B, R, kv_heads, heads per kv head, D]."""
    batch, rows, heads, head_dim = q.shape
    return q.reshape(batch, rows, num_kv_heads, heads // num_kv_heads, head_dim)


def _scores(q: jax.Array, k: jax.Array, real: jax.Array, first_query: int) -> jax.Array:
    """Causal scores float32 [B, kv_heads, group, R, C]; row r is column first_query + r.

    A padding row before its sequence sees itself, so that its softmax is finite.
    """
    scores = jnp.einsum("brkgd,bckd->bkgrc", _group(q, k.shape[2]), k) * q.shape[-1] ** -0.5
    row = first_query + jnp.arange(q.shape[1])[:, None]
    column = jnp.arange(k.shape[1])[None, :]
    seen = (column <= row) & (real[:, None, :] | (column == row))
    return jnp.where(seen[:, None, None], scores, MASKED)


def _weigh(weights: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bkgrc,bckd->brkgd", weights, v)
