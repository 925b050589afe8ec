"""The outermost frame of every program of ours: quiet on signals, one line for what stops it.

Raising in the middle of an import is not safe: extension modules swallow the exception, or print it
and go on. So a signal ends the program on the spot until something is there to be given back, and
raises only where the code has asked for it (`stoppable`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from common.errors import StartupError

PARENT_FLAG = "--parent-pid"
"""Given by a parent that reads this process's stdout: it hears of a failure there, and says it."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ending = threading.Lock()
_program = "canopy"


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM has come."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def run_program(program: str, run: Callable[[], int]) -> int:
    """Calls `run` and returns its exit code; heavy imports belong inside it.

    A StartupError is one line on stderr, or an announcement to the parent. SIGINT and SIGTERM give
    130 and 143. Anything else is a fault of ours and keeps its traceback.
    """
    global _program
    _program = program
    with _handling(_leave):
        try:
            return run()
        except StartupError as error:
            with _ending:
                _report(program, error)
            return error.exit_code
        except Stopped as stopped:
            return stopped.exit_code


def end_process(error: StartupError) -> NoReturn:
    """As if `run` had raised, from any thread and whatever the others are stuck in."""
    _ending.acquire()  # never given back: one line, whoever else comes
    _report(_program, error)
    sys.stdout.flush()
    os._exit(error.exit_code)


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGINT and SIGTERM raise Stopped within, for what must be given back."""
    with _handling(_raise):
        yield


def _leave(number: int, frame: FrameType | None) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or interrupted in the middle of a write
            stream.flush()
    os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handlers are the main thread's. A signal ignored from the start (nohup, a shell's background
    job) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    handled = [number for number in _SIGNALS if before[number] is not signal.SIG_IGN]
    try:
        for number in handled:
            signal.signal(number, handler)
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])


def _report(program: str, error: StartupError) -> None:
    if any(argument.split("=")[0] == PARENT_FLAG for argument in sys.argv[1:]):
        print(json.dumps({"event": "failed", "reason": str(error)}), flush=True)
    else:
        print(f"{program}: {error}", file=sys.stderr, flush=True)
