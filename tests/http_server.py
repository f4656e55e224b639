"""Apps, clients and a running server, for the tests of the HTTP server."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio
import trio.testing
from quart import request
from quart_trio import QuartTrio

from ramakv.config import Limits
from ramakv.web.server import open_sockets, serve_http
from ramakv.web.tls import ServerTls

App = Callable[[Any, Any, Any], Awaitable[None]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

BIG = b"x" * 16_000_000
"""More than the buffers of a socket hold."""

CHUNKED = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def post(body: bytes, headers: bytes = b"", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = b"POST /echo HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n"
    return head % (headers, size) + body


# Apps


async def reply(send: Send, body: bytes, status: int = 200) -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def read_body(receive: Any) -> bytes | None:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += bytes(message["body"])
        if not message["more_body"]:
            return body


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the request: a raw ASGI app that times its own body, like POST /event."""
    assert scope["type"] == "http"
    with trio.move_on_after(5):
        body = await read_body(receive)
        if body is not None:
            await reply(send, b"%b %b %b" % (scope["method"].encode(), scope["raw_path"], body))
        return
    await reply(send, b"", 408)


async def answer_early(scope: Any, receive: Any, send: Any) -> None:
    """Answer without a look at the body."""
    assert scope["type"] == "http"
    await reply(send, b"early")


async def big(scope: Any, receive: Any, send: Any) -> None:
    assert scope["type"] == "http"
    await read_body(receive)
    await reply(send, BIG)


async def cancels_itself(scope: Any, receive: Any, send: Any) -> None:
    """Answer like Quart-Trio, whose nursery is cancelled by the end of its last send."""
    assert scope["type"] == "http"
    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            await read_body(receive)
            assert await read_body(receive) is None
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
        await trio.testing.wait_all_tasks_blocked()
        await reply(send, BIG if scope["path"] == "/big" else b"small")
        await trio.sleep_forever()


def quart_app() -> QuartTrio:
    app = QuartTrio("tests")

    @app.get("/")
    async def index() -> dict[str, bool]:
        return {"ok": True}

    @app.get("/big")
    async def send_big() -> bytes:
        return BIG

    @app.post("/echo")
    async def send_back() -> Any:
        return await request.get_data(cache=False)

    return app


# Clients


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Wire:
    """A client that sends the bytes it is told to, and reads responses."""

    stream: trio.abc.HalfCloseableStream
    received: bytearray = field(default_factory=bytearray)

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def read(self) -> None:
        with trio.fail_after(5):
            data = await self.stream.receive_some()
        assert data, f"closed after {self.received!r}"
        self.received += data

    async def response(self, *, to_head: bool = False) -> Response:
        while b"\r\n\r\n" not in self.received:
            await self.read()
        head, _, _ = self.received.partition(b"\r\n\r\n")
        del self.received[: len(head) + 4]
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        size = 0 if to_head else int(headers.get("content-length", 0))
        while len(self.received) < size:
            await self.read()
        body = bytes(self.received[:size])
        del self.received[:size]
        return Response(int(first.split()[1]), headers, body)

    async def ask(self, data: bytes) -> Response:
        await self.send(data)
        return await self.response()

    async def is_closed_within(self, seconds: float) -> bool:
        """Whether nothing but the end comes, in time; a reset is an end too."""
        with trio.move_on_after(seconds):
            try:
                return not self.received and await self.stream.receive_some() == b""
            except trio.BrokenResourceError:
                return True
        return False


def hasty_client(port: int, data: bytes) -> Wire:
    """Connect and send before the server, in this thread, comes to accept."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(data)
    return Wire(trio.SocketStream(trio.socket.from_stdlib_socket(sock)))


@dataclass
class Served:
    port: int
    stop: trio.Event
    ended: trio.Event = field(default_factory=trio.Event)
    clients: list[Wire] = field(default_factory=list)

    async def connect(self) -> Wire:
        wire = Wire(await trio.open_tcp_stream("127.0.0.1", self.port))
        self.clients.append(wire)
        return wire

    async def ask(self, data: bytes) -> Response:
        wire = await self.connect()
        response = await wire.ask(data)
        await wire.stream.aclose()
        return response

    async def ends_within(self, seconds: float) -> bool:
        with trio.move_on_after(seconds):
            await self.ended.wait()
            return True
        return False


@asynccontextmanager
async def serving(
    app: App = echo, *, tls: ServerTls | None = None, **limits: Any
) -> AsyncIterator[Served]:
    sockets = open_sockets("127.0.0.1:0")
    served = Served(sockets[0].getsockname()[1], trio.Event())

    async def serve(*, task_status: trio.TaskStatus[None]) -> None:
        try:
            await serve_http(
                app,
                sockets,
                limits=Limits(**limits),
                stop=served.stop,
                tls=tls,
                task_status=task_status,
            )
        finally:
            served.ended.set()

    async with trio.open_nursery() as nursery:
        await nursery.start(serve)
        try:
            yield served
        finally:
            for client in served.clients:
                await trio.aclose_forcefully(client.stream)
            served.stop.set()
    assert [sock.fileno() for sock in sockets] == [-1]


async def read_to_the_end(wire: Wire) -> None:
    while await wire.stream.receive_some():
        pass


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def free_fds() -> list[int]:
    return [fd for fd in range(500) if not Path(f"/proc/self/fd/{fd}").exists()]


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for what happens elsewhere: in the kernel, or in another task's own time."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


def lines(logs: list[Any], event: str) -> list[Any]:
    return [line for line in logs if line["event"] == event]
