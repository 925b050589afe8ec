"""What the device remembers of sequences for penalties and biases, slot by slot, and when it is
right.

The state of a slot is a function of the sequence's committed rows, like its KV pages: steps count
the tokens they commit. A sequence that did not pass through its slot row by row (it is new there,
was cut back, or began with pages of others) has its slot set from the host first. Sequences without
such options cost nothing.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from common.group.leader import Leader
from common.group.wire import Array
from kernels.adjust_logits.api import empty_state, seen_row
from kernels.adjust_logits.types import SlotState
from models.sharding import VOCABULARY_SPEC
from verify_service.step import SequenceWork, TokenHistory


def _set(state: SlotState, slot: jax.Array, seen: jax.Array, bias: jax.Array) -> SlotState:
    return SlotState(state.seen.at[slot].set(seen), state.bias.at[slot].set(bias))


class Slots:
    """`state` belongs to whoever runs steps: a step takes it and gives the next one back."""

    def __init__(
        self, num_slots: int, vocab_size: int, mesh: Mesh | None, group: Leader | None = None
    ) -> None:
        """`vocab_size`: with padding, so that the mesh's chips have equal shares of it."""
        where = None if mesh is None else NamedSharding(mesh, VOCABULARY_SPEC)
        empty = jax.jit(lambda: empty_state(num_slots, vocab_size), out_shardings=where)
        self.state = SlotState(*empty())
        self._group = group
        self._vocab_size = vocab_size
        self._known: dict[int, tuple[TokenHistory, int]] = {}  # slot -> whose, and its rows so far
        seen, bias = np.zeros(vocab_size, np.int32), np.zeros(vocab_size, np.float32)
        put = jax.jit(_set, donate_argnums=(0,), out_shardings=where)
        self._set: Any = put.lower(self.state, np.int32(0), seen, bias).compile()

    def prepare(self, works: Sequence[SequenceWork]) -> None:
        """Before a step: sets the slots that do not stand where their sequence stands. That of a
        work that follows does, whatever the step before commits.
        """
        for work in works:
            if not work.needs_slot or work.follows is not None:
                continue
            assert work.history is not None  # validated with the work
            if self._known.pop(work.slot, None) != (work.history, work.kv_len):
                self._upload(work, work.history)

    def note(
        self,
        works: Sequence[SequenceWork],
        kv_lens: Sequence[int],
        in_flight: Container[int],
    ) -> None:
        """After a step; `kv_lens`: what each sequence has in pages now. Slots of a further step
        `in_flight` stand elsewhere already. Without it, as when a step failed, slots are set again.
        """
        for work, kv_len in zip(works, kv_lens, strict=True):
            if work.needs_slot and work.history is not None and work.slot not in in_flight:
                self._known[work.slot] = (work.history, kv_len)

    def _upload(self, work: SequenceWork, history: TokenHistory) -> None:
        prompt = np.array(history.tokens[: history.num_prompt_tokens], np.int32)
        answer = np.array(history.tokens[history.num_prompt_tokens : work.kv_len], np.int32)
        bias = np.zeros(self._vocab_size, np.float32)
        for token, value in work.sampling.logit_bias:
            bias[token] = value
        seen = seen_row(prompt, answer, self._vocab_size)
        slot = np.array(work.slot, np.int32)
        if self._group is not None:
            self._group.tell("slot", slot, seen, bias)
        self.set(slot, seen, bias)

    def set(self, slot: Array, seen: Array, bias: Array) -> None:
        """Sets one slot; every host of a slice must."""
        self.state = SlotState(*self._set(self.state, slot, seen, bias))


def root_nodes(node_parents: jax.Array, node_sequence: jax.Array, batch: int) -> jax.Array:
    """int32 [B]: each sequence's root among the nodes; -1 without one."""
    nodes = jnp.arange(node_parents.shape[0], dtype=jnp.int32)
    is_root = (node_parents < 0) & (node_sequence >= 0)
    place = jnp.where(is_root, node_sequence, batch)
    return jnp.full((batch,), -1, jnp.int32).at[place].set(nodes, mode="drop")
