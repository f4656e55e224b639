"""Every call of LMCache's document, in its order, against a scheduler and a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import trio
from quart_trio import QuartTrio

from ramakv.config import Embedded, Limits
from ramakv.lmcache.embedded.node import Node
from ramakv.lmcache.embedded.serving import open_nodes, serve_engine
from ramakv.web.server import open_sockets, serve_http

CPU, DISK, REMOTE = "LocalCPUBackend", "LocalDiskBackend", "RemoteBackend"

S, W = "scheduler", "worker"


class Call(NamedTuple):
    """A request of the document and the reply it asks for; a field's `...` is any value."""

    where: str
    method: str
    target: str
    body: Any
    status: int
    answer: Any


def ok(**fields: Any) -> dict[str, Any]:
    return {"status": "success", **fields}


def freeze(enabled: bool, what: str) -> dict[str, Any]:
    return ok(freeze=enabled, message=f"Freeze mode {what}")


def hot(enabled: bool, what: str) -> dict[str, Any]:
    return ok(hot_cache=enabled, message=f"Hot cache {what}")


NO_BACKEND = f"Backend 'FooBackend' not found. Available: {[CPU, DISK, REMOTE]}"
CHUNK_CHECK = "/cache/kvcache/check?slot_mapping=0,1,2,3&chunk_size=2"
CHECKED = ok(slot_mapping_ranges=[[0, 3]], chunk_size=2, num_chunks=2)
NO_LOAD = "Failed to load chunks from FSConnector"

