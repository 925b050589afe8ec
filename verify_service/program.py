"""The verify step as device programs: from one packed buffer to tokens, features and new pages.

Fill in the blocks that follow the step before (verify_service/resolve.py) -> copy the pages that
are no longer shared -> embed rows at their positions -> layers, attending the
paged prefix and the step's own block -> logits of the nodes -> the target's pick per node -> walk
-> K/V of committed rows into pages. Deferred commit: a rejected branch never touches the pages.

`verify_step` is that whole, traced as one program: what a TPU wants. `SplitStep` runs the same
parts as several programs, the layers a few at a time: a CPU loses nothing by it (measured: within
the noise from 1 to 30 layers a program), and XLA then compiles and keeps one short program per
bucket in place of one of all layers, which took 12 s and 120-280 MiB for SmolLM2's thirty.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from common.packing import Packing
from common.types import MAX_TOP_LOGPROBS
from kernels.adjust_logits.api import adjust_logits, count_tokens
from kernels.adjust_logits.types import LogitOptions, SlotState
from kernels.backend import Backend
from kernels.chips import Chip
from kernels.kv_commit.api import kv_commit
from kernels.kv_layout import copy_pages
from kernels.sample_and_accept.api import sample_and_accept
from kernels.sample_and_accept.types import Accepted, SamplerParams
from kernels.token_logprobs.api import token_logprobs
from kernels.token_logprobs.types import TokenLogprobs
from kernels.tree_attention.api import tree_attention
from models.config import TargetConfig
from models.eagle3.description import HeadConfig
from models.eagle3.fusing import FUSE
from models.eagle3.module import head_fuse
from models.layers import Params
from models.sharding import (
    PAGES_SPEC,
    VOCABULARY_SPEC,
    WHOLE_SPEC,
    parameter_specs,
    split_over,
)
from models.target import (
    LayersOutput,
    embed_rows,
    finish_rows,
    layer_params,
    run_layers,
    target_logits,
)
from verify_service.batch import BatchShape, Bucket
from verify_service.mask_share import unpack_share
from verify_service.resolve import LastRound, resolve
from verify_service.slots import root_nodes

Arrays = dict[str, jax.Array]


class DeviceState(NamedTuple):
    """What a step takes over from the last one; donated. `slots`: see verify_service/slots.py.
    `last`: None where no block can follow another.
    """

    pages: jax.Array
    slots: SlotState
    last: LastRound | None = None


STATE_SPECS = DeviceState(PAGES_SPEC, VOCABULARY_SPEC, WHOLE_SPEC)  # type: ignore[arg-type]


class StepOutput(NamedTuple):
    """What a step gives.

    small     int32, `BatchShape.results()`: accepted nodes, emitted tokens, margins, logprobs
    top       top_tokens and top_logprobs [B, D + 1, K]: fetched only where asked for
    prompt    logprobs [N], top_tokens and top_logprobs [N, K] of scored rows: likewise
    features  [T, F] as captured, or [T, H] as `StepParts.fusing` fuses them
    """

    state: DeviceState
    small: jax.Array
    top: Arrays
    prompt: Arrays
    features: jax.Array


OUTPUT_SPECS = StepOutput(STATE_SPECS, *(WHOLE_SPEC,) * 4)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The parts of a step, all pure; `x` is what `unpack` makes of the buffer.

    `fusing`: of a head whose fc and norms are among the parameters, under their own names.
    """

    target: TargetConfig
    shape: BatchShape
    bucket: Bucket
    backend: Backend
    chip: Chip | None
    fusing: HeadConfig | None = None

    def unpack(self, buffer: jax.Array) -> Arrays:
        """The fields of a buffer of `shape.packing(bucket)`."""
        return {
            field.name: lax.bitcast_convert_type(
                buffer[span].reshape(field.shape), jnp.dtype(field.dtype)
            )
            for field, span in self.shape.packing(self.bucket).spans()
        }

    def resolve(self, x: Arrays, last: LastRound | None) -> Arrays:
        """`x` with the blocks filled in that follow the step before."""
        return x if last is None else resolve(x, last)

    def pack_again(self, x: Arrays) -> jax.Array:
        """The buffer of which `unpack` makes `x`."""
        return _joined(x, self.shape.packing(self.bucket))

    def own_pages(self, pages: jax.Array, x: Arrays) -> jax.Array:
        """`pages` with those copied that sequences must have for themselves from now on."""
        return copy_pages(pages, x["copy_from"], x["copy_to"], x["num_copies"][0])

    def layers(
        self,
        layers: Sequence[Params],
        kind: int,
        first: jax.Array | int,
        pages: jax.Array,
        stream: jax.Array,
        x: Arrays,
    ) -> LayersOutput:
        """Consecutive layers of the kinds that the model has from number `kind` on; `first` is the
        first one's own number, which may be traced.
        """

        def attend(layer: int, q: jax.Array, block_kv: jax.Array) -> jax.Array:
            return tree_attention(
                q,
                block_kv,
                pages,
                first + (layer - kind),
                x["page_table"],
                x["kv_lens"],
                x["starts"],
                x["starts"],
                x["num_causal"],
                x["ancestors"],
                jnp.zeros_like(x["kv_lens"]),
                scale=self.target.attention_scale,
                window=self.target.windows[layer],
                backend=self.backend,
                chip=self.chip,
            )

        return run_layers(self.target, layers, kind, stream, x["positions"], attend)

    def finish(
        self,
        params: Params,
        state: DeviceState,
        blocks: Sequence[jax.Array],
        boundaries: Sequence[jax.Array],
        x: Arrays,
    ) -> StepOutput:
        """From the layers' output to the commit. `blocks`: block_kv of each layer; `boundaries`:
        the residual stream entering each, and behind the last.
        """
        hidden, features = finish_rows(self.target, params, boundaries)
        if self.fusing is not None:
            features = head_fuse(self.fusing, {FUSE: params[FUSE]}, features)
        logits = target_logits(self.target, params, hidden[x["node_rows"]])
        options = _logit_options(x)
        causal = x["row_is_causal"] > 0
        slots = self._count(state.slots, options, x, causal)
        accepted = self._sample(logits, slots, options, x)
        committed = _committed_rows(x, accepted.accepted, self.bucket.num_rows)
        slots = self._count(slots, options, x, committed & ~causal)
        new_pages = kv_commit(
            state.pages,
            jnp.stack(blocks),
            x["page_table"],
            x["row_sequence"],
            x["positions"],
            committed,
            backend=Backend.XLA,
        )
        logprobs = self._logprobs(logits, accepted, x)
        small = {
            "accepted": accepted.accepted,
            "num_accepted": accepted.num_accepted,
            "emitted": accepted.emitted,
            "margins": accepted.emitted_margins,
            "logprobs": logprobs.picked,
        }
        top = {"top_tokens": logprobs.top_tokens, "top_logprobs": logprobs.top}
        return StepOutput(
            DeviceState(new_pages, slots, self._last_round(state, accepted, x)),
            _joined(small, self.shape.results()),
            top,
            self._prompt_logprobs(logits, x),
            features,
        )

    def _last_round(self, state: DeviceState, accepted: Accepted, x: Arrays) -> LastRound | None:
        if state.last is None:
            return None
        return LastRound(
            emitted=accepted.emitted,
            kv_lens=x["kv_lens"] + x["num_causal"] + accepted.num_accepted,
        )

    def _count(
        self, slots: SlotState, options: LogitOptions, x: Arrays, committed: jax.Array
    ) -> SlotState:
        return count_tokens(
            slots,
            options,
            x["tokens"],
            x["positions"],
            x["row_sequence"],
            committed,
            vocab_axis=self.target.axis,
            backend=Backend.XLA,
        )

    def _sample(
        self, logits: jax.Array, slots: SlotState, options: LogitOptions, x: Arrays
    ) -> Accepted:
        axis = self.target.axis
        rows = x["node_rows"]
        nodes = (x["tokens"][rows], x["node_parents"], x["positions"][rows] + 1, x["node_sequence"])
        adjusted = adjust_logits(
            logits,
            *nodes,
            slots,
            options,
            x["stop_tokens"],
            max_depth=self.shape.max_depth,
            vocab_axis=axis,
            backend=Backend.XLA,
        )
        token_mask = None
        if self.bucket.mask_words:
            token_mask = unpack_share(x["token_mask"], logits.shape[1], axis)
        return sample_and_accept(
            adjusted,
            *nodes,
            SamplerParams(
                temperature=x["temperature"],
                top_k=x["top_k"],
                top_p=x["top_p"],
                min_p=x["min_p"],
                seed_lo=x["seed_lo"],
                seed_hi=x["seed_hi"],
            ),
            x["stop_tokens"],
            token_mask,
            max_depth=self.shape.max_depth,
            vocab_axis=axis,
            backend=self.backend if axis is None else Backend.XLA,
            chip=self.chip,
        )

    def _logprobs(self, logits: jax.Array, accepted: Accepted, x: Arrays) -> TokenLogprobs:
        roots = root_nodes(x["node_parents"], x["node_sequence"], x["kv_lens"].shape[0])
        return token_logprobs(
            logits,
            jnp.concatenate([roots[:, None], accepted.accepted], axis=1),
            accepted.emitted,
            x["num_logprobs"],
            max_top=min(MAX_TOP_LOGPROBS, self.target.vocab_size),
            vocab_axis=self.target.axis,
            backend=Backend.XLA,
        )

    def _prompt_logprobs(self, logits: jax.Array, x: Arrays) -> Arrays:
        """Each node's row is a sequence of its own here, with one place."""
        nodes = jnp.arange(self.bucket.num_nodes, dtype=jnp.int32)[:, None]
        found = token_logprobs(
            logits,
            nodes,
            x["scored"][:, None],
            x["num_scored_top"],
            max_top=min(MAX_TOP_LOGPROBS, self.target.vocab_size),
            vocab_axis=self.target.axis,
            backend=Backend.XLA,
        )
        return {
            "logprobs": found.picked[:, 0],
            "top_tokens": found.top_tokens[:, 0],
            "top_logprobs": found.top[:, 0],
        }


