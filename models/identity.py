"""Who a target is: enough to tell that two services hold the same one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models.checkpoint import FETCH_AGAIN, TensorEntry, open_checkpoint, read_json
from models.errors import CheckpointError
from models.target_tables import BUNDLE_FILE, read_target_facts

_SAMPLE_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Fields as in canopy.v1.TargetIdentity. Hashes are hex SHA-256."""

    model_name: str
    vocab_size: int  # tokens of the tokenizer
    padded_vocab_size: int  # rows of the embedding
    tokenizer_hash: str
    hidden_size: int
    weights_hash: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def target_identity(directory: str | Path) -> Identity:
    """Of a target's directory, or of the target that a bundle was made from.

    Reads tokenizer.json and a few bytes of each tensor. Raises ModelError.
    """
    directory = Path(directory)
    if (directory / BUNDLE_FILE).exists():
        return _bundled_identity(directory / BUNDLE_FILE)
    facts = read_target_facts(directory)
    return Identity(
        model_name=_model_name(directory),
        vocab_size=tokenizer_size(directory / "tokenizer.json"),
        padded_vocab_size=facts.vocab_size,
        tokenizer_hash=hashlib.sha256(_read(directory / "tokenizer.json")).hexdigest(),
        hidden_size=facts.hidden_size,
        weights_hash=weights_hash(open_checkpoint(directory).entries),
    )


def _model_name(directory: Path) -> str:
    """The directory's own name; of a snapshot in the hub's cache, the model's."""
    directory = directory.absolute()
    if directory.parent.name == "snapshots" and directory.parent.parent.name.startswith("models--"):
        return directory.parent.parent.name.split("--")[-1]
    return directory.resolve().name


def weights_hash(entries: Mapping[str, TensorEntry]) -> str:
    """Over names, dtypes, shapes, and the first and middle bytes of each tensor.

    A fine-tuned copy differs in nearly every tensor, so samples tell it apart at the cost of a few
    pages of reading. The same tensors in other files have the same hash.
    """
    digest = hashlib.sha256()
    for name in sorted(entries):
        entry = entries[name]
        digest.update(f"{name} {entry.dtype} {entry.shape}\n".encode())
        try:
            with entry.file.open("rb") as stream:
                for offset in (0, entry.size_bytes // 2):
                    stream.seek(entry.offset + offset)
                    digest.update(stream.read(min(_SAMPLE_BYTES, entry.size_bytes - offset)))
        except OSError as error:
            raise CheckpointError(
                f"{entry.file}: cannot be read ({error}); {FETCH_AGAIN}"
            ) from error
    return digest.hexdigest()


def tokenizer_size(path: Path) -> int:
    """Tokens in a tokenizer.json, added ones included: highest id + 1."""
    try:
        raw = json.loads(_read(path))
        vocabulary, added = raw["model"]["vocab"], raw.get("added_tokens") or []
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else range(len(vocabulary))
        return int(max([*ids, *(int(token["id"]) for token in added)])) + 1
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: is not a tokenizer ({error}); {FETCH_AGAIN}") from error


def _bundled_identity(path: Path) -> Identity:
    try:
        return Identity(**read_json(path)["target"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: names no target; make the bundle again") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); {FETCH_AGAIN}") from error
