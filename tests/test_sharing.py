"""A chunk stays as long as anybody references it, and goes when nobody does."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.fakes import FakeLMCache, open_agent


async def test_a_shared_chunk_survives_the_first_close_and_goes_with_the_second(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache) as agent:
        await agent.turn_end("a", "shared", "only-a")
        await agent.turn_end("b", "shared")
        first = await agent.send("session_close", "a")
        await trio.sleep(5)
        assert (first["evicted_count"], lmcache.evicted()) == (1, ["only-a"])
        second = await agent.send("session_close", "b")
        await trio.sleep(5)
        assert (second["evicted_count"], lmcache.evicted()) == (1, ["only-a", "shared"])
        assert agent.counts() == {}


async def test_a_reference_that_arrives_while_an_evict_waits_withdraws_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, eviction__batch_age_seconds=10.0) as agent:
        await agent.turn_end("a", "x", "y")
        await agent.turn_end("a", "y")
        await trio.sleep(9)
        await agent.turn_end("b", "x")
        await trio.sleep(30)
        assert lmcache.evicted() == []
        assert agent.counts() == {"x": 1, "y": 1}


async def test_a_prefetch_waits_until_the_evict_of_its_chunk_has_ended(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache(seconds_per_call=0.5)
    async with open_agent(tmp_path, lmcache, backend__prefetch_ack_seconds=5.0) as agent:
        await agent.turn_end("a", "x")
        await agent.send("session_close", "a")
        await trio.sleep(0.6)  # the evict left at 0.5 and takes until 1.0
        await agent.turn_end("b", "x")
        await agent.send("turn_start", "b")
        evict, prefetch = lmcache.calls
        assert (evict.kind, prefetch.kind) == ("evict", "prefetch")
        assert prefetch.at >= evict.at + 0.5
        assert lmcache.conflicts == []


async def test_an_evict_waits_until_the_prefetch_of_its_chunk_has_ended(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache(seconds_per_call=3.0)
    async with open_agent(tmp_path, lmcache) as agent:
        await agent.turn_end("a", "x")
        await agent.send("turn_start", "a")
        await agent.send("session_close", "a")
        await trio.sleep(10)
        prefetch, evict = lmcache.calls
        assert (prefetch.kind, evict.kind) == ("prefetch", "evict")
        assert evict.at >= prefetch.at + 3.0
        assert lmcache.conflicts == []


async def test_a_chunk_released_again_while_its_evict_flies_is_evicted_once_more(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache(seconds_per_call=5.0)
    async with open_agent(tmp_path, lmcache) as agent:
        await agent.turn_end("a", "x")
        await agent.turn_end("a")
        await trio.sleep(1)  # in flight from 0.5 to 5.5
        await agent.turn_end("b", "x")
        await agent.turn_end("b")
        await trio.sleep(30)
        assert lmcache.evicted() == ["x", "x"]
        first, second = lmcache.calls
        assert second.at >= first.at + 5.0
        assert agent.service.statistics()["chunks"]["evictions_waiting"] == 0


async def test_a_slow_backend_delays_no_turn_end(tmp_path: Path, autojump_clock: MockClock) -> None:
    lmcache = FakeLMCache(seconds_per_call=100.0)
    async with open_agent(tmp_path, lmcache) as agent:
        await agent.turn_end("a", "x")
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(agent.send, "turn_start", "a")
            await wait_all_tasks_blocked()
            await agent.turn_end("a", "x", "y")
            assert trio.current_time() == started


async def test_no_moment_of_a_new_reference_leaves_a_third_outcome(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """200 rounds: the evict was withdrawn before it left, or the prefetch left after it ended."""
    rng = random.Random(3)
    lmcache = FakeLMCache(seconds_per_call=0.2)
    outcomes: Counter[str] = Counter()
    async with open_agent(
        tmp_path, lmcache, sessions__closed_memory_seconds=0.001, backend__prefetch_ack_seconds=1.0
    ) as agent:
        for number in range(200):
            chunk = f"x{number}"
            await agent.turn_end("a", chunk)
            await agent.send("session_close", "a")
            await trio.sleep(rng.uniform(0.0, 1.0))
            await agent.turn_end("b", chunk)
            await agent.send("turn_start", "b")
            await trio.sleep(2)
            ours = {call.kind: call for call in lmcache.calls if call.chunks == (chunk,)}
            if "evict" not in ours:
                outcomes["withdrawn"] += 1
            else:
                assert ours["prefetch"].at >= ours["evict"].at + 0.2
                outcomes["prefetched after it"] += 1
        assert lmcache.conflicts == []
        assert outcomes["withdrawn"] + outcomes["prefetched after it"] == 200
        assert min(outcomes.values()) > 30, outcomes
