"""Whole verify and draft steps of real models as abstract calls, for `make prove` and `tests/aot`.

A verify step is the engine's own (verify_service/program.py), over a mesh where the model is split;
a draft step is the draft engine's, on one chip.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from benchmarks.aot import WHOLE, Argument, Program
from benchmarks.programs import Call
from common.types import TreeShape
from draft_service.batch import Bucket as DraftBucket
from draft_service.engine import AheadShape
from draft_service.engine import DeviceEngine as DraftEngine
from draft_service.engine import EngineConfig as DraftConfig
from draft_service.feature_words import num_words
from draft_service.int8 import quantise, reading_int8
from kernels.adjust_logits.types import SlotState
from kernels.backend import Backend
from kernels.chips import Chip
from kernels.kv_layout import pages_shape
from models.config import TargetConfig, default_boundaries
from models.eagle3 import FeatureKind, FuseNorm, HeadConfig, TableSource
from models.eagle3.module import head_shapes
from models.layers import Params
from models.rope import RopeConfig
from models.row_major import is_looked_up
from models.sharding import (
    PAGES_SPEC,
    VOCABULARY_SPEC,
    WHOLE_SPEC,
    Split,
    global_shape,
    parameter_spec,
    split_over,
)
from models.target import parameter_shapes
from models.trees import flatten, unflatten
from verify_service.batch import Bucket
from verify_service.engine import EngineConfig
from verify_service.program import (
    OUTPUT_SPECS,
    STATE_SPECS,
    DeviceState,
    StepParts,
    verify_step,
)
from verify_service.resolve import LastRound

BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(jnp.float32)
DRAFT_VOCAB = 32000  # of the published heads
MAX_AHEAD_NODES = 128
"""Candidates of each sequence whose round follows the step before."""


def _target(
    family: str,
    *,
    vocab: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mlp: int,
    theta: float,
    shards: int = 1,
    tied: bool = False,
) -> TargetConfig:
    return TargetConfig(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_size=mlp,
        norm_eps=1e-5,
        rope=RopeConfig(theta=theta),
        tied_embeddings=tied,
        max_positions=8192,
        windows=(None,) * layers,
        sparse_layers=(False,) * layers,
        qk_norm=family == "qwen3",
        dtype=BF16,
        boundaries=default_boundaries(layers),
        num_shards=shards,
    )


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model on `target.num_shards` chips of one kind, and a usual load: B sequences of T nodes.
    `num_pages`: what the rest of HBM roughly holds is not the question; enough to show a copy."""

    name: str
    target: TargetConfig
    chip: str
    sequences: int
    nodes: int
    page_size: int = 128
    num_pages: int = 512
    draft_chip: str = "v5e"

    @property
    def rows(self) -> int:
        return self.sequences * self.nodes

    def with_layers(self, layers: int) -> Served:
        """The same with fewer layers, to compile in seconds."""
        target = dataclasses.replace(
            self.target,
            num_layers=layers,
            windows=(None,) * layers,
            sparse_layers=(False,) * layers,
            boundaries=(1, 2, layers - 1),
        )
        return dataclasses.replace(self, target=target)


