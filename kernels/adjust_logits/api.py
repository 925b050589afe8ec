"""`adjust_logits` before `sample_and_accept`, and `count_tokens`, which keeps its memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from kernels.adjust_logits.types import LogitOptions, SlotState
from kernels.adjust_logits.xla import adjust_logits_xla, count_tokens_xla
from kernels.backend import Backend
from kernels.checks import check_dtype, check_shape


def empty_state(num_slots: int, vocab_size: int) -> SlotState:
    """Nothing seen, no biases: 8 bytes a slot and token."""
    shape = (num_slots, vocab_size)
    return SlotState(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))


def seen_row(
    prompt: npt.NDArray[np.int32], answer: npt.NDArray[np.int32], vocab_size: int
) -> npt.NDArray[np.int32]:
    """A row of `SlotState.seen`, on the host: the whole prompt, and the committed answer."""
    row = 2 * np.bincount(answer, minlength=vocab_size).astype(np.int32)
    row[prompt] += 1  # once, however often a token is there
    return row


def _check(options: LogitOptions, state: SlotState, batch: int, vocab: int) -> None:
    for name, array in options._asdict().items():
        check_shape(f"options.{name}", array, (batch,))
        is_float = name in ("presence", "frequency", "repetition")
        check_dtype(f"options.{name}", array, "float32" if is_float else "int32")
    for name, array in state._asdict().items():
        check_shape(f"state.{name}", array, (array.shape[0], vocab))
    check_dtype("state.seen", state.seen, "int32")
    check_dtype("state.bias", state.bias, "float32")


def adjust_logits(
    logits: jax.Array,
    tokens: jax.Array,
    parents: jax.Array,
    positions: jax.Array,
    node_sequence: jax.Array,
    state: SlotState,
    options: LogitOptions,
    stop_tokens: jax.Array,
    token_mask: jax.Array | None = None,
    *,
    max_depth: int,
    vocab_axis: str | None = None,
    backend: Backend,
) -> jax.Array:
    """float32 [N, V]: what the filters see of N nodes of B trees.

    In this order: repetition, frequency and presence penalty, bias, no stop token before the least
    length, mask. Penalties count the sequence's committed tokens (`state`, the root among them) and
    the tokens on the node's own path below the root, so that a node sees what plain decoding would.

    logits, tokens, parents, positions, node_sequence, stop_tokens: as `sample_and_accept` has them
    state         what `count_tokens` and the host keep of each slot
    options       arrays [B]
    token_mask    bool [N, V], False: never picked; None: no mask in this program
    max_depth     deepest node below a root
    vocab_axis    inside `shard_map`: the mesh axis over which the vocabulary is split, in order. V
                  is then this chip's share, of logits, state, mask and result; no collective

    Raises ValueError at trace time for shapes or dtypes that do not fit.
    """
    check_dtype("logits", logits, "float32")
    num_nodes, vocab = logits.shape
    columns = {"tokens": tokens, "parents": parents, "positions": positions}
    for name, array in (columns | {"node_sequence": node_sequence}).items():
        check_shape(name, array, (num_nodes,))
        check_dtype(name, array, "int32")
    check_dtype("stop_tokens", stop_tokens, "int32")
    _check(options, state, stop_tokens.shape[0], vocab)
    if token_mask is not None:
        check_shape("token_mask", token_mask, (num_nodes, vocab))
        check_dtype("token_mask", token_mask, "bool")
    _only_xla("adjust_logits", backend)
    return adjust_logits_xla(
        logits,
        tokens,
        parents,
        positions,
        node_sequence,
        state,
        options,
        stop_tokens,
        token_mask,
        max_depth,
        vocab_axis,
    )


def count_tokens(
    state: SlotState,
    options: LogitOptions,
    tokens: jax.Array,
    positions: jax.Array,
    sequence: jax.Array,
    committed: jax.Array,
    *,
    vocab_axis: str | None = None,
    backend: Backend,
) -> SlotState:
    """`state` with the generated ones among R committed rows counted; in place if donated.

    tokens, positions, sequence  int32 [R]; sequence in [0, B) where `committed`
    committed                    bool [R]; where False nothing is looked at
    vocab_axis                   as `adjust_logits` has it: `state` is this chip's share

    Prompts are not counted here: the host sets them with the slot (`seen_row`).
    """
    num_rows = tokens.shape[0]
    for name, array in {"positions": positions, "sequence": sequence}.items():
        check_shape(name, array, (num_rows,))
        check_dtype(name, array, "int32")
    check_shape("committed", committed, (num_rows,))
    check_dtype("committed", committed, "bool")
    _check(options, state, options.slot.shape[0], state.seen.shape[1])
    _only_xla("count_tokens", backend)
    return count_tokens_xla(state, options, tokens, positions, sequence, committed, vocab_axis)


def _only_xla(name: str, backend: Backend) -> None:
    if backend is not Backend.XLA:
        raise NotImplementedError(f"{name}: backend {backend.value} is not built; use Backend.XLA")
