"""`behaviour = "lmcache-0.4.4"`: the embedded engine does what a real one was seen to do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.test_embedded_cache import CPU, DISK, Lone, hashes, open_lone as open_any
from tests.test_embedded_document import open_served_engine

BEHAVIOUR = "lmcache-0.4.4"

open_lone = partial(open_any, behaviour=BEHAVIOUR, remote_dir="")


@pytest.fixture
async def lone(tmp_path: Path) -> AsyncIterator[Lone]:
    async with open_lone(tmp_path) as lone:
        yield lone


async def prefetch(lone: Lone, chunks: list[str], lookup_id: str) -> None:
    body = {"chunk_hashes": chunks, "lookup_id": lookup_id}
    assert (await lone.call("POST", "/memory/prefetch", body))["status"] == "prefetch_started"


async def hangs(lone: Lone, method: str, target: str, body: Any = None) -> bool:
    """Say whether a call is still without an answer when nothing else happens any more."""
    answered = False

    async def call() -> None:
        nonlocal answered
        await lone.call(method, target, body)
        answered = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return not answered


# The forms of its replies


async def test_versions_are_quoted(lone: Lone) -> None:
    for target, expected in (
        ("/lmc_version", b'"0.4.4"'),
        ("/commit_id", b'"g6fbec463e"'),
        ("/version", b'"0.4.4-g6fbec463e"'),
    ):
        reply = await lone.client.get(target)
        assert reply.headers["content-type"] == "application/json"
        assert reply.content == expected


async def test_the_vllm_version_is_always_an_error(lone: Lone) -> None:
    assert await lone.call("GET", "/inference_version", status=500) == {
        "error": "Failed to get inference version",
        "message": "'LMCacheManager' object has no attribute 'get_inference_version'",
    }


async def test_conf_and_meta_are_json_sent_as_text(lone: Lone) -> None:
    for target, name in (("/conf", "chunk_size"), ("/meta", "worker_id")):
        reply = await lone.client.get(f"{target}?names={name}")
        assert reply.headers["content-type"] == "text/plain; charset=utf-8"
        assert reply.text.startswith(f'{{\n  "{name}": ')


async def test_conf_that_was_changed_in_part_is_a_200(lone: Lone) -> None:
    """Only when nothing was changed it is a 400."""
    body = {"min_retrieve_tokens": 0, "unknown_key": 1}
    errors = {"unknown_key": "Unknown config"}
    answer = await lone.call("POST", "/conf", body)
    assert answer == {"updated": {"min_retrieve_tokens": 0}, "errors": errors}
    answer = await lone.call("POST", "/conf", {"unknown_key": 1}, status=400)
    assert answer == {"updated": {}, "errors": errors}
    answer = await lone.call("POST", "/conf", {"chunk_size": 256})
    assert answer == {"updated": {"chunk_size": 256}}


async def test_clear_empties_the_hot_tier_and_counts_tokens(lone: Lone) -> None:
    await lone.store(0, 50)
    assert (await lone.call("DELETE", f"/cache/clear?locations={DISK}"))["num_removed"] == 0
    assert (await lone.call("DELETE", "/cache/clear"))["num_removed"] == 50
    assert lone.counts() == (0, 5)


async def test_a_retrieve_works_only_without_asynchronous_loading(lone: Lone) -> None:
    await lone.store(0, 50)
    answer = await lone.call("POST", "/cache/retrieve?tokens_mock=0,50", status=500)
    assert answer == {
        "error": "Failed to retrieve cache",
        "message": "Event cache_api_retrieve of type EventType.LOADING is not done or not found.",
        "exception_type": "AssertionError",
    }
    await lone.call("POST", "/conf", {"enable_async_loading": False})
    assert await lone.retrieve(0, 50) == 50


async def test_the_kv_cache(lone: Lone) -> None:
    """Its info is never there; a check needs no chunk size, and its layers have other names."""
    await lone.call("GET", "/cache/kvcache/info", status=404)
    answer = await lone.call("GET", "/cache/kvcache/check?slot_mapping=0,1,2,3")
    assert answer["chunk_size"] is None
    assert (answer["num_chunks"], answer["chunk_checksums"]) == (0, [])
    target = "/cache/kvcache/check?slot_mapping=0,1&chunk_size=1&layerwise=true"
    layers = (await lone.call("GET", target))["chunk_checksums"]
    assert list(layers) == ["model.layers.0", "model.layers.1"]


async def test_load_errors_are_details(lone: Lone) -> None:
    body = {"config_path": "/nope.yaml"}
    answer = await lone.call("POST", "/cache/load-fs-chunks", body, status=400)
    assert answer == {
        "detail": "Invalid configuration file: [Errno 2] No such file or directory: '/nope.yaml'"
    }
    path = lone.folder / "x.yaml"
    path.write_text("chunk_size: 10")
    answer = await lone.call("POST", "/cache/load-fs-chunks", {"config_path": str(path)}, 500)
    assert answer["detail"].startswith("Failed to initialize RemoteBackend: ")


async def test_lookup_and_statistics(lone: Lone) -> None:
    """No role in the info; `enabled` in the status, and much beside it."""
    assert await lone.call("GET", "/lookup/info") == {
        "client": "ChunkStatisticsLookupClient(LMCacheAsyncLookupClient)",
        "server": "LMCacheAsyncLookupServer",
    }
    await lone.call("POST", "/chunk_statistics/start")
    await lone.store(0, 50)
    await lone.store(0, 50)
    status = await lone.call("GET", "/chunk_statistics/status")
    assert status["enabled"]
    assert status["auto_exit_enabled"]
    assert "is_collecting" not in status
    assert (status["total_requests"], status["duplicate_chunks"]) == (2, 5)
    assert (status["total_chunks"], status["unique_chunks"]) == (10, 5)
    assert status["reuse_rate"] == 0.5


async def test_a_worker_keeps_no_statistics(tmp_path: Path) -> None:
    """The scheduler counts what it forwards."""
    async with open_served_engine(tmp_path, behaviour=BEHAVIOUR) as served:
        reply = await served.worker.post("/chunk_statistics/start")
        assert reply.status_code == 503
        assert reply.json()["message"] == "Lookup client not configured."
        await served.scheduler.post("/chunk_statistics/start")
        body = {"chunk_hashes": ["ab", "cd", "ab"], "lookup_id": "p"}
        await served.scheduler.post("/memory/prefetch", json=body)
        status = (await served.scheduler.get("/chunk_statistics/status")).json()
        assert (status["total_chunks"], status["unique_chunks"]) == (3, 2)


# Hashes


@pytest.mark.parametrize(
    ("chunk_hashes", "error"),
    [
        (["ab", "zz"], "invalid literal for int() with base 16: 'zz'"),
        ([123], "int() can't convert non-string with explicit base"),
        (["ab", ""], "invalid literal for int() with base 16: ''"),
    ],
)
async def test_one_bad_hash_fails_the_whole_batch(
    lone: Lone, chunk_hashes: list[Any], error: str
) -> None:
    await lone.call("POST", "/engine/store", {"chunk_hashes": ["ab"]})
    for path in ("/memory/evict", "/memory/prefetch"):
        body = {"chunk_hashes": chunk_hashes, "lookup_id": "p"}
        assert await lone.call("POST", path, body, status=500) == {"error": error}
    assert lone.counts() == (1, 1)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"{bad", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b"[1]", "'list' object has no attribute 'get'"),
        (b"", "Expecting value: line 1 column 1 (char 0)"),
        (b'{"chunk_hashes":["ab"],"x":' + b"[" * 200_000, "the body is nested too deeply"),
    ],
)
async def test_bodies_are_refused_in_pythons_words(lone: Lone, content: bytes, error: str) -> None:
    reply = await lone.client.post("/memory/evict", content=content)
    assert (reply.status_code, reply.json()) == (500, {"error": error})


async def test_hashes_are_numbers(lone: Lone) -> None:
    """Any way to write one will do; a text is a list of its characters."""
    await lone.call("POST", "/engine/store", {"chunk_hashes": ["-ab", "a", "b", "10"]})
    assert await lone.evict([" -0xAB ", "-ab"], CPU) == 1
    body: dict[str, Any] = {"chunk_hashes": "abc", "locations": f"x{CPU},{DISK}"}
    assert (await lone.call("POST", "/memory/evict", body))["num_evicted"] == 4
    assert await lone.evict(["1_0"], CPU, DISK) == 2
    assert lone.counts() == (0, 1)


# Prefetches that nobody consumes


async def test_they_stay_pinned_through_evict_and_clear(lone: Lone) -> None:
    """Until a retrieve with the same id consumes them."""
    chunks = hashes(0, 50)
    await lone.store(0, 50)
    await lone.evict(chunks, CPU)
    await prefetch(lone, chunks, "p")
    await wait_all_tasks_blocked()
    assert (await lone.call("DELETE", "/cache/clear"))["num_removed"] == 0
    assert lone.counts() == (5, 5)
    assert await lone.evict(chunks, CPU) == 5
    metrics = await lone.metrics()
    assert metrics["local_cpu_hot_cache_count"] == 0
    assert metrics["pin_monitor_pinned_objects_count"] == 5
    assert metrics["storage_events_done_count"] == 1
    await prefetch(lone, ["abcdef"], "miss")
    await wait_all_tasks_blocked()
    assert (await lone.metrics())["storage_events_done_count"] == 1
    await lone.call("POST", "/engine/retrieve", {"chunk_hashes": chunks, "lookup_id": "p"})
    metrics = await lone.metrics()
    assert metrics["pin_monitor_pinned_objects_count"] == 0
    assert metrics["storage_events_done_count"] == 0


async def test_they_count_against_the_pool_until_it_wedges(tmp_path: Path) -> None:
    """Evict and prefetch the same chunks again and again: then the disk answers no more."""
    chunks = hashes(0, 50)
    async with open_lone(tmp_path, hot_chunks_max=12) as lone:
        await lone.store(0, 50)
        for attempt in range(3):
            await lone.evict(chunks, CPU)
            await prefetch(lone, chunks, f"p-{attempt}")
            await wait_all_tasks_blocked()
        metrics = await lone.metrics()
        assert metrics["storage_events_done_count"] == 2
        assert metrics["storage_events_ongoing_count"] == 1  # it waits for memory, for ever
        assert lone.counts() == (2, 5)
        assert await lone.evict(chunks, CPU) == 2  # the hot tier still answers
        await prefetch(lone, chunks, "late")  # accepted, and waits as well
        assert await hangs(lone, "POST", "/memory/evict", {"chunk_hashes": chunks})
        assert await hangs(lone, "GET", "/lmc_version")


async def test_a_store_without_memory_stores_what_it_can(tmp_path: Path) -> None:
    chunks = hashes(0, 50)
    async with open_lone(tmp_path, hot_chunks_max=6) as lone:
        await lone.store(0, 50)
        await lone.evict(chunks, CPU)
        await prefetch(lone, chunks, "p")
        await wait_all_tasks_blocked()
        await lone.evict(chunks, CPU)
        await lone.store(500, 550)
        assert lone.counts() == (1, 10)  # one place was left, and each chunk displaced the last


# An evict from disk under a prefetch


async def test_it_wedges_the_disk_and_then_the_port(tmp_path: Path) -> None:
    """Its own reply is an assertion's empty text; the next call to the disk hangs."""
    chunks = hashes(0, 50)
    async with open_lone(tmp_path) as lone:
        await lone.store(0, 50)
        await lone.evict(chunks, CPU)
        lone.gate.shut()
        await prefetch(lone, chunks, "p")
        await wait_all_tasks_blocked()
        assert await lone.evict(chunks, CPU) == 0  # without the disk nothing happens
        body = {"chunk_hashes": chunks[4:], "locations": [CPU, DISK]}
        assert await lone.call("POST", "/memory/evict", body, status=500) == {"error": ""}
        lone.gate.open()
        await wait_all_tasks_blocked()
        assert (await lone.client.get("/lmc_version")).status_code == 200
        assert await hangs(lone, "POST", "/cache/store?tokens_mock=500,550")
        assert await hangs(lone, "GET", "/lmc_version")


