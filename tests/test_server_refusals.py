"""What the server refuses, and that the errors of a connection stay in it."""

from __future__ import annotations

from contextlib import suppress

import pytest
import structlog
import trio
import trio.testing

from ramakv.web import connection as connection_module, server as server_module
from tests.http_server import (
    CHUNKED,
    GET,
    App,
    answer_early,
    echo,
    lines,
    post,
    quart_app,
    serving,
)


async def test_http2_prior_knowledge_gets_505() -> None:
    async with serving() as served:
        wire = await served.connect()
        response = await wire.ask(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        assert response.status == 505
        assert response.json()["ok"] is False
        assert await wire.is_closed_within(2)


@pytest.mark.parametrize(
    "upgrade",
    [
        b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
        b"http2-settings: AAMAAABkAAQAAP__\r\n",
        b"connection: upgrade\r\nupgrade: h2c\r\n",
        b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    ],
    ids=["h2c", "h2c without settings", "websocket"],
)
@pytest.mark.parametrize("app", [echo, quart_app()], ids=["raw", "quart"])
async def test_an_upgrade_is_not_taken_up(app: App, upgrade: bytes) -> None:
    async with serving(app) as served:
        wire = await served.connect()
        first = await wire.ask(b"GET / HTTP/1.1\r\nhost: x\r\n%b\r\n" % upgrade)
        assert first.status == 200
        assert (await wire.ask(GET)).body == first.body


@pytest.mark.parametrize(
    ("data", "status", "reason"),
    [
        (b"\0" * 50, 400, "illegal request line"),
        (b"HELLO\r\n\r\n", 400, "illegal request line"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400, "illegal request line"),
        (b"GET /\xc3\xa9 HTTP/1.1\r\nhost: x\r\n\r\n", 400, "illegal request line"),
        (b"GET ?a HTTP/1.1\r\nhost: x\r\n\r\n", 400, "the request target is not a path"),
        (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", 400, "the request target is not a path"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "Missing mandatory Host"),
        (b"GET / HTTP/1.1\r\nhost: x\r\na b\r\n\r\n", 400, "illegal header line"),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"b" * 100_000, 431, "Receive buffer too long"),
        (b"GET / HTTP/9.9\r\nhost: x\r\n\r\n", 505, "only HTTP/1.0 and HTTP/1.1 are spoken here"),
        (post(b"", b"content-length: 3\r\n", 4), 400, "conflicting Content-Length headers"),
        (post(b"", b"transfer-encoding: chunked\r\n"), 400, "both a Content-Length and"),
        (post(b"", b"transfer-encoding: gzip\r\n"), 501, "Only Transfer-Encoding"),
        (CHUNKED + b"ZZ\r\n", 400, "illegal chunk header"),
        (CHUNKED + b"1\r\nabc\r\n", 400, "malformed chunk footer"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
@pytest.mark.parametrize("app", [echo, quart_app()], ids=["raw", "quart"])
async def test_what_is_not_http_is_answered_in_json_and_closed(
    app: App, data: bytes, status: int, reason: str
) -> None:
    async with serving(app) as served:
        wire = await served.connect()
        response = await wire.ask(data)
        assert response.status == status
        assert response.json()["ok"] is False
        assert reason in response.json()["error"]
        assert response.headers["content-type"] == "application/json"
        assert response.headers["connection"] == "close"
        assert await wire.is_closed_within(2)


@pytest.mark.parametrize(
    "data",
    [
        b"HEAD" + CHUNKED.removeprefix(b"POST") + b"ZZ\r\n",
        b"HEAD ?a HTTP/1.1\r\nhost: x\r\n\r\n",
        b"HEAD / HTTP/9.9\r\nhost: x\r\n\r\n",
    ],
)
async def test_a_refusal_of_head_has_no_body(data: bytes) -> None:
    with structlog.testing.capture_logs() as logs:
        async with serving() as served:
            wire = await served.connect()
            await wire.send(data)
            assert (await wire.response(to_head=True)).status in (400, 505)
            assert await wire.is_closed_within(2)
    assert not lines(logs, "connection failed")


async def test_a_refusal_after_head_has_a_body() -> None:
    async with serving() as served:
        wire = await served.connect()
        await wire.send(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n")
        await wire.response(to_head=True)
        assert (await wire.ask(b"\0" * 9)).json()["error"] == "illegal request line"


async def test_half_a_body_and_the_end_of_it_is_answered() -> None:
    async with serving() as served:
        wire = await served.connect()
        await wire.send(post(b"abc", length=10))
        await wire.stream.send_eof()
        assert (await wire.response()).status == 400
        assert await wire.is_closed_within(1)


async def test_a_client_that_shuts_its_side_still_gets_its_answer() -> None:
    async with serving() as served:
        wire = await served.connect()
        await wire.send(post(b"abc"))
        await wire.stream.send_eof()
        assert (await wire.response()).body == b"POST /echo abc"
        assert await wire.is_closed_within(1)


@pytest.mark.parametrize("app", [answer_early, quart_app()], ids=["raw", "quart"])
async def test_a_bad_chunk_header_ends_one_connection_only(app: App) -> None:
    """On stock Hypercorn, ten of them that meet the answer end the server."""
    async with serving(app) as served:
        other = await served.connect()
        for number in range(40):
            wire = await served.connect()
            await wire.send(CHUNKED.replace(b"/echo", b"/missing"))
            for _ in range(number % 4):
                await trio.lowlevel.checkpoint()
            with suppress(trio.BrokenResourceError):
                await wire.send(b"ZZ\r\n")
                await wire.stream.send_eof()
        assert (await other.ask(GET)).status == 200


@pytest.fixture
def broken_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    real_feed = connection_module.Protocol.feed

    async def feed(self: connection_module.Protocol, data: bytes) -> None:
        if data == b"boom":
            raise ZeroDivisionError("boom")
        await real_feed(self, data)

    monkeypatch.setattr(connection_module.Protocol, "feed", feed)


@pytest.mark.usefixtures("broken_parser")
async def test_an_error_in_one_connection_is_logged_with_its_cause_and_ends_no_other() -> None:
    with structlog.testing.capture_logs() as logs:
        async with serving() as served:
            other, wire = await served.connect(), await served.connect()
            await wire.send(b"boom")
            assert await wire.is_closed_within(1)
            assert (await other.ask(GET)).body == b"GET / "
    (line,) = lines(logs, "connection failed")
    assert (line["log_level"], line["error"]) == ("warning", "ZeroDivisionError('boom')")


@pytest.mark.usefixtures("broken_parser")
async def test_a_client_cannot_fill_the_log() -> None:
    with structlog.testing.capture_logs() as logs:
        async with serving() as served:
            for _ in range(100):
                wire = await served.connect()
                await wire.send(b"boom")
                assert await wire.is_closed_within(1)
    written = len(lines(logs, "connection failed"))
    left_out = sum(line["lines"] for line in lines(logs, "more lines like these were left out"))
    # Two minutes, if one ended in the middle.
    assert server_module.LINES_PER_MINUTE <= written <= 2 * server_module.LINES_PER_MINUTE
    assert written + left_out == 100
