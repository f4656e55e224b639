"""The client over real HTTP: what it sends, and what it makes of each kind of answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import httpx
import msgspec
import pytest
import trio

from ramakv.config import Limits
from ramakv.errors import BackendRejectedError, BackendUnavailableError
from ramakv.lmcache.client import LMCacheClient
from ramakv.web.server import open_sockets, serve_http, socket_urls


class Answering:
    """An ASGI app that notes requests and answers as told."""

    def __init__(self, status: int = 200, body: bytes = b"{}") -> None:
        self.status, self.body = status, body
        self.requests: list[tuple[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        received = b""
        while True:
            message = await receive()
            received += message["body"]
            if not message["more_body"]:
                break
        self.requests.append((scope["path"], msgspec.json.decode(received)))
        headers = [(b"content-length", b"%d" % len(self.body))]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


@asynccontextmanager
async def client_of(app: Answering) -> AsyncIterator[LMCacheClient]:
    sockets = open_sockets("127.0.0.1:0")
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve_http, app, sockets, limits=Limits(), stop=stop))
        async with make_client(socket_urls(sockets)[0]) as client:
            yield client
        stop.set()


def make_client(url: str, call_timeout_seconds: float = 10.0) -> LMCacheClient:
    return LMCacheClient(
        url,
        connect_timeout_seconds=1.0,
        call_timeout_seconds=call_timeout_seconds,
        connections_max=4,
    )


async def test_it_sends_what_lmcache_documents() -> None:
    app = Answering()
    async with client_of(app) as client:
        await client.prefetch(["a", "b"], "id-1")
        await client.evict(["a"], ("LocalCPUBackend",))
    assert app.requests == [
        ("/memory/prefetch", {"chunk_hashes": ["a", "b"], "lookup_id": "id-1"}),
        ("/memory/evict", {"chunk_hashes": ["a"], "locations": ["LocalCPUBackend"]}),
    ]


async def test_an_address_may_name_a_user_and_a_path() -> None:
    """As in front of an LMCache that others must not reach."""
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200, content=b"{}")

    async with LMCacheClient(
        "http://me:s3%40cret@cache:6999/behind/",
        connect_timeout_seconds=1.0,
        call_timeout_seconds=1.0,
        connections_max=1,
        transport=httpx.MockTransport(answer),
    ) as client:
        await client.prefetch(["a"], "id-1")
    assert str(requests[0].url) == "http://cache:6999/behind/memory/prefetch"
    assert requests[0].headers["host"] == "cache:6999"
    assert requests[0].headers["authorization"] == httpx.BasicAuth("me", "s3@cret")._auth_header


async def test_a_query_tells_where_chunks_lie() -> None:
    async with client_of(Answering(body=b'{"a":["LocalCPUBackend"],"b":[]}')) as client:
        assert await client.query(["a", "b"]) == {"a": ["LocalCPUBackend"], "b": []}


async def test_without_a_query_route_nothing_can_be_told() -> None:
    async with client_of(Answering(404, b'{"detail":"Not Found"}')) as client:
        assert await client.query(["a"]) is None


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, b'{"error": "chunk_hashes is required"}'),
        (422, b'{"detail":[]}'),
        (500, b'{"error": "invalid literal for int() with base 16: \'zz\'"}'),
        (500, b'{"error": "Some workers failed to process request", "failures": '
              b'{"7000": {"error": "HTTP Error 500: Internal Server Error"}}}'),
    ],
)  # fmt: skip
async def test_a_refusal_of_the_call_is_told_from_an_outage(status: int, body: bytes) -> None:
    async with client_of(Answering(status, body)) as client:
        with pytest.raises(BackendRejectedError, match=f"status {status}"):
            await client.evict(["zz"], [])


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b'{"detail":"Not Found"}'),
        (502, b"<html>"),
        (503, b'{"error": "busy"}'),
        (500, b'{"error": "Some workers failed to process request", "failures": '
              b'{"7000": {"error": "<urlopen error [Errno 111] Connection refused>"}}}'),
        (500, b'{"error": "Some workers failed to process request", "failures": '
              b'{"7001": {"error": "timed out"}}}'),
        (200, b"not json"),
    ],
)  # fmt: skip
async def test_an_outage_is_told_from_a_refusal_of_the_call(status: int, body: bytes) -> None:
    async with client_of(Answering(status, body)) as client:
        with pytest.raises(BackendUnavailableError):
            await client.evict(["a"], [])


async def test_nobody_there_is_an_outage() -> None:
    async with make_client("http://127.0.0.1:9") as client:
        with pytest.raises(BackendUnavailableError, match="/memory/prefetch"):
            await client.prefetch(["a"], "id")


@pytest.mark.parametrize("dribbles", [False, True])
async def test_a_call_has_one_deadline_however_the_answer_dribbles(dribbles: bool) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some(65536)
        with suppress(trio.BrokenResourceError):
            await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
            while dribbles:
                await trio.sleep(0.05)
                await stream.send_all(b" ")
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        async with make_client(f"http://127.0.0.1:{port}", 0.3) as client:
            with trio.fail_after(5), pytest.raises(BackendUnavailableError, match=r"within 0\.3 s"):
                await client.evict(["a"], [])
        nursery.cancel_scope.cancel()
