"""Traces at the edge: they begin with a request, and each event in it is a span.

In front of the event app and behind it, and only where traces are on: the app itself knows nothing
of them.
"""

from __future__ import annotations

from hypercorn.typing import (
    ASGIFramework,
    ASGIReceiveCallable,
    ASGISendCallable,
    ASGISendEvent,
    Scope,
)

from ramakv import codec, events
from ramakv.errors import EventError
from ramakv.otel import Traces
from ramakv.tracing import span
from ramakv.web.event_app import PATH, EventHandler


class TracedApp:
    """Begins a span for each request for events, or goes on with its client's trace."""

    def __init__(self, app: ASGIFramework, traces: Traces) -> None:
        self._app = app
        self._traces = traces

    async def __call__(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        with self._traces.request(f"POST {PATH}", scope["headers"]) as trace:
            trace.note({"http.request.method": "POST", "url.path": PATH})

            async def noting_send(message: ASGISendEvent) -> None:
                if message["type"] == "http.response.start":
                    trace.note({"http.response.status_code": message["status"]})
                await send(message)

            await self._app(scope, receive, noting_send)


class TracedHandler:
    """A span for each event: from its decoding to its answer, waits included."""

    def __init__(self, handler: EventHandler) -> None:
        self._handler = handler

    async def handle(self, event: events.Event) -> events.Data:
        """Answer one event, as the handler does."""
        type_ = codec.type_of(event)
        with span(f"event {type_}") as trace:
            if trace is not None:
                session = getattr(event, "session_id", None)
                known = {} if session is None else {"ramakv.session.id": session}
                trace.note({"ramakv.event.type": type_, **known})
            try:
                return await self._handler.handle(event)
            except EventError as error:
                if trace is not None:
                    trace.note({"ramakv.event.refused": str(error)})
                raise
