"""A scheduler in front of several workers: forwarding, partial failure, faults on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from quart_trio import QuartTrio

from ramakv.config import Embedded
from ramakv.lmcache.embedded import forwarding
from ramakv.lmcache.embedded.node import Node
from ramakv.lmcache.embedded.serving import open_nodes, serve_engine
from tests.test_embedded_document import open_lone, open_served_engine

CPU, DISK = "LocalCPUBackend", "LocalDiskBackend"
FAILED = "Some workers failed to process request"


async def test_memory_calls_reach_every_worker(tmp_path: Path) -> None:
    """The reply is that of the first; `/engine/*` is forwarded alike."""
    async with open_served_engine(tmp_path, workers=3) as served:
        body: dict[str, Any] = {"chunk_hashes": ["ab", "-cd"]}
        stored = await served.scheduler.post("/engine/store", json=body)
        assert stored.json()["num_written"] == 2
        await served.workers[2].post("/memory/evict", json=body | {"locations": [CPU]})
        everywhere = {chunk: [CPU, DISK] for chunk in body["chunk_hashes"]}
        query = await served.scheduler.post("/memory/query", json=body)
        assert query.json() == everywhere
        for worker, expected in zip(
            served.workers, ([CPU, DISK], [CPU, DISK], [DISK]), strict=True
        ):
            found = (await worker.post("/memory/query", json=body)).json()
            assert found == dict.fromkeys(body["chunk_hashes"], expected)
        reply = await served.scheduler.post("/memory/prefetch", json=body | {"lookup_id": "p"})
        assert reply.json() == {
            "status": "prefetch_started",
            "lookup_id": "p",
            "num_chunks": 2,
        }
        evicted = await served.scheduler.post("/memory/evict", json=body)
        assert evicted.json() == {"status": "success", "num_evicted": 4}
        for worker in served.workers:
            found = (await worker.post("/memory/query", json=body)).json()
            assert found == {"ab": [], "-cd": []}
        ids = [
            (await worker.get("/meta?names=worker_id,world_size")).json()
            for worker in served.workers
        ]
        assert ids == [{"worker_id": i, "world_size": 3} for i in range(3)]
        stats = (await served.scheduler.get("/engine/stats")).json()
        assert stats["tiers"][CPU]["evictions"] == 2


async def test_kv_differs_between_workers(tmp_path: Path) -> None:
    """Each has its part of the heads; a retrieve gives each its own bytes back."""
    target = "/cache/kvcache/check?slot_mapping=[0,9]&chunk_size=10"
    async with open_served_engine(tmp_path, workers=2) as served:
        sums = []
        for worker in served.workers:
            await worker.post("/cache/store?tokens_mock=0,10")
            sums.append((await worker.get(target)).json()["chunk_checksums"])
            await worker.post("/cache/store?tokens_mock=50,60")
            await worker.post("/cache/retrieve?tokens_mock=0,10")
            assert (await worker.get(target)).json()["chunk_checksums"] == sums[-1]
        assert sums[0] != sums[1]


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{}", "400: Bad Request"), (b"{bad", "500: Internal Server Error")],
)
async def test_a_bad_body_is_a_failure_of_every_worker(
    tmp_path: Path, body: bytes, status: str
) -> None:
    """As behind a real scheduler, where the reason is lost."""
    async with open_served_engine(tmp_path, workers=2) as served:
        reply = await served.scheduler.post("/memory/evict", content=body)
        assert reply.status_code == 500
        assert reply.json() == {
            "error": FAILED,
            "failures": {str(port): {"error": f"HTTP Error {status}"} for port in served.ports[1:]},
        }


async def test_one_worker_that_fails_or_hangs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have done the call."""
    monkeypatch.setattr(forwarding, "WORKER_SECONDS_MAX", 0.05)
    monkeypatch.setattr("ramakv.lmcache.embedded.engine.PREFETCHES_MAX", 0)
    config = Embedded(behaviour="lmcache-0.4.4")
    async with open_nodes(config, disk_dir=tmp_path, workers=3) as nodes:
        scheduler, workers = nodes
        await forwarding.forward(scheduler, workers, "/engine/store", b'{"chunk_hashes":["ab"]}')
        assert workers[1].engine is not None
        workers[1].engine.disk_lock.wedge()

        async def failures(path: str, body: bytes) -> dict[str, str]:
            with pytest.raises(forwarding.WorkersFailedError) as caught:
                await forwarding.forward(scheduler, workers, path, body)
            return {port: found["error"] for port, found in caught.value.failures.items()}

        body = b'{"chunk_hashes":["ab"],"lookup_id":"p"}'
        assert await failures("/memory/evict", body) == {"7001": "timed out"}
        for worker in (workers[0], workers[2]):
            assert worker.engine is not None
            assert worker.engine.query(["ab"]) == {"ab": []}
        busy = "HTTP Error 503: Service Unavailable"
        assert await failures("/memory/prefetch", body) == {
            "7000": busy,
            "7001": "timed out",
            "7002": busy,
        }


