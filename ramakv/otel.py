"""OpenTelemetry: what a trace is where traces are on, and how spans leave the process.

Needs the extra `otel`. A thread of the SDK's exports spans out of a bounded queue: what does not
fit is dropped, and no event waits for a collector that is slow, or not there. The SDK reads its own
variables (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_*, …).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_SERVICE_NAME
from opentelemetry.sdk.resources import Resource
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
    """A `tracing.Trace`: a span, and those who begin others."""

    __slots__ = ("_tracers", "span")

    def __init__(self, tracers: _Tracers, span: Span) -> None:
        self._tracers = tracers
        self.span = span

    @property
    def is_sampled(self) -> bool:
        """Whether it is to be exported; also after its end."""
        return self.span.get_span_context().trace_flags.sampled

    @contextmanager
    def child(self, name: str, *, is_call: bool) -> Iterator[OtelTrace]:
        """Begin a span for a part of this one; where this one is not sampled, go on with it."""
        span = self.span
        if self.is_sampled:
            context = set_span_in_context(span)
            span = self._tracers.requests.start_span(name, context, _kind(is_call))
        with _under_way(OtelTrace(self._tracers, span)) as trace:
            yield trace

    @contextmanager
    def linked(
        self, name: str, others: Sequence[tracing.Trace], *, is_call: bool
    ) -> Iterator[OtelTrace]:
        """Begin a trace of its own, with links to those of these that are sampled."""
        sampled = [o for o in others if isinstance(o, OtelTrace) and o.is_sampled]
        span = self.span
        if sampled:
            links = [Link(other.span.get_span_context()) for other in sampled]
            start = self._tracers.joint.start_span
            span = start(name, Context(), _kind(is_call), links=links)
        with _under_way(OtelTrace(self._tracers, span)) as trace:
            yield trace

    def headers(self) -> dict[str, str]:
        """Return `traceparent`, and `tracestate` where there is one."""
        found: dict[str, str] = {}
        _w3c.inject(found, set_span_in_context(self.span))
        return found

    def note(self, facts: tracing.Facts) -> None:
        """Add attributes."""
        self.span.set_attributes(facts)


class Traces:
    """Where traces begin, and where their spans go."""

    def __init__(self, processor: SpanProcessor) -> None:
        """Take what exports spans. Which requests are sampled, the environment says."""
        facts = {"service.version": __version__}
        if not os.environ.get(OTEL_SERVICE_NAME):
            facts["service.name"] = "ramakv"
        resource = Resource.create(facts)
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

    @contextmanager
    def request(self, name: str, headers: Iterable[tuple[bytes, bytes]]) -> Iterator[OtelTrace]:
        """Begin the span of a request, in the trace that its headers name, or in a new one."""
        carried: dict[str, str] = {}
        for key, value in headers:
            if key in (b"traceparent", b"tracestate"):
                # Of the second there may be several; of the first, then none is valid.
                name_, text = key.decode(), value.decode("latin-1")
                carried[name_] = f"{carried[name_]},{text}" if name_ in carried else text
        context = _w3c.extract(carried, Context())
        span = self._tracers.requests.start_span(name, context, SpanKind.SERVER)
        with _under_way(OtelTrace(self._tracers, span)) as trace:
            yield trace

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


@contextmanager
def _under_way(trace: OtelTrace) -> Iterator[OtelTrace]:
    """Make a trace the current one; at the end of the block, end its span."""
    token = tracing.make_current(trace)
    try:
        yield trace
    except BaseException as error:
        if not isinstance(error, EventError) or error.status >= _SERVER_FAULT:
            name = type(error).__name__
            trace.span.set_attribute("error.type", name)
            trace.span.set_status(Status(StatusCode.ERROR, str(error) or name))
        raise
    finally:
        tracing.restore(token)
        trace.span.end()
