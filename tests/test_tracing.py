"""Traces: one event's way through the actors, also where its work is done with that of others."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import msgspec
import pytest
import trio
from trio.testing import MockClock

from ramakv import __version__, tracing
from ramakv.errors import StoreFullError
from ramakv.lmcache.client import LMCacheClient
from ramakv.service import Service, open_service
from ramakv.web.event_app import create_event_app
from tests.daemons import Daemon
from tests.fakes import FakeCare, FakeLMCache, make_config, outage, run_inline

otel = pytest.importorskip("ramakv.otel", reason="the extra is not installed: ramakv[otel]")

from opentelemetry.sdk.trace import ReadableSpan  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # noqa: E402
    InMemorySpanExporter,
)
from opentelemetry.trace import SpanKind, StatusCode  # noqa: E402

from ramakv.web.traced import TracedApp, TracedHandler  # noqa: E402

CALLER = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = f"00-{CALLER}-b7ad6b7169203331-01"
NOT_SAMPLED = f"00-{CALLER}-b7ad6b7169203331-00"


class Traced:
    """A service whose events are traced, and the spans that came of them."""

    def __init__(self, service: Service, app: Any, exporter: InMemorySpanExporter) -> None:
        self.service = service
        self._app = app
        self._exporter = exporter

    async def post(self, body: Any, *traceparents: str) -> Any:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": encoded, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            answer.append(message.get("body", b""))

        encoded, answer = msgspec.json.encode(body), []
        headers = [(b"traceparent", value.encode()) for value in traceparents]
        scope = {"type": "http", "method": "POST", "path": "/event", "headers": headers}
        await self._app(scope, receive, send)
        return msgspec.json.decode(b"".join(answer))

    async def turn_end(self, session_id: str, *hashes: str, trace: str | None = None) -> Any:
        body = {
            "type": "turn_end",
            "session_id": session_id,
            "kv_transfer_params": {"chunk_hashes": hashes},
        }
        return await self.post(body, *([trace] if trace else []))

    def spans(self) -> list[ReadableSpan]:
        """Those that ended since this was asked last, in the order of their beginning."""
        found = sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time)
        self._exporter.clear()
        return found


@asynccontextmanager
async def traced(folder: Path, client: Any = None, **overrides: Any) -> AsyncIterator[Traced]:
    exporter = InMemorySpanExporter()
    traces = otel.Traces(SimpleSpanProcessor(exporter))
    config = make_config(folder, **overrides)
    async with open_service(
        config, client=client or FakeLMCache(), care=FakeCare(), run_sync=run_inline
    ) as service:
        app = TracedApp(create_event_app(TracedHandler(service), config), traces)
        yield Traced(service, app, exporter)


def tree(spans: list[ReadableSpan]) -> list[str]:
    """Names, each indented below its parent."""
    below: dict[int | None, list[ReadableSpan]] = {}
    known = {span.context.span_id for span in spans}
    for span in spans:
        parent = span.parent.span_id if span.parent else None
        below.setdefault(parent if parent in known else None, []).append(span)

    def lines(parent: int | None, depth: int) -> Iterator[str]:
        for span in below.get(parent, []):
            yield "  " * depth + span.name
            yield from lines(span.context.span_id, depth + 1)

    return list(lines(None, 0))


def named(spans: list[ReadableSpan], name: str) -> ReadableSpan:
    (found,) = (span for span in spans if span.name == name)
    return found


async def test_a_turn_end_is_a_tree_from_its_request_to_its_commit(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with traced(tmp_path) as daemon:
        await daemon.turn_end("s", "a", trace=SAMPLED)
        spans = daemon.spans()
    assert tree(spans) == [
        "POST /event",
        "  event turn_end",
        "    session",
        "      acquire",
        "      commit",
        "      settle",
        "transaction",
    ]
    request, event = spans[0], spans[1]
    assert request.kind is SpanKind.SERVER
    assert f"{request.context.trace_id:032x}" == CALLER
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == "b7ad6b7169203331"
    assert request.attributes is not None
    assert request.attributes["http.response.status_code"] == 200
    assert event.attributes == {"ramakv.event.type": "turn_end", "ramakv.session.id": "s"}
    assert request.resource.attributes["service.name"] == "ramakv"


async def test_a_transaction_links_to_every_event_in_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with traced(tmp_path) as daemon:
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(daemon.turn_end, f"s{number}", f"c{number}")
        spans = daemon.spans()
    transactions = [span for span in spans if span.name == "transaction"]
    sessions = {span.context.span_id for span in spans if span.name == "session"}
    assert len(transactions) <= 2
    assert {link.context.span_id for span in transactions for link in span.links} == sessions
    assert len(sessions) == 10
    for transaction in transactions:
        assert transaction.attributes is not None
        assert transaction.attributes["ramakv.commits"] == len(transaction.links)
        assert transaction.parent is None


async def test_an_evict_links_to_the_events_that_released_its_chunks_and_to_no_other(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with traced(tmp_path) as daemon:
        for session_id in "stu":
            await daemon.turn_end(session_id, f"{session_id}1")
        daemon.spans()
        await daemon.turn_end("s", "s2")
        await daemon.turn_end("t")
        await daemon.turn_end("u", "u1", "u2")  # releases nothing
        released = [span for span in daemon.spans() if span.name == "session"][:2]
        await trio.sleep(10)
        evict = named(daemon.spans(), "LMCache evict")
    assert evict.kind is SpanKind.CLIENT
    assert [link.context.span_id for link in evict.links] == [
        span.context.span_id for span in released
    ]


async def test_a_prefetch_belongs_to_its_turn_and_lmcache_is_told(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={})

    async with (
        LMCacheClient(
            "http://lmcache",
            connect_timeout_seconds=1.0,
            call_timeout_seconds=1.0,
            connections_max=8,
            transport=httpx.MockTransport(answer),
        ) as client,
        traced(tmp_path, client) as daemon,
    ):
        await daemon.turn_end("s", "a")
        daemon.spans()
        await daemon.post({"type": "turn_start", "session_id": "s"}, SAMPLED)
        spans = daemon.spans()
    assert tree(spans) == [
        "POST /event",
        "  event turn_start",
        "    session",
        "      LMCache prefetch",
    ]
    call = named(spans, "LMCache prefetch")
    assert call.kind is SpanKind.CLIENT
    assert call.attributes is not None
    assert call.attributes["http.response.status_code"] == 200
    (request,) = (request for request in asked if request.url.path == "/memory/prefetch")
    assert request.headers["traceparent"] == f"00-{CALLER}-{call.context.span_id:016x}-01"


async def test_each_event_of_an_array_is_a_span_of_the_request(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with traced(tmp_path) as daemon:
        await daemon.post([{"type": "health"}, {"type": "session_map", "session_id": "s"}])
        spans = daemon.spans()
    assert tree(spans) == [
        "POST /event",
        "  event health",
        "  event session_map",
        "    session",
    ]
    refused = named(spans, "event session_map")
    assert refused.status.status_code is StatusCode.UNSET  # the client's mistake, and no fault
    assert refused.attributes is not None
    assert refused.attributes["ramakv.event.refused"] == "session 's' not found"


async def test_a_fork_into_a_child_stays_in_its_trace(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with traced(tmp_path) as daemon:
        await daemon.turn_end("s", "a")
        daemon.spans()
        await daemon.post({"type": "session_fork", "session_id": "s", "child_session_id": "t"})
        spans = [span for span in daemon.spans() if span.name != "transaction"]
    assert len({span.context.trace_id for span in spans}) == 1
    assert [span.name for span in spans].count("session") == 3


async def test_a_commit_that_fails_is_an_error_of_its_spans(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StoreFullError("the disk is full")

    async with traced(tmp_path) as daemon:
        monkeypatch.setattr("ramakv.store.store.Store.commit", full)
        await daemon.turn_end("s", "a")
        spans = daemon.spans()
        monkeypatch.undo()
    for name in ("transaction", "commit", "session", "event turn_end"):
        failed = named(spans, name)
        assert failed.status.status_code is StatusCode.ERROR, name
        assert failed.attributes is not None
        assert failed.attributes["error.type"] == "StoreFullError"


async def test_a_call_that_fails_is_an_error_of_its_span(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with traced(tmp_path, FakeLMCache(fault=outage)) as daemon:
        await daemon.turn_end("s", "a")
        await daemon.post({"type": "turn_start", "session_id": "s"})
        spans = daemon.spans()
    assert named(spans, "LMCache prefetch").status.status_code is StatusCode.ERROR
    assert named(spans, "event turn_start").status.status_code is StatusCode.UNSET


async def test_what_the_daemon_does_by_itself_is_not_put_down_to_an_earlier_event(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A session's task is begun by an event, and goes on after it."""
    async with traced(tmp_path, sessions__idle_suspend_seconds=100.0) as daemon:
        await daemon.turn_end("s", "a")
        daemon.spans()
        await trio.sleep(1000)
        assert daemon.service.router.suspended_sessions == 1
        assert daemon.spans() == []