async def test_a_fault_of_ours_is_a_workers_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and the client gets one line."""

    class Broken(Node):
        async def enter(self) -> None:
            raise KeyError("inside")

    config = Embedded()
    async with open_nodes(config, disk_dir=tmp_path) as nodes:
        broken = Broken(config, "worker", nodes.workers[0].engine, port_start=1)
        with pytest.raises(forwarding.WorkersFailedError) as caught:
            await forwarding.forward(nodes.scheduler, [broken], "/engine/stats", b"")
        assert caught.value.failures == {"2": {"error": "HTTP Error 500: Internal Server Error"}}
        assert "KeyError: 'inside'" in caplog.text


# Faults


async def outcomes(folder: Path, seed: int) -> list[int]:
    """Return the status of each of thirty calls, 0 for none."""
    found: list[int] = []
    async with open_lone(
        folder, fault_seed=seed, fault_error_share=0.3, fault_hang_share=0.2
    ) as client:
        for _ in range(30):
            status = 0
            with trio.move_on_after(1):
                status = (await client.get("/lmc_version")).status_code
            found.append(status)
    return found


async def test_faults_of_a_port_are_repeatable(tmp_path: Path, autojump_clock: object) -> None:
    """The same seed and calls, the same errors and hangs."""
    first = await outcomes(tmp_path / "a", 1)
    assert set(first) == {0, 200, 500}
    assert await outcomes(tmp_path / "b", 1) == first
    assert await outcomes(tmp_path / "c", 2) != first


async def test_an_injected_error_says_so_and_does_nothing(tmp_path: Path) -> None:
    async with open_lone(tmp_path, fault_error_share=1.0) as client:
        reply = await client.put("/freeze/enable")
        assert (reply.status_code, reply.json()) == (500, {"error": "injected fault"})


async def test_latency_is_waited_for(tmp_path: Path, autojump_clock: object) -> None:
    async with open_lone(tmp_path, fault_latency_seconds_max=100.0) as client:
        start = trio.current_time()
        for _ in range(10):
            assert (await client.get("/lmc_version")).status_code == 200
        assert 100 < trio.current_time() - start < 1000


async def test_workers_that_fail_on_purpose(tmp_path: Path) -> None:
    """Some calls lose some workers: those have not done them, the others have."""
    body = {"chunk_hashes": ["ab"]}
    async with open_served_engine(
        tmp_path, workers=2, fault_worker_share=0.4, fault_seed=3
    ) as served:
        seen: set[tuple[str, ...]] = set()
        for _ in range(30):
            for worker in served.workers:
                await worker.post("/memory/evict", json=body)
            reply = await served.scheduler.post("/engine/store", json=body)
            failed = tuple(reply.json().get("failures", ()))
            assert reply.status_code == (500 if failed else 200)
            for port, worker in zip(served.ports[1:], served.workers, strict=True):
                found = (await worker.post("/memory/query", json=body)).json()["ab"]
                assert bool(found) == (str(port) not in failed)
            seen.add(failed)
        assert len(seen) == 4  # none, either one, both


async def test_ports_follow_the_schedulers(tmp_path: Path) -> None:
    """The scheduler's port opens last; everything ends when the server returns."""
    asked: list[tuple[str, int]] = []
    stop = trio.Event()

    async def serve(
        app: QuartTrio, host: str, port: int, *, task_status: trio.TaskStatus[int]
    ) -> None:
        asked.append((host, port))
        task_status.started(port)
        await stop.wait()

    async with trio.open_nursery() as nursery:
        ports = await nursery.start(
            lambda task_status: serve_engine(
                "::1",
                6999,
                2,
                Embedded(),
                disk_dir=tmp_path,
                serve=serve,
                task_status=task_status,
            )
        )
        assert ports == [6999, 7000, 7001]
        assert asked == [("::1", 7001), ("::1", 7000), ("::1", 6999)]
        stop.set()
