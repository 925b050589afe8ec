"""Cross-entropy against the target's distribution, in row blocks, gradient and all.

The logits of a batch (rows x draft vocabulary, for teacher and head) are by far its largest
arrays. The loss is a weighted sum of rows, so its gradient with respect to the head's states is
known as soon as a block's logits are: both are made in one pass over blocks that stay in cache,
and no logits are kept.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from draft_service.training.network import make_product

BLOCK_ROWS = 128
LANES = 128

Result = tuple[jax.Array, jax.Array]


def make_cross_entropy(dtype: str) -> Callable[..., Result]:
    """The function (states, taught, labels, weights, lm_head) → (sum of weighted losses, hits).

    `states` [N, H] after the head's final norm; `taught` [N, H] the target's after its own;
    `labels` int32 [N], -1 outside the vocabulary; `weights` float32 [N], 0 for rows that do not
    count; `lm_head` [H, draft_vocab]. `hits` bool [N]: the head's best logit is the label's. A
    gradient flows to `states` alone. Products take operands in `dtype`, everything else is float32.
    """
    product = make_product(dtype)

    def block(
        inputs: tuple[jax.Array, ...], lm_head: jax.Array, turned: jax.Array
    ) -> tuple[jax.Array, ...]:
        states, taught, labels, weights = inputs
        teacher = product(taught, lm_head)
        head = product(states, lm_head)
        teacher_top, head_top = _reduce(teacher, jnp.max), _reduce(head, jnp.max)
        teacher_exp = jnp.exp(teacher - teacher_top[:, None])
        head_exp = jnp.exp(head - head_top[:, None])
        target = teacher_exp * (1.0 / _reduce(teacher_exp, jnp.sum))[:, None]
        head_sum = _reduce(head_exp, jnp.sum)
        entropy = jnp.log(head_sum) + head_top - _reduce(target * head, jnp.sum)
        slope = (head_exp * (1.0 / head_sum)[:, None] - target) * weights[:, None]
        at_label = jnp.take_along_axis(head, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
        hits = (at_label >= head_top) & (labels >= 0)
        return jnp.sum(entropy * weights), hits, product(slope, turned)

    def run(
        states: jax.Array,
        taught: jax.Array,
        labels: jax.Array,
        weights: jax.Array,
        lm_head: jax.Array,
    ) -> tuple[Result, jax.Array]:
        rows = states.shape[0]
        count = -(-rows // BLOCK_ROWS)
        blocks = [
            jnp.pad(x, [(0, count * BLOCK_ROWS - rows)] + [(0, 0)] * (x.ndim - 1)).reshape(
                count, BLOCK_ROWS, *x.shape[1:]
            )
            for x in (states, taught, labels, weights)
        ]
        table = lm_head.astype(dtype)
        turned = table.T
        losses, hits, slopes = jax.lax.map(
            lambda inputs: block(inputs, table, turned), tuple(blocks)
        )
        return (jnp.sum(losses), hits.reshape(-1)[:rows]), slopes.reshape(-1, states.shape[1])[
            :rows
        ]

    @jax.custom_vjp
    def cross_entropy(
        states: jax.Array,
        taught: jax.Array,
        labels: jax.Array,
        weights: jax.Array,
        lm_head: jax.Array,
    ) -> Result:
        return run(states, taught, labels, weights, lm_head)[0]

    def backward(slopes: jax.Array, grads: Result) -> tuple[jax.Array | None, ...]:
        return grads[0] * slopes, None, None, None, None

    cross_entropy.defvjp(run, backward)
    return cross_entropy


def _reduce(x: jax.Array, reduction: Callable[..., jax.Array]) -> jax.Array:
    """Over the last axis, in two stages: CPUs vectorise a reduction over leading axes only."""
    rows, columns = x.shape
    if columns % LANES:
        return reduction(x, axis=-1)
    return reduction(reduction(x.reshape(rows, columns // LANES, LANES), axis=1), axis=-1)
