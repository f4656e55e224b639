"""What the calls of LMCache's document do to the tiers and the KV cache of an embedded engine."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from ramakv.config import Embedded
from ramakv.errors import ConfigError
from ramakv.lmcache.embedded.app import create_app
from ramakv.lmcache.embedded.engine import Engine, open_engine
from ramakv.lmcache.embedded.hashing import split_tokens
from tests.test_embedded_engine import Gate

CPU, DISK, REMOTE = "LocalCPUBackend", "LocalDiskBackend", "RemoteBackend"


class Lone(NamedTuple):
    """A lone engine with all three tiers, called without a socket."""

    client: httpx.AsyncClient
    engine: Engine
    gate: Gate
    folder: Path

    async def call(self, method: str, target: str, body: Any = None, status: int = 200) -> Any:
        sent = {} if body is None else {"json": body}
        reply = await self.client.request(method, target, **sent)
        assert reply.status_code == status, reply.text
        return reply.json()

    async def store(self, start: int, end: int) -> None:
        answer = await self.call("POST", f"/cache/store?tokens_mock={start},{end}")
        assert answer == {"status": "success", "num_tokens": end - start}

    async def retrieve(self, start: int, end: int) -> int:
        answer = await self.call("POST", f"/cache/retrieve?tokens_mock={start},{end}")
        assert answer["num_tokens"] == end - start
        count: int = answer["num_retrieved"]
        return count

    async def checksums(self) -> list[str]:
        target = "/cache/kvcache/check?slot_mapping=[0,49]&chunk_size=10"
        found: list[str] = (await self.call("GET", target))["chunk_checksums"]
        assert len(set(found)) == 5
        return found

    async def evict(self, chunks: list[str], *locations: str) -> int:
        body = {"chunk_hashes": chunks, "locations": locations}
        count: int = (await self.call("POST", "/memory/evict", body))["num_evicted"]
        return count

    async def metrics(self) -> dict[str, float]:
        reply = await self.client.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        labels = '{model_name="ramakv-embedded",role="scheduler",worker_id="0"}'
        lines = [line for line in reply.text.splitlines() if not line.startswith("#")]
        assert all(line.startswith("lmcache:") and labels in line for line in lines)
        pairs = (line.removeprefix("lmcache:").replace(labels, "").split() for line in lines)
        return {name: float(value) for name, value in pairs}

    def counts(self) -> tuple[int, ...]:
        """How many chunks each tier holds."""
        return tuple(tier.chunks for tier in self.engine.statistics().tiers.values())


def hashes(start: int, end: int) -> list[str]:
    return [chunk.chunk_hash for chunk in split_tokens(range(start, end), 10)]


@asynccontextmanager
async def open_lone(folder: Path, **settings: Any) -> AsyncIterator[Lone]:
    gate = Gate()
    config = Embedded(
        **{
            "chunk_size": 10,
            "kv_slots": 50,
            "remote_dir": str(folder / "remote"),
            **settings,
        }
    )
    async with open_engine(config, disk_dir=folder / "chunks", run_sync=gate) as engine:
        transport = httpx.ASGITransport(create_app(engine))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://lone") as client:
            yield Lone(client, engine, gate, folder)


@pytest.fixture
async def lone(tmp_path: Path) -> AsyncIterator[Lone]:
    async with open_lone(tmp_path) as lone:
        yield lone


# Store and retrieve


@pytest.mark.parametrize("gone", [[], [CPU], [CPU, DISK]])
async def test_a_retrieve_brings_back_the_very_bytes(lone: Lone, gone: list[str]) -> None:
    """From any tier, whatever was computed into the same slots meanwhile."""
    await lone.store(0, 50)
    before = await lone.checksums()
    await lone.store(1000, 1050)
    assert not set(before) & set(await lone.checksums())
    if gone:
        query = "&".join(f"locations={location}" for location in gone)
        answer = await lone.call("DELETE", f"/cache/clear?{query}")
        assert answer == {"status": "success", "num_removed": 10 * len(gone)}
    assert await lone.retrieve(0, 50) == 50
    assert await lone.checksums() == before


async def test_bytes_survive_a_restart(tmp_path: Path) -> None:
    """In the folders of the disk and remote tiers."""
    async with open_lone(tmp_path) as lone:
        await lone.store(0, 50)
        before = await lone.checksums()
    for folder in ("chunks", "nothing"):
        async with open_lone(tmp_path) as lone:
            if folder == "nothing":
                await lone.evict(hashes(0, 50), DISK)
            assert await lone.checksums() != before
            assert await lone.retrieve(0, 50) == 50
            assert await lone.checksums() == before


async def test_only_full_chunks_of_the_saved_prefix(lone: Lone) -> None:
    """A gap ends it; the unfull last chunk is stored only if the configuration says so."""
    await lone.store(0, 45)
    assert lone.counts() == (4, 4, 4)
    assert await lone.retrieve(0, 45) == 40
    assert await lone.retrieve(1, 45) == 0
    assert await lone.evict(hashes(0, 40)[2:3], CPU, DISK, REMOTE) == 3
    assert await lone.retrieve(0, 45) == 20
    await lone.call("POST", "/conf", {"save_unfull_chunk": True})
    await lone.store(0, 45)
    assert lone.counts() == (5, 5, 5)
    assert await lone.retrieve(0, 45) == 45


async def test_a_chunk_stored_by_its_hash_alone_has_no_kv(lone: Lone) -> None:
    """Its bytes do not fit into the slots, and are left where they are."""
    await lone.call("POST", "/engine/store", {"chunk_hashes": hashes(0, 20)})
    before = await lone.checksums()
    assert await lone.retrieve(0, 20) == 0
    assert await lone.checksums() == before


async def test_a_store_that_cannot_be_taken(lone: Lone, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a 500 with the reason, and changes nothing."""
    monkeypatch.setattr("ramakv.lmcache.embedded.disk.JOBS_WAITING_MAX", 0)
    answer = await lone.call("POST", "/cache/store?tokens_mock=0,10", status=500)
    assert answer == {
        "error": "Failed to store cache",
        "message": "too much waits for the embedded engine's disk",
        "exception_type": "BackendUnavailableError",
    }
    assert lone.counts() == (0, 0, 0)
    monkeypatch.setattr("ramakv.lmcache.embedded.engine.RETRIEVES_MAX", 0)
    answer = await lone.call("POST", "/cache/retrieve?tokens_mock=0,10", status=500)
    assert answer["error"] == "Failed to retrieve cache"


