"""session_fork and session_fork_end, as the contract has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes import FakeLMCache
from tests.test_contract_events import Caller, calling, eventually


async def fork(caller: Caller, session_id: str, **fields: str) -> int:
    data = await caller.ask("session_fork", session_id, **fields)
    assert data["forked"] is True
    fork_id: int = data["fork_id"]
    return fork_id


async def end(caller: Caller, session_id: str, **fields: int) -> tuple[bool, int]:
    data = await caller.ask("session_fork_end", session_id, **fields)
    return data["matched"], data["evicted_count"]


@pytest.mark.parametrize("closed", [False, True])
async def test_a_fork_holds_its_chunks_against_the_parents_turn_end_and_close(
    tmp_path: Path, closed: bool
) -> None:
    lmcache = FakeLMCache()
    async with calling(tmp_path, lmcache) as caller:
        await caller.turn_end("s", "a", "b", "b")
        fork_id = await fork(caller, "s")
        assert (await caller.turn_end("s", "b", "x"))["evicted_count"] == 0
        if closed:
            assert (await caller.ask("session_close", "s"))["evicted_count"] == 1
            await eventually(lambda: lmcache.evicted() == ["x"])
        assert await end(caller, "s", fork_id=fork_id) == (True, 2 if closed else 1)
        kept = ["x", "a", "b"] if closed else ["a"]
        await eventually(lambda: lmcache.evicted() == kept)


async def test_a_fork_holds_its_chunks_against_a_suspension_of_the_parent(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.turn_end("s", "a", "b")
        fork_id = await fork(caller, "s")
        assert (await caller.ask("session_suspend", "s"))["evicted_count"] == 0
        assert await end(caller, "s", fork_id=fork_id) == (True, 2)


async def test_a_fork_ends_once(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.turn_end("s", "a")
        fork_id = await fork(caller, "s")
        data = await caller.ask("session_fork_end", "s", fork_id=fork_id)
        assert data == {
            "fork_end": True,
            "evicted_count": 0,
            "backend_degraded": False,
            "matched": True,
        }
        assert await end(caller, "s", fork_id=fork_id) == (False, 0)
        assert await end(caller, "s") == (False, 0)
        assert (await caller.ask("session_close", "s"))["evicted_count"] == 1


async def test_a_fork_of_another_session_or_of_none_does_not_match(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.turn_end("s1", "a")
        await caller.turn_end("s2", "b")
        fork_id = await fork(caller, "s1")
        await caller.turn_end("s1")
        assert await end(caller, "s2", fork_id=fork_id) == (False, 0)
        assert await end(caller, "s2") == (False, 0)
        assert await end(caller, "s1", fork_id=fork_id + 1000) == (False, 0)
        assert await end(caller, "s1", fork_id=fork_id) == (True, 1)


async def test_fork_end_without_an_id_ends_the_sessions_latest_open_fork(tmp_path: Path) -> None:
    lmcache = FakeLMCache()
    async with calling(tmp_path, lmcache) as caller:
        for chunk in ("a", "b", "c"):
            await caller.turn_end("s", chunk)
            await fork(caller, "s")
        await caller.turn_end("s")
        await caller.turn_end("other", "z")
        await fork(caller, "other")
        evicted = []
        for chunk in ("c", "b", "a"):
            evicted.append(chunk)
            assert await end(caller, "s") == (True, 1)
            await eventually(lambda: lmcache.evicted() == evicted)
        assert await end(caller, "s") == (False, 0)


async def test_each_fork_takes_references_of_its_own(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.turn_end("s", "a")
        forks = [await fork(caller, "s") for _ in range(3)]
        assert len(set(forks)) == 3
        await caller.turn_end("s")
        counts = [(await end(caller, "s", fork_id=fork_id))[1] for fork_id in forks]
        assert counts == [0, 0, 1]


async def test_a_fork_of_an_unknown_session_is_an_error(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        status, error = await caller.refused("session_fork", "s", child_session_id="child")
        assert (status, error) == (404, "session 's' not found")
        assert await caller.is_unknown("child")
        assert await caller.sessions_count() == 0


async def test_a_child_session_starts_with_the_parents_map(tmp_path: Path) -> None:
    lmcache = FakeLMCache()
    async with calling(tmp_path, lmcache) as caller:
        await caller.turn_end("s", "b", "a")
        fork_id = await fork(caller, "s", child_session_id="child")
        assert await caller.map_of("child") == ["b", "a"]
        assert await caller.sessions_count() == 2
        assert (await caller.ask("turn_start", "child"))["prefetch_count"] == 2
        assert lmcache.prefetched() == [("b", "a")]
        await caller.turn_end("s", "x")
        assert await caller.map_of("child") == ["b", "a"]
        assert await end(caller, "s", fork_id=fork_id) == (True, 0)
        assert (await caller.turn_end("child", "b"))["evicted_count"] == 1
        assert (await caller.ask("session_close", "child"))["evicted_count"] == 1


async def test_forks_survive_a_restart_and_their_ids_are_never_used_again(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.turn_end("s", "a", "b")
        await caller.turn_end("gone", "c")
        first, second = await fork(caller, "s"), await fork(caller, "gone")
        third = await fork(caller, "s")
        assert await end(caller, "s", fork_id=third) == (True, 0)
        await caller.ask("session_close", "gone")
        await caller.turn_end("s", "b", "x")
    lmcache = FakeLMCache()
    async with calling(tmp_path, lmcache) as caller:
        assert await fork(caller, "s") not in {first, second, third}
        assert await end(caller, "s") == (True, 0)
        assert await end(caller, "s", fork_id=third) == (False, 0)
        assert await end(caller, "gone", fork_id=second) == (True, 1)
        assert await end(caller, "s") == (True, 1)
        await eventually(lambda: lmcache.evicted() == ["c", "a"])
        assert (await caller.ask("session_close", "s"))["evicted_count"] == 2


async def test_an_abandoned_fork_is_released_by_the_daemon(tmp_path: Path) -> None:
    lmcache = FakeLMCache()
    async with calling(tmp_path, lmcache, sessions__fork_ttl_seconds=0.2) as caller:
        await caller.turn_end("s", "a")
        await fork(caller, "s")
        await caller.ask("session_close", "s")
        await eventually(lambda: lmcache.evicted() == ["a"])
        assert await end(caller, "s") == (False, 0)
