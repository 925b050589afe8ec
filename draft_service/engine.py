"""The head on a device: one compiled program per bucket feeds true pairs and grows trees.

Extend: pairs (token t+1, true feature t) -> fuse, layers over paged prefix and own block -> K/V
rows into pages. Draft, in the same program: expand all depths from each sequence's last pair ->
build the tree. One dispatch with one transfer in, one fetch of a single small array.

Over the chips of a mesh the program runs inside one `jax.shard_map` (models/sharding.py); every
chip grows the same trees, and keeps its heads' pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from common.group.leader import Leader, in_step
from common.group.wire import Array
from common.log import get_logger
from draft_service.batch import Bucket, pack, unpack_tree
from draft_service.expand import Growth, Prefix, expand
from draft_service.feature_words import num_words, take_rows
from draft_service.int8 import reading_int8
from draft_service.scoring import lay_out, score
from draft_service.shared_noise import SharedNoise
from draft_service.sizes import AheadShape as AheadShape
from draft_service.sizes import EngineConfig as EngineConfig
from draft_service.step import SequenceOutcome, SequenceWork
from kernels.backend import Backend
from kernels.build_tree.types import BuiltTree
from kernels.kv_commit.api import kv_commit
from kernels.kv_layout import copy_pages, pages_bytes, pages_shape
from kernels.tree_attention.api import tree_attention
from models.device import compile_all
from models.eagle3 import HeadConfig, head_embed, head_forward, head_fuse
from models.layers import Params
from models.sharding import PAGES_SPEC, WHOLE_SPEC, parameter_specs, split_over

_logger = get_logger("draft.engine")

REPEATS = 4
"""Runs of a step whose time is measured."""

COMPILER_OPTIONS: dict[str, dict[str, str | bool]] = {
    "cpu": {"xla_cpu_copy_insertion_use_region_analysis": True}
}
"""By platform. Without its analysis of regions XLA does not see on the CPU that attention has read
the pages before their new rows are written, and copies all of them in every step."""


class DeviceEngine:
    """Implements `step.DraftEngine`; on the further hosts of a slice, `common.group.life`'s
    FollowingEngine. Called from one thread.
    """

    def __init__(
        self,
        head: HeadConfig,
        params: Params,
        config: EngineConfig,
        feature_dtype: Any = None,
        mesh: Mesh | None = None,
        group: Leader | None = None,
    ) -> None:
        """`feature_dtype`: of the rows that come; None: the head's own. `mesh`: where `params` are
        split over chips (`models.eagle3.load_head`). `group`: of the leader of several hosts, who
        are told of every step. Raises ValueError.
        """
        config.validate(head)
        self.head, self.config = head, config
        self._mesh = mesh if head.num_shards > 1 else None
        self._group = group
        self._params = lay_out(params)
        self._feature_dtype = np.dtype(head.dtype if feature_dtype is None else feature_dtype)
        self._feature_words = num_words(self.row_width, self._feature_dtype)
        shape = pages_shape(
            num_layers=head.num_layers,
            num_pages=config.num_pages,
            kv_heads=head.stored_kv_heads,
            page_size=config.page_size,
            head_dim=head.attention.head_dim,
        )
        self._pages_shape = shape
        self._pages = self._empty_pages()
        self.pages_bytes = pages_bytes(shape, head.dtype)
        self._buckets = config.buckets()
        self._programs: dict[Bucket, Any] = {}
        self._warm = False
        self.compiles_after_warm_up = 0

    @property
    def row_width(self) -> int:
        """Values in a row of features, as it comes."""
        return self.head.hidden_size if self.config.fused_features else self.head.feature_size

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles every bucket's program, several at a time."""
        compile_all(self._program, self._buckets, progress)
        self._warm = True

    def run_each_once(self) -> None:
        """Every bucket's program on no sequences: the first run of each is slower than the rest."""
        for bucket in self._buckets:
            self._launch(bucket, [])

    def measure_levels(self, ahead: bool = False) -> tuple[tuple[int, float], ...]:
        """Seconds of one further level, by the sequences of a step, rising; `ahead`: of trees that
        are grown ahead. To be called before anybody owns a page: the made-up pairs are written to
        the first ones.
        """
        found = []
        for bucket in self._buckets:
            depth = self.config.growth(bucket)[0].max_depth
            if not bucket.drafts or bucket.ahead != ahead or depth == 1:
                continue
            shallow, deep = (self._fastest(bucket, max_levels) for max_levels in (1, depth))
            found.append((bucket.num_sequences, max(0.0, deep - shallow) / (depth - 1)))
        return tuple(found)

    def _fastest(self, bucket: Bucket, max_levels: int) -> float:
        """Seconds of a full step: what disturbs one only ever makes it longer."""
        count = min(bucket.num_sequences, self.config.num_pages)
        works = [
            SequenceWork(
                sequence_id=b"", tokens=np.zeros(1, np.int32),
                features=np.zeros((1, self.row_width), self._feature_dtype),
                kv_len=0, page_ids=np.array([page], np.int32), drafts=True, ahead=bucket.ahead,
                max_levels=max_levels,
            )
            for page in range(count)
        ]  # fmt: skip
        times = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            self._launch(bucket, works)
            times.append(time.perf_counter() - begun)
        return min(times)

    def run(self, works: Sequence[SequenceWork]) -> list[SequenceOutcome]:
        """See `step.DraftEngine.run`."""
        if not works:
            return []
        bucket = self._bucket_for(works)
        packed = self._launch(bucket, works)
        if not bucket.drafts:
            return [SequenceOutcome(tree=None) for _ in works]
        num_nodes = self.config.growth(bucket)[0].max_nodes
        return [SequenceOutcome(tree=unpack_tree(packed[i], num_nodes)) for i in range(len(works))]

    def _launch(self, bucket: Bucket, works: Sequence[SequenceWork]) -> Any:
        """Runs the bucket's program; its packed trees, on the host."""
        buffer = pack(works, self._packing(bucket), bucket)
        with in_step(self._group):
            if self._group is not None:
                number = np.array(self._buckets.index(bucket), np.int32)
                self._group.tell("step", number, buffer)
            return self._run_program(bucket, buffer)

    def follow(self, operation: str, arrays: Sequence[Array]) -> None:
        """See `common.group.life.FollowingEngine`; "step" is the only operation."""
        number, buffer = arrays
        self._run_program(self._buckets[int(number)], buffer)

    def _run_program(self, bucket: Bucket, buffer: Array) -> Any:
        program = self._program(bucket)
        try:
            self._pages, packed = program(self._params, self._pages, buffer)
            return jax.device_get(packed)
        except Exception:
            # The step owned the pages: whatever is left of them is nobody's state.
            self._pages = self._empty_pages()
            raise

    def _empty_pages(self) -> jax.Array:
        where = None if self._mesh is None else NamedSharding(self._mesh, PAGES_SPEC)
        return jnp.zeros(self._pages_shape, self.head.dtype, device=where)

    def _packing(self, bucket: Bucket) -> Any:
        last_rows = max(bucket.num_sequences, self.config.min_rows)
        return bucket.packing(self.config.pages_per_sequence, last_rows, self._feature_words)

    def _bucket_for(self, works: Sequence[SequenceWork]) -> Bucket:
        """The smallest bucket that holds the works. Raises ValueError naming what is too large."""
        config, drafts, ahead = self.config, works[0].drafts, works[0].ahead
        if ahead and config.ahead is None:
            raise ValueError("ahead: this engine has no programs for trees ahead")
        for work in works:
            work.validate(self.head.target_vocab_size, self.row_width, config.page_size)
            if work.drafts != drafts:
                raise ValueError("drafts: a step drafts for all its works or for none")
            if work.ahead != ahead:
                raise ValueError("ahead: all trees of a step are ahead, or none")
            if work.page_ids.size > config.pages_per_sequence:
                raise ValueError(
                    f"page_ids: {work.page_ids.size}; at most {config.pages_per_sequence}"
                )
        num_rows = sum(work.num_rows for work in works)
        for bucket in self._buckets:
            fits = bucket.num_rows >= num_rows and bucket.num_sequences >= len(works)
            if (bucket.drafts, bucket.ahead) == (drafts, ahead) and fits:
                return bucket
        raise ValueError(
            f"works: {len(works)} sequences, {num_rows} rows in a step; at most"
            f" {config.max_sequences} and"
            f" {config.max_sequences * config.max_draft_rows if drafts else config.max_extend_rows}"
        )

    def _program(self, bucket: Bucket) -> Any:
        if bucket in self._programs:
            return self._programs[bucket]
        sizes = {
            "sequences": bucket.num_sequences, "rows": bucket.num_rows,
            "drafts": bucket.drafts, "ahead": bucket.ahead,
        }  # fmt: skip
        if self._warm:
            self.compiles_after_warm_up += 1
            _logger.warning("compile after warm-up", **sizes)
        begun = time.monotonic()
        buffer = np.zeros(self._packing(bucket).size, np.int32)
        inputs = parameter_specs(self._params), PAGES_SPEC, WHOLE_SPEC
        split = split_over(self._mesh, self._make_step(bucket), inputs, (PAGES_SPEC, WHOLE_SPEC))
        step = jax.jit(split, donate_argnums=(1,))
        with reading_int8():
            lowered = step.lower(self._params, self._pages, buffer)
            program = lowered.compile(COMPILER_OPTIONS.get(jax.default_backend()))
        seconds = round(time.monotonic() - begun, 2)
        _logger.info("compiled", seconds=seconds, **sizes)
        self._programs[bucket] = program
        return program

    def _make_step(self, bucket: Bucket) -> Callable[..., Any]:
        """(params, pages, buffer) -> (pages, packed trees int32 [B, 3N + 1])."""
        packing = self._packing(bucket)
        shape, width = self.config.growth(bucket)

        def step(params: Params, pages: jax.Array, buffer: jax.Array) -> Any:
            x = {field.name: buffer[span].reshape(field.shape) for field, span in packing.spans()}
            pages = copy_pages(pages, x["copy_from"], x["copy_to"], x["num_copies"][0])
            outs, pages = self._extend(params, pages, x)
            if not bucket.drafts:
                return pages, jnp.zeros((bucket.num_sequences, 0), jnp.int32)
            last = outs[x["last_rows"]]
            logits = score(self.head, params, last)
            kv_lens = x["kv_lens"] + x["starts"][1:] - x["starts"][:-1]
            slots = bucket.num_sequences
            prefix = Prefix(pages, x["page_table"], kv_lens, x["num_live"][0])
            states, logits = last[:slots], logits[:slots]
            roots = x["tokens"][x["last_rows"][:slots]]
            tree = expand(
                *(self.head, params, prefix, states, logits, roots),
                shape=shape,
                width=width,
                backend=self.config.backend,
                chip=self.config.chip,
                noise=_noise(x),
                growth=Growth(x["max_levels"], _as_float(x["least_reach"])),
            )
            return pages, _packed(tree)

        return step

    def _extend(
        self, params: Params, pages: jax.Array, x: dict[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """The pairs through the head: outputs [R, H], and pages with their rows."""
        head, config = self.head, self.config
        num_rows = x["tokens"].shape[0]

        def attend(layer: int, q: jax.Array, block_kv: jax.Array) -> jax.Array:
            return tree_attention(
                q,
                block_kv,
                pages,
                layer,
                x["page_table"],
                x["kv_lens"],
                x["starts"],
                x["starts"],
                x["starts"][1:] - x["starts"][:-1],
                jnp.zeros((num_rows, 1), jnp.uint32),
                jnp.zeros_like(x["kv_lens"]),
                scale=head.attention_scale,
                window=head.windows[layer],
                backend=config.backend,
                chip=config.chip,
            )

        embed = head_embed(head, params, x["tokens"])
        rows = take_rows(x["features"], self._feature_dtype)
        fused = config.fused_features
        states = rows.astype(head.dtype) if fused else head_fuse(head, params, rows)
        outs, block_kv = head_forward(head, params, embed, states, x["positions"], attend)
        pages = kv_commit(
            pages,
            block_kv,
            x["page_table"],
            x["row_sequence"],
            x["positions"],
            jnp.arange(num_rows, dtype=jnp.int32) < x["num_live"][1],
            backend=Backend.XLA,
        )
        return outs, pages


def _as_float(words: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(words, jnp.float32)


def _noise(x: dict[str, jax.Array]) -> SharedNoise:
    return SharedNoise(
        seed_lo=lax.bitcast_convert_type(x["seed_lo"], jnp.uint32),
        seed_hi=lax.bitcast_convert_type(x["seed_hi"], jnp.uint32),
        temperature=_as_float(x["temperature"]),
        positions=x["pick_positions"],
    )


def _packed(tree: BuiltTree) -> jax.Array:
    """int32 [B, 3N + 1]: what `batch.unpack_tree` takes apart."""
    scores = lax.bitcast_convert_type(tree.scores, jnp.int32)
    return jnp.concatenate([tree.tokens, tree.parents, scores, tree.num_valid[:, None]], axis=1)
