"""OpenTelemetry: what a trace is where traces are on, and how spans leave the process.

Needs the extra `otel`. A thread of the SDK's exports spans out of a bounded queue: what does not
fit is dropped, and no event waits for a collector that is slow, or not there. The SDK reads its own
variables (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_*, …).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Final, NamedTuple

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ramakv import __version__, tracing
from ramakv.config import Tracing
from ramakv.errors import EventError

CLOSE_SECONDS: Final = 2.0
"""How long spans that wait to be exported may hold up the end of the process."""

_SERVER_FAULT = 500
_w3c = TraceContextTextMapPropagator()


class _Tracers(NamedTuple):
    """Who begins spans: where one has a parent, or none, and where it has links instead.

    Sampling decides about requests. What is done for many of them at once is traced if one of
    them is, so its tracer samples everything it is asked for.
    """

    requests: Tracer
    joint: Tracer


class OtelTrace:
    """A `tracing.Trace`: a span, and those who begin others.

    As a context manager it is the current one until the block ends, and then its span ends.
    """

    __slots__ = ("_token", "_tracers", "is_sampled", "span")

    def __init__(self, tracers: _Tracers, span: Span) -> None:
        self._tracers = tracers
        self.span = span
        self.is_sampled = span.get_span_context().trace_flags.sampled

    def child(self, name: str, *, is_call: bool) -> OtelTrace:
        """Begin a span for a part of this one."""
        context = set_span_in_context(self.span)
        span = self._tracers.requests.start_span(name, context, _kind(is_call))
        return OtelTrace(self._tracers, span)

    def linked(self, name: str, others: Sequence[tracing.Trace], *, is_call: bool) -> OtelTrace:
        """Begin a trace of its own, with links to these."""
        spans = [other.span for other in others if isinstance(other, OtelTrace)]
        links = [Link(span.get_span_context()) for span in spans]
        span = self._tracers.joint.start_span(name, Context(), _kind(is_call), links=links)
        return OtelTrace(self._tracers, span)

    def headers(self) -> dict[str, str]:
        """Return `traceparent`, and `tracestate` where there is one."""
        found: dict[str, str] = {}
        _w3c.inject(found, set_span_in_context(self.span))
        return found

    def note(self, facts: tracing.Facts) -> None:
        """Add attributes."""
        self.span.set_attributes(facts)

    def __enter__(self) -> OtelTrace:
        self._token = tracing.make_current(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not (
            isinstance(error, EventError) and error.status < _SERVER_FAULT
        ):
            name = type(error).__name__
            self.span.set_attribute("error.type", name)
            self.span.set_status(Status(StatusCode.ERROR, str(error) or name))
        tracing.restore(self._token)
        self.span.end()


class Traces:
    """Where traces begin, and where their spans go."""

    def __init__(self, processor: SpanProcessor) -> None:
        """Take what exports spans. Which requests are sampled, the environment says."""
        ours = Resource.create({"service.name": "ramakv", "service.version": __version__})
        resource = ours.merge(OTELResourceDetector().detect())  # what the environment says, wins
        providers = (
            TracerProvider(resource=resource, shutdown_on_exit=False),
            TracerProvider(resource=resource, shutdown_on_exit=False, sampler=ALWAYS_ON),
        )
        for provider in providers:
            provider.add_span_processor(processor)
        self._processor = processor
        self._tracers = _Tracers(
            *(provider.get_tracer("ramakv", __version__) for provider in providers)
        )

    def request(self, name: str, headers: Iterable[tuple[bytes, bytes]]) -> OtelTrace:
        """Begin the span of a request, in the trace that its headers name, or in a new one."""
        carried: dict[str, str] = {}
        for key, value in headers:
            if key in (b"traceparent", b"tracestate"):
                # Of the second there may be several; of the first, then none is valid.
                header, text = key.decode(), value.decode("latin-1")
                carried[header] = f"{carried[header]},{text}" if header in carried else text
        context = _w3c.extract(carried, Context()) if carried else Context()
        span = self._tracers.requests.start_span(name, context, SpanKind.SERVER)
        return OtelTrace(self._tracers, span)

    def close(self) -> None:
        """Export what waits, for a moment at most."""
        closing = threading.Thread(target=self._processor.shutdown, name="otel-close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def open_traces(config: Tracing) -> Traces:
    """Begin to export to the configured collector, else to the one that the environment names."""
    endpoint = config.otlp_endpoint.rstrip("/")
    exporter = OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces" if endpoint else None)
    return Traces(BatchSpanProcessor(exporter))


def _kind(is_call: bool) -> SpanKind:
    return SpanKind.CLIENT if is_call else SpanKind.INTERNAL
