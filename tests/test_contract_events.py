"""The contract's envelope and table, held against every reply; and how sessions begin and end."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import trio

from tests.daemons import serving
from tests.fakes import Call, FakeLMCache, outage

SHAPES: dict[str, dict[str, type]] = {
    "turn_start": {
        "prefetch_sent": bool,
        "prefetch_count": int,
        "backend_degraded": bool,
        "restored": bool,
    },
    "turn_end": {
        "evicted_count": int,
        "map_updated": bool,
        "debug_written": bool,
        "backend_degraded": bool,
        "chunk_count": int,
    },
    "snapshot_restore": {
        "prefetch_sent": bool,
        "prefetch_count": int,
        "backend_degraded": bool,
        "evicted_count": int,
        "pinned": bool,
        "source_session_id": str,
        "target_session_id": str,
    },
    "session_map": {"session_id": str, "chunk_hashes": list},
    "session_close": {
        "closed": bool,
        "pinned": bool,
        "evicted_count": int,
        "backend_degraded": bool,
    },
    "session_suspend": {
        "suspended": bool,
        "pinned": bool,
        "evicted_count": int,
        "backend_degraded": bool,
    },
    "session_fork": {"forked": bool, "fork_id": int},
    "session_fork_end": {
        "fork_end": bool,
        "evicted_count": int,
        "backend_degraded": bool,
        "matched": bool,
    },
    "health": {"status": str, "sessions_count": int},
}
"""Keys and kinds of `data` on success, as the contract's table has them."""


def event(type_: str, session_id: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"type": type_, **({} if session_id is None else {"session_id": session_id}), **fields}


def turn_end(session_id: str, *hashes: str, **fields: Any) -> dict[str, Any]:
    return event(
        "turn_end", session_id, kv_transfer_params={"chunk_hashes": list(hashes)}, **fields
    )


@dataclass
class Caller:
    """A client that holds every reply against the contract's envelope and table."""

    http: httpx.AsyncClient

    async def post(self, body: Any) -> httpx.Response:
        response = await self.http.post("/event", json=body)
        assert response.headers["content-type"] == "application/json"
        return response

    async def ask(self, type_: str, session_id: str | None = None, **fields: Any) -> dict[str, Any]:
        """Data of an event that succeeds."""
        response = await self.post(event(type_, session_id, **fields))
        reply = response.json()
        assert reply.get("ok") is True, reply
        assert (response.status_code, set(reply)) == (200, {"ok", "type", "data"})
        data: dict[str, Any] = reply["data"]
        assert reply["type"] == type_
        assert {key: type(value) for key, value in data.items()} == SHAPES[type_]
        return data

    async def refused(
        self, type_: str, session_id: str | None = None, **fields: Any
    ) -> tuple[int, str]:
        """Status and error text of an event that fails."""
        response = await self.post(event(type_, session_id, **fields))
        reply = response.json()
        assert reply.get("ok") is False, reply
        assert set(reply) == {"ok", "type", "error"}
        assert reply["type"] == type_
        error: str = reply["error"]
        assert error
        return response.status_code, error

    async def turn_end(self, session_id: str, *hashes: str, **fields: Any) -> dict[str, Any]:
        params = {"chunk_hashes": list(hashes)}
        return await self.ask("turn_end", session_id, kv_transfer_params=params, **fields)

    async def map_of(self, session_id: str) -> list[str]:
        data = await self.ask("session_map", session_id)
        assert data["session_id"] == session_id
        hashes: list[str] = data["chunk_hashes"]
        return hashes

    async def sessions_count(self) -> int:
        data = await self.ask("health")
        assert data["status"] == "running"
        count: int = data["sessions_count"]
        return count

    async def is_unknown(self, session_id: str) -> bool:
        status, error = await self.refused("session_map", session_id)
        return (status, error) == (404, f"session '{session_id}' not found")


@asynccontextmanager
async def calling(
    folder: Path, lmcache: FakeLMCache | None = None, **overrides: Any
) -> AsyncIterator[Caller]:
    """A daemon that evicts without delay, and a client of it."""
    settings = {"eviction__batch_age_seconds": 0.01, **overrides}
    async with serving(folder, client=lmcache, **settings) as (http, _):
        yield Caller(http)


