"""The best score and the next best on the way through a vocabulary, lane by lane."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

NO_TOKEN = 2**30
"""Token of a best that was never set; token ids are exact in float32 up to 2**24."""


class Best(NamedTuple):
    """Any one shape, `value` and `second` float32. `token`: that of `value`, the lowest among
    equals, int32 or float32. `second`: the best of all others."""

    value: jax.Array
    second: jax.Array
    token: jax.Array

    @staticmethod
    def none(shape: tuple[int, ...]) -> Best:
        """Nothing yet; tokens int32."""
        worst = jnp.full(shape, -jnp.inf, jnp.float32)
        return Best(worst, worst, jnp.full(shape, NO_TOKEN, jnp.int32))

    @property
    def _nobody(self) -> jax.Array:
        return jnp.asarray(NO_TOKEN, self.token.dtype)

    def push(self, values: jax.Array, ids: jax.Array) -> Best:
        """With one more value per place; `ids`, one for all places or one each, above all that
        came before."""
        better = values > self.value
        return Best(
            jnp.maximum(self.value, values),
            jnp.maximum(self.second, jnp.minimum(self.value, values)),
            jnp.where(better, ids, self.token),
        )

    def merge(self, other: Best) -> Best:
        """Of both; their tokens are different ones."""
        value = jnp.maximum(self.value, other.value)
        own = jnp.where(self.value == value, self.token, self._nobody)
        others = jnp.where(other.value == value, other.token, self._nobody)
        second = jnp.maximum(self.second, other.second)
        second = jnp.maximum(second, jnp.minimum(self.value, other.value))
        return Best(value, second, jnp.minimum(own, others))

    def over_last_axis(self) -> Best:
        """Of all places along the last axis, which stays with size 1."""
        value = jnp.max(self.value, axis=-1, keepdims=True)
        at_best = jnp.where(self.value == value, self.token, self._nobody)
        token = jnp.min(at_best, axis=-1, keepdims=True)
        # The winner's place gives its next best, every other place its best.
        second = jnp.where(self.token == token, self.second, self.value)
        return Best(value, jnp.max(second, axis=-1, keepdims=True), token)
