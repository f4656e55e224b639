"""A real LMCache is looked after: restarts, memory that prefetches hold, ports that hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from ramakv.core.topology import Condition
from ramakv.errors import BackendRejectedError, BackendTimeoutError
from ramakv.lmcache.care import LMCacheCare
from ramakv.lmcache.client import LMCacheClient
from tests.fakes import Call, FakeCare, FakeLMCache, open_agent, outage
from tests.test_topology import Stand, stand, two_ports


async def test_an_lmcache_that_must_not_be_called_is_not_until_it_may_be(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    care, lmcache = FakeCare(may_be_called=False), FakeLMCache()
    async with open_agent(tmp_path, lmcache, care) as agent:
        await agent.turn_end("s", "a", "b")
        await trio.sleep(1)
        answer = await agent.send("turn_start", "s")
        assert (answer["prefetch_sent"], answer["backend_degraded"]) == (False, True)
        await agent.turn_end("s", "a")
        await trio.sleep(100)
        assert lmcache.calls == []
        care.may_be_called = True
        await trio.sleep(60)
        assert lmcache.evicted() == ["b"]
        assert (await agent.send("turn_start", "s"))["prefetch_sent"]


async def test_after_a_restart_of_lmcache_nothing_is_owed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    care, lmcache = FakeCare(), FakeLMCache(fault=outage)
    async with open_agent(tmp_path, lmcache, care) as agent:
        await agent.turn_end("s", "a", "b")
        await agent.turn_end("s", "a")
        await trio.sleep(60)
        assert agent.service.backend.is_degraded
        care.condition = Condition(restarted=True)
        lmcache.fault, lmcache.calls = None, []
        await trio.sleep(7)
        assert not agent.service.backend.is_degraded
        assert agent.service.statistics()["chunks"]["evictions_waiting"] == 0
    async with open_agent(tmp_path, again := FakeLMCache()) as agent:
        await trio.sleep(60)
        assert agent.counts() == {"a": 1}
    assert again.calls == lmcache.calls == []


async def test_what_was_released_since_lmcache_restarted_is_evicted_from_the_new_process(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    care, lmcache = FakeCare(), FakeLMCache()
    async with open_agent(tmp_path, lmcache, care) as agent:
        await agent.turn_end("s", "old", "kept")
        lmcache.fault = outage
        await agent.turn_end("s", "kept")
        await trio.sleep(6)  # a look has seen the process that is about to end
        await agent.turn_end("s", "kept", "new")
        await agent.turn_end("s", "kept")
        care.condition = Condition(restarted=True)
        lmcache.fault, lmcache.calls = None, []
        await trio.sleep(60)
        assert lmcache.evicted() == ["new"]


async def test_a_restart_does_not_forgive_what_lies_in_a_remote_tier(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    care, lmcache = FakeCare(), FakeLMCache(fault=outage)
    async with open_agent(
        tmp_path, lmcache, care, eviction__locations=["LocalCPUBackend", "RemoteBackend"]
    ) as agent:
        await agent.turn_end("s", "a")
        await agent.turn_end("s")
        await trio.sleep(60)
        care.condition = Condition(restarted=True)
        lmcache.fault, lmcache.calls = None, []
        await trio.sleep(60)
        assert lmcache.evicted() == ["a"]


async def test_prefetching_pauses_while_lmcache_holds_too_much_and_goes_on_by_itself(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    care, lmcache = FakeCare(condition=Condition(held_chunks=99)), FakeLMCache()
    async with open_agent(tmp_path, lmcache, care, backend__unconsumed_chunks_max=100) as agent:
        await agent.turn_end("s", "a")
        await trio.sleep(7)
        assert (await agent.send("turn_start", "s"))["prefetch_sent"]
        care.condition = Condition(held_chunks=100)
        await trio.sleep(7)
        paused = await agent.send("turn_start", "s")
        assert (paused["prefetch_sent"], paused["backend_degraded"]) == (False, True)
        await agent.turn_end("s", "b")
        await trio.sleep(7)
        assert lmcache.evicted() == ["a"], "evicts go on"
        care.condition = Condition(held_chunks=10)
        await trio.sleep(7)
        assert (await agent.send("turn_start", "s"))["prefetch_sent"]
        assert len(lmcache.prefetched()) == 2


async def test_a_port_that_hangs_after_a_timeout_opens_the_breaker(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    def time_out(call: Call) -> BaseException:
        return BackendTimeoutError("no answer")

    care, lmcache = FakeCare(wedged=["http://h:7000"]), FakeLMCache(fault=time_out)
    async with open_agent(tmp_path, lmcache, care) as agent:
        await agent.turn_end("s", "a")
        await agent.send("turn_start", "s")
        await trio.sleep(0.1)
        assert agent.service.backend.is_degraded, "after one call, not after five"
        assert care.diagnoses == 1
        care.wedged = []


async def test_mla_ranks_that_always_fail_do_not_count() -> None:
    refused = {"error": "Some workers failed to process request", "failures": {"7001": {"error": "'NoneType' object has no attribute 'batched_remove'"}}}  # noqa: E501  # fmt: skip
    first = stand("scheduler", (500, refused))
    worker = Stand({"/meta": (200, {"role": "worker", "use_mla": True})})
    async with two_ports(first, worker) as url, make_client(url) as client:
        with pytest.raises(BackendRejectedError):
            await client.evict(["a"], [])
        assert await LMCacheCare(client, url, timeout_seconds=5.0).check_first()
        await client.evict(["a"], [])
        first.answers["/memory/evict"] = (500, {**refused, "failures": {client_port(url): {"error": "broken"}}})  # noqa: E501  # fmt: skip
        with pytest.raises(BackendRejectedError):
            await client.evict(["a"], [])


def client_port(url: str) -> str:
    """The first worker's port, as the scheduler names it."""
    return str(int(url.rpartition(":")[2]) + 1)