DOCUMENT = [
    # Version and information
    Call(W, "GET", "/lmc_version", None, 200, "0.1.0"),
    Call(W, "GET", "/commit_id", None, 200, "embedded"),
    Call(W, "GET", "/version", None, 200, "0.1.0-embedded"),
    Call(W, "GET", "/inference_info", None, 200, {"vllm_config": ..., "lmcache": ...}),
    Call(W, "GET", "/inference_version", None, 200, {"vllm_version": "0.1.0+embedded"}),
    # Configuration and metadata
    Call(
        W,
        "GET",
        "/conf?names=min_retrieve_tokens,save_decode_cache",
        None,
        200,
        {"min_retrieve_tokens": 0, "save_decode_cache": False},
    ),
    Call(
        W,
        "POST",
        "/conf",
        {"min_retrieve_tokens": 512, "save_decode_cache": True},
        200,
        {"updated": {"min_retrieve_tokens": 512, "save_decode_cache": True}},
    ),
    Call(
        W,
        "POST",
        "/conf",
        {"min_retrieve_tokens": 512, "unknown_key": 1},
        400,
        {"updated": {"min_retrieve_tokens": 512}, "errors": {"unknown_key": "Unknown config"}},
    ),
    Call(
        W,
        "POST",
        "/conf",
        {"chunk_size": 1},
        400,
        {"updated": {}, "errors": {"chunk_size": "Config is not mutable at runtime"}},
    ),
    Call(W, "POST", "/conf", b"{no", 400, {"error": "Invalid JSON body", "message": ...}),
    Call(
        W,
        "GET",
        "/meta?names=worker_id,model_name",
        None,
        200,
        {"worker_id": 0, "model_name": "ramakv-embedded"},
    ),
    # Cache operations, on chunks of ten tokens
    Call(W, "DELETE", "/cache/clear", None, 200, ok(num_removed=0)),
    Call(W, "POST", "/cache/store?tokens_mock=0,100", None, 200, ok(num_tokens=100)),
    Call(
        W,
        "DELETE",
        f"/cache/clear?locations={CPU}&locations={DISK}",
        None,
        200,
        ok(num_removed=20),
    ),
    Call(
        W,
        "POST",
        "/cache/store",
        None,
        400,
        {
            "error": "Missing parameters",
            "message": "Must specify either tokens_input or tokens_mock",
        },
    ),
    Call(W, "DELETE", "/cache/clear", None, 200, ok(num_removed=10)),
    Call(W, "POST", "/cache/store?tokens_mock=0,80", None, 200, ok(num_tokens=80)),
    Call(
        W,
        "POST",
        "/cache/retrieve?tokens_mock=0,100",
        None,
        200,
        ok(num_tokens=100, num_retrieved=80),
    ),
    Call(W, "GET", CHUNK_CHECK, None, 200, CHECKED | {"chunk_checksums": ..., "layerwise": False}),
    Call(
        W,
        "GET",
        f"{CHUNK_CHECK}&layerwise=true",
        None,
        200,
        CHECKED | {"chunk_checksums": {"layer_0": ..., "layer_1": ...}, "layerwise": True},
    ),
    Call(
        W,
        "POST",
        "/cache/kvcache/record_slot?enabled=true",
        None,
        200,
        ok(kvcache_check_log_enabled=True),
    ),
    Call(
        W,
        "POST",
        "/cache/kvcache/record_slot?enabled=false",
        None,
        200,
        ok(kvcache_check_log_enabled=False),
    ),
    Call(W, "POST", "/cache/kvcache/record_slot", None, 200, ok(kvcache_check_log_enabled=False)),
    Call(
        W,
        "GET",
        "/cache/kvcache/info",
        None,
        200,
        ok(
            num_layers=2,
            layers={
                f"layer_{i}": {"shape": [100, 4], "dtype": "torch.uint8", "device": "cpu"}
                for i in range(2)
            },
        ),
    ),
    Call(
        W,
        "POST",
        "/cache/load-fs-chunks",
        {"config_path": "{folder}/lmcache.yaml", "max_chunks": 100},
        200,
        ok(
            loaded_chunks=8,
            total_files=9,
            failed_keys=["garbage"],
            config_path="{folder}/lmcache.yaml",
        ),
    ),
    Call(
        W,
        "POST",
        "/cache/load-fs-chunks",
        {"config_path": "/path/to/lmcache.yaml", "max_chunks": 100},
        400,
        {
            "error": NO_LOAD,
            "message": "Configuration file not found",
            "config_path": "/path/to/lmcache.yaml",
        },
    ),
    # Freeze mode
    Call(W, "PUT", "/freeze/enable", None, 200, freeze(True, "enabled successfully")),
    Call(W, "GET", "/freeze/status", None, 200, freeze(True, "is enabled")),
    Call(W, "PUT", "/freeze/disable", None, 200, freeze(False, "disabled successfully")),
    # Hot cache
    Call(W, "PUT", "/hot_cache/disable", None, 200, hot(False, "disabled successfully")),
    Call(W, "PUT", "/hot_cache/enable", None, 200, hot(True, "enabled successfully")),
    Call(W, "GET", "/hot_cache/status", None, 200, hot(True, "is enabled")),
    # Lookup client and server
    Call(
        S,
        "POST",
        "/conf",
        {
            "hit_miss_ratio": 0.5,
            "enable_chunk_statistics": False,
            "enable_scheduler_bypass_lookup": True,
        },
        200,
        {"updated": ...},
    ),
    Call(S, "POST", "/lookup/recreate", None, 200, {"old": ..., "new": ..., "role": S}),
    Call(
        S,
        "GET",
        "/lookup/info",
        None,
        200,
        {
            "client": "HitLimitLookupClient(LMCacheBypassLookupClient)",
            "server": "None",
            "role": "scheduler",
        },
    ),
    Call(
        W,
        "GET",
        "/lookup/info",
        None,
        200,
        {"client": "None", "server": "LMCacheLookupServer", "role": "worker"},
    ),
    Call(
        S,
        "POST",
        "/lookup/close",
        None,
        200,
        {"old": "HitLimitLookupClient(LMCacheBypassLookupClient)", "role": "scheduler"},
    ),
    Call(
        S,
        "POST",
        "/conf",
        {"hit_miss_ratio": None, "enable_scheduler_bypass_lookup": False},
        200,
        {"updated": {"hit_miss_ratio": None, "enable_scheduler_bypass_lookup": False}},
    ),
    Call(
        S,
        "POST",
        "/lookup/create?dryrun=true",
        None,
        200,
        {"new": "LMCacheLookupClient", "dryrun": True, "role": "scheduler"},
    ),
    Call(
        S,
        "POST",
        "/lookup/create",
        None,
        200,
        {"new": "LMCacheLookupClient", "role": "scheduler"},
    ),
    # The four steps of a reconfiguration
    Call(
        W,
        "POST",
        "/conf",
        {"enable_async_loading": True},
        200,
        {"updated": {"enable_async_loading": True}},
    ),
    Call(
        W,
        "POST",
        "/lookup/recreate",
        None,
        200,
        {"old": "LMCacheLookupServer", "new": "LMCacheAsyncLookupServer", "role": "worker"},
    ),
    Call(
        S,
        "POST",
        "/conf",
        {"enable_scheduler_bypass_lookup": True},
        200,
        {"updated": {"enable_scheduler_bypass_lookup": True}},
    ),
    Call(
        S,
        "POST",
        "/lookup/recreate",
        None,
        200,
        {"old": "LMCacheLookupClient", "new": "LMCacheBypassLookupClient", "role": "scheduler"},
    ),
    # Chunk statistics
    Call(W, "POST", "/chunk_statistics/start", None, 200, ok(message="Started")),
    Call(
        S,
        "POST",
        "/chunk_statistics/start",
        None,
        400,
        {"error": "Not available", "message": "Client does not support statistics."},
    ),
    Call(W, "POST", "/chunk_statistics/stop", None, 200, ok(message="Stopped")),
    Call(W, "POST", "/chunk_statistics/reset", None, 200, ok(message="Reset")),
    Call(
        W,
        "GET",
        "/chunk_statistics/status",
        None,
        200,
        {
            "is_collecting": False,
            "total_chunks": 0,
            "unique_chunks": 0,
            "timestamp": ...,
            "auto_exit_enabled": False,
            "auto_exit_timeout_hours": 0.0,
            "auto_exit_target_unique_chunks": 0,
        },
    ),
    # Bypass
    Call(
        W,
        "PUT",
        f"/bypass/add?backend_name={REMOTE}",
        None,
        200,
        ok(
            backend_name=REMOTE,
            bypassed=True,
            was_already_bypassed=False,
            bypassed_backends=[REMOTE],
        ),
    ),
    Call(
        W,
        "GET",
        "/bypass/list",
        None,
        200,
        ok(bypassed_backends=[REMOTE], all_backends=[CPU, DISK, REMOTE]),
    ),
    Call(
        W,
        "PUT",
        "/bypass/add?backend_name=FooBackend",
        None,
        400,
        {"error": "Unknown backend", "message": NO_BACKEND},
    ),
    Call(
        W,
        "PUT",
        f"/bypass/remove?backend_name={REMOTE}",
        None,
        200,
        ok(backend_name=REMOTE, bypassed=False, was_bypassed=True, bypassed_backends=[]),
    ),
    Call(
        W,
        "PUT",
        "/bypass/remove?backend_name=FooBackend",
        None,
        400,
        {"error": "Unknown backend", "message": NO_BACKEND},
    ),
]


