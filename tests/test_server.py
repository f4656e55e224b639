"""The HTTP server, over real sockets: what it serves, refuses, bounds, and how it stops."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
import trio.testing
from quart import request
from quart_trio import QuartTrio

from ramakv.config import Limits
from ramakv.errors import ConfigError
from ramakv.web import connection as connection_module, server as server_module
from ramakv.web.server import close_sockets, open_sockets, serve_http, socket_urls

App = Callable[[Any, Any, Any], Awaitable[None]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

BIG = b"x" * 16_000_000
"""More than the buffers of a socket hold."""

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
async def serving(app: App = echo, **limits: Any) -> AsyncIterator[Served]:
    sockets = open_sockets("127.0.0.1:0")
    served = Served(sockets[0].getsockname()[1], trio.Event())

    async def serve(*, task_status: trio.TaskStatus[None]) -> None:
        try:
            await serve_http(
                app,
                sockets,
                limits=Limits(**limits),
                stop=served.stop,
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


# Sockets


def test_a_name_is_listened_on_at_all_its_addresses_with_one_port() -> None:
    sockets = open_sockets("localhost:0")
    with closing_all(sockets):
        wanted = {
            where[0]
            for *_, where in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)
            if can_bind(where)
        }
        assert {sock.getsockname()[0] for sock in sockets} == wanted
        assert len({sock.getsockname()[1] for sock in sockets}) == 1
        for sock in sockets:
            assert not sock.getblocking()
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


@contextmanager
def closing_all(sockets: list[socket.socket]) -> Iterator[list[socket.socket]]:
    try:
        yield sockets
    finally:
        close_sockets(sockets)


def can_bind(where: Any) -> bool:
    family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    with socket.socket(family) as sock:
        try:
            sock.bind((where[0], 0, *where[2:]))
        except OSError:
            return False
    return True


def test_urls_are_written_as_people_write_them(tmp_path: Path) -> None:
    sockets = open_sockets("127.0.0.1:0") + open_sockets(f"unix:{tmp_path}/s")
    if can_bind(("::1", 0)):
        sockets += open_sockets("[::1]:0")
    with closing_all(sockets):
        port = sockets[0].getsockname()[1]
        urls = socket_urls(sockets)
        assert urls[:2] == [f"http://127.0.0.1:{port}", f"unix:{tmp_path}/s"]
        assert all(re.fullmatch(r"http://\[::1\]:\d+", url) for url in urls[2:])


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("", "expected host:port"),
        ("127.0.0.1", "expected host:port"),
        (":6998", "expected host:port"),
        ("::1:6998", "expected host:port"),
        ("http://127.0.0.1:6998", "expected host:port"),
        ("127.0.0.1:", "expected a port from 0 to 65535"),
        ("127.0.0.1:http", "expected a port from 0 to 65535"),
        ("127.0.0.1:65536", "expected a port from 0 to 65535"),
        ("127.0.0.1:-1", "expected a port from 0 to 65535"),
        ("127.0.0.1:²", "expected a port from 0 to 65535"),
        ("no-such-host.invalid:80", "is unknown"),
        ("x" * 70 + ":80", "is unknown"),
        ("203.0.113.7:80", "this machine has no such address"),
        ("unix:", "expected host:port, [ipv6]:port or unix:/path"),
        ("unix:relative", "expected host:port, [ipv6]:port or unix:/path"),
        ("unix:/no/such/folder/s", "the folder does not exist"),
        ("unix:/" + "x" * 200, "path too long"),
        ("unix:/dev/null", "is no socket"),
        ("127.0.0.1\n:80\n", "expected a port from 0 to 65535"),
    ],
)
def test_an_unusable_address_is_one_line_that_names_the_key(address: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_sockets(address, key="admin.listen_addr")
    message = str(caught.value)
    assert message.startswith(f"admin.listen_addr: cannot listen on {address!r}: ")
    assert problem in message
    assert "\n" not in message


def found(*hosts: str) -> Callable[..., list[Any]]:
    """Return a getaddrinfo for a name that has these addresses."""
    families = [socket.AF_INET6 if ":" in host else socket.AF_INET for host in hosts]
    answer = [(family, 0, 0, "", (host, 0)) for family, host in zip(families, hosts, strict=True)]
    return lambda *_, **__: answer


@pytest.mark.parametrize("hosts", [("127.0.0.1", "127.0.0.2"), ("::", "0.0.0.0")])
def test_all_addresses_get_the_port_that_was_free(
    hosts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_bind(("::1", 0)):
        pytest.skip("no IPv6 here")
    monkeypatch.setattr(socket, "getaddrinfo", found(*hosts))
    with closing_all(open_sockets("name:0")) as sockets:
        assert [sock.getsockname()[0] for sock in sockets] == list(hosts)
        assert len({sock.getsockname()[1] for sock in sockets}) == 1


def test_an_address_of_a_name_that_the_machine_has_not_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere = "203.0.113.7"
    for hosts in ([elsewhere, "127.0.0.1"], ["127.0.0.1", elsewhere]):
        monkeypatch.setattr(socket, "getaddrinfo", found(*hosts))
        with closing_all(open_sockets("name:0")) as sockets:
            assert [sock.getsockname()[0] for sock in sockets] == ["127.0.0.1"]
    monkeypatch.setattr(socket, "getaddrinfo", found(elsewhere, elsewhere))
    with pytest.raises(ConfigError, match="this machine has no such address"):
        open_sockets("name:0")


def test_what_was_opened_is_closed_when_the_rest_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = open_fds()
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = other.getsockname()[1]
        hosts = [(socket.AF_INET, 0, 0, "", (f"127.0.0.{last}", port)) for last in (1, 2)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: hosts)
        with pytest.raises(ConfigError, match="another process listens there"):
            open_sockets(f"name:{port}")
    assert open_fds() == before


def test_a_port_in_use_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match="another process listens there; stop it"):
            open_sockets(address)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use any port")
def test_a_port_that_is_not_permitted_says_so() -> None:  # pragma: no cover
    with pytest.raises(ConfigError, match="permission"):
        open_sockets("127.0.0.1:1")


async def test_a_unix_socket_is_for_user_and_group_and_is_gone_in_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    sockets = open_sockets(f"unix:{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve_http, echo, sockets, limits=Limits(), stop=stop))
        async with await trio.open_unix_socket(str(path)) as stream:
            assert (await Wire(stream).ask(GET)).body == b"GET / "
        stop.set()
    assert not path.exists()


def test_a_socket_file_that_nobody_listens_on_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with closing_all(open_sockets(f"unix:{path}")), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    assert not path.exists()


def test_a_socket_that_another_process_listens_on_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))
        live.listen()
        with pytest.raises(ConfigError, match="another process listens there"):
            open_sockets(f"unix:{path}")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is no socket"):
        open_sockets(f"unix:{path}")
    assert path.read_text() == "precious"


def test_closing_leaves_the_socket_of_a_successor(tmp_path: Path) -> None:
    path = tmp_path / "s"
    sockets = open_sockets(f"unix:{path}")
    path.unlink()
    with closing_all(open_sockets(f"unix:{path}")), socket.socket(socket.AF_UNIX) as client:
        close_sockets(sockets)
        client.connect(str(path))


# Requests


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


# HTTP/1.1 only, and refusals


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


CHUNKED = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


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
    """On stock Hypercorn, ten of them that meet the answer end the server (traps.md, 1)."""
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


# Errors of connections


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


# Deadlines


@pytest.mark.parametrize(
    "app", [echo, cancels_itself, quart_app()], ids=["raw", "cancels itself", "quart"]
)
async def test_an_idle_connection_is_closed_after_keep_alive_seconds(app: App) -> None:
    """Behind Quart-Trio, stock Hypercorn never closed it (traps.md, 3)."""
    async with serving(app, keep_alive_seconds=0.2) as served:
        new, used = await served.connect(), await served.connect()
        await used.ask(GET)
        await used.ask(post(b"abc"))
        started = trio.current_time()
        assert await used.is_closed_within(1)
        assert await new.is_closed_within(1)
        assert trio.current_time() - started > 0.1


@pytest.mark.parametrize("after", [b"", GET], ids=["first", "second"])
async def test_a_head_that_dribbles_in_is_cut(after: bytes) -> None:
    async with serving(keep_alive_seconds=0.3) as served:
        wire = await served.connect()
        if after:
            await wire.ask(after)
        with trio.fail_after(2), suppress(trio.BrokenResourceError):
            await wire.send(b"GET / HTTP/1.1\r\nhost: ")
            while not await wire.is_closed_within(0.05):
                await wire.send(b"x")


async def test_a_request_in_hand_has_no_idle_deadline() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            body = await read_body(receive)
            await trio.sleep(0.3)
            await reply(send, body or b"")

    async with serving(slow, keep_alive_seconds=0.2) as served:
        wire = await served.connect()
        await wire.send(post(b"", length=3))
        for byte in (b"a", b"b", b"c"):
            await trio.sleep(0.15)
            await wire.send(byte)
        assert (await wire.response()).body == b"abc"


async def test_a_client_that_leaves_an_idle_connection_is_forgotten_at_once() -> None:
    """Stock Hypercorn kept its descriptor for keep_alive_timeout (traps.md, 13)."""
    async with serving(keep_alive_seconds=60) as served:
        before = open_fds()
        wires = [await served.connect() for _ in range(20)]
        for wire in wires[10:]:
            await wire.ask(GET)
        for wire in wires[::2]:
            await wire.stream.send_eof()
            assert await wire.is_closed_within(1)
        for wire in wires:
            await wire.stream.aclose()
        await until(lambda: open_fds() == before, 1)


@pytest.mark.parametrize("app", [big, quart_app()], ids=["raw", "quart"])
async def test_a_client_that_never_reads_is_dropped(app: App) -> None:
    async with serving(app, send_timeout_seconds=0.3, keep_alive_seconds=60) as served:
        before = open_fds()
        wire = await served.connect()
        await wire.send(GET.replace(b"/ ", b"/big "))
        await until(lambda: open_fds() == before + 1, 2)  # the client's own is left
        with pytest.raises(trio.BrokenResourceError):  # a reset, not the end of the response
            await read_to_the_end(wire)


@pytest.mark.parametrize(
    "app", [big, cancels_itself, quart_app()], ids=["raw", "cancels itself", "quart"]
)
async def test_a_client_that_reads_slowly_gets_it_all(app: App) -> None:
    async with serving(app, keep_alive_seconds=60) as served:
        wire = await served.connect()
        await wire.send(GET.replace(b"/ ", b"/big "))
        await trio.sleep(0.1)
        assert len((await wire.response()).body) == len(BIG)
        await wire.send(GET)
        assert (await wire.response()).status == 200


async def test_an_endless_response_ends_with_its_client() -> None:
    stopped = trio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
        finally:
            stopped.set()

    with structlog.testing.capture_logs() as logs:
        async with serving(endless) as served:
            wire = await served.connect()
            await wire.send(GET)
            await wire.read()
            await wire.stream.aclose()
            with trio.fail_after(2):
                await stopped.wait()
    assert not lines(logs, "request failed")


async def test_a_response_to_a_client_that_reads_as_fast_starves_nobody() -> None:
    sent = 0

    async def long(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        assert scope["type"] == "http"
        if scope["path"] == "/echo":
            await reply(send, b"%d" % sent)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while sent < 5000:
            sent += 1
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with serving(long) as served, trio.open_nursery() as nursery:
        other = await served.connect()

        def read_all() -> None:  # not in this thread: there it would read in turns
            with socket.create_connection(("127.0.0.1", served.port)) as client:
                client.sendall(GET)
                while not client.recv(100_000).endswith(b"0\r\n\r\n"):
                    pass

        nursery.start_soon(trio.to_thread.run_sync, read_all)
        await until(lambda: sent > 0)
        assert int((await other.ask(post(b""))).body) < 4000


async def test_a_client_that_is_given_up_is_a_disconnect_for_the_app() -> None:
    told = trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await read_body(receive)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with pytest.raises(OSError, match="takes no more"):
            await send({"type": "http.response.body", "body": BIG, "more_body": True})
        assert await read_body(receive) is None
        told.set()

    async with serving(app, send_timeout_seconds=0.2) as served:
        wire = await served.connect()
        await wire.send(GET)
        with trio.fail_after(2):
            await told.wait()


async def test_what_a_client_pipelines_is_not_hoarded() -> None:
    async def wait(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await read_body(receive)
        await receive()

    async with serving(wait, drain_timeout_seconds=0.1) as served:
        wire = await served.connect()
        with trio.move_on_after(0.5) as sending:
            await wire.send(post(b"abc") + BIG)
        assert sending.cancelled_caught


async def test_a_body_of_many_pieces_starves_nobody() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await trio.lowlevel.checkpoint()
            ticks += 1

    async with serving() as served, trio.open_nursery() as nursery:
        wire = await served.connect()
        await wire.ask(GET)
        nursery.start_soon(tick)
        await wire.ask(CHUNKED + b"1\r\nx\r\n" * 5000 + b"0\r\n\r\n")
        nursery.cancel_scope.cancel()
    assert ticks > 5000 / connection_module.EVENTS_PER_TURN / 2


async def test_a_disconnect_reaches_a_handler_that_waits_for_one() -> None:
    left = trio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            assert await read_body(receive) == b"abc"
            assert (await receive())["type"] == "http.disconnect"
            assert (await receive())["type"] == "http.disconnect"
            left.set()

    with structlog.testing.capture_logs() as logs:
        async with serving(wait) as served:
            wire = await served.connect()
            await wire.send(post(b"abc"))
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not left.is_set()
            await wire.stream.aclose()
            with trio.fail_after(1):
                await left.wait()
    assert not lines(logs, "request failed")


# Too many


async def test_a_client_too_many_gets_503_and_the_next_a_free_place() -> None:
    async with serving(connections_max=2) as served:
        first, second = await served.connect(), await served.connect()
        assert (await first.ask(GET)).status == (await second.ask(GET)).status == 200
        third = hasty_client(served.port, GET)
        response = await third.response()
        assert response.status == 503
        assert response.json() == {"ok": False, "error": "too many connections"}
        with trio.fail_after(2):
            assert await third.stream.receive_some() == b""  # and no reset
        await third.stream.aclose()
        await first.stream.aclose()
        assert await second.is_closed_within(0.05) is False
        assert (await served.ask(GET)).status == 200


async def test_without_file_descriptors_the_server_waits_quietly() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with structlog.testing.capture_logs() as logs:
        async with serving() as served:
            clients = [trio.socket.socket() for _ in range(6)]
            free = free_fds()
            try:
                # Two more, then none; the clients have theirs already.
                resource.setrlimit(resource.RLIMIT_NOFILE, (free[2], hard))
                for client in clients:
                    await client.connect(("127.0.0.1", served.port))
                await until(lambda: bool(lines(logs, "cannot accept connections")))
                for _ in range(4):
                    await trio.sleep(server_module.ACCEPT_PAUSE_SECONDS)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for client in clients:
                async with trio.SocketStream(client) as stream:
                    assert (await Wire(stream).ask(GET)).status == 200
    said = lines(logs, "cannot accept connections")
    assert 1 <= len(said) <= 8
    assert said[0]["error"] == os.strerror(errno.EMFILE)


async def test_a_burst_of_clients_is_let_in_at_once() -> None:
    async with serving() as served:
        wires = [await served.connect() for _ in range(100)]
        for wire in wires:
            await wire.send(GET)
        for wire in wires:
            assert (await wire.response()).status == 200


# Stopping


async def test_stopping_closes_listener_and_idle_connections_at_once() -> None:
    async with serving(keep_alive_seconds=60, drain_timeout_seconds=60) as served:
        idle, used = await served.connect(), await served.connect()
        await used.ask(GET)
        served.stop.set()
        assert await served.ends_within(1)
        assert await idle.is_closed_within(0.1)
        assert await used.is_closed_within(0.1)
        with pytest.raises(OSError, match="all attempts to connect"):
            await trio.open_tcp_stream("127.0.0.1", served.port)


async def test_a_request_in_hand_is_finished_and_says_close() -> None:
    asked, go = trio.Event(), trio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            asked.set()
            await go.wait()
            await reply(send, b"done")

    async with serving(wait) as served:
        wire = await served.connect()
        await wire.send(GET + GET)
        await asked.wait()
        served.stop.set()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert not served.ended.is_set()
        go.set()
        response = await wire.response()
        assert (response.body, response.headers["connection"]) == (b"done", "close")
        assert await served.ends_within(2)
        assert await wire.is_closed_within(0.1)


async def test_a_response_that_has_begun_is_finished_and_its_connection_closed() -> None:
    begun, go = trio.Event(), trio.Event()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        headers = [(b"content-length", b"6")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"abc", "more_body": True})
        begun.set()
        await go.wait()
        await send({"type": "http.response.body", "body": b"def"})

    async with serving(stream) as served:
        wire = await served.connect()
        await wire.send(GET)
        await begun.wait()
        served.stop.set()
        await trio.testing.wait_all_tasks_blocked(0.05)
        go.set()
        assert (await wire.response()).body == b"abcdef"
        assert await served.ends_within(1)


async def test_half_a_body_is_cut_at_shutdown() -> None:
    async with serving(drain_timeout_seconds=0.3) as served:
        wire = await served.connect()
        await wire.send(post(b"abc", length=10))
        await trio.testing.wait_all_tasks_blocked(0.05)
        served.stop.set()
        assert not await served.ends_within(0.1)
        assert await served.ends_within(1)
        assert await wire.is_closed_within(0.1)


@pytest.mark.parametrize("app", [big, quart_app()], ids=["raw", "quart"])
async def test_a_client_that_never_reads_cannot_hold_shutdown(app: App) -> None:
    """On stock Hypercorn it held it for as long as it liked (traps.md, 5)."""
    async with serving(app, send_timeout_seconds=60, drain_timeout_seconds=0.3) as served:
        wire = await served.connect()
        await wire.send(GET.replace(b"/ ", b"/big "))
        await wire.read()
        served.stop.set()
        assert await served.ends_within(1.5)


async def test_an_app_that_does_not_end_is_cut_at_shutdown() -> None:
    async def sleep(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await trio.sleep_forever()

    async with serving(sleep, drain_timeout_seconds=0.2) as served:
        wire = await served.connect()
        await wire.send(GET)
        await trio.testing.wait_all_tasks_blocked(0.05)
        served.stop.set()
        assert await served.ends_within(1)
        assert await wire.is_closed_within(0.1)


async def test_a_cancelled_server_leaves_nothing_behind() -> None:
    before = open_fds()
    sockets = open_sockets("127.0.0.1:0")
    with trio.fail_after(2):
        async with trio.open_nursery() as nursery:
            limits = Limits(send_timeout_seconds=60)
            await nursery.start(partial(serve_http, big, sockets, limits=limits, stop=trio.Event()))
            stream = await trio.open_tcp_stream("127.0.0.1", sockets[0].getsockname()[1])
            await stream.send_all(GET)
            await stream.receive_some()
            nursery.cancel_scope.cancel()
        await trio.aclose_forcefully(stream)
    assert sockets[0].fileno() == -1
    assert open_fds() == before


async def test_a_stop_before_the_start_ends_it() -> None:
    stop = trio.Event()
    stop.set()
    with trio.fail_after(1):
        sockets = open_sockets("127.0.0.1:0")
        await serve_http(echo, sockets, limits=Limits(), stop=stop)
    assert sockets[0].fileno() == -1


# The lifespan


async def test_the_lifespan_of_a_quart_app_is_served() -> None:
    app, seen = QuartTrio("tests"), []

    @app.before_serving
    async def before() -> None:
        seen.append("before")

    @app.after_serving
    async def after() -> None:
        seen.append("after")

    @app.get("/")
    async def index() -> str:
        seen.append("request")
        return ""

    async with serving(app) as served:
        await served.ask(GET)
    assert seen == ["before", "request", "after"]


async def test_an_app_that_cannot_start_is_not_served() -> None:
    app = QuartTrio("tests")

    @app.before_serving
    async def before() -> None:
        raise KeyError("oops")

    with pytest.RaisesGroup(
        pytest.RaisesExc(Exception, match="oops"), flatten_subgroups=True, allow_unwrapped=True
    ):
        sockets = open_sockets("127.0.0.1:0")
        await serve_http(app, sockets, limits=Limits(), stop=trio.Event())
    assert sockets[0].fileno() == -1


@pytest.mark.parametrize("returns", [True, False])
async def test_an_app_needs_no_lifespan(returns: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            if returns:
                return
            raise NotImplementedError
        await reply(send, b"fine")

    with structlog.testing.capture_logs() as logs:
        async with serving(app) as served:
            assert (await served.ask(GET)).body == b"fine"
    assert not [line for line in logs if line["log_level"] != "debug"]


async def test_a_lifespan_that_ends_in_an_error_is_logged() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            raise KeyError("oops")
        await reply(send, b"fine")

    with structlog.testing.capture_logs() as logs:
        async with serving(app) as served:
            assert (await served.ask(GET)).body == b"fine"
    assert [line["log_level"] for line in logs] == ["error"]
