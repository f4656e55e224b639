"""What the daemon counts: each figure goes up by what happened, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from ramakv.core.tallies import EventTallies, Histogram
from ramakv.errors import BackendRejectedError, BackendTimeoutError
from tests.daemons import serving
from tests.fakes import Agent, Call, FakeLMCache, open_agent, outage


def test_a_value_lies_in_the_bucket_of_the_first_bound_that_it_is_not_above() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert (histogram.counts, histogram.sum, histogram.count) == ([2, 2, 1], 7.5, 5)


def test_what_has_no_type_that_is_known_is_counted_by_status_alone() -> None:
    tallies = EventTallies(["health"])
    for type_ in (None, "made up by a client"):
        tallies.refused(type_, 400)
    tallies.refused("health", 413)
    assert tallies.unread[400] == 2
    assert list(tallies.by_type) == ["health"]
    assert tallies.by_type["health"].statuses[413] == 1


def answered(tallies: EventTallies) -> dict[str, dict[int, int]]:
    """All counts that are not 0."""
    counts = {name: tally.statuses for name, tally in tallies.by_type.items()}
    return {
        name: found
        for name, statuses in {**counts, "": tallies.unread}.items()
        if (found := {status: count for status, count in statuses.items() if count})
    }


async def test_each_event_is_counted_once_however_it_comes(tmp_path: Path) -> None:
    health: dict[str, Any] = {"type": "health"}
    nobody = {"type": "session_map", "session_id": "nobody"}
    async with serving(tmp_path, auth_token="secret", limits__body_bytes_max=500) as (
        http,
        service,
    ):
        assert (await http.post("/event", json=health)).status_code == 401
        http.headers["authorization"] = "Bearer secret"
        await http.get("/event")
        await http.post("/event", content=b"{")
        await http.post("/event", content=b" " * 501)
        await http.post("/event", json={"type": "list_events"})
        await http.post("/event", json={"type": "session_map"})
        await http.post("/event", json=[health, nobody, {"type": "turn_end"}, {"type": "x"}, 5])
        await http.get("/elsewhere")  # not an event
        assert answered(service.answered) == {
            "": {400: 3, 401: 1, 405: 1, 413: 1},
            "health": {200: 1},
            "list_events": {200: 1},
            "session_map": {400: 1, 404: 1},
            "turn_end": {400: 1},
        }
        seconds = service.answered.by_type["session_map"].seconds
        assert seconds.count == 1  # what was refused before took no time worth counting
        assert 0 < seconds.sum < 10


async def test_a_crash_on_an_event_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (http, service):

        async def crash(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(type(service), "handle", crash)
        await http.post("/event", json={"type": "health"})
        assert answered(service.answered) == {"health": {500: 1}}


async def test_prefetches_are_accepted_or_failed_or_late_or_skipped(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    options = {"backend__calls_in_flight_max": 1, "backend__breaker_failures_max": 1}
    async with open_agent(tmp_path, lmcache, **options) as agent:
        tallies = agent.service.backend.prefetches
        for session_id in "stu":
            await agent.turn_end(session_id, *"abc")
        await agent.send("turn_start", "s")
        assert (tallies.accepted, tallies.chunks) == (1, 3)
        lmcache.seconds_per_call = 10.0
        for session_id in "st":
            await agent.send("turn_start", session_id)
        await trio.sleep(60)
        assert (tallies.accepted, tallies.late) == (2, 1)
        lmcache.fault = outage
        await agent.send("turn_start", "s")  # under way until it fails, and opens the breaker
        await trio.sleep(9)
        await agent.send("turn_start", "t")  # waits until then
        await trio.sleep(1)
        assert (tallies.failed, tallies.skipped) == (1, 1)
        await agent.send("turn_start", "u")
        assert (tallies.failed, tallies.skipped) == (1, 2)
        assert (tallies.accepted, tallies.late) == (2, 1)


async def test_calls_are_counted_by_how_they_end(tmp_path: Path, autojump_clock: MockClock) -> None:
    faults: list[BaseException | None] = []
    lmcache = FakeLMCache(seconds_per_call=0.2, fault=lambda _: faults.pop() if faults else None)
    async with open_agent(tmp_path, lmcache) as agent:
        tally = agent.service.backend.call_tallies["evict"]
        faults[:] = [outage(lmcache_call()), BackendTimeoutError("x"), BackendRejectedError("x")]
        await agent.turn_end("s", "a")
        await agent.send("session_close", "s")
        await trio.sleep(600)
        assert (tally.ok, tally.rejected, tally.timeout, tally.unavailable) == (1, 1, 1, 1)
        assert tally.seconds.count == 4
        assert tally.seconds.sum == pytest.approx(0.8)
        assert agent.service.backend.call_tallies["prefetch"].seconds.count == 0


def lmcache_call() -> Call:
    return Call("evict", ("a",), None, 0.0)


async def release(agent: Agent, *chunks: str) -> None:
    await agent.turn_end("s", *chunks)
    await agent.turn_end("s")


async def test_evictions_end_as_what_they_ended_as(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    def refuse(call: Call) -> BaseException | None:
        bad = call.kind == "evict" and "bad" in call.chunks
        return BackendRejectedError("invalid literal") if bad else None

    async with open_agent(tmp_path, FakeLMCache(fault=refuse)) as agent:
        tallies = agent.service.refcount.evictions
        await release(agent, *"abcd")
        await agent.turn_end("s", "d")
        assert (tallies.queued, tallies.withdrawn) == (4, 1)
        assert agent.service.refcount.oldest_eviction_seconds == 0.0
        await trio.sleep(0.4)
        assert agent.service.refcount.oldest_eviction_seconds == pytest.approx(0.4)
        await trio.sleep(10)
        assert (tallies.done, tallies.dead, tallies.retried) == (3, 0, 0)
        assert agent.service.refcount.oldest_eviction_seconds == 0.0
        await release(agent, "d", "bad")
        await trio.sleep(100)
        assert (tallies.queued, tallies.done, tallies.dead) == (6, 4, 1)
        assert tallies.retried > 2
        assert agent.service.journal.statistics()["dead_letters"] == 1


async def test_evictions_that_lmcache_forgot_are_forgiven(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        await release(agent, *"ab")
        agent.service.refcount.forgive(trio.current_time() + 1)
        assert agent.service.refcount.evictions.forgiven == 2


async def test_a_transaction_is_counted_with_its_commits(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(agent.turn_end, f"s{number}", "a")
        tallies, journal = agent.service.journal.tallies, agent.service.journal
        assert tallies.sizes.sum == journal.commits == 20
        assert tallies.sizes.count == tallies.seconds.count == journal.transactions
        assert tallies.failed == 0


async def test_the_spread_of_references_says_how_much_is_shared(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        await agent.turn_end("s", *"abc")
        await agent.turn_end("t", *"ab")
        assert (await agent.service.refcount.spread()).chunks == {1: 1, 2: 2}
        await trio.sleep(1)
        await agent.turn_end("t", "a")
        assert (await agent.service.refcount.spread()).chunks == {1: 2, 2: 1}


async def test_of_many_chunks_the_spread_is_not_counted_at_each_look(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        await agent.turn_end("s", *(f"c{number}" for number in range(20_000)))
        first = await agent.service.refcount.spread()
        assert await agent.service.refcount.spread() is first
        await trio.sleep(0.3)
        assert await agent.service.refcount.spread() is not first


async def test_suspended_sessions_and_unfinished_requests_are_counted(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        router = agent.service.router
        for session_id in "stu":
            await agent.turn_end(session_id, "a")
        await agent.send("session_suspend", "t")
        assert (router.active_sessions, router.suspended_sessions) == (2, 1)
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(agent.turn_end, "s", "b")
            seen = []
            for _ in range(20):
                await trio.lowlevel.checkpoint()
                seen.append(router.unfinished)
            assert 0 < max(seen) <= 5
        assert router.unfinished == 0
