"""Chat templates as Hugging Face tokenizers carry them: sandboxed Jinja with a few helpers.

Templates expect `messages`, `add_generation_prompt`, the special tokens by name, and the functions
`raise_exception` and `strftime_now`. A template cannot reach Python through the sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class ChatTemplateError(Exception):
    """The template does not compile, or refuses these messages; the message says why."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` … `{% endgeneration %}` marks what to train on: of no effect here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template with the special tokens it may name."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`special_tokens`: as `bos_token` → its text. Raises ChatTemplateError."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format_: now().strftime(format_)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt up to where the assistant speaks. Raises ChatTemplateError."""
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, **self._special_tokens
            )
        except ChatTemplateError:
            raise
        except Exception as error:  # a template may fail in any way that its expressions can
            raise ChatTemplateError(f"the chat template failed: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(f"the model's chat template refuses: {message}")


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes for HTML; prompts must not be."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