class Served(NamedTuple):
    """Clients of a scheduler and of its workers, and what is behind them."""

    scheduler: httpx.AsyncClient
    workers: list[httpx.AsyncClient]
    ports: list[int]

    @property
    def worker(self) -> httpx.AsyncClient:
        return self.workers[0]


@asynccontextmanager
async def open_served_engine(
    folder: Path, *, workers: int = 1, timeout: float | None = 20.0, **settings: Any
) -> AsyncIterator[Served]:
    """Serve a scheduler and workers on free ports of the loopback."""
    config = Embedded(**{"chunk_size": 10, "kv_slots": 100, **settings})
    stop = trio.Event()

    async def serve(
        app: QuartTrio, host: str, port: int, *, task_status: trio.TaskStatus[int]
    ) -> None:
        sockets = open_sockets(f"{host}:{port}")
        limits = Limits(drain_timeout_seconds=1.0)
        async with trio.open_nursery() as nursery:
            await nursery.start(
                lambda task_status: serve_http(
                    app,
                    sockets,
                    limits=limits,
                    stop=stop,
                    task_status=task_status,
                )
            )
            task_status.started(sockets[0].getsockname()[1])

    async with trio.open_nursery() as nursery:
        ports: list[int] = await nursery.start(
            lambda task_status: serve_engine(
                "127.0.0.1",
                0,
                workers,
                config,
                disk_dir=folder / "chunks",
                serve=serve,
                task_status=task_status,
            )
        )
        clients = [
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=timeout)
            for port in ports
        ]
        try:
            yield Served(clients[0], clients[1:], ports)
        finally:
            with trio.CancelScope(shield=True):
                for client in clients:
                    await client.aclose()
            stop.set()