async def test_a_store_whose_client_hangs_up_is_done(lone: Lone) -> None:
    """In every tier, although nobody waits any more."""
    lone.gate.shut()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lone.store, 0, 50)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert lone.counts() == (5, 5, 5)
    lone.gate.open()
    await wait_all_tasks_blocked()
    for folder in ("chunks", "remote"):
        assert len(list((lone.folder / folder).iterdir())) == 5


async def test_slots_are_logged_when_that_is_asked_for(
    lone: Lone, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="ramakv.lmcache")
    await lone.store(0, 20)
    assert not caplog.records
    await lone.call("POST", "/cache/kvcache/record_slot?enabled=TRUE")
    await lone.store(0, 25)
    await lone.retrieve(0, 25)
    assert caplog.messages == [
        "kvcache store of 25 tokens, slot_mapping [[0, 24]]",
        "kvcache retrieve of 20 tokens, slot_mapping [[0, 19]]",
    ]


# The remote tier


async def test_a_prefetch_goes_through_all_tiers(lone: Lone) -> None:
    """Each from where the one before ended, and to its own first miss."""
    chunks = hashes(0, 50)
    await lone.store(0, 50)
    assert await lone.evict(chunks[1:], CPU) == 4
    assert await lone.evict(chunks[3:], DISK) == 2
    body = {"chunk_hashes": chunks, "lookup_id": "p"}
    assert (await lone.call("POST", "/memory/prefetch", body))["num_chunks"] == 5
    await wait_all_tasks_blocked()
    assert lone.counts() == (5, 3, 5)
    found = await lone.call("POST", "/memory/query", {"chunk_hashes": chunks[2:4]})
    assert found == {chunks[2]: [CPU, DISK, REMOTE], chunks[3]: [CPU, REMOTE]}
    await lone.evict(chunks, CPU)
    answer = await lone.call("POST", "/engine/retrieve", {"chunk_hashes": chunks})
    assert answer["found"] == {CPU: 0, DISK: 3, REMOTE: 2}


