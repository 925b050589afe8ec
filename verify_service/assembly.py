"""Puts the engine together from settings: model, boundaries, sizes. Loads, compiles and measures.

Everything here blocks and runs on a thread before the service says SERVING.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from common.errors import StartupError
from common.group.leader import Leader
from common.log import get_logger
from common.tensors import FeatureDtype
from common.types import Drafting
from kernels.backend import backend_for_platform
from kernels.chips import chip_by_name
from models.checkpoint import TensorEntry
from models.config import TargetConfig
from models.device import set_up_jax
from models.eagle3.description import FeatureKind, HeadConfig, HeadOverrides
from models.eagle3.fusing import FusingHead, load_fusing_head
from models.eagle3.loader import open_head
from models.errors import of_setting
from models.hub import resolve_model
from models.identity import Identity, target_identity
from models.sharding import model_mesh
from models.target import load_target
from models.target_tables import read_target_facts
from verify_service import step_curve
from verify_service.budget import TreeBudget
from verify_service.config import VerifyConfig
from verify_service.draft_gate import DraftGate, FixedWay
from verify_service.engine import DeviceEngine, EngineConfig
from verify_service.info import VerifyInfo
from verify_service.limits import VerifyLimits
from verify_service.prefill_pace import PrefillPace
from verify_service.step import StepPoint
from verify_service.step_cost import StepCurve

_logger = get_logger("verify.assembly")


@dataclass(frozen=True, slots=True)
class Assembly:
    engine: DeviceEngine
    limits: VerifyLimits
    info: VerifyInfo
    budget: TreeBudget | None
    gate: DraftGate | FixedWay
    pace: PrefillPace | None


LAYERS_PER_PROGRAM = 3
"""On a CPU; ten dispatches a step for SmolLM2. See verify_service/program.py."""


def assemble(config: VerifyConfig, group: Leader | None) -> Assembly:
    """The warm engine and what is said of it. Raises StartupError with one line."""
    engine, identity = build_engine(config, group)
    if group is not None:
        group.await_ready(facts_of(engine, identity))
    # Whatever the tree budget: who asks for GetVerifyInfo, as for sizing, is told of them.
    step_times = step_curve.measure(engine)
    for point in step_times:
        _logger.info("step time", **asdict(point))
    limits, info = _limits(config, engine), _info(config, engine, identity, step_times)
    curve = StepCurve.of(step_times)
    return Assembly(
        engine, limits, info, _budget(config, curve), _gate(config), _pace(config, curve)
    )


def facts_of(engine: DeviceEngine, identity: Identity) -> dict[str, Any]:
    """What the hosts of a slice must agree on, beside their settings."""
    return identity.as_dict() | {
        "boundaries": list(engine.target.boundaries),
        "fused_by": _fused_by(engine),
    }


def build_engine(
    config: VerifyConfig, group: Leader | None = None
) -> tuple[DeviceEngine, Identity]:
    """The engine, its programs compiled, on any host of a slice. Raises StartupError."""
    set_up_jax(config)
    with of_setting("model"):
        config = config.model_copy(update={"model": resolve_model(config.model)})
        identity = target_identity(config.model)
    with of_setting("head"):
        head = _open_head(config)
    with of_setting("tensor_parallel"):
        mesh = model_mesh(config.tensor_parallel) if config.tensor_parallel > 1 else None
    fusing = None
    if head is not None and config.features == "fused":
        with of_setting("head"):
            fusing = load_fusing_head(*head, mesh)
    with of_setting("model"):
        begun = time.monotonic()
        target, params = load_target(
            config.model,
            dtype=jnp.dtype(config.dtype),
            boundaries=config.boundaries or (None if head is None else head[0].boundaries),
            progress=_report_loading,
            mesh=mesh,
        )
    _logger.info(
        "target loaded",
        model=identity.model_name,
        seconds=round(time.monotonic() - begun, 2),
        boundaries=list(target.boundaries),
        features=config.features,
    )
    engine = _engine(config, target, params, mesh, group, fusing)
    begun = time.monotonic()
    engine.warm_up()
    _logger.info("warm", seconds=round(time.monotonic() - begun, 2))
    return engine, identity


def _open_head(config: VerifyConfig) -> tuple[HeadConfig, Mapping[str, TensorEntry]] | None:
    """The head that says which boundaries to capture, or fuses them; None where none is needed."""
    if config.head is None or (config.boundaries and config.features == "captured"):
        return None
    facts = read_target_facts(config.model)
    overrides = HeadOverrides(boundaries=config.boundaries or None)
    head, tensors = open_head(config.head, facts, overrides, jnp.dtype(config.dtype))
    if head.feature_kind is not FeatureKind.AUX:
        raise StartupError(
            f"head: {config.head} needs features of kind {head.feature_kind.value}; verify sends"
            " aux features only"
        )
    return head, tensors


def _report_loading(placed: int, total: int) -> None:
    """A line at each tenth of the parameters."""
    if placed * 10 // total != (placed - 1) * 10 // total:
        _logger.info("loading", placed=placed, total=total)


def _engine(
    config: VerifyConfig,
    target: TargetConfig,
    params: dict[str, object],
    mesh: Mesh | None,
    group: Leader | None,
    fusing: FusingHead | None,
) -> DeviceEngine:
    try:
        chip = chip_by_name(config.chip) if config.chip else None
    except ValueError as error:
        raise StartupError(str(error)) from error
    try:
        return DeviceEngine(
            target,
            params,
            EngineConfig(
                num_pages=config.num_pages,
                page_size=config.page_size_tokens,
                max_sequences=config.max_sequences,
                max_context_len=_context(config, target),
                max_tree_nodes=config.max_tree_nodes,
                max_depth=config.max_tree_depth,
                max_ahead_nodes=config.max_ahead_nodes,
                row_buckets=config.row_buckets,
                max_rows=config.max_step_tokens,
                min_rows=8 if config.platform == "tpu" else 1,
                layers_per_program=LAYERS_PER_PROGRAM if config.platform == "cpu" else None,
                backend=backend_for_platform(config.platform),
                chip=chip,
            ),
            mesh,
            group,
            fusing,
        )
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise StartupError(
            f"kv_pool_tokens: {config.kv_pool_tokens} tokens of KV do not fit the device"
            f" ({reason}); lower it"
        ) from error


def _context(config: VerifyConfig, target: TargetConfig) -> int:
    return min(config.max_context_tokens, target.max_positions)


def _limits(config: VerifyConfig, engine: DeviceEngine) -> VerifyLimits:
    return VerifyLimits(
        vocab_size=engine.target.vocab_size,
        max_context_len=engine.config.max_context_len,
        max_tree_nodes=config.max_tree_nodes,
        max_tree_depth=config.max_tree_depth,
        max_sequences=config.max_sequences,
        max_waiting_sequences=config.max_waiting_sequences,
        page_size=config.page_size_tokens,
        num_pages=config.num_pages,
        max_step_tokens=config.max_step_tokens,
        max_prefill_tokens=config.max_prefill_tokens,
        max_stop_tokens=engine.config.max_stop_tokens,
        max_ahead_nodes=config.max_ahead_nodes,
        feature_window_tokens=config.feature_window_tokens,
        prefix_cache=config.prefix_cache,
        cached_feature_tokens=config.cached_feature_tokens,
        grace_seconds=config.grace_seconds,
        pause_seconds=config.pause_seconds,
    )


def _budget(config: VerifyConfig, curve: StepCurve) -> TreeBudget | None:
    if config.tree_budget == "full":
        return None
    return TreeBudget(curve, config.max_tree_depth)


def _pace(config: VerifyConfig, curve: StepCurve) -> PrefillPace | None:
    if not config.max_prefill_slowdown:
        return None
    return PrefillPace(curve, config.max_prefill_slowdown)


def _gate(config: VerifyConfig) -> DraftGate | FixedWay:
    if config.drafting != "auto":
        return FixedWay(Drafting[config.drafting.upper()])
    return FixedWay() if config.waits_for_trees else DraftGate()


def _fused_by(engine: DeviceEngine) -> str:
    return "" if engine.fusing is None else engine.fusing.hash


def _info(
    config: VerifyConfig,
    engine: DeviceEngine,
    identity: Identity,
    step_times: tuple[StepPoint, ...],
) -> VerifyInfo:
    target = engine.target
    return VerifyInfo(
        identity=identity.as_dict(),
        boundaries=target.boundaries,
        feature_dtype=FeatureDtype.of(target.dtype),
        row_width=engine.row_width,
        fused_by=_fused_by(engine),
        max_context_len=engine.config.max_context_len,
        max_tree_nodes=config.max_tree_nodes,
        max_sequences=config.max_sequences,
        page_size_tokens=config.page_size_tokens,
        num_pages=config.num_pages,
        step_times=step_times,
    )
