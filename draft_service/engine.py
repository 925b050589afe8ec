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
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from common.group.leader import Leader, in_step
from common.group.wire import Array
from common.log import get_logger
from common.types import TreeShape
from draft_service.batch import Bucket, pack, unpack_tree
from draft_service.expand import Growth, Prefix, expand
from draft_service.feature_words import num_words, take_rows
from draft_service.int8 import reading_int8
from draft_service.scoring import lay_out, score
from draft_service.shared_noise import SharedNoise
from draft_service.stem import run_stem
from draft_service.step import SequenceOutcome, SequenceWork
from kernels.backend import Backend
from kernels.build_tree.types import BuiltTree
from kernels.chips import Chip
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

EXTEND_ROWS = (32, 128, 512, 2048)
"""Row buckets of steps that only extend, up to max_extend_rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine; counts of pairs unless the name says otherwise."""

    num_pages: int
    page_size: int
    max_context_len: int  # of one sequence
    tree: TreeShape = field(default_factory=TreeShape)
    max_sequences: int = 8  # in one step
    max_draft_rows: int = 8  # of one sequence, in a step that drafts
    max_extend_rows: int = 512  # in a step that only extends
    fused_features: bool = False  # rows come fused, as `head_fuse` would give them
    max_guessed: int = 0  # tokens without features that a tree may stand on; 0: no such programs
    max_outcomes: int = 0  # trees on guessed tokens that one sequence asks for at a time
    min_rows: int = 1  # 8 on TPU: one-row matrix products take another, slower path there
    backend: Backend = Backend.XLA
    chip: Chip | None = None

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.max_context_len // self.page_size)

    def buckets(self) -> tuple[Bucket, ...]:
        """Every bucket that a step may take, smallest first within each kind."""
        sizes, size = [self.max_sequences], 1
        while size < self.max_sequences:
            sizes.append(size)
            size *= 2
        drafting = [Bucket(b, b * self.max_draft_rows, True) for b in sorted(sizes)]
        if self.max_guessed:
            least = min(self.max_outcomes, self.max_sequences)  # they come together
            drafting += [
                replace(bucket, num_guessed=self.max_guessed)
                for bucket in drafting
                if bucket.num_sequences >= least
            ]
        rows = sorted({min(r, self.max_extend_rows) for r in EXTEND_ROWS})
        return (*drafting, *(Bucket(self.max_sequences, r, False) for r in rows))

    def validate(self, head: HeadConfig) -> None:
        """Raises ValueError naming field, value and limit."""
        shape = self.tree
        if not 1 <= shape.top_k <= head.draft_vocab_size:
            raise ValueError(
                f"top_k: {shape.top_k} is outside [1, {head.draft_vocab_size}],"
                " the draft vocabulary"
            )
        if shape.max_depth < 1:
            raise ValueError(f"max_depth: {shape.max_depth} is below 1")
        if shape.max_nodes < 2:
            raise ValueError(f"max_nodes: {shape.max_nodes} is below 2, the root and one child")
        if self.min_rows > shape.top_k:
            raise ValueError(
                f"top_k: {shape.top_k} is below {self.min_rows}, the fewest rows that this device"
                " multiplies well; raise it"
            )


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

    def measure_levels(self) -> tuple[tuple[int, float], ...]:
        """Seconds of one further level, by the sequences of a step, rising. To be called before
        anybody owns a page: the made-up pairs are written to the first ones.
        """
        found = []
        for bucket in self._buckets:
            levels = self.config.tree.max_depth - 1
            if not bucket.drafts or bucket.num_guessed or not levels:
                continue
            shallow, deep = (
                self._fastest(bucket, max_levels) for max_levels in (1, self.config.tree.max_depth)
            )
            found.append((bucket.num_sequences, max(0.0, deep - shallow) / levels))
        return tuple(found)

    def _fastest(self, bucket: Bucket, max_levels: int) -> float:
        """Seconds of a full step: what disturbs one only ever makes it longer."""
        count = min(bucket.num_sequences, self.config.num_pages)
        works = [
            SequenceWork(
                sequence_id=b"", tokens=np.zeros(1, np.int32),
                features=np.zeros((1, self.row_width), self._feature_dtype),
                kv_len=0, page_ids=np.array([page], np.int32), drafts=True, max_levels=max_levels,
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
        num_nodes = self.config.tree.max_nodes
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
        config, drafts = self.config, works[0].drafts
        for work in works:
            work.validate(self.head.target_vocab_size, self.row_width, config.page_size)
            if work.drafts != drafts:
                raise ValueError("drafts: a step drafts for all its works or for none")
            if work.page_ids.size > config.pages_per_sequence:
                raise ValueError(
                    f"page_ids: {work.page_ids.size}; at most {config.pages_per_sequence}"
                )
        num_rows = sum(work.num_rows for work in works)
        num_guessed = max(int(work.guessed.size) for work in works)
        if num_guessed > config.max_guessed:
            raise ValueError(f"guessed: {num_guessed} tokens; at most {config.max_guessed}")
        for bucket in self._buckets:
            fits = bucket.num_rows >= num_rows and bucket.num_sequences >= len(works)
            fits = fits and bool(bucket.num_guessed) == bool(num_guessed)
            if bucket.drafts == drafts and fits:
                return bucket
        raise ValueError(
            f"works: {len(works)} sequences, {num_rows} rows in a step; at most"
            f" {config.max_sequences} and"
            f" {config.max_sequences * config.max_draft_rows if drafts else config.max_extend_rows}"
        )

    def _program(self, bucket: Bucket) -> Any:
        if bucket in self._programs:
            return self._programs[bucket]
        sizes = {"sequences": bucket.num_sequences, "rows": bucket.num_rows}
        if self._warm:
            self.compiles_after_warm_up += 1
            _logger.warning("compile after warm-up", drafts=bucket.drafts, **sizes)
        begun = time.monotonic()
        buffer = np.zeros(self._packing(bucket).size, np.int32)
        inputs = parameter_specs(self._params), PAGES_SPEC, WHOLE_SPEC
        split = split_over(self._mesh, self._make_step(bucket), inputs, (PAGES_SPEC, WHOLE_SPEC))
        step = jax.jit(split, donate_argnums=(1,))
        with reading_int8():
            lowered = step.lower(self._params, self._pages, buffer)
            program = lowered.compile(COMPILER_OPTIONS.get(jax.default_backend()))
        seconds = round(time.monotonic() - begun, 2)
        _logger.info("compiled", drafts=bucket.drafts, seconds=seconds, **sizes)
        self._programs[bucket] = program
        return program

    def _make_step(self, bucket: Bucket) -> Callable[..., Any]:
        """(params, pages, buffer) -> (pages, packed trees int32 [B, 3N + 1])."""
        packing = self._packing(bucket)

        def step(params: Params, pages: jax.Array, buffer: jax.Array) -> Any:
            x = {field.name: buffer[span].reshape(field.shape) for field, span in packing.spans()}
            pages = copy_pages(pages, x["copy_from"], x["copy_to"], x["num_copies"][0])
            outs, pages = self._extend(params, pages, x)
            if not bucket.drafts:
                return pages, jnp.zeros((bucket.num_sequences, 0), jnp.int32)
            last = outs[x["last_rows"]]
            logits = score(self.head, params, last)  # not used where tokens are guessed: left out
            kv_lens = x["kv_lens"] + x["starts"][1:] - x["starts"][:-1]
            slots = bucket.num_sequences
            prefix = Prefix(pages, x["page_table"], kv_lens, x["num_live"][0])
            states, logits = last[:slots], logits[:slots]
            roots, stem = x["tokens"][x["last_rows"][:slots]], None
            if bucket.num_guessed:
                states, stem = run_stem(
                    *(self.head, params, prefix, states, x["guessed"], x["num_guessed"]),
                    backend=self.config.backend,
                    chip=self.config.chip,
                )
                logits = score(self.head, params, states)
                ends = jnp.maximum(x["num_guessed"] - 1, 0)
                roots = jnp.take_along_axis(x["guessed"], ends[:, None], axis=1)[:, 0]
            tree = expand(
                *(self.head, params, prefix, states, logits, roots),
                shape=self.config.tree,
                backend=self.config.backend,
                chip=self.config.chip,
                stem=stem,
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
