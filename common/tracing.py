"""Traces: which spans a process makes, and how they are tied to those of others.

A caller's `traceparent` (W3C Trace Context) is carried along whether spans are made or not. Spans
are made where `trace_endpoint` names an OTLP collector; that needs the packages of the extra
`otel`, which nothing else here imports. Off, a span costs one look at None.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.errors import StartupError
from common.log import Logger

if TYPE_CHECKING:
    from opentelemetry.trace import Span

TRACEPARENT = "traceparent"
_VALID = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class Trace:
    """Which request a sequence belongs to. `traceparent` empty: it is not traced."""

    request_id: str = ""
    traceparent: str = ""


UNTRACED = Trace()

Attributes = Mapping[str, str | int | float | bool]


def note_open(logger: Logger, sequence_id: bytes, trace: Trace) -> None:
    """Ties a sequence's id, which errors name, to the client's request."""
    logger.debug(
        "sequence opened",
        sequence_id=sequence_id.hex(),
        request_id=trace.request_id,
        traceparent=trace.traceparent,
    )


def traceparent_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The caller's, if it is well formed; else empty, as the standard says: a new trace."""
    for key, value in metadata or ():
        if key == TRACEPARENT and isinstance(value, str) and _VALID.fullmatch(value):
            return value
    return ""


class Tracing:
    """Makes the spans of one process. `provider` None: none are made."""

    def __init__(self, provider: Any = None) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("canopy")

    @staticmethod
    def to(service: str, endpoint: str) -> Tracing:
        """Spans go to the OTLP collector at `endpoint`, HOST:PORT or a URL; empty: they are off.

        Raises StartupError if the packages are not there.
        """
        if not endpoint:
            return Tracing()
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise StartupError(
                f"trace_endpoint: {endpoint!r} needs packages that are not there ({error.name});"
                " install canopy-spec[otel]"
            ) from None
        resource = Resource.create({"service.name": f"canopy-{service}"})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        secure = endpoint.startswith("https://")
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not secure)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return Tracing(provider)

    @property
    def on(self) -> bool:
        return self._tracer is not None

    def begin(self, name: str, parent: str, attributes: Attributes) -> tuple[Span | None, str]:
        """A span that `end` ends, and what its children are given as `parent`.

        Off: None, and the parent itself, so that the caller's trace still reaches the others.
        """
        if self._tracer is None:
            return None, parent
        span = self._tracer.start_span(name, _context(parent), attributes=dict(attributes))
        return span, _traceparent(span)

    def end(self, span: Span | None, attributes: Attributes, error: str = "") -> None:
        if span is None:
            return
        span.set_attributes(dict(attributes))
        if error:
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, error))
        span.end()

    def note(self, name: str, parent: str, seconds: float, attributes: Attributes) -> None:
        """A span that ends now and took so long. Nothing where the request is not traced."""
        if self._tracer is None or not parent:
            return
        end = time.time_ns()
        start = end - round(seconds * 1e9)
        span = self._tracer.start_span(
            name, _context(parent), attributes=dict(attributes), start_time=start
        )
        span.end(end)

    def stop(self) -> None:
        """Sends what is left. Blocks for a few seconds at most."""
        if self._provider is not None:
            self._provider.force_flush(3000)
            self._provider.shutdown()


def _context(parent: str) -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({TRACEPARENT: parent} if parent else {})


def _traceparent(span: Span) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