async def test_without_a_folder_there_is_no_remote_tier(tmp_path: Path) -> None:
    async with open_lone(tmp_path, remote_dir="") as lone:
        answer = await lone.call("GET", "/bypass/list")
        assert answer["all_backends"] == [CPU, DISK]
        await lone.call("PUT", f"/bypass/add?backend_name={REMOTE}", status=400)
        assert (await lone.call("GET", "/conf?names=remote_url")) == {"remote_url": None}


async def test_a_remote_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "remote").write_text("a file")
    with pytest.raises(ConfigError, match=r"embedded\.remote_dir: "):
        async with open_lone(tmp_path):
            pass


# Clear


async def test_clear_counts_and_empties_by_location(lone: Lone) -> None:
    await lone.store(0, 50)
    for location, left in ((CPU, (0, 5, 5)), ("Nope", (0, 5, 5)), (REMOTE, (0, 5, 0))):
        await lone.call("DELETE", f"/cache/clear?locations={location}")
        assert lone.counts() == left
    assert list((lone.folder / "remote").iterdir()) == []
    assert len(list((lone.folder / "chunks").iterdir())) == 5
    assert (await lone.call("DELETE", "/cache/clear"))["num_removed"] == 5
    assert list((lone.folder / "chunks").iterdir()) == []


async def test_clear_keeps_a_prefetch_from_bringing_chunks_up(lone: Lone) -> None:
    await lone.store(0, 50)
    await lone.call("DELETE", f"/cache/clear?locations={CPU}")
    lone.gate.shut()
    await lone.call("POST", "/memory/prefetch", {"chunk_hashes": hashes(0, 50), "lookup_id": "p"})
    await wait_all_tasks_blocked()
    await lone.call("DELETE", f"/cache/clear?locations={CPU}")
    lone.gate.open()
    await wait_all_tasks_blocked()
    assert lone.counts() == (0, 5, 5)


# Freeze, hot cache, bypass


async def test_frozen_nothing_is_stored_and_only_the_hot_tier_read(lone: Lone) -> None:
    """Evict and clear work all the same."""
    chunks = hashes(0, 50)
    await lone.store(0, 50)
    await lone.evict(chunks[3:], CPU)
    await lone.call("PUT", "/freeze/enable")
    assert await lone.retrieve(0, 50) == 30
    await lone.call("POST", "/memory/prefetch", {"chunk_hashes": chunks, "lookup_id": "p"})
    await wait_all_tasks_blocked()
    await lone.store(500, 550)
    stored = await lone.call("POST", "/engine/store", {"chunk_hashes": ["ab"]})
    assert (stored["num_stored"], stored["num_written"]) == (0, 0)
    assert lone.counts() == (3, 5, 5)
    found = await lone.call("POST", "/memory/query", {"chunk_hashes": chunks[4:]})
    assert found == {chunks[4]: [DISK, REMOTE]}
    assert await lone.evict(chunks[:1], DISK) == 1
    assert (await lone.call("DELETE", f"/cache/clear?locations={CPU}"))["num_removed"] == 3
    await lone.call("PUT", "/freeze/disable")
    assert await lone.retrieve(0, 50) == 50


async def test_a_prefetch_in_progress_does_not_change_a_frozen_hot_tier(lone: Lone) -> None:
    await lone.store(0, 50)
    await lone.evict(hashes(0, 50), CPU)
    lone.gate.shut()
    await lone.call("POST", "/memory/prefetch", {"chunk_hashes": hashes(0, 50), "lookup_id": "p"})
    await wait_all_tasks_blocked()
    await lone.call("PUT", "/freeze/enable")
    lone.gate.open()
    await wait_all_tasks_blocked()
    assert lone.counts() == (0, 5, 5)


async def test_without_hot_cache_its_chunks_are_dropped_and_none_enters(lone: Lone) -> None:
    chunks = hashes(0, 50)
    await lone.store(0, 50)
    await lone.call("PUT", "/hot_cache/disable")
    assert lone.counts() == (0, 5, 5)
    assert (await lone.call("GET", "/hot_cache/status"))["message"] == "Hot cache is disabled"
    await lone.call("POST", "/memory/prefetch", {"chunk_hashes": chunks, "lookup_id": "p"})
    await wait_all_tasks_blocked()
    assert await lone.retrieve(0, 50) == 50  # from disk, each time
    await lone.store(500, 550)
    assert lone.counts() == (0, 10, 10)
    await lone.call("PUT", "/hot_cache/enable")
    assert await lone.retrieve(0, 50) == 50
    assert lone.counts() == (5, 10, 10)


