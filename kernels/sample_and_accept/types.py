"""What sampling takes and gives besides logits."""

from __future__ import annotations

from typing import NamedTuple

import jax


class SamplerParams(NamedTuple):
    """How each of B sequences picks. Device arrays [B]; values as in `common.types.SamplingParams`.

    temperature float32, below 1e-5: argmax; top_k int32, 0 off; top_p float32, 1 off;
    min_p float32, 0 off; seed_lo, seed_hi uint32
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed_lo: jax.Array
    seed_hi: jax.Array


class Picks(NamedTuple):
    """The target's choice at each of N nodes, as far as the walk can need it.

    picks    int32 [N]; -1 where the row has no valid pick: padding, a NaN or +inf logit, all -inf
    margins  float32 [N]: as long as no score (logit / temperature) moves by half of it or more,
             the pick stands. inf where only one token can be picked; 0 where there is no pick
    """

    picks: jax.Array
    margins: jax.Array


class RowPicks(NamedTuple):
    """Picks of all N rows, sampled ones included.

    usable   bool [N]: the row can have a pick
    logprobs float32 [N] of the picks, unfiltered, temperature 1; anything where not asked for
    """

    picks: Picks
    usable: jax.Array
    logprobs: jax.Array


class Accepted(NamedTuple):
    """The walk down each of B trees. D = max_depth.

    num_accepted     int32 [B], accepted nodes without root and bonus
    accepted         int32 [B, D], rows of the accepted path, root excluded; -1 padded
    emitted          int32 [B, D + 1], the target's picks along the path: num_accepted + 1 of them,
                     -1 padded. All -1 for a sequence without a root row, or whose root has no
                     valid pick
    emitted_margins  float32 [B, D + 1], see `Picks`; 0 padded
    emitted_logprobs float32 [B, D + 1] of the picks, unfiltered, temperature 1; 0 padded and
                     where not asked for
    """

    num_accepted: jax.Array
    accepted: jax.Array
    emitted: jax.Array
    emitted_margins: jax.Array
    emitted_logprobs: jax.Array
