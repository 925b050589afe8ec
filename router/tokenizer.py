"""The target's tokenizer and chat template, read from its model directory."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from common.errors import StartupError


class TemplateError(ValueError):
    """The model has no chat template, or the template refuses the messages."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat: `role` as the template knows it, and its text."""

    role: str
    content: str


class ModelTokenizer:
    """Text to token ids and back, and messages to the prompt text that the model was trained on.

    `stop_token_ids`: from generation_config.json, else config.json. `tokenizer_hash`: SHA-256 of
    tokenizer.json, hex. `vocab_size`: ids, added tokens included. `context_len`: tokens.
    """

    def __init__(self, directory: Path) -> None:
        """Raises StartupError naming the file that is missing or cannot be read."""
        raw = _read(directory / "tokenizer.json")
        self.tokenizer_hash = hashlib.sha256(raw).hexdigest()
        try:
            self._tokenizer = Tokenizer.from_buffer(raw)
        except Exception as error:  # the library raises bare Exception
            raise StartupError(f"{directory / 'tokenizer.json'} cannot be read: {error}") from error
        config = _read_json(directory / "config.json")
        settings = _read_json(directory / "tokenizer_config.json", optional=True)
        generation = _read_json(directory / "generation_config.json", optional=True)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.padded_vocab_size = int(config.get("vocab_size", self.vocab_size))
        self.context_len = int(config.get("max_position_embeddings", 2048))
        self.stop_token_ids = _ids(generation.get("eos_token_id", config.get("eos_token_id")))
        self._special = {
            name: _token_text(settings.get(name))
            for name in ("bos_token", "eos_token", "pad_token")
        }
        self._template = self._compile(_template_source(directory, settings))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Special tokens are added as the tokenizer's own post-processor says."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The prompt for the assistant's next turn. Raises TemplateError."""
        text = self.render(messages)
        # The template writes the special tokens itself.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def render(self, messages: Sequence[Message]) -> str:
        """The chat as prompt text, with the assistant's header. Raises TemplateError."""
        if self._template is None:
            raise TemplateError("the model has no chat template; send text or token ids instead")
        turns = [{"role": turn.role, "content": turn.content} for turn in messages]
        try:
            return self._template.render(
                messages=turns, add_generation_prompt=True, **self._special
            )
        except jinja2.TemplateError as error:
            raise TemplateError(
                f"the model's chat template refuses the messages: {error}"
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens are left out; bytes that are no whole character become U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        """One token for people to look at, special tokens included."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def _compile(self, source: str | None) -> jinja2.Template | None:
        if source is None:
            return None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        environment.filters["tojson"] = _to_json
        try:
            return environment.from_string(source)
        except jinja2.TemplateError as error:
            raise StartupError(f"the model's chat template cannot be read: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(
            f"{path} cannot be read ({error.strerror}); the model directory needs it"
        ) from error


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise StartupError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} must hold a JSON object")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _template_source(directory: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json, as in transformers."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return _read(path).decode()
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        value = named.get("default")
    return value if isinstance(value, str) else None
