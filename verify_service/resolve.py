"""The first stage of a step, on the device: fills in the blocks that follow the step before.

Everything the rest of a step is told of such a block depends on what the step before emitted: its
root, its positions, its tree. This stage takes these from that step's own arrays, which never left
the device, so that the host can launch a step before it knows what the last one gave.

Candidates come with their depth and with their place in a walk through the tree, parents first:
node k is m's ancestor, or m itself, if `entered[k] <= entered[m] < left[k]`. So nothing here goes
from node to node: each question is one comparison of all with all. M candidates of each of B
sequences, T rows, N nodes, D most accepted nodes of a round.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

Arrays = dict[str, jax.Array]

_OTHER = -3  # a row of a block that does not follow
_INERT = -2  # a row that no node takes
_ROOT = -1


class LastRound(NamedTuple):
    """What a step leaves for those that follow it, by the places of its works.

    `emitted` int32 [B, D + 1], -1 padded: all -1 where nothing was picked. `kv_lens` int32 [B]:
    rows in pages now, which is where the last emitted token stands.
    """

    emitted: jax.Array
    kv_lens: jax.Array


def no_round(batch: int, max_depth: int) -> LastRound:
    """Before the first step."""
    return LastRound(
        jnp.full((batch, max_depth + 1), -1, jnp.int32), jnp.zeros((batch,), jnp.int32)
    )


class _Rounds(NamedTuple):
    """The new rounds: arrays int32 [B], `rank` [B, M].

    `is_on`: the block follows; `lives`: and there is a root. `rank`: the number of each candidate
    in its round's tree, 0 below the root; -1 where it is not in it.
    """

    is_on: jax.Array
    lives: jax.Array
    roots: jax.Array
    kv_lens: jax.Array
    rank: jax.Array


def resolve(x: Arrays, last: LastRound) -> Arrays:
    """The fields of a step's buffer (`BatchShape.packing`), blocks that follow filled in, the
    others as they were.

    Rows left over are nodes of no sequence; in attention each sees the prefix, the root and itself,
    and no other row sees it.
    """
    rounds = _rounds(x, last)
    tokens, positions, ancestors, kind = _rows(x, rounds)
    is_other = kind == _OTHER
    x = x | {
        "tokens": jnp.where(is_other, x["tokens"], tokens),
        "positions": jnp.where(is_other, x["positions"], positions),
        "ancestors": jnp.where(is_other[:, None], x["ancestors"], ancestors),
        "row_is_causal": jnp.where(is_other, x["row_is_causal"], (kind == _ROOT).astype(jnp.int32)),
        "kv_lens": jnp.where(rounds.is_on > 0, rounds.kv_lens, x["kv_lens"]),
    }
    node_kind = jnp.where(x["node_sequence"] >= 0, kind[x["node_rows"]], _OTHER)
    below_root = jnp.where(node_kind >= 0, x["node_parents"] + node_kind, -1)
    x["node_parents"] = jnp.where(node_kind == _OTHER, x["node_parents"], below_root)
    x["node_sequence"] = jnp.where(node_kind == _INERT, -1, x["node_sequence"])
    return x


def _rounds(x: Arrays, last: LastRound) -> _Rounds:
    """Which candidates are a round's tree: those below the node to which the emitted tokens lead,
    the first such node if there are several.
    """
    tokens, depths = x["ahead_tokens"], x["ahead_depths"]
    entered, left = x["ahead_entered"], x["ahead_left"]
    is_on = x["follows"] >= 0
    before = jnp.maximum(x["follows"], 0)
    emitted = last.emitted[before]
    num_emitted = jnp.sum(emitted >= 0, axis=1, dtype=jnp.int32)
    lives = is_on & (num_emitted > 0)
    place = jnp.arange(emitted.shape[1], dtype=jnp.int32)
    roots = jnp.sum(jnp.where(place == num_emitted[:, None] - 1, emitted, 0), axis=1)

    fits = (tokens[:, :, None] == emitted[:, None, :]) & (depths[:, :, None] == place + 1)
    on_path = jnp.any(fits, axis=2)
    contains = entered[:, None, :] <= entered[:, :, None]
    contains &= entered[:, :, None] < left[:, None, :]
    num_fitting = jnp.sum(contains & on_path[:, None, :], axis=2, dtype=jnp.int32)
    ends = (depths == num_emitted[:, None]) & (num_fitting == depths) & lives[:, None]
    node = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    end = jnp.min(jnp.where(ends, node, tokens.shape[1]), axis=1)
    is_end = node == end[:, None]
    first = jnp.sum(jnp.where(is_end, entered, 0), axis=1)[:, None]
    beyond = jnp.sum(jnp.where(is_end, left, 0), axis=1)[:, None]

    below = (first < entered) & (entered < beyond)
    below &= depths - num_emitted[:, None] <= x["follow_depth"][:, None]
    rank = jnp.cumsum(below, axis=1, dtype=jnp.int32) - 1
    room = (x["starts"][1:] - x["starts"][:-1] - 1)[:, None]
    return _Rounds(
        is_on=is_on.astype(jnp.int32),
        lives=lives.astype(jnp.int32),
        roots=roots,
        kv_lens=last.kv_lens[before],
        rank=jnp.where(below & (rank < room), rank, -1),
    )


def _rows(x: Arrays, rounds: _Rounds) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Token, position, ancestor bits and kind of each row, as a block that follows has them.

    kind int32 [T]: the parent's row in the block, or _ROOT, _INERT, _OTHER. Of what is there for a
    sequence, each row takes its own copy, by one look-up.
    """
    num_candidates = rounds.rank.shape[1]
    columns = (x["ahead_tokens"], x["ahead_entered"], x["ahead_left"], rounds.rank)
    few = jnp.stack([rounds.is_on, rounds.lives, rounds.roots, rounds.kv_lens], axis=1)
    own = jnp.concatenate([*columns, few], axis=1)[x["row_sequence"]]
    tokens, entered, left, rank = (
        own[:, i * num_candidates : (i + 1) * num_candidates] for i in range(len(columns))
    )
    is_on, lives, root, kv_len = (own[:, i - few.shape[1]] for i in range(few.shape[1]))
    number = x["positions"]  # in a block that follows: the row's own, 0 for the root

    is_own = (rank == number[:, None] - 1) & (rank >= 0)
    is_node = jnp.any(is_own, axis=1)
    place = jnp.sum(jnp.where(is_own, entered, 0), axis=1)[:, None]
    above = (rank >= 0) & (entered <= place) & (place < left) & is_node[:, None]
    depth = jnp.sum(above, axis=1, dtype=jnp.int32)
    # The nearest ancestor has the highest number, for parents stand before their children.
    parent = jnp.max(jnp.where(above & ~is_own, rank, -1), axis=1) + 1

    bits = jnp.where(above, rank, -1)
    bits = jnp.where((number > 0)[:, None] & ~is_node[:, None], _one(number - 1, bits), bits)
    words = [_word(bits, w) for w in range(x["ancestors"].shape[1])]
    is_root = number == 0
    kind = jnp.where(is_node, parent, _INERT)
    kind = jnp.where(is_root & (lives > 0), _ROOT, kind)
    row = jnp.arange(number.shape[0], dtype=jnp.int32)
    kind = jnp.where((is_on > 0) & (row < x["starts"][-1]), kind, _OTHER)
    token = jnp.sum(jnp.where(is_own, tokens, 0), axis=1)
    offset = jnp.where(is_node, depth, (~is_root).astype(jnp.int32))
    return jnp.where(is_root, root, token), kv_len + offset, jnp.stack(words, axis=1), kind


def _one(value: jax.Array, like: jax.Array) -> jax.Array:
    """int32 as `like` [T, M]: each row's `value` in the first column, else -1."""
    is_first = jnp.arange(like.shape[1], dtype=jnp.int32) == 0
    return jnp.where(is_first, value[:, None], -1)


def _word(bits: jax.Array, word: int) -> jax.Array:
    """uint32 [T]: those of each row's bit numbers that fall into this word; -1: none."""
    shift = bits - 32 * word
    is_here = (bits >= 0) & (shift >= 0) & (shift < 32)
    bit = jnp.uint32(1) << jnp.where(is_here, shift, 0).astype(jnp.uint32)
    return jnp.sum(jnp.where(is_here, bit, jnp.uint32(0)), axis=1, dtype=jnp.uint32)
