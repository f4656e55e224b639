"""session_suspend, snapshot_restore, pins and restarts, as the contract has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.daemons import running_daemon
from tests.fakes import FakeLMCache
from tests.test_contract_events import Caller, calling, eventually, turn_end


async def says_suspended(caller: Caller, session_id: str) -> bool:
    _, error = await caller.refused("session_map", session_id)
    return "suspended" in error and session_id in error


# session_suspend


async def test_suspend_releases_the_references_from_the_hot_tier_only(tmp_path: Path) -> None:
    lmcache = FakeLMCache()
    everywhere = ["LocalCPUBackend", "LocalDiskBackend"]
    tiers: dict[str, Any] = {
        "eviction__locations": everywhere,
        "eviction__close_locations": everywhere,
    }
    async with calling(tmp_path, lmcache, **tiers) as caller:
        await caller.turn_end("s1", "a", "b", "c")
        await caller.turn_end("s2", "b")
        assert await caller.ask("session_suspend", "s1") == {
            "suspended": True,
            "pinned": True,
            "evicted_count": 2,
            "backend_degraded": False,
        }
        assert await says_suspended(caller, "s1")
        assert await caller.sessions_count() == 1
        await eventually(lambda: sorted(lmcache.evicted()) == ["a", "c"])
        assert {call.detail for call in lmcache.calls} == {("LocalCPUBackend",)}
        assert (await caller.turn_end("s2"))["evicted_count"] == 1


async def test_turn_start_restores_a_suspended_session_first(tmp_path: Path) -> None:
    lmcache = FakeLMCache()
    async with calling(tmp_path, lmcache) as caller:
        await caller.turn_end("s", "b", "a")
        await caller.ask("session_suspend", "s")
        data = await caller.ask("turn_start", "s")
        assert (data["restored"], data["prefetch_count"]) == (True, 2)
        assert lmcache.prefetched() == [("b", "a")]
        assert await caller.map_of("s") == ["b", "a"]
        assert await caller.sessions_count() == 1
        assert (await caller.ask("turn_start", "s"))["restored"] is False
        assert (await caller.ask("session_close", "s"))["evicted_count"] == 2


async def test_turn_end_replaces_the_map_of_a_suspended_session(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.turn_end("s", "a", "b")
        await caller.ask("session_suspend", "s")
        assert (await caller.turn_end("s", "b", "c"))["chunk_count"] == 2
        assert await caller.map_of("s") == ["b", "c"]
        assert (await caller.ask("session_close", "s"))["evicted_count"] == 2


# snapshot_restore


async def test_restore_brings_a_suspended_session_back(tmp_path: Path) -> None:
    lmcache = FakeLMCache()
    async with calling(tmp_path, lmcache) as caller:
        await caller.turn_end("s", "b", "a", "b")
        await caller.ask("session_suspend", "s")
        data = await caller.ask("snapshot_restore", "s")
        assert data.pop("pinned") in {True, False}
        assert data == {
            "prefetch_sent": True,
            "prefetch_count": 2,
            "backend_degraded": False,
            "evicted_count": 0,
            "source_session_id": "s",
            "target_session_id": "s",
        }
        assert lmcache.prefetched() == [("b", "a")]
        assert set(await caller.map_of("s")) == {"a", "b"}
        assert await caller.sessions_count() == 1
        assert (await caller.ask("session_close", "s"))["evicted_count"] == 2


async def test_restore_from_another_session_takes_its_map_and_releases_the_old(
    tmp_path: Path,
) -> None:
    lmcache = FakeLMCache()
    async with calling(tmp_path, lmcache) as caller:
        await caller.turn_end("source", "a", "b")
        await caller.turn_end("target", "x", "a", "y")
        data = await caller.ask("snapshot_restore", "target", source_session_id="source")
        assert (data["evicted_count"], data["prefetch_count"]) == (2, 2)
        names = (data["source_session_id"], data["target_session_id"])
        assert names == ("source", "target")
        assert await caller.map_of("target") == await caller.map_of("source") == ["a", "b"]
        assert lmcache.prefetched() == [("a", "b")]
        await eventually(lambda: sorted(lmcache.evicted()) == ["x", "y"])


async def test_restore_twice_is_as_once(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.turn_end("source", "a", "b")
        for _ in range(2):
            data = await caller.ask("snapshot_restore", "new", source_session_id="source")
            assert data["evicted_count"] == 0
        await caller.ask("snapshot_restore", "new")
        assert await caller.sessions_count() == 2
        assert (await caller.ask("session_close", "source"))["evicted_count"] == 0
        assert (await caller.turn_end("new", "b"))["evicted_count"] == 1
        assert (await caller.ask("session_close", "new"))["evicted_count"] == 1


async def test_restore_from_a_suspended_session_leaves_it_suspended(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.turn_end("source", "b", "a")
        await caller.ask("session_suspend", "source")
        await caller.ask("snapshot_restore", "target", source_session_id="source")
        assert await caller.map_of("target") == ["b", "a"]
        assert await says_suspended(caller, "source")


async def test_restore_from_an_unknown_source_changes_nothing(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.turn_end("s", "a")
        answer = await caller.refused("snapshot_restore", "s", source_session_id="X")
        assert answer == (404, "source session 'X' not found in memory or store")
        assert await caller.map_of("s") == ["a"]
        _, error = await caller.refused("snapshot_restore", "Y")
        assert error == "source session 'Y' not found in memory or store"
        assert await caller.sessions_count() == 1


async def test_restore_from_an_empty_map_changes_nothing(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.turn_end("s", "a")
        await caller.turn_end("X")
        _, error = await caller.refused("snapshot_restore", "s", source_session_id="X")
        assert error == "source session 'X' has no chunk_hashes to restore"
        assert await caller.map_of("s") == ["a"]


# Pins


async def test_close_keeps_the_rows_of_pinned_sessions_where_it_is_told_to(
    tmp_path: Path,
) -> None:
    """A suspension pins, a restore pins, and the pin outlives a restart and the close."""
    ways = ["suspended", "restored", "suspended and restored", "closed after a restart"]

    async def close(caller: Caller, session_id: str) -> bool:
        data = await caller.ask("session_close", session_id)
        assert data["closed"] is True
        pinned: bool = data["pinned"]
        return pinned

    async with calling(tmp_path, sessions__keep_pinned_on_close=True) as caller:
        for name in [*ways, "plain"]:
            await caller.turn_end(name, f"{name} a", f"{name} b")
        for name in ("suspended", "suspended and restored", "closed after a restart"):
            assert (await caller.ask("session_suspend", name))["pinned"] is True
        for name in ("restored", "suspended and restored", "closed after a restart"):
            assert (await caller.ask("snapshot_restore", name))["pinned"] is True
        assert [await close(caller, name) for name in ways[:3]] == [True] * 3
        assert await close(caller, "plain") is False
        assert await caller.sessions_count() == 1
    async with calling(tmp_path, sessions__keep_pinned_on_close=True) as caller:
        assert await close(caller, "closed after a restart") is True
        assert await caller.sessions_count() == 0
        for name in ways:
            await caller.ask("snapshot_restore", name)
            assert await caller.map_of(name) == [f"{name} a", f"{name} b"]
        status, _ = await caller.refused("snapshot_restore", "plain")
        assert status == 404


async def test_close_releases_what_a_pinned_session_referenced(tmp_path: Path) -> None:
    lmcache = FakeLMCache()
    async with calling(tmp_path, lmcache, sessions__keep_pinned_on_close=True) as caller:
        await caller.turn_end("s", "a", "b")
        await caller.turn_end("other", "b")
        await caller.ask("snapshot_restore", "s")
        data = await caller.ask("session_close", "s")
        assert (data["pinned"], data["evicted_count"]) == (True, 1)
        await eventually(lambda: lmcache.evicted() == ["a"])


async def test_close_deletes_sessions_that_were_suspended_by_default(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        for name in ("suspended", "restored"):
            await caller.turn_end(name, "a")
            await caller.ask("session_suspend", name)
        await caller.ask("snapshot_restore", "restored")
        for name in ("suspended", "restored"):
            data = await caller.ask("session_close", name)
            assert (data["closed"], data["pinned"]) == (True, False)
            assert await caller.is_unknown(name)
            status, _ = await caller.refused("snapshot_restore", name)
            assert status == 404


# Restarts


async def test_maps_counts_and_suspensions_survive_a_restart(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.turn_end("s1", "b", "a")
        await caller.turn_end("s2", "a", "c")
        await caller.turn_end("paused", "c", "d")
        await caller.ask("session_suspend", "paused")
    async with calling(tmp_path) as caller:
        assert await caller.sessions_count() == 2
        assert await caller.map_of("s1") == ["b", "a"]
        assert await says_suspended(caller, "paused")
        assert (await caller.ask("session_close", "s2"))["evicted_count"] == 1
        assert (await caller.ask("turn_start", "paused"))["restored"] is True
        assert await caller.map_of("paused") == ["c", "d"]
        assert (await caller.ask("session_close", "s1"))["evicted_count"] == 2


async def test_seq_survives_suspension_restore_and_restart(tmp_path: Path) -> None:
    async def stale(caller: Caller) -> bool:
        return (await caller.post(turn_end("s", "x", seq=5))).status_code == 409

    async with calling(tmp_path) as caller:
        await caller.turn_end("s", "a", seq=5)
        await caller.ask("session_suspend", "s")
        await caller.ask("snapshot_restore", "s")
        assert await stale(caller)
    async with calling(tmp_path) as caller:
        assert await stale(caller)
        assert await caller.map_of("s") == ["a"]
        await caller.turn_end("s", "b", seq=6)


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    """The typical round trip on a real process, which is killed in between; noop backend."""
    with running_daemon(tmp_path, RAMAKV_BACKEND__KIND="noop") as daemon:
        assert daemon.send("health")["data"] == {"status": "running", "sessions_count": 0}
        assert daemon.send("turn_start", "s1")["data"]["prefetch_count"] == 0
        assert daemon.turn_end("s1", "h-a", "h-b", "h-c", seq=1)["ok"]
        fork_id = daemon.send("session_fork", "s1")["data"]["fork_id"]
        assert daemon.turn_end("s1", "h-a", "h-b", seq=2)["data"]["evicted_count"] == 0
        assert daemon.turn_end("paused", "h-p")["ok"]
        assert daemon.send("session_suspend", "paused")["data"]["suspended"]
        daemon.kill()
        daemon.start()
        assert daemon.send("health")["data"]["sessions_count"] == 1
        start = daemon.send("turn_start", "s1")["data"]
        assert (start["prefetch_sent"], start["prefetch_count"]) == (True, 2)
        assert start["backend_degraded"] is False
        assert daemon.send("session_map", "s1")["data"]["chunk_hashes"] == ["h-a", "h-b"]
        assert daemon.turn_end("s1", "h-x", seq=2)["ok"] is False
        end = daemon.send("session_fork_end", "s1", fork_id=fork_id)["data"]
        assert (end["matched"], end["evicted_count"]) == (True, 1)
        assert daemon.send("session_map", "paused")["ok"] is False
        assert daemon.send("session_close", "s1")["data"]["evicted_count"] == 2
