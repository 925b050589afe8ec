"""Errors that end a process before it serves: one line for people, an exit code for machines."""

from __future__ import annotations

import sys
from collections.abc import Callable


class StartupError(Exception):
    """The process cannot serve. The message is one line: what is wrong and how to mend it."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ConfigError(StartupError):
    """A setting is missing, unknown or outside its limits."""

    exit_code = 2


def exit_with_one_line(program: str, run: Callable[[], int]) -> int:
    """Calls `run` and returns its exit code; a StartupError becomes one line on stderr.

    Anything else is a fault of ours and keeps its traceback.
    """
    try:
        return run()
    except StartupError as error:
        print(f"{program}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
