"""Log-probabilities in plain XLA: a pass over all rows if anyone asks, a top-k of the rows of those
who ask for more. Over a split vocabulary each chip does so with its share, and the chips exchange a
sum and a logit a place, and their own K likeliest where those are wanted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from kernels.token_logprobs.types import TokenLogprobs
from kernels.vocabulary import place_in_share, share_start


def token_logprobs_xla(
    logits: jax.Array,
    visited: jax.Array,
    picks: jax.Array,
    wanted: jax.Array,
    max_top: int,
    vocab_axis: str | None,
) -> TokenLogprobs:
    """Arguments as in `api.token_logprobs`."""
    empty = TokenLogprobs(
        picked=jnp.zeros(visited.shape, jnp.float32),
        top_tokens=jnp.full((*visited.shape, max_top), -1, jnp.int32),
        top=jnp.zeros((*visited.shape, max_top), jnp.float32),
    )

    def fill() -> TokenLogprobs:
        total, picked = _totals_and_picked(logits, visited, picks, vocab_axis)
        live = (visited >= 0) & (wanted[:, None] >= 0)
        found = empty._replace(picked=jnp.where(live, picked - total, 0.0))
        if max_top == 0:
            return found
        with_top: TokenLogprobs = lax.cond(
            jnp.any(wanted > 0), lambda: likeliest(found, total), lambda: found
        )
        return with_top

    def likeliest(found: TokenLogprobs, total: jax.Array) -> TokenLogprobs:
        values, tokens = _own_likeliest(logits, visited, wanted, max_top, vocab_axis)
        if vocab_axis is not None:
            values, tokens = _likeliest_of_chips(values, tokens, max_top, vocab_axis)
        live = ((visited >= 0) & (wanted[:, None] > 0))[:, :, None]
        return found._replace(
            top_tokens=jnp.where(live, tokens, -1),
            top=jnp.where(live, values - total[:, :, None], 0.0),
        )

    return TokenLogprobs(*lax.cond(jnp.any(wanted >= 0), fill, lambda: empty))


def _totals_and_picked(
    logits: jax.Array, visited: jax.Array, picks: jax.Array, vocab_axis: str | None
) -> tuple[jax.Array, jax.Array]:
    """float32 [B, D + 1] each: log of the sum of exponentials, and the pick's logit. Padding gets
    whatever."""
    rows = jnp.maximum(visited, 0)
    size = logits.shape[1]
    total = jax.nn.logsumexp(logits, axis=1)[rows]
    place = place_in_share(picks, size, vocab_axis)
    held = logits[rows, jnp.minimum(place, size - 1)]
    if vocab_axis is None:
        return total, held
    held = jnp.where(place < size, held, -jnp.inf)
    totals, helds = jnp.moveaxis(lax.all_gather(jnp.stack([total, held]), vocab_axis), 0, -1)
    return jax.nn.logsumexp(totals, axis=-1), jnp.max(helds, axis=-1)


def _own_likeliest(
    logits: jax.Array,
    visited: jax.Array,
    wanted: jax.Array,
    max_top: int,
    vocab_axis: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Logits float32 and tokens int32 [B, D + 1, k] of this chip's likeliest; k is `max_top`, or
    all of its share. Place after place, and only those asked for: a row costs more than a loop.
    """
    batch, places = visited.shape
    count = min(max_top, logits.shape[1])
    first = share_start(logits.shape[1], vocab_axis)

    def sequence(b: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def place(i: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            row = lax.dynamic_slice_in_dim(logits, visited[b, i], 1)
            best, tokens = lax.top_k(row, count)
            return found[0].at[b, i].set(best[0]), found[1].at[b, i].set(tokens[0] + first)

        num_places = jnp.sum(visited[b] >= 0, dtype=jnp.int32)
        filled: tuple[jax.Array, jax.Array] = lax.fori_loop(
            0, jnp.where(wanted[b] > 0, num_places, 0), place, found
        )
        return filled

    shape = (batch, places, count)
    nothing = jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)
    done: tuple[jax.Array, jax.Array] = lax.fori_loop(0, batch, sequence, nothing)
    return done


def _likeliest_of_chips(
    values: jax.Array, tokens: jax.Array, max_top: int, vocab_axis: str
) -> tuple[jax.Array, jax.Array]:
    """[B, D + 1, max_top] of all chips' own; of equals the lower token, which stands first."""
    both = jnp.stack([values, tokens.astype(jnp.float32)])  # exact up to 2**24
    both = lax.all_gather(both, vocab_axis, axis=3, tiled=True)
    all_values, all_tokens = both.reshape(2, -1, both.shape[3])
    best, at = lax.top_k(all_values, max_top)  # of two axes: of three it would be a sort on TPU
    shape = (*values.shape[:2], max_top)
    chosen = jnp.take_along_axis(all_tokens, at, axis=1).astype(jnp.int32)
    return best.reshape(shape), chosen.reshape(shape)
