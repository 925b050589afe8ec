"""`canopy head check`: how much of a head's trees the target accepts, and which reading of its
captured layers accepts most.

A head fed from the wrong layers still drafts; only acceptance falls. Files often do not say which
layers are meant (facts: ids are read as boundaries by some and as outputs by others). So each
reading is measured on the same answers of the target itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from common.types import TreeShape
from draft_service.training.generate import Chat, respond
from draft_service.training.replay import (
    Answer,
    acceptance_length,
    make_engine,
    padded,
    per_depth,
    replay,
)
from draft_service.training.target_states import make_target_states
from models.config import TargetConfig
from models.eagle3 import FeatureKind, HeadConfig, HeadOverrides, load_head
from models.layers import Params
from models.target import load_target

COLUMNS = 64
"""Answers are padded to a multiple of it for the target's pass."""

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """What `canopy head check` is asked for. `boundaries`: what the services are told, if so."""

    model: Path
    head: Path
    prompts: Path
    limit: int = 8
    max_tokens: int = 64
    max_prompt_tokens: int = 320
    temperature: float = 0.0
    seed: int = 0
    tree: TreeShape = field(default_factory=lambda: TreeShape(max_depth=5, top_k=4, max_nodes=16))
    boundaries: tuple[int, ...] | None = None
    all_readings: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """One choice of captured boundaries and what came of it."""

    name: str
    boundaries: tuple[int, ...]
    rounds: int
    acceptance_length: float | None
    per_depth: list[float]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The first reading is the one that the services take from the head's files."""

    answers: int
    response_tokens: int
    temperature: float
    tree: TreeShape
    readings: tuple[Reading, ...]

    @property
    def best(self) -> Reading:
        return max(self.readings, key=lambda r: r.acceptance_length or 0.0)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "best": asdict(self.best)}

    def as_text(self) -> str:
        """Lines to read: one a reading, then what to do where another one accepts more."""
        shape = self.tree
        lines = [
            f"{self.answers} answers, {self.response_tokens} tokens, temperature"
            f" {self.temperature:g}; trees of {shape.max_nodes} nodes, depth {shape.max_depth},"
            f" top_k {shape.top_k}"
        ]
        width = max(len(reading.name) for reading in self.readings)
        for reading in self.readings:
            where = ",".join(map(str, reading.boundaries)) or "last state"
            lines.append(
                f"  {reading.name:<{width}}  boundaries {where}: acceptance length"
                f" {reading.acceptance_length} over {reading.rounds} rounds"
            )
        if self.best is not self.readings[0]:
            where = ",".join(map(str, self.best.boundaries))
            lines.append(
                f"another reading accepts more: start verify and draft with --boundaries {where}"
            )
        return "\n".join(lines)


def check_head(settings: CheckSettings, report: Report) -> CheckReport:
    """Measures. Raises ModelError, ValueError and OSError, each naming field and remedy."""
    overrides = HeadOverrides(boundaries=settings.boundaries)
    head, params = load_head(settings.head, settings.model, overrides=overrides)
    readings = list(readings_of(head, _num_layers(settings.model), settings.all_readings))
    wanted = tuple(sorted({b for _, boundaries in readings for b in boundaries}))
    target, target_params = load_target(settings.model, boundaries=wanted)
    answers = _answers(settings, target, target_params, report)
    context = max(len(answer.tokens) for answer in answers) + settings.tree.max_depth + 1
    engine = make_engine(head, params, settings.tree, context)
    states = make_target_states(target, target_params)
    emitted: list[list[int]] = [[] for _ in readings]
    for number, answer in enumerate(answers, 1):
        features, hidden = (
            rows[0, : len(answer.tokens)] for rows in states(padded(answer.tokens, COLUMNS))
        )
        for (_, boundaries), rounds in zip(readings, emitted, strict=True):
            rounds += replay(engine, answer, _fed(head, wanted, boundaries, features, hidden))
        report(f"{number} of {len(answers)}: {acceptance_length(emitted[0])} so far")
    return CheckReport(
        answers=len(answers),
        response_tokens=sum(len(answer.response) for answer in answers),
        temperature=settings.temperature,
        tree=settings.tree,
        readings=tuple(
            Reading(
                name,
                boundaries,
                len(rounds),
                acceptance_length(rounds),
                per_depth(rounds, settings.tree.max_depth),
            )
            for (name, boundaries), rounds in zip(readings, emitted, strict=True)
        ),
    )


def _num_layers(model: Path) -> int:
    from models.target_tables import read_target_facts

    return read_target_facts(model).num_layers


def readings_of(
    head: HeadConfig, num_layers: int, all_readings: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, boundaries): the one that is served first; its neighbours if the files are unsure."""
    choice = next((c for c in head.provenance if c.field == "boundaries"), None)
    yield "as served", head.boundaries
    if head.feature_kind is FeatureKind.LAST or choice is None:
        return
    if choice.assumed or all_readings:
        for name, shift in (("one layer earlier", -1), ("one layer later", 1)):
            shifted = tuple(b + shift for b in head.boundaries)
            if shifted[0] >= 0 and shifted[-1] <= num_layers:
                yield name, shifted


def _fed(
    head: HeadConfig,
    captured: tuple[int, ...],
    boundaries: tuple[int, ...],
    features: Any,
    hidden: Any,
) -> Any:
    """float32 [T, F]: the columns of `boundaries` out of those of all `captured` ones."""
    if head.feature_kind is FeatureKind.LAST:
        return np.asarray(hidden, head.dtype)
    size = head.target_hidden_size
    parts = [features[:, (i := captured.index(b)) * size : (i + 1) * size] for b in boundaries]
    return np.ascontiguousarray(np.concatenate(parts, axis=1), head.dtype)


def _answers(
    settings: CheckSettings, target: TargetConfig, params: Params, report: Report
) -> list[Answer]:
    """Answers that the file brings, else the target's own. Raises ValueError naming the row."""
    answers: list[Answer] = []
    chat: Chat | None = None
    unanswered: list[list[int]] = []
    for number, line in enumerate(settings.prompts.read_text().splitlines(), 1):
        if len(answers) + len(unanswered) == settings.limit:
            break
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise ValueError(f"prompts: {settings.prompts}:{number} is not JSON") from None
        if row.get("prompt_ids") and row.get("response_ids"):
            if float(row.get("temperature", 0.0)) == settings.temperature:
                answers.append(Answer(list(row["prompt_ids"]), list(row["response_ids"])))
            continue
        text = row["turns"][0] if row.get("turns") else row.get("prompt")
        if not isinstance(text, str):
            raise ValueError(
                f"prompts: {settings.prompts}:{number} has neither prompt, turns nor prompt_ids"
                " with response_ids"
            )
        chat = chat or Chat(settings.model)
        ids = chat.ids(text)
        if len(ids) <= settings.max_prompt_tokens:
            unanswered.append(ids)
    if unanswered:
        report(f"the target answers {len(unanswered)} prompts")
        key = jax.random.key(settings.seed)
        responses = respond(
            target, params, unanswered, key, settings.max_tokens, settings.temperature
        )
        answers += [Answer(ids, own) for ids, own in zip(unanswered, responses, strict=True)]
    answers = [answer for answer in answers if len(answer.response) > 1]
    if not answers:
        raise ValueError(
            f"prompts: {settings.prompts} gives no answer of two tokens or more at temperature"
            f" {settings.temperature:g} to a prompt of at most {settings.max_prompt_tokens} tokens"
        )
    return answers
