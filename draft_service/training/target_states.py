"""The target run densely over whole batches: what capture and generation need of it.

`models.target.target_forward` with a causal `attend` over [B, T] rows, no cache and no pages.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from common.types import Int32Array
from draft_service.training.features import TargetStates
from models.config import TargetConfig
from models.layers import Attend, Params
from models.target import target_forward

MASKED = -1e30


def make_target_states(config: TargetConfig, params: Params) -> TargetStates:
    """tokens int32 [B, T] → features [B, T, F], hidden [B, T, Ht], float32 on the host.

    One program is compiled per shape. Sequences are padded on the right. The parameters are an
    argument of the program: as constants in it they would be copied and folded by the compiler.
    """

    @jax.jit
    def states(params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        batch, columns = tokens.shape
        positions = jnp.tile(jnp.arange(columns, dtype=jnp.int32), batch)
        attend = dense_attend(config, batch, columns)
        hidden, _, features = target_forward(config, params, tokens.reshape(-1), positions, attend)
        return (
            features.reshape(batch, columns, -1).astype(jnp.float32),
            hidden.reshape(batch, columns, -1).astype(jnp.float32),
        )

    def run(
        tokens: Int32Array,
    ) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating]]:
        features, hidden = jax.device_get(states(params, jnp.asarray(tokens)))
        return features, hidden

    return run


def dense_attend(config: TargetConfig, batch: int, columns: int) -> Attend:
    """Causal attention of `batch` sequences of `columns` rows each, flattened, within windows."""
    row, column = jnp.arange(columns)[:, None], jnp.arange(columns)[None, :]

    def attend(layer: int, q: jax.Array, block_kv: jax.Array) -> jax.Array:
        seen = column <= row
        window = config.windows[layer]
        if window is not None:
            seen &= column > row - window
        k, v = jnp.split(
            block_kv.reshape(batch, columns, config.num_kv_heads, 2 * config.head_dim), 2, axis=-1
        )
        grouped = q.reshape(batch, columns, config.num_kv_heads, -1, config.head_dim)
        scores = jnp.einsum(
            "brkgd,bckd->bkgrc", grouped, k, preferred_element_type=jnp.float32
        ) * jnp.float32(config.attention_scale)
        weights = jax.nn.softmax(jnp.where(seen, scores, MASKED), axis=-1).astype(v.dtype)
        return jnp.einsum("bkgrc,bckd->brkgd", weights, v).reshape(q.shape)

    return attend
