"""Many short lives leave nothing behind; `make churn` does it for minutes with a real process."""

from __future__ import annotations

import gc
import random
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from ramakv.errors import BackendRejectedError, ConflictError
from tests.fakes import Agent, Call, FakeLMCache, open_agent, outage

LIVES = 150
DEAD_LETTERS_MAX = 10
SESSIONS = {
    "idle_suspend_seconds": 200.0,
    "idle_close_seconds": 400.0,
    "fork_ttl_seconds": 300.0,
    "passivate_seconds": 20.0,
}
LONG_AFTER = 900.0
TABLES = ("sessions", "pins", "forks", "closed", "set_aside")


def refuse_bad(call: Call) -> BaseException | None:
    bad = call.kind == "evict" and any(chunk.startswith("bad") for chunk in call.chunks)
    return BackendRejectedError("invalid literal") if bad else None


async def live(agent: Agent, rng: random.Random, name: str) -> None:
    """A short life with chunks of its own, that ends in one of the ways lives end."""
    number, forks = rng.randrange(10**9), []
    for turn in range(rng.randint(1, 3)):
        await agent.send("turn_start", name)
        await agent.turn_end(name, *(f"{name} {number} {turn} {n}" for n in range(5)), seq=2 * turn)
        if rng.random() < 0.3:
            forks.append((await agent.send("session_fork", name))["fork_id"])
        if rng.random() < 0.2:
            child = f"{name} child"  # which nobody closes
            await agent.send("session_fork", name, child_session_id=child)
        if rng.random() < 0.1:
            await agent.turn_end(name, f"bad {number}", seq=2 * turn + 1)
        if rng.random() < 0.2:
            await agent.send("session_suspend", name)
        await trio.sleep(rng.uniform(0.0, 5.0))
    ending = rng.randrange(4)
    if ending:
        for fork_id in forks:
            await agent.send("session_fork_end", name, fork_id=fork_id)
        await agent.send("session_close", name)
    if ending == 1:
        with pytest.raises(ConflictError, match="was closed"):
            await agent.turn_end(name, "late")
    if ending == 2:
        await agent.send("turn_start", name)  # a new life, which comes to nothing


async def churn(agent: Agent, lmcache: FakeLMCache, rng: random.Random, first: int) -> None:
    """Many lives, side by side, through an outage; then long enough for all of it to be over."""
    async with trio.open_nursery() as nursery:
        for number in range(first, first + LIVES):
            nursery.start_soon(live, agent, rng, f"s{number}")
            await trio.sleep(0.1)
            if number % LIVES == LIVES // 3:
                lmcache.fault = outage
            if number % LIVES == LIVES // 2:
                lmcache.fault = refuse_bad
    await trio.sleep(LONG_AFTER)
    lmcache.calls.clear()
    lmcache.under_way.clear()


def objects() -> Counter[str]:
    """How many objects of our own there are, and containers by kind."""
    gc.collect()
    kinds: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        # Some classes, of other programs' extensions, have a descriptor for a module's name.
        if str(kind.__module__).startswith(("ramakv", "trio")) or kind in (dict, list, set, tuple):
            kinds[f"{kind.__module__}.{kind.__qualname__}"] += 1
    return kinds


async def test_lives_that_ended_leave_nothing_behind(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache(fault=refuse_bad)
    overrides: dict[str, Any] = {
        "sessions": SESSIONS,
        "eviction__dead_letters_max": DEAD_LETTERS_MAX,
        "limits__sessions_max": 3 * LIVES,
    }
    async with open_agent(tmp_path, lmcache, **overrides) as agent:
        rng = random.Random(1)
        await churn(agent, lmcache, rng, 0)
        before = objects()
        await churn(agent, lmcache, rng, LIVES)
        after = objects()
        assert_empty(agent)
        grown = {kind: count - before[kind] for kind, count in after.items()}
        assert not {kind: more for kind, more in grown.items() if more > LIVES // 5}
        assert agent.service.statistics()["store"]["dead_letters_dropped"] > 0
    with closing(sqlite3.connect(tmp_path / "sessions.db")) as database:
        for table in TABLES:
            assert database.execute(f"SELECT * FROM {table}").fetchall() == [], table
        reasons = database.execute("SELECT dead_reason FROM outbox").fetchall()
        assert 0 < len(reasons) <= DEAD_LETTERS_MAX
        assert None not in {reason for (reason,) in reasons}, "an evict is owed still"


def assert_empty(agent: Agent) -> None:
    """Nothing of any session is in memory."""
    service = agent.service
    assert service.router.statistics() == {"known": 0, "active": 0, "awake": 0}
    counts = service.refcount._counts
    evictions = counts.evictions
    for what in (
        counts._counts,
        counts._provisional,
        counts._leaving,
        counts._owed,
        *evictions._fresh.values(),
        evictions._retries,
        evictions._retry_of,
        evictions._in_flight,
        service.backend._lane,
        service.backend._lane.chunks,
    ):
        assert not what
    assert not service.journal._books
    assert len(service.journal._mailbox) == 0
