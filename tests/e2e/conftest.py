"""The real three processes on free ports, with the real SmolLM2, shared by the whole session."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from canopy import library
from canopy.client import Client
from canopy.stack import Stack, StackSettings
from canopy.v1 import generation_pb2_grpc
from tests.e2e.metrics import read_metric


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M-Instruct in the user's cache, fetched if it is not there."""
    return library.fetch_model(library.DEMO_MODEL)


@pytest.fixture(scope="session")
def head(model: Path) -> Path:
    return library.demo_head(model)


@pytest.fixture(scope="session")
def stack(model: Path, head: Path) -> Iterator[Stack]:
    """Generations wait out a verify that is killed and started anew: test_chaos does that.

    Every round has a tree, whether it pays here or not: so all that is promised of tokens is tested
    with them. Trees ahead are in test_frame_lifecycle's own stack.
    """
    flags = {
        "router": ("--verify-lost-seconds", "240"),
        "verify": ("--tree-budget", "full"),
    }
    settings = StackSettings(model=model, head=head, flags=flags, show_logs=False)
    with Stack(settings) as running:
        yield running


@pytest.fixture(scope="session")
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.address) as client:
        yield client


@pytest.fixture(scope="session")
def stub(stack: Stack) -> Iterator[generation_pb2_grpc.GenerationServiceStub]:
    """For requests that the client's own types would not let through."""
    with grpc.insecure_channel(stack.address) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


@pytest.fixture(scope="session")
def metric(stack: Stack) -> Callable[[str, str], float]:
    """`metric("verify", 'canopy_verify_kv_pages{state="live"}')`: its value as scraped now."""

    def read(service: str, name: str) -> float:
        return read_metric(stack.children[service].metrics_address, name)

    return read


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether `condition` comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def pages_settle(metric: Callable[[str, str], float]) -> Callable[[], bool]:
    """Whether both services come to hold no page and no sequence."""

    def settled() -> bool:
        names = ['{state="live"}', '{state="reserved"}']
        return all(metric("verify", f"canopy_verify_kv_pages{name}") == 0 for name in names)

    return lambda: wait_until(settled)