async def test_a_bypassed_backend_is_left_out(lone: Lone) -> None:
    """Of contains, put and get; evict and clear still reach it."""
    chunks = hashes(0, 50)
    await lone.store(0, 50)
    await lone.call("PUT", f"/bypass/add?backend_name={DISK}")
    await lone.evict(chunks, CPU)
    found = await lone.call("POST", "/memory/query", {"chunk_hashes": chunks[:1]})
    assert found == {chunks[0]: [REMOTE]}
    answer = await lone.call("POST", "/engine/retrieve", {"chunk_hashes": chunks})
    assert answer["found"] == {CPU: 0, DISK: 0, REMOTE: 5}
    await lone.call("PUT", f"/bypass/add?backend_name={REMOTE}")
    await lone.evict(chunks, CPU)
    await lone.call("POST", "/memory/prefetch", {"chunk_hashes": chunks, "lookup_id": "p"})
    await wait_all_tasks_blocked()
    await lone.store(500, 550)
    assert lone.counts() == (5, 5, 5)
    assert await lone.retrieve(0, 50) == 0
    assert await lone.evict(chunks[:1], DISK) == 1
    await lone.call("PUT", f"/bypass/add?backend_name={CPU}")
    assert await lone.retrieve(500, 550) == 0
    answer = await lone.call("PUT", f"/bypass/remove?backend_name={CPU}")
    assert answer["bypassed_backends"] == [DISK, REMOTE]
    assert await lone.retrieve(500, 550) == 50


# Loading chunk files


async def load(lone: Lone, status: int = 200, **body: Any) -> Any:
    path = lone.folder / "lmcache.yaml"
    return await lone.call(
        "POST", "/cache/load-fs-chunks", {"config_path": str(path), **body}, status
    )


async def test_chunk_files_are_loaded_into_the_hot_tier(tmp_path: Path) -> None:
    """Their bytes are those that were stored; what is no chunk is reported, up to a number."""
    async with open_lone(tmp_path) as lone:
        await lone.store(0, 50)
        before = await lone.checksums()
    for number in range(3):
        (tmp_path / "remote" / f"0{number}.data").write_bytes(b"garbage")
    (tmp_path / "remote" / os.fsdecode(b"03\xff")).write_bytes(b"garbage")
    (tmp_path / "remote" / "a folder").mkdir()
    text = f"chunk_size: 10\nremote_url: fs://localhost:0{tmp_path}/remote\n"
    (tmp_path / "lmcache.yaml").write_text(text)
    async with open_lone(tmp_path, remote_dir="", disk_chunks_max=1) as lone:
        answer = await load(lone, max_failed_keys=2)
        assert answer["failed_keys"] == ["00", "01"]
        assert (answer["loaded_chunks"], answer["total_files"]) == (5, 9)
        assert lone.counts()[0] == 5
        assert await lone.retrieve(0, 50) == 50
        assert await lone.checksums() == before
        answer = await load(lone)
        assert answer["loaded_chunks"] == 5  # those present count as loaded
        assert answer["failed_keys"][3:] == ["03\ufffd"]
        await lone.call("DELETE", f"/cache/clear?locations={CPU}")
        answer = await load(lone, max_chunks=4, max_failed_keys=0)
        assert answer["failed_keys"] == []
        assert (answer["loaded_chunks"], answer["total_files"]) == (0, 9)  # the others come first
        await lone.call("PUT", "/freeze/enable")
        assert (await load(lone))["loaded_chunks"] == 0


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("chunk_size: 1", 400, "remote_url is not set in the configuration file"),
        ("remote_url: lm://h:1", 400, "remote_url must be fs://host:port/path, got 'lm://h:1'"),
        ("remote_url: fs://[bad/x", 400, None),
        ('{"remote_url":"fs://h:1/a%00"}', 400, None),
        ("no yaml", 400, "Invalid configuration file: line 1: expected 'key: value'"),
        ("\xff", 400, None),
        ("x" * 1_100_000, 400, "Invalid configuration file: larger than 1048576 bytes"),
        ("remote_url: fs://h:1/no/such/folder", 500, None),
    ],
)
async def test_configurations_that_name_no_folder(
    lone: Lone, text: str, status: int, message: str | None
) -> None:
    path = lone.folder / "lmcache.yaml"
    path.write_bytes(text.encode("latin-1"))
    answer = await load(lone, status)
    assert list(answer) == ["error", "message", "config_path"]
    assert answer["error"] == "Failed to load chunks from FSConnector"
    assert message is None or answer["message"] == message