async def test_other_chunks_may_be_evicted_under_a_prefetch(lone: Lone) -> None:
    await lone.store(0, 50)
    await lone.store(500, 550)
    await lone.evict(hashes(0, 50), CPU)
    lone.gate.shut()
    await prefetch(lone, hashes(0, 50), "p")
    await wait_all_tasks_blocked()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lone.evict, hashes(500, 550), CPU, DISK)
        await wait_all_tasks_blocked()
        lone.gate.open()
    await wait_all_tasks_blocked()
    assert lone.counts() == (5, 5)


async def test_a_retrieve_from_the_wedged_disk_hangs_too(lone: Lone) -> None:
    await lone.store(0, 50)
    await lone.evict(hashes(0, 50), CPU)
    lone.engine.disk_lock.wedge()
    assert await hangs(lone, "POST", "/engine/retrieve", {"chunk_hashes": hashes(0, 50)})


async def test_the_documented_engine_does_none_of_this(tmp_path: Path) -> None:
    """The same calls there leave nothing pinned and no disk wedged."""
    chunks = hashes(0, 50)
    async with open_any(tmp_path, hot_chunks_max=12) as lone:
        await lone.store(0, 50)
        for attempt in range(10):
            await lone.evict(chunks, CPU)
            await prefetch(lone, chunks, "p")
            if attempt % 2:
                await wait_all_tasks_blocked()
        assert await lone.evict([*chunks, "zz"], CPU, DISK) == 10
        assert (await lone.metrics())["pin_monitor_pinned_objects_count"] == 0
