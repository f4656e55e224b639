"""The embedded engine over real HTTP: routes, replies byte by byte, errors, hang-ups."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio import serve
from trio.testing import wait_all_tasks_blocked

from ramakv.config import Embedded
from ramakv.lmcache.embedded import app as app_module, engine as engine_module
from ramakv.lmcache.embedded.app import create_app
from ramakv.lmcache.embedded.engine import Engine, open_engine
from tests.test_embedded_engine import DISK, HOT, Gate, files_in, names

if TYPE_CHECKING:
    from hypercorn.typing import ASGIFramework


@dataclass
class Served:
    """An engine, a client of its app, and the gate its files go through."""

    engine: Engine
    client: httpx.AsyncClient
    gate: Gate
    port: int

    async def post(self, path: str, body: Any) -> tuple[int, bytes]:
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        response = await self.client.post(path, content=content)
        assert response.headers["content-type"] == "application/json"
        return response.status_code, response.content

    async def get(self, path: str) -> tuple[int, bytes]:
        response = await self.client.get(path)
        assert response.headers["content-type"] == "application/json"
        return response.status_code, response.content


@asynccontextmanager
async def open_served(folder: Path, **sizes: Any) -> AsyncIterator[Served]:
    """Serve an engine on a free port of the loopback, with Hypercorn as it is."""
    gate = Gate()
    config = Embedded(**sizes)
    hypercorn_config = HypercornConfig()
    hypercorn_config.bind = ["127.0.0.1:0"]
    hypercorn_config.accesslog = None
    stop = trio.Event()
    async with open_engine(config, disk_dir=folder, run_sync=gate) as engine:
        app = cast("ASGIFramework", create_app(engine))
        async with trio.open_nursery() as nursery:
            [url] = await nursery.start(
                partial(serve, app, hypercorn_config, shutdown_trigger=stop.wait)
            )
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
                port = urlsplit(url).port
                assert port is not None
                yield Served(engine, client, gate, port)
            stop.set()
            nursery.cancel_scope.cancel()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with open_served(tmp_path) as served:
        yield served


async def test_a_turn_over_http(served: Served) -> None:
    """Store, evict, query, prefetch and retrieve answer in LMCache's shapes, key by key."""
    hashes = ["h-a", "-af2f5548dde4cdb", "h-c"]
    stored = await served.post("/engine/store", {"chunk_hashes": hashes})
    assert stored == (
        200,
        b'{"status":"success","num_chunks":3,"num_stored":3,"num_written":3}',
    )
    evicted = await served.post("/memory/evict", {"chunk_hashes": hashes, "locations": [HOT]})
    assert evicted == (200, b'{"status":"success","num_evicted":3}')
    query = await served.post("/memory/query", {"chunk_hashes": ["h-c", "h-x"]})
    assert query == (200, b'{"h-c":["LocalDiskBackend"],"h-x":[]}')
    body = {"chunk_hashes": hashes[:2], "lookup_id": "pf-1"}
    prefetch = await served.post("/memory/prefetch", body)
    assert prefetch == (
        200,
        b'{"status":"prefetch_started","lookup_id":"pf-1","num_chunks":2}',
    )
    await wait_all_tasks_blocked()
    retrieved = await served.post("/engine/retrieve", {"chunk_hashes": [*hashes, "h-x", "h-a"]})
    assert retrieved == (
        200,
        b'{"status":"success","num_chunks":5,'
        b'"found":{"LocalCPUBackend":2,"LocalDiskBackend":1},'
        b'"num_missing":2,"missing":["h-x","h-a"]}',
    )
    for locations, count in (([], 0), (["Nope"], 0), (None, 6)):
        everything = {"chunk_hashes": hashes, "locations": locations}
        reply = await served.post("/memory/evict", everything)
        assert reply == (200, b'{"status":"success","num_evicted":%d}' % count)


