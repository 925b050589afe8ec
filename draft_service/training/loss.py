"""The loss of a training-time test, and the same pass as a measure of greedy chains.

    loss = sum over steps k of decay^k * mean over rows of CE(softmax(teacher), head)

with the teacher's logits restricted to the draft vocabulary. Rows count where the predicted
token is a response token inside that vocabulary. Axes as in `unroll`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from draft_service.training.cross_entropy import make_cross_entropy
from draft_service.training.network import HeadShape, Params, head_logits, rms_norm
from draft_service.training.unroll import unroll


class Frozen(NamedTuple):
    """What training reads and never changes. float32."""

    embedding: jax.Array  # [V, H] the target's
    lm_head: jax.Array  # [H, draft_vocab] rows of the target's, the head's own as well
    draft_ids: jax.Array  # int32 [V]: draft id of a target token, -1 outside
    feature_scale: jax.Array  # [F] features are multiplied by it; see `warm_start.frozen_tables`


class Batch(NamedTuple):
    """Padded sequences; prompts end at the same column P, C = P + S - 2 columns of pairs."""

    tokens: jax.Array  # int32 [B, P + S + K], padding 0
    features: jax.Array  # float16 [B, C, F], padding 0
    teacher_hidden: jax.Array  # float16 [B, S + K - 1, Ht] from column P-1, after the final norm
    starts: jax.Array  # int32 [B] first real column; P + S for a padding sequence
    ends: jax.Array  # int32 [B] one past the last real column; 0 for a padding sequence


class StepMetrics(NamedTuple):
    """Per step, float32 [K]: sums over rows, so that batches add up."""

    loss: jax.Array
    correct: jax.Array
    rows: jax.Array


def batch_loss(
    shape: HeadShape,
    params: Params,
    frozen: Frozen,
    batch: Batch,
    *,
    num_steps: int,
    step_decay: float,
    axis: str | None = None,
) -> tuple[jax.Array, StepMetrics]:
    """Scalar float32 loss and the steps' metrics.

    Under `shard_map` over `axis` a device's loss is its share of the whole batch's: shares add up.
    """
    prompt_columns, rows = _geometry(batch, num_steps)
    cross_entropy = make_cross_entropy(shape.matmul_dtype)
    taught = batch.teacher_hidden.astype(jnp.float32)
    total = jnp.zeros((), jnp.float32)
    metrics = []
    for step, out in enumerate(_outputs(shape, params, frozen, batch, num_steps)):
        states = rms_norm(out, params["norm"], shape.norm_eps)
        labels, in_response = _labels(frozen, batch, prompt_columns, rows, step)
        counted = (in_response & (labels >= 0)).astype(jnp.float32)
        own = jnp.sum(counted)
        count = own if axis is None else jax.lax.psum(own, axis)  # type: ignore[no-untyped-call]
        mean, hits = cross_entropy(
            states.reshape(-1, states.shape[-1]),
            taught[:, step : step + rows].reshape(-1, taught.shape[-1]),
            labels.reshape(-1),
            (counted / jnp.maximum(count, 1.0)).reshape(-1),
            frozen.lm_head,
        )
        total = total + step_decay**step * mean
        metrics.append((mean * count, _sum_where(counted, hits), own))
    columns = [jnp.stack(column) for column in zip(*metrics, strict=True)]
    return total, StepMetrics(*columns)


def chain_hits(
    shape: HeadShape, params: Params, frozen: Frozen, batch: Batch, *, num_steps: int
) -> tuple[jax.Array, jax.Array]:
    """bool [B, R, K] twice: the greedy draft's token of step k is the response's; it has one.

    A chain is fed the true tokens. That is what a real draft reads as long as it is right, and
    after its first miss nothing counts, so leading hits are exactly what greedy verification
    would accept.
    """
    prompt_columns, rows = _geometry(batch, num_steps)
    hits, present = [], []
    for step, out in enumerate(_outputs(shape, params, frozen, batch, num_steps)):
        logits = head_logits(shape, params, frozen.lm_head, out)
        labels, in_response = _labels(frozen, batch, prompt_columns, rows, step)
        hits.append((jnp.argmax(logits, axis=-1) == labels) & in_response)
        present.append(in_response)
    return jnp.stack(hits, axis=-1), jnp.stack(present, axis=-1)


def _sum_where(weights: jax.Array, hits: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(hits.reshape(weights.shape), weights, 0.0))


def _geometry(batch: Batch, num_steps: int) -> tuple[int, int]:
    """(P, R) from the batch's shapes."""
    rows = batch.teacher_hidden.shape[1] - num_steps + 1
    return batch.features.shape[1] - rows + 2, rows


def _outputs(
    shape: HeadShape, params: Params, frozen: Frozen, batch: Batch, num_steps: int
) -> list[jax.Array]:
    prompt_columns, _ = _geometry(batch, num_steps)
    return list(
        unroll(
            shape,
            params,
            frozen.embedding,
            batch.tokens,
            batch.features.astype(jnp.float32) * frozen.feature_scale,
            batch.starts,
            prompt_columns,
            num_steps,
        )
    )


def _labels(
    frozen: Frozen, batch: Batch, prompt_columns: int, rows: int, step: int
) -> tuple[jax.Array, jax.Array]:
    """int32 [B, R] draft ids of the true tokens (-1 outside); bool [B, R]: a response token is
    there."""
    columns = prompt_columns + step + jnp.arange(rows)  # row r predicts column P + r + step
    true = jax.lax.dynamic_slice_in_dim(batch.tokens, prompt_columns + step, rows, axis=1)
    return frozen.draft_ids[true], columns[None, :] < batch.ends[:, None]