def _joined(arrays: Arrays, packing: Packing) -> jax.Array:
    """int32 [size]: the fields of `packing`, one behind the other."""
    return jnp.concatenate(
        [
            lax.bitcast_convert_type(arrays[field.name], jnp.int32).reshape(-1)
            for field in packing.fields
        ]
    )


def _logit_options(x: Arrays) -> LogitOptions:
    return LogitOptions(**{name: x[name] for name in LogitOptions._fields})


def verify_step(
    parts: StepParts, params: Params, state: DeviceState, buffer: jax.Array
) -> StepOutput:
    """The whole step, to be traced as one program. `state` should be donated."""
    x = parts.resolve(parts.unpack(buffer), state.last)
    state = state._replace(pages=parts.own_pages(state.pages, x))
    layers = layer_params(parts.target, params)
    stream = embed_rows(parts.target, params, x["tokens"])
    out = parts.layers(layers, 0, 0, state.pages, stream, x)
    return parts.finish(params, state, out.block_kv, (*out.entering, out.stream), x)


class WholeStep:
    """The step of one bucket as one compiled program."""

    def __init__(
        self, parts: StepParts, params: Params, state: DeviceState, mesh: Mesh | None
    ) -> None:
        """Over the chips of `mesh` all make the same picks; each keeps its heads' pages and its own
        logits."""
        self._params = params
        buffer = np.zeros(parts.shape.packing(parts.bucket).size, np.int32)

        def step(params: Params, state: DeviceState, buffer: jax.Array) -> StepOutput:
            return verify_step(parts, params, state, buffer)

        inputs = parameter_specs(params), STATE_SPECS, WHOLE_SPEC
        split = split_over(mesh, step, inputs, OUTPUT_SPECS)
        lowered = jax.jit(split, donate_argnums=(1,)).lower(params, state, buffer)
        self._program: Any = lowered.compile()

    def __call__(self, state: DeviceState, buffer: np.ndarray[Any, Any]) -> StepOutput:
        """Runs the step; `state` is given up."""
        output: StepOutput = self._program(self._params, state, buffer)
        return output


