"""The walk: from each root along the picks, as long as a child carries the picked token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels.sample_and_accept.types import Accepted, Picks, RowPicks


@dataclass(frozen=True, slots=True)
class Trees:
    """Where the N nodes stand. Arrays int32 [N] and `stop_tokens` int32 [B, S] as in the public
    function; `usable` bool [N]: the row can have a pick."""

    tokens: jax.Array
    parents: jax.Array
    node_sequence: jax.Array
    stop_tokens: jax.Array
    usable: jax.Array

    @property
    def num_sequences(self) -> int:
        return int(self.stop_tokens.shape[0])

    def roots(self) -> jax.Array:
        """int32 [B]: each sequence's root row; -1 without a usable one."""
        nodes = jnp.arange(self.tokens.shape[0], dtype=jnp.int32)
        is_root = (self.parents < 0) & (self.node_sequence >= 0) & self.usable
        place = jnp.where(is_root, self.node_sequence, self.num_sequences)
        none = jnp.full((self.num_sequences,), -1, jnp.int32)
        return none.at[place].set(nodes, mode="drop")

    def child(self, node: jax.Array, pick: jax.Array) -> jax.Array:
        """int32 [K]: where `pick` leads from `node`, both [K]; -1 where the walk ends.

        It ends at a stop token of the sequence, and without a usable child that carries the pick:
        then the pick is the bonus. Of several such children the first counts.
        """
        num_nodes = self.tokens.shape[0]
        nodes = jnp.arange(num_nodes, dtype=jnp.int32)
        owner = jnp.maximum(self.node_sequence[jnp.maximum(node, 0)], 0)
        goes_on = (node >= 0) & (pick >= 0)
        goes_on &= ~jnp.any(self.stop_tokens[owner] == pick[:, None], axis=1)
        leads = (self.parents[None] == node[:, None]) & (self.tokens[None] == pick[:, None])
        leads &= goes_on[:, None] & self.usable[None]
        first = jnp.min(jnp.where(leads, nodes[None], num_nodes), axis=1)
        return jnp.where(first < num_nodes, first, -1)


class Path(NamedTuple):
    """`visited` int32 [B, D + 1]: root and accepted rows, -1 after the end. `emitted` int32 and
    `margins` float32 of the same shape: their picks."""

    visited: jax.Array
    emitted: jax.Array
    margins: jax.Array


def _at(values: jax.Array, node: jax.Array, padding: int) -> jax.Array:
    return jnp.where(node >= 0, values[jnp.maximum(node, 0)], jnp.asarray(padding, values.dtype))


def walk(chosen: Picks, trees: Trees, max_depth: int) -> Path:
    """From every root along the picks, at most `max_depth` nodes down."""
    node = trees.roots()
    visited = [node]
    for _ in range(max_depth):
        node = trees.child(node, _at(chosen.picks, node, -1))
        visited.append(node)
    path = jnp.stack(visited, axis=1)
    return Path(path, _at(chosen.picks, path, -1), _at(chosen.margins, path, 0))


def as_accepted(path: Path, logprobs: jax.Array) -> Accepted:
    """`logprobs` float32 [B, D + 1] of the emitted tokens."""
    accepted = path.visited[:, 1:]
    return Accepted(
        num_accepted=jnp.sum(accepted >= 0, axis=1, dtype=jnp.int32),
        accepted=accepted,
        emitted=path.emitted,
        emitted_margins=path.margins,
        emitted_logprobs=logprobs,
    )


def walk_rows(rows: RowPicks, trees: Trees, want_logprobs: jax.Array, max_depth: int) -> Accepted:
    """The walk over picks that are there for every row."""
    path = walk(rows.picks, trees, max_depth)
    logprobs = _at(rows.logprobs, path.visited, 0)
    return as_accepted(path, jnp.where(want_logprobs, logprobs, 0.0))
