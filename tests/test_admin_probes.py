"""Probes: /livez and /readyz say what an orchestrator needs, and why to those who may know."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from ramakv.actors import readiness
from tests.certificates import Certificates
from tests.daemons import READY_SECONDS_MAX, Daemon, free_port
from tests.fakes import FakeCare, FakeLMCache, outage
from tests.operators import BEARER, TOKEN, admin_listener, operators


async def test_a_daemon_at_work_is_live_and_ready(tmp_path: Path) -> None:
    async with operators(tmp_path) as ops:
        assert await ops.get("/livez") == {"live": True, "phase": "running"}
        reply = await ops.http.get("/readyz")
        assert reply.status_code == 200
        assert reply.json() == {
            "ready": True,
            "degraded": False,
            "phase": "running",
            "checks": {name: {"ok": True} for name in ("startup", "actors", "store", "lmcache")},
        }


async def test_a_daemon_that_reads_its_database_is_live_and_not_ready(tmp_path: Path) -> None:
    async with admin_listener(tmp_path) as (http, _, _):
        live = await http.get("/livez")
        assert (live.status_code, live.json()) == (200, {"live": True, "phase": "starting"})
        ready = await http.get("/readyz")
        assert ready.status_code == 503
        assert ready.json()["checks"]["startup"]["reason"].startswith("the daemon is starting")


async def test_a_daemon_that_drains_is_live_and_not_ready(tmp_path: Path) -> None:
    async with operators(tmp_path) as ops:
        ops.stop.set()
        assert (await ops.http.get("/livez")).status_code == 200
        ready = await ops.http.get("/readyz")
        assert (ready.status_code, ready.json()["phase"]) == (503, "stopping")


async def test_without_lmcache_it_is_ready_and_degraded(tmp_path: Path) -> None:
    async with operators(
        tmp_path, FakeLMCache(fault=outage), backend__breaker_failures_max=1
    ) as ops:
        await ops.agent.turn_end("s", "a")
        assert not (await ops.agent.send("turn_start", "s"))["prefetch_sent"]
        reply = await ops.http.get("/readyz")
        assert reply.status_code == 200
        found = reply.json()
        assert (found["ready"], found["degraded"]) == (True, True)
        assert found["checks"]["lmcache"] == {
            "ok": False,
            "reason": "LMCache does not answer: prefetches are skipped, and evictions wait",
        }


async def test_an_lmcache_that_must_not_be_called_is_degraded(tmp_path: Path) -> None:
    async with operators(tmp_path, care=FakeCare(may_be_called=False)) as ops:
        found = await ops.get("/readyz")
        assert found["ready"]
        assert "the log says why" in found["checks"]["lmcache"]["reason"]


async def test_a_store_that_cannot_commit_is_not_ready_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "_FRESH_SECONDS", 0.0)
    async with operators(tmp_path, store__busy_timeout_seconds=0.05) as ops:
        with closing(sqlite3.connect(tmp_path / "sessions.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            reply = await ops.http.get("/readyz")
            assert reply.status_code == 503
            store = reply.json()["checks"]["store"]
            assert not store["ok"]
            assert "locked" in store["reason"]
            other.execute("ROLLBACK")
        # No event has to come for that: the probe itself tries.
        assert (await ops.http.get("/readyz")).status_code == 200


async def test_a_commit_of_moments_ago_is_proof_enough(tmp_path: Path) -> None:
    """A probe may not cost an fsync each time."""
    async with operators(tmp_path, store__busy_timeout_seconds=0.05) as ops:
        await ops.agent.turn_end("s", "a")
        with closing(sqlite3.connect(tmp_path / "sessions.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert (await ops.http.get("/readyz")).status_code == 200


async def test_a_disk_that_hangs_is_not_ready_and_does_not_hold_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "_ANSWER_SECONDS_MAX", 0.2)
    hanging, released = threading.Event(), threading.Event()

    def stuck(function: Any, *args: Any) -> Any:
        if hanging.is_set():
            released.wait(30)
        return function(*args)

    async def run_sync(function: Any, *args: Any, limiter: Any = None) -> Any:
        return await trio.to_thread.run_sync(stuck, function, *args, limiter=limiter)

    async with operators(tmp_path, run_sync=run_sync) as ops:
        hanging.set()
        try:
            reply = await ops.http.get("/readyz")
            assert reply.status_code == 503
            assert reply.json()["checks"]["store"]["reason"].startswith("the store does not answer")
            assert (await ops.http.get("/livez")).status_code == 200
        finally:
            hanging.clear()
            released.set()


async def test_many_probes_at_once_are_one_look(tmp_path: Path) -> None:
    async with operators(tmp_path) as ops:
        looks = 0
        ping = ops.service.refcount.ping

        async def counted() -> None:
            nonlocal looks
            looks += 1
            await ping()

        ops.service.refcount.ping = counted  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ops.http.get, "/readyz")
        assert looks <= 2  # the second where twenty took longer than a second


async def test_a_probe_without_the_token_learns_whether_and_not_why(tmp_path: Path) -> None:
    async with operators(tmp_path, auth_token=TOKEN) as ops:
        assert "checks" not in await ops.get("/readyz")
        assert (await ops.get("/readyz", **BEARER))["checks"]["store"] == {"ok": True}
        assert await ops.get("/livez") == {"live": True, "phase": "running"}


async def test_a_name_that_only_resolves_to_this_machine_is_refused(tmp_path: Path) -> None:
    async with operators(tmp_path) as ops:
        for host in ("evil.example:6997", "127.0.0.1.evil.example", "", "[fe80::1]:1"):
            reply = await ops.http.get("/readyz", headers={"Host": host})
            assert reply.status_code == 403, host
            assert "127.0.0.1 and localhost" in reply.json()["error"]
        for host in ("localhost:8000", "127.0.0.1", "[::1]:6997"):
            assert (await ops.http.get("/readyz", headers={"Host": host})).status_code == 200


async def test_what_is_not_there_is_answered_as_events_are(tmp_path: Path) -> None:
    async with operators(tmp_path) as ops:
        reply = await ops.http.get("/nothing")
        assert reply.status_code == 404
        assert reply.json() == {"ok": False, "error": "no such path; the page is at /"}
        reply = await ops.http.post("/livez")
        assert reply.status_code == 405
        assert "GET" in reply.headers["allow"]
        assert not reply.json()["ok"]
        reply = await ops.http.post("/event", json={"type": "health"})
        assert reply.status_code == 404


async def test_an_answer_forbids_what_a_browser_could_do_with_it(tmp_path: Path) -> None:
    async with operators(tmp_path) as ops:
        for path in ("/livez", "/nothing"):
            headers = (await ops.http.get(path)).headers
            assert headers["content-security-policy"].startswith("default-src 'none'")
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-store"


def test_a_real_daemon_answers_probes_and_stops_with_a_connection_open(tmp_path: Path) -> None:
    port = free_port()
    daemon = Daemon(tmp_path, RAMAKV_ADMIN__LISTEN_ADDR=f"127.0.0.1:{port}")
    try:
        daemon.start()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            assert http.get("/readyz").json()["ready"]
            assert f"http://127.0.0.1:{port}" in daemon.log.read_text()
            assert daemon.stop() == 0
    finally:
        daemon.kill()


@pytest.mark.parametrize("events", ["127.0.0.1", "unix"])
def test_it_speaks_tls_with_the_same_files_and_asks_for_the_same_token(
    tmp_path: Path, events: str
) -> None:
    certificates, port = Certificates(tmp_path), free_port()
    daemon = Daemon(
        tmp_path,
        **certificates.environment,
        RAMAKV_ADMIN__LISTEN_ADDR=f"127.0.0.1:{port}",
        RAMAKV_AUTH_TOKEN=TOKEN,
    )
    if events == "unix":
        daemon.environment["RAMAKV_LISTEN_ADDR"] = f"unix:{tmp_path}/events.sock"
    try:
        daemon.start(wait=False)
        with httpx.Client(
            base_url=f"https://127.0.0.1:{port}", verify=False, trust_env=False
        ) as http:
            found = ready_in_time(http)
        assert found["checks"]["startup"] == {"ok": True}
        assert daemon.stop() == 0
    finally:
        daemon.kill()


def ready_in_time(http: httpx.Client) -> Any:
    ends = time.monotonic() + READY_SECONDS_MAX
    while time.monotonic() < ends:
        try:
            reply = http.get("/readyz", headers=BEARER)
            if reply.status_code == 200:
                return reply.json()
        except httpx.HTTPError:
            pass
        time.sleep(0.02)
    raise AssertionError("not ready")


def test_an_empty_address_is_no_listener(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, RAMAKV_ADMIN__LISTEN_ADDR="")
    try:
        daemon.start()
        assert '"admin": []' in daemon.log.read_text()
        assert daemon.stop() == 0
    finally:
        daemon.kill()