def make_client(url: str) -> LMCacheClient:
    return LMCacheClient(
        url, connect_timeout_seconds=5.0, call_timeout_seconds=5.0, connections_max=2
    )


async def test_a_restart_shows_in_the_instance_id_and_held_chunks_in_the_metrics() -> None:
    metrics = 'lmcache:pin_monitor_pinned_objects_count{role="worker"} 42.0\n'
    worker = stand("worker")
    conf: dict[str, Any] = {"lmcache_instance_id": "one"}
    worker.answers["/conf"] = (200, conf)
    async with two_ports(stand("scheduler"), worker) as url, make_client(url) as client:
        care = LMCacheCare(client, url, timeout_seconds=5.0)
        assert await care.check_first()
        assert await care.look() == Condition()
        worker.texts["/metrics"] = metrics
        assert await care.look() == Condition(held_chunks=42)
        conf["lmcache_instance_id"] = "two"
        assert (await care.look()).restarted
        assert not (await care.look()).restarted
        assert await care.find_wedged() == []
    assert await care.look() == Condition(answers=False)
    assert len(await care.find_wedged()) == 2


async def test_a_restart_under_a_configured_instance_id_shows_in_the_start_of_the_process() -> None:
    worker = stand("worker")
    worker.answers["/conf"] = (200, {"lmcache_instance_id": "configured"})

    def started(seconds: str) -> None:
        worker.texts["/metrics"] = f"process_start_time_seconds {seconds}\n"

    async with two_ports(stand("scheduler"), worker) as url, make_client(url) as client:
        care = LMCacheCare(client, url, timeout_seconds=5.0)
        assert await care.check_first()
        started("1.76438e+09")
        assert not (await care.look()).restarted
        worker.texts["/metrics"] = ""
        assert not (await care.look()).restarted, "nothing is said, so nothing is known"
        started("1764380123.5")
        assert (await care.look()).restarted
        assert not (await care.look()).restarted


async def test_a_metric_that_is_no_count_is_passed_over() -> None:
    worker = stand("worker")
    worker.texts["/metrics"] = "lmcache:pin_monitor_pinned_objects_count NaN\n"
    async with two_ports(stand("scheduler"), worker) as url, make_client(url) as client:
        care = LMCacheCare(client, url, timeout_seconds=5.0)
        assert await care.check_first()
        assert await care.look() == Condition()


async def test_between_two_looks_the_daemon_keeps_count_itself(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    care, lmcache = FakeCare(condition=Condition(held_chunks=0)), FakeLMCache()
    async with open_agent(tmp_path, lmcache, care, backend__unconsumed_chunks_max=100) as agent:
        await agent.turn_end("s", *(f"c{number}" for number in range(30)))
        await trio.sleep(6)
        sent = [(await agent.send("turn_start", "s"))["prefetch_sent"] for _ in range(5)]
        assert sent == [True, True, True, False, False]
        await trio.sleep(20)
        assert (await agent.send("turn_start", "s"))["prefetch_sent"], "LMCache holds none"