# Chunk statistics


async def test_statistics_count_lookups_and_stores(lone: Lone) -> None:
    """Until the number of different chunks that the configuration names."""
    await lone.store(0, 50)
    await lone.call("POST", "/chunk_statistics/start")
    await lone.store(0, 50)
    await lone.retrieve(0, 60)
    body = {"chunk_hashes": ["ab", "cd"], "lookup_id": "p"}
    await lone.call("POST", "/memory/prefetch", body)
    status = await lone.call("GET", "/chunk_statistics/status")
    assert (status["is_collecting"], status["auto_exit_enabled"]) == (True, False)
    assert (status["total_chunks"], status["unique_chunks"]) == (13, 8)
    changes = {
        "chunk_statistics_auto_exit_target_unique_chunks": 9,
        "chunk_statistics_auto_exit_timeout_hours": 24,
    }
    await lone.call("POST", "/conf", changes)
    await lone.store(500, 550)
    status = await lone.call("GET", "/chunk_statistics/status")
    assert (status["is_collecting"], status["auto_exit_enabled"]) == (False, True)
    assert (status["total_chunks"], status["unique_chunks"]) == (14, 9)
    assert status["auto_exit_timeout_hours"] == 24.0
    assert status["auto_exit_target_unique_chunks"] == 9
    await lone.call("POST", "/chunk_statistics/reset")
    await lone.call("POST", "/chunk_statistics/start")
    changes["chunk_statistics_auto_exit_timeout_hours"] = 1e-12  # type: ignore[assignment]
    await lone.call("POST", "/conf", changes)
    assert not (await lone.call("GET", "/chunk_statistics/status"))["is_collecting"]


async def test_a_new_client_may_count_by_itself(lone: Lone) -> None:
    await lone.call("POST", "/conf", {"chunk_statistics_auto_start_statistics": True})
    for operation in ("recreate", "create"):
        assert not (await lone.call("GET", "/chunk_statistics/status"))["is_collecting"]
        await lone.call("POST", f"/lookup/{operation}")
        assert (await lone.call("GET", "/chunk_statistics/status"))["is_collecting"]
        await lone.call("POST", "/chunk_statistics/stop")


async def test_statistics_need_a_client_that_keeps_them(lone: Lone) -> None:
    """A changed configuration takes effect with the next client."""
    await lone.call("POST", "/conf", {"enable_chunk_statistics": False})
    await lone.call("POST", "/chunk_statistics/start")
    await lone.call("POST", "/lookup/recreate")
    for method, operation in (
        ("POST", "start"),
        ("POST", "stop"),
        ("POST", "reset"),
        ("GET", "status"),
    ):
        answer = await lone.call(method, f"/chunk_statistics/{operation}", status=400)
        assert answer == {
            "error": "Not available",
            "message": "Client does not support statistics.",
        }


# Metrics


async def test_metrics_tell_the_state(lone: Lone) -> None:
    """A prefetch is one ongoing event, and its chunks are held, until it is done."""
    await lone.store(0, 50)
    payload_bytes = 5 * 2 * 10 * 4
    idle = await lone.metrics()
    assert idle["local_cache_usage"] == idle["local_storage_usage"] == payload_bytes
    assert idle["remote_cache_usage"] == payload_bytes
    assert idle["local_cpu_hot_cache_count"] == 5
    assert idle["storage_events_ongoing_count"] == idle["storage_events_done_count"] == 0
    await lone.evict(hashes(0, 50), CPU)
    lone.gate.shut()
    await lone.call("POST", "/memory/prefetch", {"chunk_hashes": hashes(0, 50), "lookup_id": "p"})
    busy = await lone.metrics()
    assert busy["storage_events_ongoing_count"] == 1
    assert busy["pin_monitor_pinned_objects_count"] == busy["pinned_memory_objs_count"] == 5
    assert busy["local_cpu_hot_cache_count"] == busy["local_cache_usage"] == 0
    lone.gate.open()
    await wait_all_tasks_blocked()
    assert await lone.metrics() == {**idle, "num_prefetched_chunks_total": 5}
