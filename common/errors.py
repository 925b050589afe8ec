"""Errors that end a process before it serves: one line for people, an exit code for machines."""

from __future__ import annotations


class StartupError(Exception):
    """The process cannot serve. The message is one line: what is wrong and how to mend it."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ConfigError(StartupError):
    """A setting is missing, unknown or outside its limits."""

    exit_code = 2