class SplitStep:
    """The step of one bucket as programs of at most `layers_per_program` layers, one behind the
    other. Groups of the same kinds of layers share a program.
    """

    def __init__(
        self, parts: StepParts, params: Params, state: DeviceState, layers_per_program: int
    ) -> None:
        target = parts.target
        layers = layer_params(target, params)
        self._top = {k: v for k, v in params.items() if not k.startswith("layer_")}
        buffer = np.zeros(parts.shape.packing(parts.bucket).size, np.int32)

        def embed(
            top: Params, pages: jax.Array, last: LastRound | None, buffer: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            x = parts.resolve(parts.unpack(buffer), last)
            resolved = buffer if last is None else parts.pack_again(x)
            return embed_rows(target, top, x["tokens"]), parts.own_pages(pages, x), resolved

        inputs = self._top, state.pages, state.last, buffer
        self._embed: Any = jax.jit(embed, donate_argnums=(1,)).lower(*inputs).compile()
        stream: Any = jax.eval_shape(embed, *inputs)[0]
        programs: dict[Any, Any] = {}
        self._groups: list[tuple[Any, list[Params], np.int32]] = []
        blocks: list[Any] = []
        for span in even_spans(target.num_layers, layers_per_program):
            group, first = layers[span], np.int32(span.start)
            key = tuple(target.layer_kind(layer) for layer in range(span.start, span.stop))

            def run(
                group: Sequence[Params],
                first: jax.Array,
                pages: jax.Array,
                stream: jax.Array,
                buffer: jax.Array,
                kind: int = span.start,
            ) -> LayersOutput:
                return parts.layers(group, kind, first, pages, stream, parts.unpack(buffer))

            if key not in programs:
                lowered = jax.jit(run).lower(group, first, state.pages, stream, buffer)
                programs[key] = lowered.compile()
            blocks += jax.eval_shape(run, group, first, state.pages, stream, buffer).block_kv
            self._groups.append((programs[key], group, first))

        def finish(
            top: Params,
            state: DeviceState,
            blocks: Sequence[jax.Array],
            boundaries: Sequence[jax.Array],
            buffer: jax.Array,
        ) -> StepOutput:
            return parts.finish(top, state, blocks, boundaries, parts.unpack(buffer))

        boundaries = [stream] * (target.num_layers + 1)
        self._finish: Any = (
            jax.jit(finish, donate_argnums=(1,))
            .lower(self._top, state, blocks, boundaries, buffer)
            .compile()
        )

    def __call__(self, state: DeviceState, buffer: np.ndarray[Any, Any]) -> StepOutput:
        """Runs the step; `state` is given up."""
        stream, pages, on_device = self._embed(self._top, state.pages, state.last, buffer)
        state = state._replace(pages=pages)
        blocks: list[jax.Array] = []
        boundaries: list[jax.Array] = []
        for program, group, first in self._groups:
            out: LayersOutput = program(group, first, state.pages, stream, on_device)
            stream = out.stream
            blocks += out.block_kv
            boundaries += out.entering
        output: StepOutput = self._finish(
            self._top, state, blocks, [*boundaries, stream], on_device
        )
        return output


def even_spans(num_layers: int, most: int) -> list[slice]:
    """Consecutive layers in as few groups of at most `most` as can be, none much shorter."""
    num_groups = -(-num_layers // most)
    cuts = [num_layers * i // num_groups for i in range(num_groups + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(cuts)]


def _committed_rows(x: Arrays, accepted: jax.Array, num_rows: int) -> jax.Array:
    """bool [T]: causal rows, and the accepted paths (`accepted` [B, D]: nodes, -1 padded)."""
    beyond = jnp.int32(num_rows)
    rows = jnp.where(accepted >= 0, x["node_rows"][jnp.maximum(accepted, 0)], beyond)
    causal = x["row_is_causal"] > 0
    return causal.at[rows.reshape(-1)].set(True, mode="drop")
