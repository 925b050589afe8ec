"""Structured logs on stderr: an event in words, then fields; one JSON object or one text line each.

What people wrote or were told never reaches a log: fields that would hold it are withheld by name.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

LogFormat = Literal["json", "text"]
LogLevel = Literal["debug", "info", "warning", "error"]

WITHHELD_FIELDS = frozenset(
    {"prompt", "text", "messages", "content", "tokens", "token_ids", "token_texts", "stop"}
    | {"authorization", "token", "secret", "password"}
)
"""Names whose values are replaced by `WITHHELD`."""

WITHHELD = "<withheld>"


class Logger:
    """`logger.info("peer connected", address=...)`; fields are plain JSON values."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: object) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._log(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """Like `error`, with the traceback of the exception being handled."""
        self._log(logging.ERROR, event, fields, exc_info=True)

    def _log(
        self, level: int, event: str, fields: dict[str, object], exc_info: bool = False
    ) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": fields}, exc_info=exc_info)


def get_logger(name: str) -> Logger:
    return Logger(name)


def set_up_logging(service: str, log_format: LogFormat = "text", level: LogLevel = "info") -> None:
    """Sends every record of this process to stderr in one format. Call once, at start."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service) if log_format == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for library in ("jax", "grpc", "asyncio", "huggingface_hub", "urllib3"):
        logging.getLogger(library).setLevel(logging.WARNING)


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, "fields", {})
    return {name: WITHHELD if name in WITHHELD_FIELDS else value for name, value in fields.items()}


def _timestamp(record: logging.LogRecord) -> str:
    """UTC, RFC 3339, milliseconds."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "event": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _fields_of(record).items())
        line = f"{_timestamp(record)} {record.levelname:<7} {record.name}: {record.getMessage()}"
        if record.exc_info:
            return f"{line}{fields}\n{self.formatException(record.exc_info)}"
        return line + fields
