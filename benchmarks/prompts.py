"""Prompts for the benchmarks: JSON lines with `turns` or `messages`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from canopy.results import Message
from common.errors import StartupError

_PARITY = Path(__file__).resolve().parents[1] / "tests" / "parity"
GOLDENS = _PARITY / "goldens" / "smollm2_greedy.jsonl"
"""Answers of transformers in float32; `tests/parity/make_smollm2_goldens.py` made them."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat to be answered. `golden`: the answer's token ids by another implementation."""

    messages: tuple[Message, ...]
    golden: tuple[int, ...] = ()
    golden_margins: tuple[float, ...] = ()


def read_conversations(path: Path, limit: int | None = None) -> list[Conversation]:
    """The first `limit` lines. Of `turns` only the first is used: the later ones need answers.

    Raises StartupError naming the line that is neither.
    """
    if limit is not None and limit < 1:
        raise StartupError(f"limit: {limit} leaves no prompt; ask for at least 1")
    if not path.is_file():
        raise StartupError(f"prompts: no file {path}; give JSON lines with `turns`")
    conversations: list[Conversation] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if len(conversations) == limit:
            break
        if not line.strip():
            continue
        try:
            conversations.append(_conversation(json.loads(line)))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise StartupError(
                f"prompts: {path}:{number} has no `turns` or `messages` ({error!r})"
            ) from None
    if not conversations:
        raise StartupError(f"prompts: {path} is empty; give JSON lines with `turns`")
    return conversations


def _conversation(entry: dict[str, object]) -> Conversation:
    if "turns" in entry:
        turns = entry["turns"]
        assert isinstance(turns, list)
        return Conversation((Message("user", str(turns[0])),))
    messages = entry["messages"]
    assert isinstance(messages, list)
    return Conversation(
        tuple(Message(turn["role"], turn["content"]) for turn in messages),
        golden=tuple(entry.get("response_ids", ())),  # type: ignore[arg-type]
        golden_margins=tuple(entry.get("margins", ())),  # type: ignore[arg-type]
    )
