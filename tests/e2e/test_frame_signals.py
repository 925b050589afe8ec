"""Ctrl-C and SIGTERM at any moment: a quiet end, the right exit code, no process left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from canopy.stack import Stack
from tests.e2e.conftest import wait_until

pytestmark = pytest.mark.e2e

STORY = ("--chat", "Tell me a long story.", "--ignore-eos", "--max-tokens", "1500")


NOT_IGNORED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "canopy", *sys.argv[1:]])
"""
"""Where the suite runs in the background of a script, SIGINT is ignored from the start. (A
`preexec_fn` would fork this process, which other tests load jax into.)"""


def begin(*arguments: str) -> subprocess.Popen[str]:
    """The command as a shell would start it: in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-S", "-c", NOT_IGNORED, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize("seconds", [0.25, 0.5, 0.8, 1.2])
def test_ctrl_c_while_imports_run_is_quiet(seconds: float) -> None:
    process = begin("model", "fetch", "smollm2-135m-instruct")
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    # It may have been through, or in the interpreter's own start or end, where a signal is fatal
    # (a shell calls that 130, too).
    assert process.returncode in (0, 130, -signal.SIGINT)
    assert "Traceback" not in stderr
    assert "Error" not in stderr


@pytest.mark.parametrize(
    ("number", "code", "kill"),
    [(signal.SIGINT, 130, os.killpg), (signal.SIGTERM, 143, os.kill)],
    ids=["ctrl_c_to_the_group", "sigterm_to_the_parent"],
)
def test_signal_while_services_warm_leaves_no_process(
    number: signal.Signals, code: int, kill: Callable[[int, int], None]
) -> None:
    process = begin("serve", "all", "--port", "0")
    assert wait_until(lambda: len(children_of(process.pid)) >= 2)
    children = children_of(process.pid)
    time.sleep(1.0)  # they import and load
    kill(process.pid, number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in stderr
    assert not any(is_running(child) for child in children)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl_c", "sigterm"]
)
def test_signal_while_text_streams_frees_its_pages(
    stack: Stack, pages_settle: Callable[[], bool], number: signal.Signals, code: int
) -> None:
    process = begin("generate", "--address", stack.address, *STORY)
    assert process.stdout is not None
    assert process.stdout.read(8)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (code, "")
    assert pages_settle()


def test_serve_all_says_in_one_line_why_it_cannot(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = begin("serve", "all", "--port", port)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    (line,) = stderr.splitlines()
    assert line.startswith(f"canopy: port: cannot listen on 127.0.0.1:{port}")

    process = begin("serve", "all", "--model", str(tmp_path), "--port", "0")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    said = [line for line in stderr.splitlines() if " INFO " not in line]
    (line,) = said
    assert line.startswith("canopy: ")
    assert str(tmp_path) in line


def test_serve_all_starts_an_engine_that_dies_anew_and_ends_with_its_router(model: Path) -> None:
    process = begin("serve", "all", "--model", str(model), "--port", "0")
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline())["event"] == "serving"
        verify, router = children_of(process.pid)
        os.kill(verify, signal.SIGKILL)
        assert wait_until(lambda: verify not in children_of(process.pid))
        assert wait_until(lambda: len(children_of(process.pid)) == 2)
        os.kill(router, signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    said = [line for line in stderr.splitlines() if line.startswith("canopy: ")]
    assert said == [
        "canopy: verify: ended with status -9; starting it anew",
        "canopy: router: ended with status -9",
    ]


def test_replicas_are_at_least_one() -> None:
    process = begin("serve", "all", "--port", "0", "--num-verify", "0")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert stderr.splitlines()[-1] == "canopy: num_verify: 0 replicas; ask for at least 1"
