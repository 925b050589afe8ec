"""Puts the engine together from settings: head, the target's tables, sizes. Loads and compiles.

Everything here blocks and runs on a thread before the service says SERVING.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from common.errors import StartupError
from common.group.leader import Leader
from common.log import get_logger
from common.tensors import FeatureDtype
from common.types import TreeShape
from draft_service.config import DraftConfig
from draft_service.engine import AheadShape, DeviceEngine, EngineConfig
from draft_service.info import DraftInfo
from draft_service.int8 import quantise
from draft_service.levels import LevelSeconds
from draft_service.limits import DraftLimits
from kernels.backend import backend_for_platform
from kernels.chips import chip_by_name
from kernels.cpu_matmul.api import is_available
from models.checkpoint import open_checkpoint
from models.device import set_up_jax
from models.eagle3 import AuxReading, FeatureKind, HeadConfig, HeadOverrides, load_head
from models.eagle3.fusing import FUSE, fusing_hash_of
from models.errors import of_setting
from models.identity import Identity, target_identity, weights_hash
from models.sharding import model_mesh
from models.target_tables import BUNDLE_FILE

_logger = get_logger("draft.assembly")


@dataclass(frozen=True, slots=True)
class Assembly:
    engine: DeviceEngine
    limits: DraftLimits
    info: DraftInfo


def assemble(config: DraftConfig, group: Leader | None) -> Assembly:
    """The warm engine and what is said of it. Raises StartupError with one line."""
    engine, identity = build_engine(config, group)
    if group is not None:
        group.await_ready(facts_of(config, engine, identity))
    engine.run_each_once()
    return Assembly(engine, _limits(config, engine), _info(config, engine, identity))


def facts_of(config: DraftConfig, engine: DeviceEngine, identity: Identity) -> dict[str, Any]:
    """What the hosts of a slice must agree on, beside their settings."""
    return identity.as_dict() | {
        "boundaries": list(engine.head.boundaries),
        "head_hash": weights_hash(open_checkpoint(config.head).entries),
    }


def build_engine(config: DraftConfig, group: Leader | None = None) -> tuple[DeviceEngine, Identity]:
    """The engine, its programs compiled, on any host of a slice. Raises StartupError."""
    set_up_jax(config)
    begun = time.monotonic()
    if config.target is None and not (config.head / BUNDLE_FILE).exists():
        raise StartupError(
            f"target: not set, and {config.head} is no bundle of `canopy head bundle`; set --target"
            " to the target's directory"
        )
    with of_setting("tensor_parallel"):
        mesh = model_mesh(config.tensor_parallel) if config.tensor_parallel > 1 else None
    with of_setting("head" if config.target is None else "target"):
        identity = target_identity(config.target_directory)
    with of_setting("head"):
        head, params = load_head(
            config.head,
            config.target_directory,
            dtype=jnp.dtype(config.dtype),
            overrides=_overrides(config),
            mesh=mesh,
        )
    if config.features == "fused":
        _check_fusable(config, head)
        del params[FUSE]  # verify has it
    head = with_window(head, config.attention_window_tokens)
    int8 = in_int8(config)
    if int8:
        params = quantise(params, mesh)
    for choice in head.provenance:
        _logger.info(
            "head setting",
            field=choice.field, value=choice.value, source=choice.source, assumed=choice.assumed,
        )  # fmt: skip
    seconds = round(time.monotonic() - begun, 2)
    _logger.info("head loaded", seconds=seconds, weights="int8" if int8 else "native")
    engine = _engine(config, head, params, mesh, group)
    begun = time.monotonic()
    engine.warm_up()
    _logger.info("warm", seconds=round(time.monotonic() - begun, 2))
    return engine, identity


def _check_fusable(config: DraftConfig, head: HeadConfig) -> None:
    if head.feature_kind is not FeatureKind.AUX:
        raise StartupError(
            f"features: fused, but {config.head} takes the target's last hidden state, which is"
            " not fused; set features to captured"
        )


def in_int8(config: DraftConfig) -> bool:
    """Whether the head's matrices are kept in 8 bits. XLA widens them within the product on a TPU;
    on a CPU it does so in front of it, and only our own product gains.
    """
    if config.weights != "auto":
        return config.weights == "int8"
    if config.platform == "cpu":
        return config.dtype == "float32" and config.tensor_parallel == 1 and is_available()
    return config.platform == "tpu"


def with_window(head: HeadConfig, num_tokens: int) -> HeadConfig:
    """The head seeing at most so many tokens back in every layer; 0: as it is."""
    if not num_tokens:
        return head
    windows = tuple(min(own or num_tokens, num_tokens) for own in head.windows)
    return replace(head, windows=windows)


def _overrides(config: DraftConfig) -> HeadOverrides:
    return HeadOverrides(
        boundaries=config.boundaries or None,
        aux_reading=AuxReading(config.aux_reading) if config.aux_reading else None,
    )


def _engine(
    config: DraftConfig,
    head: HeadConfig,
    params: dict[str, Any],
    mesh: Mesh | None,
    group: Leader | None,
) -> DeviceEngine:
    try:
        return DeviceEngine(
            head,
            params,
            EngineConfig(
                num_pages=config.num_pages,
                page_size=config.page_size_tokens,
                max_context_len=config.max_context_tokens,
                tree=config.tree,
                fused_features=config.features == "fused",
                ahead=_ahead(config) if config.draft_ahead else None,
                max_sequences=config.max_step_sequences,
                max_draft_rows=config.max_draft_tokens,
                max_extend_rows=config.max_extend_tokens,
                min_rows=8 if config.platform == "tpu" else 1,
                backend=backend_for_platform(config.platform),
                chip=chip_by_name(config.chip) if config.chip else None,
            ),
            mesh=mesh,
            group=group,
        )
    except ValueError as error:
        raise StartupError(str(error)) from error


def _ahead(config: DraftConfig) -> AheadShape:
    return AheadShape(
        max_depth=config.ahead_depth,
        max_nodes=config.ahead_nodes,
        top_k=config.ahead_top_k,
        max_rows=config.ahead_rows,
    )


def _level_seconds(config: DraftConfig, engine: DeviceEngine, *, ahead: bool) -> LevelSeconds:
    if config.levels == "all":
        return ()
    found = engine.measure_levels(ahead)
    for num_sequences, seconds in found:
        _logger.info(
            "level time", num_sequences=num_sequences, seconds=round(seconds, 6), ahead=ahead
        )
    return found


def _most_ahead(config: DraftConfig) -> TreeShape:
    """What may be sent of them; children are as many as the engine grows."""
    unbounded = TreeShape.unbounded()
    return replace(unbounded, max_depth=config.ahead_depth, max_nodes=config.ahead_nodes)


def _limits(config: DraftConfig, engine: DeviceEngine) -> DraftLimits:
    return DraftLimits(
        level_seconds=_level_seconds(config, engine, ahead=False),
        ahead=_most_ahead(config) if config.draft_ahead else None,
        ahead_level_seconds=_level_seconds(config, engine, ahead=True),
        vocab_size=engine.head.target_vocab_size,
        feature_size=engine.row_width,
        max_context_len=config.max_context_tokens,
        tree=config.tree,
        max_sequences=config.max_sequences,
        page_size=config.page_size_tokens,
        num_pages=config.num_pages,
        max_step_sequences=config.max_step_sequences,
        max_draft_rows=config.max_draft_tokens,
        max_extend_rows=config.max_extend_tokens,
        shared_noise=config.shared_noise,
        recent_rows=config.recent_feature_rows,
        max_waiting_bytes=config.feature_memory_bytes,
        prefix_cache=config.prefix_cache,
        grace_seconds=config.grace_seconds,
    )


def _info(config: DraftConfig, engine: DeviceEngine, identity: Identity) -> DraftInfo:
    head = engine.head
    return DraftInfo(
        head_name=config.head.resolve().name,
        target=identity.as_dict(),
        feature_kind=head.feature_kind.value,
        boundaries=head.boundaries,
        feature_dtype=FeatureDtype.of(head.dtype),
        row_width=engine.row_width,
        fused_by=fusing_hash_of(config.head, head) if config.features == "fused" else "",
        max_context_len=config.max_context_tokens,
        max_tree=config.tree,
        max_sequences=config.max_sequences,
        draft_ahead=config.draft_ahead,
    )
