"""Traces: the caller's traceparent reaches both services, spans are made when they are on, and
nothing needs OpenTelemetry's packages while they are off.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from canopy.v1 import generation_pb2
from common.tracing import Tracing, traceparent_of
from router.spans import RequestSpans
from tests.protocol.router_world import collect, router_world, simulated_peers
from tests.protocol.test_router_service import request
from tests.unit.router_tiny import write_model
from verify_service.events import RoundDone, RoundResult
from verify_service.streams import StreamHub

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("traced") / "toy")


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Tracing:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider)


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


async def generate(model: Path, tracing: Tracing | None, **fields: Any) -> tuple[Any, Any]:
    """The opens that verify and draft got."""
    verify, draft = simulated_peers(model)
    opens: dict[str, Any] = {}
    for host in (verify, draft):
        handle = host.simulator.toy.handle

        def watch(command: Any, handle: Any = handle, name: str = host.service) -> Any:
            if command.WhichOneof("command") == "open":
                opens.setdefault(name, command.open)
            return handle(command)

        host.simulator.toy.handle = watch  # type: ignore[method-assign]
    async with router_world(model, verify, draft) as world:
        if tracing is not None:
            world.service.core._spans = RequestSpans(tracing)
        message = generation_pb2.GenerateRequest(**request(**fields))
        metadata = (("traceparent", PARENT),)
        call = world.stub.Generate(message, metadata=metadata)
        if fields.get("n", 1) == 1:
            await collect(call)
        else:
            async for _ in call:
                pass
    return opens[verify.service], opens[draft.service]


async def test_off_the_callers_trace_and_request_id_reach_both_services(model: Path) -> None:
    for opened in await generate(model, None, request_id="mine", max_tokens=4):
        assert (opened.trace.request_id, opened.trace.traceparent) == ("mine", PARENT)


async def test_on_each_choice_and_round_is_a_span_of_the_callers_trace(
    model: Path, tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    opened, _ = await generate(model, tracing, request_id="mine", max_tokens=20, n=2)
    requests, rounds = named(exporter, "canopy.request"), named(exporter, "canopy.round")
    assert [span.attributes["canopy.choice_index"] for span in requests] in ([0, 1], [1, 0])
    for span in requests:
        assert span.parent is not None
        assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
        own = [r for r in rounds if r.parent.span_id == span.context.span_id]
        assert len(own) == span.attributes["canopy.num_rounds"] > 1
        numbers = [r.attributes["canopy.round"] for r in own]
        assert numbers == list(range(len(own)))
        assert sum(r.attributes["canopy.num_emitted"] for r in own) >= 20
        assert all(r.end_time >= r.start_time >= span.start_time for r in own[1:])
        assert span.attributes["canopy.outcome"] == "length"
    first = next(span for span in requests if span.attributes["canopy.choice_index"] == 0)
    assert opened.trace.traceparent == f"00-{TRACE}-{first.context.span_id:016x}-01"


def test_verify_notes_steps_of_traced_rounds_alone(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    result = RoundResult(
        round=3, kv_len=7, tokens=(5, 6), margins=(1.0, 1.0), num_nodes=4, step_seconds=0.25
    )
    hub = StreamHub(tracing)
    stream, _ = hub.open("link")
    for traceparent in (PARENT, ""):
        done = RoundDone(
            stream=stream, sequence_id=bytes(16), epoch=1, result=result, traceparent=traceparent
        )
        hub.deliver([done])
    [span] = named(exporter, "canopy.verify.step")
    assert span.attributes["canopy.num_nodes"] == 4
    assert span.end_time - span.start_time == 250_000_000


@pytest.mark.parametrize(
    "value", ["", "00-x", PARENT.upper(), f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01"]
)
def test_malformed_traceparent_is_left_out(value: str) -> None:
    assert traceparent_of((("traceparent", value),)) == ""
    assert traceparent_of(None) == ""
    assert traceparent_of((("other", "x"), ("traceparent", PARENT))) == PARENT


WITHOUT = """
import sys
sys.modules["opentelemetry"] = None
import router.api, verify_service.streams, draft_service.service
from common.errors import StartupError
from common.tracing import Tracing
assert Tracing.to("router", "").begin("x", "parent", {}) == (None, "parent")
try:
    Tracing.to("router", "collector:4317")
except StartupError as error:
    print(error)
"""


def test_packages_are_needed_only_where_spans_are_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True, timeout=120
    )
    assert "canopy-spec[otel]" in done.stdout


def test_collector_that_is_away_stops_nothing() -> None:
    tracing = Tracing.to("router", "127.0.0.1:1")
    span, child = tracing.begin("canopy.request", PARENT, {})
    assert TRACE in child
    tracing.end(span, {}, error="UNAVAILABLE")