async def test_stats(served: Served) -> None:
    """Counts per tier and of the prefetches."""
    await served.post("/engine/store", {"chunk_hashes": names("a b")})
    await served.post("/memory/evict", {"chunk_hashes": names("b"), "locations": [HOT]})
    await served.post("/engine/retrieve", {"chunk_hashes": names("a b c")})
    await served.post("/memory/prefetch", {"chunk_hashes": names("a"), "lookup_id": "p"})
    await wait_all_tasks_blocked()
    status, content = await served.get("/engine/stats")
    assert status == 200
    tier = {"chunks": 2, "payload_bytes": 512, "evictions_lru": 0}
    hot = {**tier, "chunks_max": 16_384, "hits": 1, "misses": 2, "evictions": 1}
    disk = {**tier, "chunks_max": 131_072, "hits": 1, "misses": 1, "evictions": 0}
    files = {"jobs_waiting": 0, "write_failures": 0, "read_failures": 0}
    assert msgspec.json.decode(content) == {
        "tiers": {HOT: hot, DISK: {**disk, **files}},
        "prefetches": {
            "started": 1,
            "finished": 1,
            "refused": 0,
            "chunks_hot": 1,
            "chunks_loaded": 0,
        },
    }


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"chunk_hashes": ["ab"]},
        {"chunk_hashes": ["ab"], "lookup_id": ""},
        {"chunk_hashes": ["ab"], "lookup_id": None},
        {"chunk_hashes": [], "lookup_id": "x"},
        {"chunk_hashes": None, "lookup_id": "x"},
    ],
)
async def test_prefetch_needs_hashes_and_an_id(served: Served, body: dict[str, Any]) -> None:
    """As a real worker says it."""
    expected = 400, b'{"error":"chunk_hashes and lookup_id are required"}'
    assert await served.post("/memory/prefetch", body) == expected


@pytest.mark.parametrize(
    "path", ["/memory/evict", "/memory/query", "/engine/store", "/engine/retrieve"]
)
async def test_the_others_need_hashes(served: Served, path: str) -> None:
    """As a real worker says it."""
    for body in (b"{}", b'{"chunk_hashes":[]}', b'{"chunk_hashes":null,"locations":[]}'):
        assert await served.post(path, body) == (400, b'{"error":"chunk_hashes is required"}')


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{bad",
        b"[1]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"chunk_hashes":["\xff"],"lookup_id":"x"}',
        b'{"chunk_hashes":["ab",5],"lookup_id":"x"}',
        b'{"chunk_hashes":[""],"lookup_id":"x"}',
        b'{"chunk_hashes":["\\ud800"],"lookup_id":"x"}',
        b'{"chunk_hashes":"ab","lookup_id":"x"}',
        b'{"chunk_hashes":["ab"],"lookup_id":"x","deep":' + b"[" * 100_000,
        b'{"chunk_hashes":["ab"],"lookup_id":"x","deep":' + b'{"a":' * 100_000,
        b'{"chunk_hashes":["' + b"a" * (app_module.HASH_CHARS_MAX + 1) + b'"],"lookup_id":"x"}',
    ],
)
async def test_bodies_that_cannot_be_decoded(served: Served, body: bytes) -> None:
    """They are a 500 with one line of JSON, as in LMCache, and change nothing."""
    for path in ("/memory/prefetch", "/memory/evict", "/memory/query", "/engine/store"):
        status, content = await served.post(path, body)
        error = msgspec.json.decode(content, type=dict[str, str])
        assert status == 500
        assert list(error) == ["error"]
        assert "Traceback" not in error["error"]
    assert served.engine.statistics().tiers[HOT].chunks == 0


@pytest.mark.parametrize("lookup_id", [5, -(2**63), 2**63 - 1])
async def test_lookup_id_may_be_a_number(served: Served, lookup_id: int) -> None:
    """It comes back as it was."""
    body = {"chunk_hashes": ["ab"], "lookup_id": lookup_id, "unknown": "ignored"}
    status, content = await served.post("/memory/prefetch", body)
    assert (status, msgspec.json.decode(content)["lookup_id"]) == (200, lookup_id)


