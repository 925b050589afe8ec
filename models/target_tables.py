"""What a head needs of its target: sizes, the embedding, sometimes the lm_head.

Nothing else is read. The place is the target's own directory, or a bundle (eagle3/bundle.py), which
carries just these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.checkpoint import Checkpoint, HostArray, open_checkpoint, read_json
from models.config import positive_int
from models.errors import CheckpointError

BUNDLE_FILE = "canopy_bundle.json"
BUNDLED_TARGET = "target"

EMBEDDING_NAMES = ("model.embed_tokens.weight", "language_model.model.embed_tokens.weight")
LM_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """A target's sizes, from its config.json alone."""

    directory: Path
    num_layers: int
    hidden_size: int
    vocab_size: int
    tied_embeddings: bool


def target_root(directory: Path) -> Path:
    """Where the target's files lie: the directory itself, or its part of a bundle."""
    return directory / BUNDLED_TARGET if (directory / BUNDLE_FILE).exists() else directory


def read_target_facts(directory: Path) -> TargetFacts:
    """Of any decoder, also one whose architecture verify cannot run. Raises ModelError."""
    directory = target_root(directory)
    where = directory / "config.json"
    raw: Mapping[str, Any] = read_json(where)
    raw = raw.get("text_config") or raw  # models that also see or hear
    return TargetFacts(
        directory=directory,
        num_layers=positive_int(raw, "num_hidden_layers", where),
        hidden_size=positive_int(raw, "hidden_size", where),
        vocab_size=positive_int(raw, "vocab_size", where),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )


def embedding_name(checkpoint: Checkpoint) -> str:
    return _first_present(checkpoint, EMBEDDING_NAMES)


def output_table_name(facts: TargetFacts, checkpoint: Checkpoint) -> str:
    """The lm_head's name; the embedding's where they are tied."""
    return _first_present(checkpoint, EMBEDDING_NAMES if facts.tied_embeddings else LM_HEAD_NAMES)


def read_embedding(facts: TargetFacts) -> HostArray:
    """[V, Ht] in the stored dtype. Raises CheckpointError."""
    checkpoint = open_checkpoint(facts.directory)
    return checkpoint.read(embedding_name(checkpoint), (facts.vocab_size, facts.hidden_size))


def read_output_table(facts: TargetFacts) -> HostArray:
    """[V, Ht], the rows that score tokens, in the stored dtype. Raises CheckpointError."""
    checkpoint = open_checkpoint(facts.directory)
    name = output_table_name(facts, checkpoint)
    return checkpoint.read(name, (facts.vocab_size, facts.hidden_size))


def _first_present(checkpoint: Checkpoint, names: tuple[str, ...]) -> str:
    for name in names:
        if name in checkpoint:
            return name
    raise CheckpointError(
        f"{checkpoint.where}: has no tensor {names[0]}; point to the target's own directory, or to"
        " a bundle made for this head"
    )
