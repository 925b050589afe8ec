"""What a request may ask of logits, and what the device remembers of a sequence for it."""

from __future__ import annotations

from typing import NamedTuple

import jax


class SlotState(NamedTuple):
    """Of every slot a sequence can have on the device. A slot's rows mean nothing until set.

    seen  int32 [slots, V]: twice the number of times that a token was generated, plus 1 if it is in
          the prompt; of committed tokens only
    bias  float32 [slots, V], added to logits
    """

    seen: jax.Array
    bias: jax.Array


class LogitOptions(NamedTuple):
    """Of B sequences of a step; device arrays [B].

    slot         int32, the row of `SlotState`; not looked at where the sequence needs none
    presence     float32, 0 off: taken from each generated token
    frequency    float32, 0 off: taken once for each time that a token was generated
    repetition   float32, 1 off: divides positive and multiplies negative logits of tokens of prompt
                 and answer
    has_bias     int32, 1: `SlotState.bias` counts
    min_position int32: no stop token is picked for a position below
    num_prompt   int32: tokens from this position on are generated
    """

    slot: jax.Array
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    has_bias: jax.Array
    min_position: jax.Array
    num_prompt: jax.Array

    @property
    def is_penalised(self) -> jax.Array:
        """bool [B]: whether `SlotState.seen` counts."""
        return (self.presence != 0.0) | (self.frequency != 0.0) | (self.repetition != 1.0)