@pytest.mark.parametrize("lookup_id", [b"123456789012345678901234567890", b"[]", b"true", b"1.5"])
async def test_lookup_id_of_another_kind(served: Served, lookup_id: bytes) -> None:
    """What could not be sent back is refused."""
    body = b'{"chunk_hashes":["ab"],"lookup_id":%b}' % lookup_id
    assert (await served.post("/memory/prefetch", body))[0] == 500


async def test_content_type_is_not_looked_at(served: Served) -> None:
    """A form, as some clients say by default, is decoded as JSON all the same."""
    response = await served.client.post(
        "/memory/evict",
        content=b'{"chunk_hashes":["ab"]}',
        headers={"content-type": "application/x-www-form-urlencoded"},
    )
    assert response.json() == {"status": "success", "num_evicted": 0}


@pytest.mark.parametrize(
    ("method", "path", "status", "detail"),
    [
        ("GET", "/", 404, "Not Found"),
        ("POST", "/memory/pin", 404, "Not Found"),
        ("GET", "/static/x", 404, "Not Found"),
        ("GET", "/memory/evict", 405, "Method Not Allowed"),
        ("OPTIONS", "/memory/prefetch", 405, "Method Not Allowed"),
        ("POST", "/engine/stats", 405, "Method Not Allowed"),
    ],
)
async def test_unknown_paths_and_methods(
    served: Served, method: str, path: str, status: int, detail: str
) -> None:
    """They are answered as FastAPI does."""
    response = await served.client.request(method, path)
    assert (response.status_code, response.json()) == (status, {"detail": detail})
    assert ("allow" in response.headers) == (status == 405)


async def test_body_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too large is a 413, whether announced or not."""
    monkeypatch.setattr(app_module, "BODY_BYTES_MAX", 1000)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b" " * 100

    for content in (b" " * 1001, pieces()):
        async with open_served(tmp_path) as served:
            response = await served.client.post("/memory/query", content=content)
            assert response.status_code == 413
            assert response.json() == {"detail": "Request Entity Too Large"}


async def test_too_many_prefetches_are_a_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an error in JSON, and advice to come back."""
    monkeypatch.setattr(engine_module, "PREFETCHES_MAX", 1)
    async with open_served(tmp_path, disk_read_seconds=3600.0) as served:
        await served.post("/engine/store", {"chunk_hashes": ["a"]})
        await served.post("/memory/evict", {"chunk_hashes": ["a"], "locations": [HOT]})
        body = {"chunk_hashes": ["a"], "lookup_id": "p"}
        assert (await served.post("/memory/prefetch", body))[0] == 200
        response = await served.client.post("/memory/prefetch", json=body)
        assert response.status_code == 503
        assert response.json() == {"error": "too many prefetches in progress"}
        assert response.headers["retry-after"] == "1"


async def test_a_store_survives_the_hang_up_of_its_client(served: Served, tmp_path: Path) -> None:
    """The chunks are hot at once; the files are written although nobody waits any more."""
    served.gate.shut()
    served.gate.calls = 0
    body = b'{"chunk_hashes":["h-a","h-b"]}'
    stream = await trio.open_tcp_stream("127.0.0.1", served.port)
    async with stream:
        await stream.send_all(
            b"POST /engine/store HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        while not served.gate.calls:
            await trio.lowlevel.checkpoint()
    await wait_all_tasks_blocked()
    assert served.engine.query(names("a b")) == {"h-a": [HOT, DISK], "h-b": [HOT, DISK]}
    assert files_in(tmp_path) == set()
    served.gate.open()
    await wait_all_tasks_blocked()
    assert len(files_in(tmp_path)) == 2


async def test_a_fault_of_ours_shows_no_inside(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client gets one line, the log the rest."""

    def broken() -> None:
        raise KeyError("inside")

    monkeypatch.setattr(served.engine, "statistics", broken)
    assert await served.get("/engine/stats") == (500, b'{"error":"internal error"}')
    assert "KeyError: 'inside'" in caplog.text
