"""Log-probabilities in plain XLA: a pass over all rows if anyone asks, a top-k of the rows of those
who ask for more."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels.token_logprobs.types import TokenLogprobs


def token_logprobs_xla(
    logits: jax.Array,
    visited: jax.Array,
    picks: jax.Array,
    wanted: jax.Array,
    max_top: int,
) -> TokenLogprobs:
    """Arguments as in `api.token_logprobs`."""
    batch, places = visited.shape
    empty = TokenLogprobs(
        picked=jnp.zeros((batch, places), jnp.float32),
        top_tokens=jnp.full((batch, places, max_top), -1, jnp.int32),
        top=jnp.zeros((batch, places, max_top), jnp.float32),
    )

    def fill() -> TokenLogprobs:
        rows = jnp.maximum(visited, 0)
        total = jax.nn.logsumexp(logits, axis=1)
        picked = logits[rows, jnp.maximum(picks, 0)] - total[rows]
        live = (visited >= 0) & (wanted[:, None] >= 0)
        found = empty._replace(picked=jnp.where(live, picked, 0.0))
        if max_top == 0:
            return found

        def sequence(b: jax.Array, found: TokenLogprobs) -> TokenLogprobs:
            def place(i: jax.Array, found: TokenLogprobs) -> TokenLogprobs:
                row = visited[b, i]
                best, tokens = lax.top_k(lax.dynamic_slice_in_dim(logits, row, 1), max_top)
                return found._replace(
                    top_tokens=found.top_tokens.at[b, i].set(tokens[0]),
                    top=found.top.at[b, i].set(best[0] - total[row]),
                )

            count = jnp.sum(visited[b] >= 0, dtype=jnp.int32)
            return TokenLogprobs(
                *lax.fori_loop(0, jnp.where(wanted[b] > 0, count, 0), place, found)
            )

        return TokenLogprobs(*lax.fori_loop(0, batch, sequence, found))

    return TokenLogprobs(*lax.cond(jnp.any(wanted >= 0), fill, lambda: empty))
