"""What a head is fed: how many states of the target, from which boundaries, how fused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from models.config import default_boundaries
from models.eagle3.description import AuxReading, FeatureKind, FuseNorm, HeadOverrides
from models.eagle3.layouts import SPECULATORS
from models.eagle3.notes import Notes
from models.target_tables import TargetFacts

IDS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids")
COUNTS = ("num_aux_hidden_states", "num_capture_layers", "num_aux_layers")
DEFAULT_NUM_STATES = 3


@dataclasses.dataclass(frozen=True, slots=True)
class AuxStates:
    """The part of HeadConfig that concerns the features."""

    target_hidden_size: int
    num_states: int
    feature_kind: FeatureKind
    boundaries: tuple[int, ...]
    has_fc: bool
    fc_bias: bool
    fuse_norm: FuseNorm


def read_aux_states(
    notes: Notes,
    hidden_size: int,
    layout: str,
    facts: TargetFacts | None,
    overrides: HeadOverrides,
) -> AuxStates:
    """Raises ModelError where the files contradict each other or do not fit the target."""
    target_hidden_size = _target_hidden_size(notes, hidden_size, facts)
    has_fc = "fc.weight" in notes.tensors
    kind = FeatureKind.AUX
    uses_aux, source = notes.fields.find("use_aux_hidden_state")
    if uses_aux is False:
        kind = FeatureKind.LAST
        notes.note("feature_kind", kind, source)
    if not has_fc and kind is FeatureKind.AUX:
        notes.shape("fc.weight")  # raises: missing
    num_states = _num_states(notes, hidden_size, target_hidden_size, kind)
    fuse_norm = _fuse_norm(notes, num_states, target_hidden_size)
    boundaries: tuple[int, ...] = ()
    if kind is FeatureKind.AUX:
        boundaries = _boundaries(notes, num_states, layout, facts, overrides)
    return AuxStates(
        target_hidden_size=target_hidden_size,
        num_states=num_states,
        feature_kind=kind,
        boundaries=boundaries,
        has_fc=has_fc,
        fc_bias="fc.bias" in notes.tensors,
        fuse_norm=fuse_norm,
    )


def _target_hidden_size(notes: Notes, hidden_size: int, facts: TargetFacts | None) -> int:
    given, source = notes.fields.find("target_hidden_size")
    if facts is None:
        value = int(given) if given is not None else hidden_size
        notes.note("target_hidden_size", value, source or "the head's own", assumed=given is None)
        return value
    if given is not None and int(given) != facts.hidden_size:
        notes.refuse(
            f"{source} is {given}, but the target {facts.directory} has hidden size"
            f" {facts.hidden_size}; this head was made for another target"
        )
    notes.note("target_hidden_size", facts.hidden_size, f"config.json of {facts.directory}")
    return facts.hidden_size


def _num_states(notes: Notes, hidden_size: int, target_hidden_size: int, kind: FeatureKind) -> int:
    """k = fc.in / Ht, against every count that config and tensors give."""
    if "fc.weight" not in notes.tensors:
        if hidden_size != target_hidden_size:
            notes.refuse(
                f"the head has no fc, yet its hidden size {hidden_size} is not the target's"
                f" {target_hidden_size}; this head was made for another target"
            )
        return 1
    out_size, in_size = notes.shape("fc.weight")
    num_states, rest = divmod(in_size, target_hidden_size)
    if out_size != hidden_size:
        notes.misshapen("fc.weight", f"[{hidden_size}, k·{target_hidden_size}]")
    if rest or num_states == 0:
        notes.refuse(
            f"fc takes {in_size} numbers, which is no multiple of the target's hidden size"
            f" {target_hidden_size}; this head was made for another target"
        )
    notes.note("num_states", num_states, f"shape of fc.weight: {in_size} / {target_hidden_size}")
    if kind is FeatureKind.LAST and num_states != 1:
        notes.refuse(
            f"use_aux_hidden_state is false, but fc takes {num_states} states; config.json and"
            " weights do not belong together"
        )
    ids = notes.fields.get(*IDS)
    if ids is not None and kind is FeatureKind.AUX and len(ids) != num_states:
        notes.refuse(
            f"{len(ids)} aux layer ids {list(ids)} are named, but fc takes {num_states} states of"
            f" {target_hidden_size}"
        )
    notes.agree("num_states", COUNTS, num_states)
    return num_states


def _fuse_norm(notes: Notes, num_states: int, target_hidden_size: int) -> FuseNorm:
    """Told by the tensors; a flag that says otherwise is a contradiction."""
    joint = "input_norm.weight" in notes.tensors
    per_state = [name for name in notes.tensors if name.startswith("fc_norm.")]
    wants_joint, wants_per_state = (notes.fields.get(f) for f in ("norm_before_fc", "fc_norm"))
    if (joint and per_state) or (wants_joint and wants_per_state):
        notes.refuse("norm_before_fc and fc_norm exclude each other, yet the head has both")
    if wants_joint is True or (joint and wants_joint is None):
        if notes.shape("input_norm.weight", 1) != (num_states * target_hidden_size,):
            notes.misshapen("input_norm.weight", f"[{num_states * target_hidden_size}]")
        notes.note("fuse_norm", FuseNorm.JOINT, "tensor input_norm.weight")
        return FuseNorm.JOINT
    if wants_per_state is True or (per_state and wants_per_state is None):
        for i in range(num_states):
            if notes.shape(f"fc_norm.{i}.weight", 1) != (target_hidden_size,):
                notes.misshapen(f"fc_norm.{i}.weight", f"[{target_hidden_size}]")
        notes.note("fuse_norm", FuseNorm.PER_STATE, "tensors fc_norm.<i>.weight")
        return FuseNorm.PER_STATE
    return FuseNorm.NONE


def _boundaries(
    notes: Notes,
    num_states: int,
    layout: str,
    facts: TargetFacts | None,
    overrides: HeadOverrides,
) -> tuple[int, ...]:
    num_layers = facts.num_layers if facts else None
    if overrides.boundaries is not None:
        notes.note("boundaries", list(overrides.boundaries), "override")
        return _checked(notes, overrides.boundaries, num_states, num_layers)
    own = (notes.fields.raw.get("canopy") or {}).get("boundaries")
    if own is not None and overrides.aux_reading is None:
        notes.note("boundaries", list(own), "boundaries in canopy in config.json")
        return _checked(notes, own, num_states, num_layers)
    ids, source = notes.fields.find(*IDS)
    if ids is not None:
        ids = sorted(int(i) for i in ids)  # everybody concatenates in the order of the layers
        reading, why, assumed = _reading(ids, layout, num_layers, overrides)
        shift = 1 if reading is AuxReading.OUTPUTS else 0
        chosen = tuple(i + shift for i in ids)
        notes.note("boundaries", list(chosen), f"{source}, {ids} read as {reading}: {why}", assumed)
        return _checked(notes, chosen, num_states, num_layers)
    if num_states != DEFAULT_NUM_STATES:
        notes.refuse(
            f"the head takes {num_states} states and names no aux layer ids; name the boundaries it"
            " was trained on"
        )
    if num_layers is None:
        notes.note("boundaries", "undecided", "the default needs the target's depth", assumed=True)
        return ()
    chosen = default_boundaries(num_layers)
    notes.note("boundaries", list(chosen), "default of EAGLE-3 {2, n//2, n-3}", assumed=True)
    return chosen


def _reading(
    ids: Sequence[int], layout: str, num_layers: int | None, overrides: HeadOverrides
) -> tuple[AuxReading, str, bool]:
    """(reading, why, assumed): the same ids are served either way by different programs."""
    if overrides.aux_reading is not None:
        return overrides.aux_reading, "override", False
    if num_layers is not None:
        default = [2, num_layers // 2, num_layers - 3]
        if list(ids) == default:
            return AuxReading.BOUNDARIES, "the default boundaries of this target", False
        if list(ids) == [b - 1 for b in default]:
            return AuxReading.OUTPUTS, "the default boundaries of this target, as outputs", False
        if ids[-1] >= num_layers:
            return AuxReading.BOUNDARIES, "no layer has an output of that number", False
    if ids[0] == 0 and layout == SPECULATORS:
        return AuxReading.BOUNDARIES, "id 0 is the embedding's output there", False
    if layout == SPECULATORS:
        return AuxReading.BOUNDARIES, "the habit of this layout", True
    return AuxReading.OUTPUTS, "the habit of this layout", True


def _checked(
    notes: Notes, boundaries: Sequence[int], num_states: int, num_layers: int | None
) -> tuple[int, ...]:
    chosen = tuple(int(b) for b in boundaries)
    if len(chosen) != num_states:
        notes.refuse(f"boundaries {list(chosen)} are not {num_states}, the states that fc takes")
    ascending = list(chosen) == sorted(set(chosen))
    if not ascending or chosen[0] < 0 or (num_layers is not None and chosen[-1] > num_layers):
        limit = "the target's layers" if num_layers is None else str(num_layers)
        notes.refuse(
            f"boundaries {list(chosen)} must ascend within [0, {limit}]; name them yourself, or use"
            " a head made for this target"
        )
    return chosen