class HangingLMCache(FakeLMCache):
    """Answers nothing until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = trio.Event()

    async def _call(self, call: Call) -> None:
        self.calls.append(call)
        await self.released.wait()


@asynccontextmanager
async def hanging(folder: Path, **overrides: Any) -> AsyncIterator[Caller]:
    """A daemon whose backend answers nothing until the daemon stops."""
    lmcache = HangingLMCache()
    async with calling(folder, lmcache, **overrides) as caller:
        yield caller
        lmcache.released.set()


async def eventually(check: Callable[[], bool | Awaitable[bool]]) -> None:
    """Poll until what happens behind an answer has happened."""
    with trio.fail_after(8):
        while True:
            result = check()
            if result is True or (result and await result):
                return
            await trio.sleep(0.01)


# turn_start


async def test_turn_start_prefetches_the_map_in_its_order_without_duplicates(
    tmp_path: Path,
) -> None:
    lmcache = FakeLMCache()
    async with calling(tmp_path, lmcache) as caller:
        await caller.turn_end("s", "c", "a", "c", "b", "a")
        assert await caller.ask("turn_start", "s") == {
            "prefetch_sent": True,
            "prefetch_count": 3,
            "backend_degraded": False,
            "restored": False,
        }
        assert lmcache.prefetched() == [("c", "a", "b")]


async def test_turn_start_of_an_unknown_session_sends_and_creates_nothing(tmp_path: Path) -> None:
    lmcache = FakeLMCache()
    async with calling(tmp_path, lmcache) as caller:
        assert await caller.ask("turn_start", "s") == {
            "prefetch_sent": False,
            "prefetch_count": 0,
            "backend_degraded": False,
            "restored": False,
        }
        assert lmcache.calls == []
        assert await caller.sessions_count() == 0
        assert await caller.is_unknown("s")


async def test_turn_start_of_an_empty_map_sends_nothing(tmp_path: Path) -> None:
    lmcache = FakeLMCache()
    async with calling(tmp_path, lmcache) as caller:
        await caller.turn_end("s")
        data = await caller.ask("turn_start", "s")
        assert (data["prefetch_sent"], data["prefetch_count"]) == (False, 0)
        assert lmcache.prefetched() == []


async def test_turn_start_sends_nothing_where_prefetch_is_switched_off(tmp_path: Path) -> None:
    lmcache = FakeLMCache()
    async with calling(tmp_path, lmcache, turn_start_prefetch=False) as caller:
        await caller.turn_end("s", "a")
        data = await caller.ask("turn_start", "s")
        assert (data["prefetch_sent"], data["prefetch_count"]) == (False, 0)
        assert lmcache.prefetched() == []


async def test_lookup_id_overrides_the_id_that_the_backend_gets(tmp_path: Path) -> None:
    lmcache = FakeLMCache()
    async with calling(tmp_path, lmcache) as caller:
        await caller.turn_end("s", "a")
        await caller.ask("turn_start", "s")
        await caller.ask("turn_start", "s", lookup_id="mine-7")
        ids = [call.detail for call in lmcache.calls]
        assert ids[1] == "mine-7" != ids[0]


async def test_turn_start_waits_for_a_hanging_backend_no_longer_than_its_bound(
    tmp_path: Path,
) -> None:
    async with hanging(tmp_path, backend__prefetch_ack_seconds=0.2) as caller:
        await caller.turn_end("s", "a", "b")
        began = trio.current_time()
        data = await caller.ask("turn_start", "s")
        assert 0.15 < trio.current_time() - began < 2
        assert (data["prefetch_sent"], data["backend_degraded"]) == (True, True)
        assert data["prefetch_count"] == 2


async def test_a_hanging_backend_delays_no_session_beyond_the_bound(tmp_path: Path) -> None:
    """More turns than calls may be in flight, evicts that hang too, and turn_ends beside them."""
    async with hanging(tmp_path, backend__prefetch_ack_seconds=0.2) as caller:
        names = [f"s{n}" for n in range(24)]
        for extra in (["old"], []):
            await caller.post([turn_end(name, "shared", name, *extra) for name in names])
        with trio.fail_after(4):
            async with trio.open_nursery() as nursery:
                for name in names:
                    nursery.start_soon(caller.ask, "turn_start", name)
                    nursery.start_soon(caller.turn_end, f"beside-{name}", name)


async def test_a_dead_backend_is_reported_and_costs_no_turn_its_time(tmp_path: Path) -> None:
    async with calling(tmp_path, FakeLMCache(fault=outage)) as caller:
        await caller.turn_end("s", "a")
        with trio.fail_after(4):
            for _ in range(12):
                data = await caller.ask("turn_start", "s")
                assert (data["prefetch_sent"], data["backend_degraded"]) == (False, True)


async def test_with_the_noop_backend_every_call_counts_as_accepted(tmp_path: Path) -> None:
    async with serving(tmp_path, fake=False, backend__kind="noop") as (http, _):
        caller = Caller(http)
        await caller.turn_end("s", "a", "b")
        data = await caller.ask("turn_start", "s")
        assert (data["prefetch_sent"], data["prefetch_count"]) == (True, 2)
        assert data["backend_degraded"] is False
        data = await caller.ask("snapshot_restore", "s")
        assert (data["prefetch_sent"], data["backend_degraded"]) == (True, False)


# session_close, and the end that the daemon brings


async def test_session_close_ends_a_session_for_good(tmp_path: Path) -> None:
    lmcache = FakeLMCache()
    async with calling(tmp_path, lmcache) as caller:
        await caller.turn_end("s1", "a", "b")
        await caller.turn_end("s2", "b", "c")
        assert await caller.ask("session_close", "s1") == {
            "closed": True,
            "pinned": False,
            "evicted_count": 1,
            "backend_degraded": False,
        }
        assert await caller.is_unknown("s1")
        assert await caller.sessions_count() == 1
        assert await caller.refused("snapshot_restore", "s1") == (
            404,
            "source session 's1' not found in memory or store",
        )
        await eventually(lambda: lmcache.evicted() == ["a"])
    async with calling(tmp_path) as caller:
        assert await caller.is_unknown("s1")


async def test_a_turn_end_that_arrives_after_the_close_is_too_late(tmp_path: Path) -> None:
    async with calling(tmp_path, sessions__closed_memory_seconds=0.5) as caller:
        params = {"chunk_hashes": ["a"]}
        await caller.turn_end("s", "a")
        await caller.ask("session_close", "s")
        status, _ = await caller.refused("turn_end", "s", kv_transfer_params=params)
        assert status == 409
        assert await caller.is_unknown("s")

        async def accepted() -> bool:
            return (await caller.post(turn_end("s", "a"))).status_code == 200

        await eventually(accepted)
        assert await caller.map_of("s") == ["a"]


async def test_an_idle_session_is_suspended_and_then_closed_by_the_daemon(tmp_path: Path) -> None:
    def rows() -> int:
        with sqlite3.connect(f"file:{tmp_path}/sessions.db?mode=ro", uri=True) as database:
            count: int = database.execute("SELECT count(*) FROM sessions").fetchone()[0]
        database.close()
        return count

    async def idle() -> bool:
        return await caller.sessions_count() == 0

    lmcache = FakeLMCache()
    ages = {"sessions__idle_suspend_seconds": 0.2, "sessions__idle_close_seconds": 0.6}
    async with calling(tmp_path, lmcache, **ages) as caller:
        await caller.turn_end("s", "a")
        await eventually(idle)
        assert rows() == 1
        await eventually(lambda: lmcache.evicted() == ["a"])
        await eventually(lambda: rows() == 0)
        assert await caller.is_unknown("s")


async def test_ends_of_an_unknown_session_are_ok_and_change_nothing(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        for type_, key, value in (
            ("session_suspend", "suspended", False),
            ("session_fork_end", "matched", False),
            ("session_close", "closed", True),
        ):
            data = await caller.ask(type_, "s")
            assert (data[key], data["evicted_count"]) == (value, 0)
        assert await caller.sessions_count() == 0
        assert await caller.is_unknown("s")
