"""Bytes that no client should send, and ends that no client should make, by the hundred.

After each of them the server serves, holds no connection and no descriptor, and has nothing to
say in its log. A failure names its seed; the same seed makes the same connections.
"""

from __future__ import annotations

import random
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import structlog
import trio

from tests.http_server import GET, App, echo, open_fds, post, quart_app, serving, until

CONNECTIONS = 700
AT_ONCE = 24

CHUNKED = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
UPGRADE = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: %b\r\n%b\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def get(target: bytes, headers: bytes = b"", version: bytes = b"1.1") -> bytes:
    return b"GET %b HTTP/%b\r\nHost: x\r\n%b\r\n" % (target, version, headers)


PIECES = [
    # What a client may send
    GET,
    get(b"/quart"),
    get(b"/quart/missing"),
    get(b"/", version=b"1.0"),
    get(b"/", b"Connection: close\r\n"),
    get(b"http://x/quart"),
    post(b"{}"),
    post(b"{}", b"Connection: close\r\n"),
    post(b"{}", b"Expect: 100-continue\r\n"),
    post(b"", b"Expect: 100-continue\r\n", 20),
    post(b"y" * 40_000),
    CHUNKED + b"3\r\nabc\r\n0\r\n\r\n",
    CHUNKED + b"1;name=value\r\na\r\n0\r\nTrailer: x\r\n\r\n",
    b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"HEAd / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"HEAD ?a HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    # Bodies that are not what was announced
    post(b"abc", length=1),
    post(b"abc", length=300),
    post(b"abc", b"Content-Length: 7\r\n"),
    post(b"abc", b"Transfer-Encoding: chunked\r\n"),
    post(b"", b"Transfer-Encoding: gzip, chunked\r\n"),
    b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1, 1\r\n\r\nx",
    b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\nx",
    b"POST /quart HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\nhalf",
    CHUNKED + b"ZZ\r\n",
    CHUNKED + b"5\r\nab",
    CHUNKED + b"2\r\nabcd\r\n0\r\n\r\n",
    CHUNKED + b"-1\r\n",
    CHUNKED + b"F" * 21 + b"\r\n",
    CHUNKED + b"1\r\nx\r\n" * 3000 + b"0\r\n\r\n",
    CHUNKED + b"0\r\n" + b"A: b\r\n" * 9000,
    # Other protocols
    PREFACE,
    PREFACE + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\4\x08\0\0\0\0\0\0\1\0\0",
    b"PRI * HTTP/2.0\r\n\r\n",
    UPGRADE % (b"h2c", b"HTTP2-Settings: AAMAAABkAAQAAP__\r\n"),
    UPGRADE % (b"h2c", b"HTTP2-Settings: !!!!\r\n"),
    UPGRADE % (b"h2c", b""),
    UPGRADE % (b"websocket", b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAA\r\n"),
    UPGRADE % (b"websocket", b""),
    UPGRADE % (b"websocket", b"Content-Length: 4\r\n") + b"\x81\x02hi",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    # Heads that are none
    get(b"?a"),
    get(b"x"),
    get(b"//evil"),
    get(b"/%ff%fe%00?%ff"),
    get(b"/\xff"),
    get(b"/quart", b"Cookie: \xff\xfe=\x01\r\n"),
    get(b"/", b"Host: y\r\n"),
    get(b"/", b" folded\r\n"),
    get(b"/", b"no colon\r\n"),
    get(b"/", b"\0: \0\r\n"),
    get(b"/", b"A: b\r\n" * 2000),
    get(b"/", version=b"9.9"),
    get(b"/", version=b"11"),
    get(b"/" + b"a" * 70_000),
    b"get / http/1.1\r\nhost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET /\n\n",
    b"\xc3\x89 / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\r\n\r\n",
    b"\0" * 40,
    b"A" * 70_000,
    b"A",
]


@dataclass(frozen=True)
class Visit:
    """One connection: what it sends, in which parts, and how it ends."""

    parts: list[bytes]
    pause: float
    after: bytes
    end: str


def make_visit(chance: random.Random) -> Visit:
    data = bytearray().join(chance.choices(PIECES, k=chance.choice([1, 1, 1, 2, 4])))
    if chance.random() < 0.3:
        del data[chance.randrange(1, len(data) + 1) :]
    for _ in range(chance.choice([0, 0, 0, 0, 1, 3])):
        data[chance.randrange(len(data))] = chance.randrange(256)
    cut = chance.randrange(len(data)) if chance.random() < 0.4 else 0
    return Visit(
        parts=[bytes(data[:cut]), bytes(data[cut:])] if cut else [bytes(data)],
        pause=chance.choice([0, 0, 0.001, 0.01]),
        after=chance.choice(PIECES)[:2000] if chance.random() < 0.2 else b"",
        end=chance.choice(["close", "close", "reset", "half", "read", "stay"]),
    )


async def pay(visit: Visit, port: int) -> None:
    """Make one connection; that the server cuts it is none of its business."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        with suppress(trio.BrokenResourceError), trio.move_on_after(2):
            for part in visit.parts:
                await stream.send_all(part)
                await trio.sleep(visit.pause)
            if visit.end == "half":
                await stream.send_eof()
            if visit.end in ("half", "read"):
                with trio.move_on_after(0.05):
                    await stream.receive_some()
            if visit.after and visit.end != "half":
                await stream.send_all(visit.after)
            if visit.end == "stay":
                while await stream.receive_some():
                    pass
        if visit.end == "reset":
            linger = struct.pack("ii", 1, 0)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


def one_of_each() -> App:
    """Quart behind a raw app: each has traps of its own."""
    quart = quart_app()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        inner = quart if scope["type"] != "http" or "quart" in scope["path"] else echo
        await inner(scope, receive, send)

    return app


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_server_outlives_hostile_connections(seed: int) -> None:
    chance = random.Random(seed)
    visits = iter([make_visit(chance) for _ in range(CONNECTIONS)])
    limits = {"keep_alive_seconds": 0.3, "send_timeout_seconds": 0.3, "drain_timeout_seconds": 2}
    here = f"seed {seed}"
    with structlog.testing.capture_logs() as logs:
        async with serving(one_of_each(), **limits) as served:
            before = open_fds()

            async def visitor() -> None:
                for visit in visits:
                    await pay(visit, served.port)

            async with trio.open_nursery() as nursery:
                for _ in range(AT_ONCE):
                    nursery.start_soon(visitor)
            assert not served.ended.is_set(), here
            assert (await served.ask(GET)).body == b"GET / ", here
            assert (await served.ask(get(b"/quart"))).status == 404, here
            # The longest that may be left: half a body, which the app itself times.
            await until(lambda: open_fds() <= before, 8)
            assert open_fds() == before, here
            served.stop.set()
            assert await served.ends_within(1), here
    assert [line for line in logs if line["log_level"] != "debug"] == [], here