SERVED = (
    Served(
        name="SmolLM2-135M",
        target=_target(
            "llama",
            vocab=49152,
            hidden=576,
            layers=30,
            heads=9,
            kv_heads=3,
            head_dim=64,
            mlp=1536,
            theta=1e5,
            tied=True,
        ),
        chip="v5e",
        sequences=4,
        nodes=16,
    ),
    Served(
        name="Llama-3.1-8B on 4 chips",
        target=_target(
            "llama",
            vocab=128256,
            hidden=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp=14336,
            theta=5e5,
            shards=4,
        ),
        chip="v5e",
        sequences=16,
        nodes=16,
    ),
    Served(
        name="Llama-3.3-70B on 8 chips",
        target=_target(
            "llama",
            vocab=128256,
            hidden=8192,
            layers=80,
            heads=64,
            kv_heads=8,
            head_dim=128,
            mlp=28672,
            theta=5e5,
            shards=8,
        ),
        chip="v6e",
        draft_chip="v6e",
        sequences=16,
        nodes=16,
        page_size=256,
        num_pages=256,
    ),
    Served(
        name="Qwen3-8B on 4 chips",
        target=_target(
            "qwen3",
            vocab=151936,
            hidden=4096,
            layers=36,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp=12288,
            theta=1e6,
            shards=4,
        ),
        chip="v5e",
        sequences=16,
        nodes=16,
    ),
    Served(
        name="Qwen3-32B on 8 chips",
        target=_target(
            "qwen3",
            vocab=151936,
            hidden=5120,
            layers=64,
            heads=64,
            kv_heads=8,
            head_dim=128,
            mlp=25600,
            theta=1e6,
            shards=8,
        ),
        chip="v6e",
        draft_chip="v6e",
        sequences=8,
        nodes=32,
        page_size=256,
        num_pages=256,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A call and what to look for in it.

    `weights`: shapes of the large ones on a chip, which no copy may make; `int8_weights`: those of
    them that nothing may write down wider; `pages_bytes` of a chip; `vocab_size` that no sort may
    reach; `temp_limit_bytes`: an eighth of the pages, and what a step cannot be without.
    """

    call: Call
    weights: tuple[tuple[int, ...], ...]
    pages_bytes: int
    vocab_size: int
    temp_limit_bytes: int
    int8_weights: tuple[tuple[int, ...], ...] = ()


def copied_weights(step: Step, program: Program) -> list[tuple[int, ...]]:
    """Shapes of large weights that are copied within HBM.

    In front of a product with int8 the compiler writes its other order of rows (tiles of 8 by 128
    in place of 32 by 128) as a `copy_fusion` whose result is its operand, inside the product: it is
    how a window is read, takes no memory, and is left out.
    """
    retiling = r"^%copy_fusion[\w.]* \(.*\{\n.*\n  ROOT %\S+ = s8\[.* copy\(.*\n\}"
    rest = dataclasses.replace(program, text=re.sub(retiling, "", program.text, flags=re.MULTILINE))
    weights = {tuple(sorted(shape)) for shape in step.weights}
    copies = rest.result_shapes("copy", in_hbm=True)
    return sorted({shape for shape in copies if tuple(sorted(shape)) in weights})


def widened_weights(step: Step, program: Program) -> list[str]:
    """Of weights that are int8: as what wider arrays they are written down, in HLO's words."""
    names = "|".join(f"{i},{o}" for i, o in step.int8_weights)
    return sorted(set(re.findall(rf"(?:bf16|f32)\[(?:{names})\]", program.text)) if names else ())


def _large(shapes: list[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted({s for s in shapes if len(s) == 2 and s[0] * s[1] >= 2**18}))


def _weight(
    config: Split, path: tuple[str, ...], own: jax.ShapeDtypeStruct, spec: PartitionSpec
) -> Argument:
    """As it lies when it was loaded; `own`: a chip's part."""
    shape = global_shape(config, path, tuple(own.shape))
    return Argument(shape, own.dtype, spec, row_major=is_looked_up(path))


def _nbytes(shape: tuple[int, ...]) -> int:
    return math.prod(shape) * int(BF16.itemsize)


def verify(served: Served, chip: Chip, mesh: Mesh | None) -> Step:
    """The verify engine's step with every row a node; split over `mesh` if it is there."""
    target, rows = served.target, served.rows
    config = EngineConfig(
        num_pages=served.num_pages,
        page_size=served.page_size,
        max_sequences=served.sequences,
        max_context_len=8192,
        max_tree_nodes=served.nodes,
        max_depth=8,
        max_ahead_nodes=MAX_AHEAD_NODES,
        max_rows=rows,
        backend=Backend.PALLAS,
        chip=chip,
    )
    bucket = Bucket(rows, rows)
    parts = StepParts(
        target=target, shape=config.shape, bucket=bucket, backend=config.backend, chip=chip
    )
    local = parameter_shapes(target)
    specs = {path: parameter_spec(path) if mesh else WHOLE_SPEC for path in local}
    inputs = (unflatten(dict(specs)), STATE_SPECS, WHOLE_SPEC)

    def whole(params: Any, state: DeviceState, buffer: Any) -> Any:
        return verify_step(parts, params, state, buffer)

    step = split_over(mesh, whole, inputs, OUTPUT_SPECS)

    def run(
        pages: Any, seen: Any, bias: Any, emitted: Any, kv_lens: Any, buffer: Any, *leaves: Any
    ) -> Any:
        params = unflatten(dict(zip(local, leaves, strict=True)))
        last = LastRound(emitted, kv_lens)
        return step(params, DeviceState(pages, SlotState(seen, bias), last), buffer)

    shape = pages_shape(
        num_layers=target.num_layers,
        num_pages=served.num_pages,
        kv_heads=target.stored_kv_heads,
        page_size=served.page_size,
        head_dim=target.head_dim,
    )
    weights = [_weight(target, path, _leaf(own), specs[path]) for path, own in local.items()]
    pages = Argument(shape, BF16, PAGES_SPEC if mesh else WHOLE)
    buffer = Argument((config.shape.packing(bucket).size,), jnp.int32)
    slots = (config.max_sequences, target.stored_vocab_size)
    by_token = VOCABULARY_SPEC if mesh else WHOLE
    state = [
        *(Argument(slots, dtype, by_token) for dtype in (jnp.int32, F32)),
        Argument((config.max_sequences, config.max_depth + 1), jnp.int32),
        Argument((config.max_sequences,), jnp.int32),
    ]
    return Step(
        call=Call(
            function=run,
            arguments=[pages, *state, buffer, *weights],
            donate=(0, 1, 2, 3, 4),
        ),
        weights=_large(list(local.values())),
        pages_bytes=_nbytes(shape) // target.num_shards,
        vocab_size=target.local_vocab_size,
        # The chip's share of the logits in float32, several times over: as they are, adjusted,
        # scaled, perturbed. Compiled for four v5e, all else of the step included: 5.0 times for
        # Llama-3.1-8B, 7.0 for Qwen3-8B, of which the compiler keeps copies.
        temp_limit_bytes=_nbytes(shape) // target.num_shards // 8
        + 7 * 4 * rows * target.local_vocab_size,
    )


def head_of(target: TargetConfig) -> HeadConfig:
    """An EAGLE-3 head as published ones are: one layer of the target's own sizes."""
    return HeadConfig(
        layout="prove",
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        num_states=3,
        feature_kind=FeatureKind.AUX,
        boundaries=target.boundaries,
        has_fc=True,
        fc_bias=False,
        fuse_norm=FuseNorm.NONE,
        embedding_layers=(True,),
        windows=(None,),
        attention=target.attention,
        mlp_size=target.mlp_size,
        mlp_bias=False,
        norm_eps=target.norm_eps,
        norm_before_residual=False,
        norm_output=False,
        rope=target.rope,
        draft_vocab_size=min(DRAFT_VOCAB, target.vocab_size),
        target_vocab_size=target.vocab_size,
        embedding_source=TableSource.TARGET,
        lm_head_source=TableSource.HEAD,
        dtype=BF16,
    )


def _leaf(shape: tuple[int, ...], dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def _head_leaves(head: HeadConfig, int8: bool) -> Params:
    """A chip's part of each parameter but the ids of the draft vocabulary, as the engine lays it
    out on a TPU (draft_service/scoring.py)."""
    vocabulary, size = head.local_draft_vocab_size, head.hidden_size
    params = {
        **head_shapes(head),
        "embedding": _leaf((head.local_target_vocab_size, size)),
        "lm_head": _leaf((vocabulary, size)),
        "draft_to_target": _leaf((vocabulary,), jnp.int32),
    }
    leaves = jax.eval_shape(quantise, params) if int8 else params
    kept = {
        name: leaf for name, leaf in leaves.items() if name not in ("lm_head", "draft_to_target")
    }
    turned = _leaf((size, vocabulary), leaves["lm_head"].dtype)
    return {**kept, "lm_head_turned": turned}


def draft(
    served: Served,
    chip: Chip,
    mesh: Mesh | None = None,
    *,
    ahead: AheadShape | None = None,
    int8: bool = False,
) -> Step:
    """The draft engine's drafting step: up to eight new pairs a sequence, all depths, the tree;
    split over `mesh` if it is there; of trees `ahead` if they are asked for; `int8`: with matrices
    in 8 bits.
    """
    head = head_of(dataclasses.replace(served.target, num_shards=1))
    head = head.with_shards(mesh.size) if mesh else head
    config = DraftConfig(
        num_pages=served.num_pages,
        page_size=served.page_size,
        max_context_len=8192,
        tree=TreeShape(max_nodes=served.nodes),
        ahead=ahead,
        max_sequences=served.sequences,
        min_rows=8,
        backend=Backend.PALLAS,
        chip=chip,
    )
    engine = object.__new__(DraftEngine)  # without its pages: nothing is allocated here
    engine.head, engine.config = head, config
    engine._feature_dtype = np.dtype(BF16)
    engine._feature_words = num_words(head.feature_size, BF16)
    rows = served.sequences * config.max_draft_rows
    bucket = DraftBucket(served.sequences, rows, True, ahead=ahead is not None)
    leaves = dict(flatten(_head_leaves(head, int8)))
    local = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
    specs = {path: parameter_spec(path) if mesh else WHOLE_SPEC for path in local}
    inputs = ({**unflatten(dict(specs)), "draft_to_target": WHOLE_SPEC}, PAGES_SPEC, WHOLE_SPEC)
    step: Any = split_over(mesh, engine._make_step(bucket), inputs, (PAGES_SPEC, WHOLE_SPEC))

    def run(pages: Any, buffer: Any, to_target: Any, *leaves: Any) -> Any:
        params = unflatten(dict(zip(local, leaves, strict=True)))
        with reading_int8():
            return step({**params, "draft_to_target": to_target}, pages, buffer)

    shape = pages_shape(
        num_layers=1,
        num_pages=served.num_pages,
        kv_heads=head.stored_kv_heads,
        page_size=served.page_size,
        head_dim=head.attention.head_dim,
    )
    size = engine._packing(bucket).size
    return Step(
        call=Call(
            function=run,
            arguments=[
                Argument(shape, BF16, PAGES_SPEC if mesh else WHOLE),
                Argument((size,), jnp.int32),
                Argument((head.draft_vocab_size,), jnp.int32),
                *[_weight(head, path, leaf, specs[path]) for path, leaf in leaves.items()],
            ],
            donate=(0,),
        ),
        weights=_large(list(local.values())),
        pages_bytes=_nbytes(shape) // head.num_shards,
        vocab_size=head.local_draft_vocab_size,
        temp_limit_bytes=_nbytes(shape) // head.num_shards // 8,
        int8_weights=_large([tuple(x.shape) for x in leaves.values() if x.dtype == jnp.int8]),
    )