async def test_a_request_that_is_not_sampled_costs_no_span_and_passes_that_on(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    seen: list[tracing.Trace | None] = []
    lmcache = FakeLMCache(watch=lambda _: seen.append(tracing.current()))
    async with traced(tmp_path, lmcache) as daemon:
        await daemon.turn_end("s", "a", trace=NOT_SAMPLED)
        await daemon.post({"type": "turn_start", "session_id": "s"}, NOT_SAMPLED)
        assert daemon.spans() == []
        assert seen[-1] is not None
        passed_on = seen[-1].headers()["traceparent"]
        assert (passed_on[:35], passed_on[-2:]) == (NOT_SAMPLED[:35], "00")
        async with trio.open_nursery() as nursery:
            for session_id, header in (("t", NOT_SAMPLED), ("u", SAMPLED)):
                nursery.start_soon(partial(daemon.turn_end, session_id, "b", trace=header))
        transaction = named(daemon.spans(), "transaction")
    assert [f"{link.context.trace_id:032x}" for link in transaction.links] == [CALLER]
    assert len(transaction.links) == 1


@pytest.mark.parametrize(
    "headers", [["garbage"], ["00-" + "0" * 32 + "-b7ad6b7169203331-01"], [SAMPLED, SAMPLED]]
)
async def test_a_trace_that_cannot_be_read_is_a_new_one(
    headers: list[str], tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with traced(tmp_path) as daemon:
        assert (await daemon.post({"type": "health"}, *headers))["ok"]
        request = named(daemon.spans(), "POST /event")
    assert request.parent is None
    assert f"{request.context.trace_id:032x}" != CALLER


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_SERVICE_NAME", "ours"), ("OTEL_RESOURCE_ATTRIBUTES", "service.name=ours,rack=7")],
)
async def test_the_environment_may_name_the_service(
    variable: str,
    value: str,
    tmp_path: Path,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, value)
    async with traced(tmp_path) as daemon:
        await daemon.post({"type": "health"})
        attributes = daemon.spans()[0].resource.attributes
    assert attributes["service.name"] == "ours"
    assert attributes["service.version"] == __version__


async def test_where_traces_are_off_nothing_is_current(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    with tracing.span("x") as span, tracing.joined([None, None], "y") as many:
        assert (span, many, tracing.current()) == (None, None, None)


def test_of_many_releases_the_oldest_are_forgotten(tmp_path: Path) -> None:
    releases, trace = tracing.Releases(), object()
    releases.add(0, [])
    for generation in range(1, 1002):
        releases.add(generation, [trace])  # type: ignore[list-item]
    assert list(releases.of([0, 1])) == []
    assert list(releases.of([2, 2, 1001])) == [trace, trace]


# A real daemon ----------------------------------------------------------------------------


class Collector(ThreadingHTTPServer):
    """Takes what is exported; `bodies` are the requests to /v1/traces."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        super().__init__(("127.0.0.1", 0), _Taker)
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Taker(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert isinstance(self.server, Collector)
        if self.path == "/v1/traces":
            self.server.bodies.append(body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_daemon_exports_its_spans_at_its_end_at_the_latest(tmp_path: Path) -> None:
    with closing(Collector()) as collector:
        collector.close = collector.server_close  # type: ignore[attr-defined]
        daemon = Daemon(
            tmp_path,
            RAMAKV_TRACING__ENABLED="true",
            RAMAKV_TRACING__OTLP_ENDPOINT=collector.url,
            OTEL_SERVICE_NAME="ours",
        )
        try:
            daemon.start()
            daemon.turn_end("s", "a")
            assert daemon.stop() == 0
        finally:
            daemon.kill()
            collector.shutdown()
        exported = b"".join(collector.bodies)
    for text in (b"ours", b"event turn_end", b"commit", b"transaction"):
        assert text in exported


def test_a_collector_that_never_answers_holds_up_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        daemon = Daemon(
            tmp_path,
            RAMAKV_TRACING__ENABLED="true",
            RAMAKV_TRACING__OTLP_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}",
            OTEL_BSP_SCHEDULE_DELAY="10",
            OTEL_BSP_MAX_QUEUE_SIZE="64",
            OTEL_BSP_MAX_EXPORT_BATCH_SIZE="16",
        )
        try:
            daemon.start()
            for turn in range(100):
                assert daemon.turn_end("s", f"c{turn}")["ok"]
            began = time.monotonic()
            assert daemon.stop() == 0
            assert time.monotonic() - began < otel.CLOSE_SECONDS + 8
        finally:
            daemon.kill()
        assert daemon.log.read_text().count("Queue full") <= 2


def test_without_the_extra_the_start_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from ramakv.cli import main; main(['serve'])"
    )
    environment = Daemon(tmp_path, RAMAKV_TRACING__ENABLED="true").environment
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "pip install 'ramakv[otel]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_daemon_without_traces_loads_none_of_it(tmp_path: Path) -> None:
    program = (
        "import sys; import ramakv.commands.serve, ramakv.web.admin_app\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
