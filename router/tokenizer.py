"""The model's tokenizer, chat template and stop tokens, from its Hugging Face-style directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.errors import StartupError
from router.chat import ChatTemplate, ChatTemplateError
from router.detokenizer import Decoding, Detokenizer

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ModelTokenizer:
    """Text ↔ token ids of one model. Encoding may run on threads; the rest is for one thread.

    `tokenizer_hash`: SHA-256 of tokenizer.json, hex. `stop_token_ids`: where the model ends by
    itself. `longest_token`: characters of the longest one, added ones included. `chat_template`
    None: the model has none.
    """

    def __init__(self, directory: str | Path) -> None:
        """Raises StartupError naming the file that is missing or broken."""
        directory = Path(directory)
        raw = _read_bytes(directory / "tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_buffer(raw)
            decoder = json.loads(raw).get("decoder")
        except Exception as error:  # the library raises bare Exception
            raise _broken(directory / "tokenizer.json", error) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.tokenizer_hash = hashlib.sha256(raw).hexdigest()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = len(vocabulary)
        self.longest_token = max(map(len, vocabulary), default=1)
        self.stop_token_ids = _stop_token_ids(directory)
        self.chat_template = _chat_template(directory)
        self._decoding = Decoding(self._tokenizer, decoder)

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with what the tokenizer adds at its ends (a BOS)."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids up to where the assistant speaks. Raises ChatTemplateError."""
        if self.chat_template is None:
            raise ChatTemplateError("the model has no chat template; send text or token_ids")
        text = self.chat_template.render(messages)
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # `encode` would hold the interpreter's lock all the while, `encode_batch` lets go of it.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def detokenizer(self) -> Detokenizer:
        """A fresh one, for one sequence."""
        return self._decoding.detokenizer()

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of all ids at once, special tokens skipped."""
        return self._decoding.decode(token_ids)

    def token_text(self, token_id: int) -> str:
        """One token by itself, for people to look at; special tokens by their names."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(
            f"model: cannot read {path} ({error.strerror}); --model must be the target's directory"
            " with tokenizer.json and config.json"
        ) from None


def _broken(path: Path, error: Exception) -> StartupError:
    return StartupError(f"model: {path} is broken ({error}); fetch the model's files again")


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_bytes(path))
    except ValueError as error:
        raise _broken(path, error) from None
    if not isinstance(value, dict):
        raise _broken(path, ValueError("not a JSON object"))
    return value


def _stop_token_ids(directory: Path) -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json, which outranks config.json; one id or a list."""
    _read_bytes(directory / "config.json")  # every model has one: without it this is none
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        value = _read_json(path).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(id_, int) and id_ >= 0 for id_ in ids):
            raise _broken(path, ValueError(f"eos_token_id is {value!r}; must be ids"))
        return tuple(dict.fromkeys(ids))
    return ()


def _chat_template(directory: Path) -> ChatTemplate | None:
    config = _read_json(directory / "tokenizer_config.json")
    file = directory / "chat_template.jinja"
    source = _read_bytes(file).decode() if file.exists() else config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not source:
        return None
    named = {name: config.get(name) for name in _SPECIAL_TOKENS}
    special_tokens = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in named.items()
        if token is not None
    }
    try:
        return ChatTemplate(str(source), special_tokens)
    except ChatTemplateError as error:
        raise StartupError(f"model: {error}; fetch the model's files again") from None