def matches(actual: Any, expected: Any) -> bool:
    """Say whether a reply has the fields expected, in their order, `...` being any value."""
    if expected is ...:
        return True
    if isinstance(expected, dict):
        return (
            isinstance(actual, dict)
            and list(actual) == list(expected)
            and all(matches(actual[name], value) for name, value in expected.items())
        )
    return bool(actual == expected) and type(actual) is type(expected)


def filled(value: Any, folder: Path) -> Any:
    if isinstance(value, str):
        return value.replace("{folder}", str(folder))
    if isinstance(value, dict):
        return {name: filled(inner, folder) for name, inner in value.items()}
    return value


async def test_every_call_of_the_document(tmp_path: Path) -> None:
    """Status, fields in their order, and values: those of the document, or of this engine."""
    (tmp_path / "lmcache.yaml").write_text(
        f"chunk_size: 10\nremote_url: 'fs://host:0{tmp_path}/chunks'  # the disk tier's\n"
    )
    wrong: list[str] = []
    async with open_served_engine(
        tmp_path, remote_dir=str(tmp_path / "remote"), disk_chunks_max=100
    ) as served:
        for call in DOCUMENT:
            if "{folder}" in str(call.body):
                (tmp_path / "chunks" / "garbage.data").write_bytes(b"no chunk")
            client = served.scheduler if call.where == S else served.worker
            body = filled(call.body, tmp_path)
            sent = {"content": body} if isinstance(body, bytes) else {"json": body}
            if body is None:
                sent = {}
            reply = await client.request(call.method, call.target, **sent)
            kind = reply.headers["content-type"]
            answer = reply.text if kind.startswith("text/plain") else reply.json()
            if reply.status_code != call.status or not matches(
                answer, filled(call.answer, tmp_path)
            ):
                wrong.append(f"{call.method} {call.target}: {reply.status_code} {answer}")
    assert wrong == []


async def test_the_documents_calls_without_a_filter(tmp_path: Path) -> None:
    """All of `/conf` and `/meta` is JSON, and the named values are among it."""
    async with open_served_engine(tmp_path) as served:
        for client, role in ((served.scheduler, "scheduler"), (served.worker, "worker")):
            conf, meta = await client.get("/conf"), await client.get("/meta")
            assert conf.headers["content-type"] == "application/json"
            assert conf.json()["chunk_size"] == meta.json()["chunk_size"] == 10
            assert meta.json()["role"] == role
            assert meta.json()["kv_shape"] == [2, 1, 10, 1, 4]
            assert (await client.get("/conf?names=nope,chunk_size")).json() == {"chunk_size": 10}
            assert (await client.get("/conf?names=")).json() == conf.json()
        ids = {
            (await client.get("/conf?names=lmcache_instance_id")).text
            for client in (served.scheduler, served.worker)
        }
        assert len(ids) == 2


