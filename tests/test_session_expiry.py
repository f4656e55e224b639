"""Sessions and forks that nobody ends: when they do end, and what may come in between."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from ramakv.actors.session import SessionActor
from ramakv.errors import ConflictError, StoreFullError, StoreIOError, UnavailableError
from ramakv.service import open_service
from ramakv.store.store import Store
from tests.fakes import Agent, FakeLMCache, make_config, open_agent, outage, run_inline

TIMES = {"idle_suspend_seconds": 100.0, "idle_close_seconds": 1000.0, "fork_ttl_seconds": 500.0}
LATE = 11.0
"""How late a sweep may be: a tenth of the shortest of these times, and a bit."""

DAY = 86_400.0


def status(agent: Agent) -> str:
    """What became of the only session; asked without an event, which would make it younger."""
    found = agent.service.router.statistics()
    if found["active"]:
        return "active"
    return "suspended" if found["known"] else "gone"


@asynccontextmanager
async def open_life(
    folder: Path, clock_is_off: float = 0.0, **times: float
) -> AsyncIterator[Agent]:
    """One life of the daemon, on a machine whose wall clock is off by so many seconds."""
    async with open_service(
        make_config(folder, sessions={**TIMES, **times}),
        client=FakeLMCache(),
        run_sync=run_inline,
        wall_clock=lambda: 1.7e9 + trio.current_time() + clock_is_off,
    ) as service:
        yield Agent(service)


# Ages, across restarts and clocks that are set ---------------------------------------------


async def test_a_restart_moves_no_age(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_life(tmp_path) as agent:
        await agent.turn_end("s", "a")
        await trio.sleep(60)
    async with open_life(tmp_path) as agent:
        await trio.sleep(39)
        assert status(agent) == "active"
        await trio.sleep(1 + LATE)
        assert status(agent) == "suspended"
    async with open_life(tmp_path) as agent:
        await trio.sleep_until(autojump_clock.current_time() + 700)
    async with open_life(tmp_path) as agent:
        await trio.sleep(1000 - 700 - 100 - LATE - 1)
        assert status(agent) == "suspended"
        await trio.sleep(1 + 2 * LATE)
        assert status(agent) == "gone", "the suspend did not make it younger"


async def test_the_end_of_a_fork_makes_its_session_no_younger(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    times = {"fork_ttl_seconds": 50.0}
    async with open_life(tmp_path, **times) as agent:
        await agent.turn_end("s", "a")
        await agent.send("session_fork", "s")
        await trio.sleep(70)
        assert agent.counts() == {"a": 1}
    async with open_life(tmp_path, **times) as agent:
        await trio.sleep(30 + LATE)
        assert status(agent) == "suspended"


async def test_a_fork_and_a_close_age_across_a_restart(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_life(tmp_path, idle_suspend_seconds=0.0) as agent:
        await agent.turn_end("s", "a")
        await agent.send("session_fork", "s")
        await agent.send("session_close", "s")
        await trio.sleep(40)
    async with open_life(tmp_path, idle_suspend_seconds=0.0) as agent:
        await trio.sleep(15)
        with pytest.raises(ConflictError, match="was closed"):
            await agent.turn_end("s", "b")
        await trio.sleep(6)
        await agent.turn_end("s", "b")
        await trio.sleep(430)
        assert agent.counts() == {"a": 1, "b": 1}
        await trio.sleep(9 + LATE)
        assert agent.counts() == {"b": 1}


async def test_a_clock_that_was_set_back_meanwhile_makes_nothing_immortal(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_life(tmp_path) as agent:
        await agent.turn_end("s", "a")
        await agent.send("session_fork", "s")
        await agent.turn_end("t", "b")
        await agent.send("session_close", "t")
    async with open_life(tmp_path, clock_is_off=-30 * DAY) as agent:
        with pytest.raises(ConflictError, match="was closed"):
            await agent.turn_end("t", "c")
        await trio.sleep(61)
        await agent.turn_end("t", "c")
        await agent.send("session_close", "t")
        await trio.sleep(40 + LATE)
        assert agent.counts() == {"a": 1}, "the fork's"
        await trio.sleep(400 + LATE)
        assert agent.counts() == {}
        await trio.sleep(500 + 2 * LATE)
        assert status(agent) == "gone"
    with closing(sqlite3.connect(tmp_path / "sessions.db")) as database:
        assert database.execute("SELECT * FROM closed").fetchall() == []


async def test_a_clock_that_was_set_forward_meanwhile_ends_what_is_old_by_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_life(tmp_path) as agent:
        await agent.turn_end("s", "a")
        await agent.send("session_fork", "s")
        await agent.turn_end("t", "b")
        await agent.send("session_close", "t")
    async with open_life(tmp_path, clock_is_off=200.0) as agent:
        await agent.turn_end("t", "c")
        await agent.send("session_close", "t")
        await trio.sleep(LATE)
        assert agent.counts() == {"a": 1}, "suspended, and the fork is younger than its time"


async def test_a_session_of_the_rust_daemon_is_as_good_as_new_once(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    with closing(sqlite3.connect(tmp_path / "sessions.db")) as rust:
        rust.execute("CREATE TABLE sessions (session_id TEXT PRIMARY KEY, map_json TEXT NOT NULL)")
        rust.execute("""INSERT INTO sessions VALUES ('s', '["a"]')""")
        rust.commit()
    for _ in range(3):  # the first one migrates
        async with open_life(tmp_path) as agent:
            await trio.sleep(30)
            assert status(agent) == "active"
    async with open_life(tmp_path) as agent:
        await trio.sleep(10 + LATE)
        assert status(agent) == "suspended"


# Off ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("off", "expected"),
    [
        ({"idle_suspend_seconds": 0.0}, {"a": 1}),
        ({"idle_close_seconds": 0.0}, {}),
        ({"fork_ttl_seconds": 0.0}, {"a": 1}),
    ],
    ids=lambda value: next(iter(value), "nothing"),
)
async def test_a_time_of_0_is_never(
    tmp_path: Path, autojump_clock: MockClock, off: dict[str, float], expected: dict[str, int]
) -> None:
    async with open_life(tmp_path, **off) as agent:
        await agent.turn_end("s", "a")
        await agent.send("session_fork", "s")
        await trio.sleep(3000)
        assert agent.counts() == expected
        wanted = {"idle_suspend_seconds": "active", "idle_close_seconds": "suspended"}
        # A fork that is never released keeps its session's place, and nothing else of it.
        assert status(agent) == wanted.get(next(iter(off)), "suspended")


# At the very moment ------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["event", "expiry"])
async def test_an_event_at_the_moment_of_a_suspend_keeps_its_session(
    tmp_path: Path, autojump_clock: MockClock, first: str
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, sessions=TIMES) as agent:
        await agent.turn_end("s", "a", "b")
        agent.service.router._places["s"].last_event -= 100.0
        async with trio.open_nursery() as nursery:
            for who in (first, "event" if first == "expiry" else "expiry"):
                if who == "event":
                    nursery.start_soon(agent.turn_end, "s", "b", "c")
                else:
                    nursery.start_soon(agent.service.router.sweep)
                await trio.lowlevel.checkpoint()  # one after the other, none of them ended
        await trio.sleep(10)
        assert status(agent) == "active"
        assert agent.counts() == {"b": 1, "c": 1}
        assert lmcache.evicted() == ["a"], "what it references again was withdrawn"


async def test_a_turn_that_ends_at_the_moment_of_a_close_is_not_late(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_life(tmp_path) as agent:
        await agent.turn_end("s", "a")
        await agent.send("session_suspend", "s")
        await trio.sleep(1000 + LATE)
        assert status(agent) == "gone"
        assert (await agent.turn_end("s", "b"))["map_updated"], "nobody had closed it"
        assert agent.counts() == {"b": 1}
    with closing(sqlite3.connect(tmp_path / "sessions.db")) as database:
        assert database.execute("SELECT count(*) FROM closed").fetchone() == (0,)


async def test_a_session_with_a_full_mailbox_is_not_abandoned(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SessionActor._handle

    async def slow(self: SessionActor, request: Any) -> Any:
        if type(request).__name__ == "SessionMap":
            await trio.sleep(30)
        return await original(self, request)

    monkeypatch.setattr(SessionActor, "_handle", slow)
    async with open_agent(
        tmp_path,
        sessions={"idle_suspend_seconds": 0.0, "fork_ttl_seconds": 20.0},
        limits={"mailbox_events_max": 3, "event_timeout_seconds": 1000.0},
    ) as agent:
        await agent.turn_end("s", "a")
        await agent.send("session_fork", "s")
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(agent.send, "session_map", "s")
                await wait_all_tasks_blocked()
            with pytest.raises(UnavailableError, match="3 events waiting"):
                await agent.send("session_map", "s")
            await trio.sleep(29)
            assert agent.counts() == {"a": 2}, "its fork is due, and has to wait for room"
        await trio.sleep(5)
        assert agent.counts() == {"a": 1}


# While something fails ---------------------------------------------------------------------


@pytest.mark.parametrize("error", [StoreFullError("no space left"), StoreIOError("I/O error")])
async def test_what_cannot_be_stored_expires_when_it_can(
    tmp_path: Path,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def fail(self: Store, writes: Any) -> int:
        raise error

    async with open_life(tmp_path, fork_ttl_seconds=50.0) as agent:
        await agent.turn_end("s", "a")
        await agent.send("session_fork", "s")
        await trio.sleep(1)
        monkeypatch.setattr(Store, "commit", fail)
        await trio.sleep(500)
        assert (status(agent), agent.counts()) == ("active", {"a": 2})
        monkeypatch.undo()
        await trio.sleep(LATE)
        assert (status(agent), agent.counts()) == ("suspended", {})
        monkeypatch.setattr(Store, "commit", fail)
        await trio.sleep(1000)
        assert status(agent) == "suspended"
        monkeypatch.undo()
        await trio.sleep(LATE)
        assert status(agent) == "gone"


async def test_a_sleeping_session_that_cannot_be_read_expires_when_it_can(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Store, session_id: str) -> Any:
        raise StoreIOError("I/O error")

    async with open_life(tmp_path) as agent:
        await agent.turn_end("s", "a")
        await trio.sleep(80)
        assert agent.service.router.statistics()["awake"] == 0
        monkeypatch.setattr(Store, "load", fail)
        await trio.sleep(200)
        assert (status(agent), agent.counts()) == ("active", {"a": 1})
        monkeypatch.undo()
        await trio.sleep(LATE)
        assert (status(agent), agent.counts()) == ("suspended", {})


async def test_sessions_expire_although_lmcache_is_down(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache(fault=outage)
    async with open_agent(tmp_path, lmcache, sessions=TIMES) as agent:
        await agent.turn_end("s", "a")
        await agent.send("session_fork", "s")
        await agent.turn_end("s", "b")
        await trio.sleep(2000)
        assert (status(agent), agent.counts()) == ("gone", {})
        assert agent.service.statistics()["chunks"]["evictions_waiting"] == 2
        lmcache.calls, lmcache.fault = [], None
        await trio.sleep(60)
        assert sorted(lmcache.evicted()) == ["a", "b"]


# Many at once ------------------------------------------------------------------------------


async def test_thousands_that_expire_at_once_are_few_at_a_time_and_in_nobodys_way(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, awake, awake_max = 1000, 0, 0
    under_way = trio.Event()
    original = SessionActor.run

    async def counted(self: SessionActor) -> None:
        nonlocal awake, awake_max
        awake += 1
        awake_max = max(awake, awake_max)
        under_way.set()
        try:
            await original(self)
        finally:
            awake -= 1

    async with open_life(tmp_path) as agent:
        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(agent.turn_end, f"s{number}", f"c{number}")
        await agent.turn_end("busy", "x")
        await trio.sleep(90)
        await agent.turn_end("busy", "x")
        monkeypatch.setattr(SessionActor, "run", counted)
        assert agent.service.router.statistics() == {
            "known": count + 1,
            "active": count + 1,
            "awake": 1,
        }
        await under_way.wait()
        await agent.turn_end("busy", "y")
        assert agent.service.router.active_sessions > count // 2, "it did not wait for them all"
        await trio.sleep(10)
        assert agent.service.router.active_sessions == 1
        assert agent.counts() == {"y": 1}
        assert awake_max < 150
        assert agent.service.router.statistics()["awake"] <= 100
