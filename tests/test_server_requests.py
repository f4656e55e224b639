"""What the server makes of requests and responses that are in order."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import pytest
import structlog
import trio
import trio.testing

from tests.http_server import (
    GET,
    lines,
    post,
    quart_app,
    read_body,
    reply,
    serving,
)


async def test_requests_of_a_connection_are_served_one_after_the_other() -> None:
    async with serving() as served:
        wire = await served.connect()
        for number in range(20):
            response = await wire.ask(post(b"%d" % number))
            assert (response.status, response.body) == (200, b"POST /echo %d" % number)
            assert "date" in response.headers
            assert "connection" not in response.headers


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as served:
        wire = await served.connect()
        await wire.send(b"".join(post(b"%d" % number) for number in range(50)) + GET[:9])
        bodies = [(await wire.response()).body for _ in range(50)]
        assert bodies == [b"POST /echo %d" % number for number in range(50)]
        assert (await wire.ask(GET[9:])).body == b"GET / "


async def test_pipelined_requests_behind_quart_are_answered_too() -> None:
    async with serving(quart_app()) as served:
        wire = await served.connect()
        await wire.send(post(b"1") + post(b"2") + GET)
        assert [(await wire.response()).body for _ in range(2)] == [b"1", b"2"]
        assert (await wire.response()).json() == {"ok": True}


async def test_a_chunked_body_arrives_whole() -> None:
    async with serving() as served:
        head = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        wire = await served.connect()
        response = await wire.ask(head + b"3\r\nabc\r\n" + b"1\r\nd\r\n" * 5000 + b"0\r\n\r\n")
        assert response.body == b"POST /echo abc" + b"d" * 5000


async def test_a_body_in_many_packets_arrives_whole() -> None:
    async with serving() as served:
        wire = await served.connect()
        body = os.urandom(300_000)
        whole = post(body)
        for start in range(0, len(whole), 50_000):
            await wire.send(whole[start : start + 50_000])
            await trio.lowlevel.checkpoint()
        assert (await wire.response()).body == b"POST /echo " + body


async def test_head_has_the_headers_of_get_and_no_body() -> None:
    async with serving() as served:
        wire = await served.connect()
        await wire.send(b"HEAD /a HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await wire.response(to_head=True)).headers["content-length"] == "8"
        assert (await wire.ask(GET)).body == b"GET / "


async def test_apps_get_header_names_in_lower_case() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await reply(send, b" ".join(b"%b=%b" % header for header in scope["headers"]))

    async with serving(app) as served:
        response = await served.ask(b"GET / HTTP/1.1\r\nHOST: X\r\nX-Name: Value\r\n\r\n")
        assert response.body == b"host=X x-name=Value"


async def test_methods_are_case_sensitive() -> None:
    """Hypercorn takes HEAd for HEAD, and h11 does not: a response without its body."""
    async with serving() as served:
        wire = await served.connect()
        assert (await wire.ask(b"HEAd /a HTTP/1.1\r\nhost: x\r\n\r\n")).body == b"HEAd /a "


async def test_http_1_0_is_answered_and_closed() -> None:
    async with serving() as served:
        wire = await served.connect()
        response = await wire.ask(b"GET /a HTTP/1.0\r\n\r\n")
        assert response.body == b"GET /a "
        assert response.headers["connection"] == "close"
        assert await wire.is_closed_within(1)


async def test_a_target_in_the_form_of_proxies_is_a_path() -> None:
    async with serving() as served:
        wire = await served.connect()
        answer = await wire.ask(b"GET http://other:1/a/b?c HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer.body == b"GET /a/b "
        assert (await wire.ask(b"GET http://other HTTP/1.1\r\nhost: x\r\n\r\n")).body == b"GET / "


async def test_100_continue_is_sent_when_the_app_wants_the_body() -> None:
    async with serving() as served:
        wire = await served.connect()
        response = await wire.ask(post(b"", b"expect: 100-continue\r\n", 3))
        assert (response.status, response.body) == (100, b"")
        assert (await wire.ask(b"abc")).body == b"POST /echo abc"
        assert (await wire.ask(GET)).body == b"GET / "


async def test_100_continue_is_not_sent_for_a_body_that_the_app_refuses() -> None:
    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await reply(send, b"too large", 413)

    async with serving(refuse) as served:
        wire = await served.connect()
        response = await wire.ask(post(b"", b"expect: 100-continue\r\n", 3))
        assert (response.status, response.body) == (413, b"too large")
        assert await wire.is_closed_within(2)


async def test_a_refusal_reaches_a_client_that_is_still_sending() -> None:
    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await receive()
            await reply(send, b"too large", 413)

    async with serving(refuse) as served:
        wire = await served.connect()
        await wire.send(post(b"x" * 1_000_000, length=100_000_000))
        assert (await wire.response()).body == b"too large"


async def test_head_and_body_of_a_response_leave_in_one_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writes: list[bytes] = []

    def write(fd: int, data: bytes) -> int:
        writes.append(bytes(data))
        return real_write(fd, data)

    real_write = os.write
    async with serving() as served:
        wire = await served.connect()
        monkeypatch.setattr(os, "write", write)
        await wire.ask(post(b"abc"))
        monkeypatch.undo()
    assert len(writes) == 1
    assert writes[0].startswith(b"HTTP/1.1 200")
    assert writes[0].endswith(b"POST /echo abc")


async def test_a_streamed_response_leaves_piece_by_piece() -> None:
    got_one = trio.Event()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for piece in (b"one", b"two", b"three"):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await got_one.wait()
            await send({"type": "http.response.body", "body": b""})

    async with serving(stream) as served:
        wire = await served.connect()
        await wire.send(GET)
        while not wire.received.endswith(b"3\r\none\r\n"):
            await wire.read()
        got_one.set()
        while not wire.received.endswith(b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n"):
            await wire.read()


@pytest.mark.parametrize("read_first", [True, False])
async def test_an_app_that_fails_is_answered_for_and_logged(read_first: bool) -> None:
    async def fail(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/echo":
            if read_first:
                await read_body(receive)
            raise KeyError("oops")
        await reply(send, b"fine")

    with structlog.testing.capture_logs() as logs:
        async with serving(fail) as served:
            wire = await served.connect()
            response = await wire.ask(post(b"abc"))
            assert response.status == 500
            assert response.json() == {"ok": False, "error": "internal error"}
            assert (await wire.ask(GET)).body == b"fine"
    (line,) = lines(logs, "request failed")
    assert (line["path"], line["error"]) == ("/echo", "KeyError('oops')")


@pytest.mark.parametrize(
    "headers",
    [[(b"content-length", b"9")], [(b"bad name", b"1")], [(b"a", b"b\r\nc: d")]],
    ids=["length", "name", "value"],
)
async def test_a_response_that_is_not_http_ends_one_connection_only(headers: Any) -> None:
    async def wrong(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/echo":
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"abc"})
        await reply(send, b"fine")

    with structlog.testing.capture_logs() as logs:
        async with serving(wrong) as served:
            wire = await served.connect()
            await wire.send(post(b""))
            with suppress(AssertionError):  # the head may be out already
                response = await wire.response()
                assert response.json() == {"ok": False, "error": "internal error"}
            assert (await served.ask(GET)).body == b"fine"
    assert len(lines(logs, "request failed")) == 1
    assert not lines(logs, "connection failed")