async def test_a_scheduler_has_no_engine(tmp_path: Path) -> None:
    """What needs one is a 503 or 404 in the words of a real scheduler."""
    unavailable = "LMCache API is unavailable"
    no_engine = "LMCache engine not configured."
    expected = {
        ("DELETE", "/cache/clear"): (503, unavailable, no_engine),
        ("POST", "/cache/store?tokens_mock=0,100"): (503, unavailable, no_engine),
        ("POST", "/cache/retrieve?tokens_mock=0,100"): (503, unavailable, no_engine),
        ("GET", CHUNK_CHECK): (
            404,
            "kv_caches not available",
            "kv_caches is empty or not initialized",
        ),
        ("GET", "/cache/kvcache/info"): (
            404,
            "kv_caches not available",
            "kv_caches is empty or not initialized",
        ),
        ("POST", "/cache/kvcache/record_slot?enabled=true"): (
            500,
            "Failed to set record slot status",
            "'NoneType' object has no attribute 'kvcache_check_log_enabled'",
        ),
        ("POST", "/cache/load-fs-chunks"): (
            503,
            "/cache/load-fs-chunks API is unavailable",
            no_engine,
        ),
        ("PUT", "/freeze/enable"): (503, "/freeze/enable API is unavailable", no_engine),
        ("PUT", "/freeze/disable"): (503, "/freeze/disable API is unavailable", no_engine),
        ("GET", "/freeze/status"): (503, "/freeze/status API is unavailable", no_engine),
        ("PUT", "/hot_cache/enable"): (503, "hot_cache API is unavailable", no_engine),
        ("PUT", "/hot_cache/disable"): (503, "hot_cache API is unavailable", no_engine),
        ("GET", "/hot_cache/status"): (503, "hot_cache API is unavailable", no_engine),
        ("GET", "/bypass/list"): (503, "Bypass API is unavailable", no_engine),
        ("PUT", "/bypass/add?backend_name=x"): (503, "Bypass API is unavailable", no_engine),
        ("PUT", "/bypass/remove?backend_name=x"): (503, "Bypass API is unavailable", no_engine),
    }
    async with open_served_engine(tmp_path) as served:
        for (method, target), (status, error, message) in expected.items():
            reply = await served.scheduler.request(method, target)
            assert reply.status_code == status, target
            assert reply.json() == {"error": error, "message": message}
        reply = await served.scheduler.post("/cache/kvcache/record_slot")
        assert reply.json() == ok(kvcache_check_log_enabled=False)
        assert (await served.scheduler.get("/metrics")).text == ""


@pytest.mark.parametrize(
    ("method", "target", "body", "status", "error"),
    [
        ("POST", "/cache/store?tokens_mock=5", None, 400, "Invalid tokens_mock format"),
        ("POST", "/cache/store?tokens_mock=a,b", None, 400, "Invalid tokens_mock format"),
        ("POST", "/cache/store?tokens_mock=9,1", None, 400, "Invalid tokens_mock format"),
        ("POST", "/cache/store?tokens_mock=0,99999999", None, 400, "Invalid tokens_mock format"),
        ("POST", "/cache/retrieve", None, 400, "Missing parameters"),
        ("GET", "/cache/kvcache/check?chunk_size=2", None, 400, "Missing parameters"),
        ("GET", "/cache/kvcache/check?slot_mapping=1", None, 400, "Missing parameters"),
        (
            "GET",
            "/cache/kvcache/check?slot_mapping=x&chunk_size=2",
            None,
            400,
            "Invalid slot_mapping format",
        ),
        (
            "GET",
            "/cache/kvcache/check?slot_mapping=100&chunk_size=2",
            None,
            400,
            "Invalid slot indices",
        ),
        (
            "GET",
            "/cache/kvcache/check?slot_mapping=1&chunk_size=0",
            None,
            400,
            "Invalid chunk_size",
        ),
        ("GET", "/cache/kvcache/check?slot_mapping=1&chunk_size=x", None, 422, None),
        ("GET", "/cache/kvcache/check?slot_mapping=1&layerwise=maybe", None, 422, None),
        ("POST", "/cache/kvcache/record_slot?enabled=maybe", None, 400, "Invalid parameter"),
        ("POST", "/cache/kvcache/record_slot?enabled=", None, 400, "Invalid parameter"),
        ("POST", "/cache/load-fs-chunks", b"", 422, None),
        ("POST", "/cache/load-fs-chunks", b"{}", 422, None),
        ("POST", "/cache/load-fs-chunks", b"{x", 422, None),
        ("POST", "/cache/load-fs-chunks", b"[]", 422, None),
        ("POST", "/cache/load-fs-chunks", b'{"config_path":1}', 422, None),
        ("POST", "/cache/load-fs-chunks", b'{"config_path":"x","max_chunks":"y"}', 422, None),
        (
            "POST",
            "/cache/load-fs-chunks",
            b'{"config_path":"/dev/null"}',
            400,
            "Failed to load chunks from FSConnector",
        ),
        ("DELETE", "/cache/clear", b"{bad", 422, None),
        ("PUT", "/bypass/add", None, 400, "Missing parameter"),
        ("PUT", "/bypass/remove", None, 400, "Missing parameter"),
        ("POST", "/conf", b"[1]", 400, "Request body must be a JSON object"),
        ("POST", "/conf", b"", 400, "Invalid JSON body"),
        ("POST", "/conf", b'{"remote_serde":"\\ud800"}', 400, "Invalid JSON body"),
        ("POST", "/conf", b'{"hit_miss_ratio":NaN}', 400, "Invalid JSON body"),
        ("POST", "/conf", b"[" * 200_000, 400, "Invalid JSON body"),
        ("GET", f"/cache/kvcache/check?slot_mapping=1&chunk_size={2**63}", None, 422, None),
        ("POST", "/lookup/create?dryrun=zzz", None, 422, None),
        ("POST", "/cache/clear", None, 405, None),
        ("POST", "/freeze/enable", None, 405, None),
    ],
)
async def test_what_a_call_cannot_mean(
    tmp_path: Path, method: str, target: str, body: bytes | None, status: int, error: str | None
) -> None:
    """Errors are as LMCache's: `error` and mostly a `message`, or FastAPI's `detail`."""
    async with open_lone(tmp_path) as client:
        reply = await client.request(method, target, content=body)
        assert reply.status_code == status, reply.text
        if error is None:
            assert "detail" in reply.json()
        else:
            assert reply.json()["error"] == error


