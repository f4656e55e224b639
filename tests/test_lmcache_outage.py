"""LMCache down, slow, hanging, refusing: agents do not wait for it, and nothing is forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from ramakv.errors import BackendRejectedError
from tests.fakes import Agent, Call, FakeLMCache, open_agent, outage

ACK = 0.1  # backend.prefetch_ack_seconds


async def test_a_hanging_lmcache_delays_a_turn_start_by_the_bound_only(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path, FakeLMCache(seconds_per_call=1000.0)) as agent:
        await agent.turn_end("s", "a")
        before = trio.current_time()
        answer = await agent.send("turn_start", "s")
        assert trio.current_time() - before == pytest.approx(ACK)
        assert answer == {
            "prefetch_sent": True,
            "prefetch_count": 1,
            "backend_degraded": True,
            "restored": False,
        }


async def test_with_an_open_breaker_nothing_waits_and_nothing_is_sent(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache(fault=outage)
    async with open_agent(tmp_path, lmcache, backend__breaker_open_seconds=60.0) as agent:
        await agent.turn_end("s", "a")
        for _ in range(5):
            await agent.send("turn_start", "s")
        assert agent.service.backend.is_degraded
        calls, before = len(lmcache.calls), trio.current_time()
        answer = await agent.send("turn_start", "s")
        assert (trio.current_time(), len(lmcache.calls)) == (before, calls)
        assert not answer["prefetch_sent"]
        assert answer["backend_degraded"]
        assert (await agent.turn_end("s", "a", "b"))["backend_degraded"]


async def release_some(agent: Agent) -> None:
    for number in range(20):
        await agent.turn_end(f"s{number}", f"chunk-{number}")
        await agent.send("session_close", f"s{number}")


async def test_every_owed_evict_arrives_when_lmcache_is_back(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache(fault=outage)
    async with open_agent(tmp_path, lmcache, backend__breaker_failures_max=1) as agent:
        await release_some(agent)
        await trio.sleep(600)
        assert agent.service.statistics()["chunks"]["evictions_waiting"] == 20
        lmcache.calls, lmcache.fault = [], None
        await trio.sleep(600)
        assert sorted(lmcache.evicted()) == sorted(f"chunk-{n}" for n in range(20))
        assert not agent.service.backend.is_degraded


async def test_every_owed_evict_arrives_also_after_a_restart(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path, FakeLMCache(fault=outage)) as agent:
        await release_some(agent)
        await agent.turn_end("other", "chunk-3")
        await trio.sleep(60)
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache) as agent:
        await trio.sleep(60)
        assert sorted(lmcache.evicted()) == sorted(f"chunk-{n}" for n in range(20) if n != 3)
    async with open_agent(tmp_path, again := FakeLMCache()):
        await trio.sleep(60)
    assert again.evicted() == [], "the outbox is empty"


async def test_an_open_breaker_closes_by_a_prefetch_where_no_evict_waits(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache(fault=outage)
    async with open_agent(tmp_path, lmcache, backend__breaker_failures_max=1) as agent:
        await agent.turn_end("s", "a")
        await agent.send("turn_start", "s")
        assert agent.service.backend.is_degraded
        lmcache.fault = None
        await trio.sleep(10)
        answer = await agent.send("turn_start", "s")
        assert (answer["prefetch_sent"], answer["backend_degraded"]) == (True, False)


async def test_a_prefetch_is_never_sent_twice(tmp_path: Path, autojump_clock: MockClock) -> None:
    lmcache = FakeLMCache(fault=outage)
    async with open_agent(tmp_path, lmcache) as agent:
        await agent.turn_end("s", "a")
        await agent.send("turn_start", "s")
        await trio.sleep(600)
        assert len(lmcache.prefetched()) == 1


async def test_a_prefetch_that_waited_too_long_is_dropped(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache(seconds_per_call=10.0)
    async with open_agent(tmp_path, lmcache, backend__calls_in_flight_max=1) as agent:
        await agent.turn_end("s", "a")
        await agent.turn_end("t", "b")
        await agent.send("turn_start", "s")
        await agent.send("turn_start", "t")
        await trio.sleep(60)
        assert lmcache.prefetched() == [("a",)]


async def test_calls_keep_to_their_rate_and_their_number_in_flight(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    under_way = []
    lmcache = FakeLMCache(seconds_per_call=0.5)
    lmcache.watch = lambda call: under_way.append(sum(lmcache.under_way.values()) + 1)
    async with open_agent(
        tmp_path,
        lmcache,
        backend__calls_per_second=10.0,
        backend__burst_calls_max=5,
        backend__calls_in_flight_max=3,
        backend__prefetch_deadline_seconds=1000.0,
    ) as agent:
        for number in range(40):
            await agent.turn_end(f"s{number}", f"c{number}")
        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(agent.send, "turn_start", f"s{number}")
        await trio.sleep(100)
        times = [call.at for call in lmcache.calls]
        assert len(times) == 40
        assert max(under_way) == 3
        assert times[-1] - times[0] >= (40 - 5) / 10.0


async def test_a_long_prefetch_goes_in_parts_in_prefix_order(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, backend__chunks_per_call_max=3) as agent:
        await agent.turn_end("s", *"abcdefgh", "a")
        answer = await agent.send("turn_start", "s", lookup_id="mine")
        assert (answer["prefetch_count"], answer["prefetch_sent"]) == (8, True)
        assert lmcache.prefetched() == [tuple("abc"), tuple("def"), tuple("gh")]
        ids = [call.detail for call in lmcache.calls]
        assert ids[0] == "mine"
        assert len(set(ids)) == 3


async def test_one_bad_hash_becomes_a_dead_letter_and_the_rest_is_evicted(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    def refuse(call: Call) -> BaseException | None:
        bad = call.kind == "evict" and "bad" in call.chunks
        return BackendRejectedError("invalid literal") if bad else None

    lmcache = FakeLMCache(fault=refuse)
    async with open_agent(tmp_path, lmcache) as agent:
        await agent.turn_end("s", "bad", *"abcdefg")
        await agent.turn_end("t", "z")
        await agent.send("session_close", "s")
        await trio.sleep(60)
        done = [call.chunks for call in lmcache.calls if "bad" not in call.chunks]
        assert sorted(chunk for chunks in done for chunk in chunks) == list("abcdefg")
        assert agent.service.statistics()["chunks"]["evictions_waiting"] == 0
        assert not agent.service.backend.is_degraded
        tries = len(lmcache.calls)
        await trio.sleep(600)
        assert len(lmcache.calls) == tries


async def test_evicts_name_their_locations(tmp_path: Path, autojump_clock: MockClock) -> None:
    lmcache = FakeLMCache()
    hot, disk = "LocalCPUBackend", "LocalDiskBackend"
    async with open_agent(
        tmp_path, lmcache, eviction={"locations": [disk], "close_locations": [hot, disk]}
    ) as agent:
        await agent.turn_end("s", "turned", "suspended")
        await agent.turn_end("s", "suspended")
        await agent.turn_end("t", "closed")
        await agent.send("session_suspend", "s")
        await agent.send("session_close", "t")
        await trio.sleep(10)
        assert {call.chunks: call.detail for call in lmcache.calls} == {
            ("turned",): (disk,),
            ("suspended",): (hot,),
            ("closed",): (hot, disk),
        }
        await agent.send("session_close", "s")
        await trio.sleep(10)
        assert lmcache.calls[-1].chunks == ("suspended",), "it lies on the disk still"
        assert lmcache.calls[-1].detail == (hot, disk)


async def test_a_rounded_clock_stops_nothing(tmp_path: Path, autojump_clock: MockClock) -> None:
    autojump_clock.jump(900_000.0)
    async with open_agent(
        tmp_path,
        backend__calls_per_second=300.0,
        backend__burst_calls_max=1,
        eviction__batch_chunks_max=1,
    ) as agent:
        await agent.turn_end("s", *(f"c{number}" for number in range(500)))
        await agent.turn_end("s")
        await trio.sleep(60)
        assert agent.service.statistics()["chunks"]["evictions_waiting"] == 0
