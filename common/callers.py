"""Who calls a server: the same caller the same name, from bearer tokens or a trusted gateway."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common.errors import StartupError
from common.log import get_logger
from common.security import (
    AUTHORIZATION,
    Held,
    as_text,
    read_named_tokens,
    shown_digest,
    token_digest,
)

_logger = get_logger("common.callers")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. `key`: the same for the same caller, and says nothing of its token; empty for
    those without one. `name`: as it may be shown, empty if it has none.
    """

    key: str = ""
    name: str = ""


ANYBODY = Caller()


class Callers:
    """Tells callers apart: by the names of `token_file`, else by their tokens, and by what a
    gateway says in the metadata key `header`, if it is set.
    """

    def __init__(self, token_file: Path | None, header: str = "") -> None:
        """Raises StartupError."""
        self._file, self._header = token_file, header.lower()
        self._held = Held([token_file] if token_file else [])
        self._names = self._read()

    def of(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Caller:
        if self._held.changed():
            try:
                self._names = self._read()
            except StartupError as error:
                _logger.warning("names of tokens not renewed", reason=str(error))
        sent = {key: as_text(value) for key, value in metadata or ()}
        digest = shown_digest(sent.get(AUTHORIZATION, ""))
        name = self._names.get(digest, "")
        key = name or digest.hex()[:32]
        if self._header and (given := sent.get(self._header, "")):
            return Caller(f"{key} {given}", given)
        return Caller(key, name)

    def _read(self) -> dict[bytes, str]:
        """Names by their tokens' digests: a look-up must not tell how much of a token is right."""
        if self._file is None:
            return {}
        named = read_named_tokens(self._file)
        return {token_digest(token): name for token, name in named.items() if name}