@asynccontextmanager
async def open_lone(folder: Path, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Call a lone engine's app without a socket."""
    from ramakv.lmcache.embedded.app import create_app
    from ramakv.lmcache.embedded.engine import open_engine

    config = Embedded(**{"chunk_size": 10, "kv_slots": 100, **settings})
    async with open_engine(config, disk_dir=folder / "chunks") as engine:
        transport = httpx.ASGITransport(create_app(engine))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://lone") as client:
            yield client


async def test_inference_info_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the document's shape."""
    from ramakv.lmcache.embedded import routes_conf

    def broken(node: Node) -> Any:
        raise RuntimeError("no connector")

    monkeypatch.setattr(routes_conf, "_inference_info", broken)
    async with open_lone(tmp_path) as client:
        reply = await client.get("/inference_info?format=x")
        assert reply.status_code == 500
        assert reply.json() == {
            "error": "Failed to get inference info",
            "message": "no connector",
        }


async def test_a_lone_engine_is_scheduler_and_worker(tmp_path: Path) -> None:
    """One port answers for both, and calls itself a scheduler."""
    async with open_lone(tmp_path) as client:
        assert (await client.get("/lookup/info")).json() == {
            "client": "ChunkStatisticsLookupClient(LMCacheLookupClient)",
            "server": "LMCacheLookupServer",
            "role": "scheduler",
        }
        assert (await client.get("/meta?names=role")).json() == {"role": "scheduler"}
        assert (await client.get("/freeze/status")).status_code == 200
        await client.post("/lookup/close")
        reply = await client.post("/lookup/recreate")
        assert (reply.status_code, reply.json()) == (
            400,
            {"error": "lookup client not available", "role": "scheduler"},
        )
        reply = await client.post("/chunk_statistics/start")
        assert (reply.status_code, reply.json()) == (
            503,
            {"error": "API unavailable", "message": "Lookup client not configured."},
        )


async def test_workers_have_folders_of_their_own(tmp_path: Path) -> None:
    """One worker has the folder itself, as a lone engine."""
    for workers, folders in ((1, ["one"]), (2, ["worker-0", "worker-1"])):
        folder = tmp_path / str(workers)
        config = Embedded(remote_dir=str(folder / "remote"))
        async with open_nodes(config, disk_dir=folder / "one", workers=workers) as nodes:
            assert [node.port for node in nodes.workers] == [7000 + i for i in range(workers)]
        found = folder if workers == 1 else folder / "one"
        assert sorted(path.name for path in found.iterdir() if path.name != "remote") == folders
