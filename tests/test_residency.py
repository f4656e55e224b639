"""Residency in the daemon: real actors and a real database on the mock clock, a fake LMCache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio
from trio.testing import MockClock

from ramakv.actors.residency import DECIDE_SECONDS
from ramakv.config import HOT_LOCATION
from ramakv.core.residency import Action, Order
from tests.fakes import Agent, FakeLMCache, open_agent, outage

STICKY = {
    "backend__kind": "embedded",
    "residency__policy": "sticky",
    "residency__hot_chunks_max": 40,
}


class Scripted:
    """Rules that order what a test wants, once."""

    def __init__(self, agent: Agent) -> None:
        rules = agent.service.residency.rules
        assert rules is not None
        self.rules = rules
        self.orders: Sequence[Order] = ()
        self.failed: list[Order] = []
        rules.decide = self._decide  # type: ignore[method-assign]
        rules.failed = self.failed.append  # type: ignore[method-assign]

    def _decide(self, now: float) -> list[Order]:
        orders, self.orders = list(self.orders), ()
        return orders

    async def order(self, *orders: tuple[Action, str]) -> None:
        self.orders = [Order(*order) for order in orders]
        await trio.sleep(DECIDE_SECONDS * 1.01 + 0.2)


async def work(agent: Agent, lmcache: FakeLMCache, *sessions: str) -> None:
    """A turn of each, of three chunks of its own."""
    for session_id in sessions:
        await agent.send("turn_start", session_id)
        await agent.turn_end(session_id, *(f"{session_id}{number}" for number in range(3)))
    lmcache.calls.clear()


async def test_a_session_is_brought_up_and_renewed_by_prefetches(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, **STICKY) as agent:
        await work(agent, lmcache, "a", "b", "c")
        scripted = Scripted(agent)
        await scripted.order((Action.BRING_UP, "a"), (Action.RENEW, "b"), (Action.RENEW, "c"))
        assert sorted(lmcache.prefetched()) == [
            ("a0", "a1", "a2"),
            ("b0", "b1", "b2", "c0", "c1", "c2"),
        ]
        assert agent.service.residency.done[Action.BRING_UP] == 1
        assert scripted.failed == []


async def test_a_demotion_takes_from_the_hot_tier_alone_and_never_what_others_reference(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, **STICKY) as agent:
        await agent.turn_end("a", "shared", "a0", "a1")
        await agent.turn_end("b", "shared", "b0")
        await Scripted(agent).order((Action.DEMOTE, "a"))
        evicts = [call for call in lmcache.calls if call.kind == "evict"]
        assert [(call.chunks, call.detail) for call in evicts] == [(("a0", "a1"), (HOT_LOCATION,))]
        assert agent.counts() == {"shared": 2, "a0": 1, "a1": 1, "b0": 1}


async def test_nothing_is_done_with_a_session_whose_turn_is_open(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, **STICKY) as agent:
        await work(agent, lmcache, "a")
        await agent.send("turn_start", "a")
        lmcache.calls.clear()
        scripted = Scripted(agent)
        await scripted.order((Action.DEMOTE, "a"), (Action.RENEW, "a"))
        assert lmcache.calls == []


async def test_an_errand_that_waits_is_dropped_when_the_sessions_turn_begins(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    slow = {**STICKY, "backend__calls_per_second": 0.5, "backend__burst_calls_max": 1}
    async with open_agent(tmp_path, lmcache, **slow) as agent:
        await work(agent, lmcache, "a", "b")
        scripted = Scripted(agent)
        scripted.orders = [Order(Action.BRING_UP, "b"), Order(Action.DEMOTE, "a")]
        await trio.sleep(DECIDE_SECONDS * 1.01)
        await agent.send("turn_start", "a")
        await trio.sleep(10)
        assert not [call for call in lmcache.calls if call.kind == "evict"]
        assert Order(Action.DEMOTE, "a") in scripted.failed


async def test_a_prefetch_waits_for_a_demotion_of_its_chunks_that_is_under_way(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache(seconds_per_call=1.0)
    async with open_agent(tmp_path, lmcache, **STICKY) as agent:
        await work(agent, lmcache, "a")
        scripted = Scripted(agent)
        scripted.orders = [Order(Action.DEMOTE, "a")]
        await trio.sleep(DECIDE_SECONDS * 1.01 + 0.3)
        await agent.send("turn_start", "a")
        await trio.sleep(5)
        assert [call.kind for call in lmcache.calls] == ["evict", "prefetch"]
        assert lmcache.conflicts == []


async def test_a_close_during_a_demotion_evicts_after_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache(seconds_per_call=1.0)
    async with open_agent(tmp_path, lmcache, **STICKY) as agent:
        await work(agent, lmcache, "a")
        Scripted(agent).orders = [Order(Action.DEMOTE, "a")]
        await trio.sleep(DECIDE_SECONDS * 1.01 + 0.3)
        await agent.send("session_close", "a")
        await trio.sleep(5)
        assert [call.kind for call in lmcache.calls] == ["evict", "evict"]
        assert lmcache.conflicts == []


async def test_while_lmcache_is_away_nothing_is_wanted_of_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, **STICKY, backend__breaker_failures_max=1) as agent:
        await work(agent, lmcache, "a")
        scripted = Scripted(agent)
        lmcache.fault = outage
        await scripted.order((Action.BRING_UP, "a"))
        calls = len(lmcache.calls)
        await scripted.order((Action.BRING_UP, "a"))
        assert len(lmcache.calls) == calls
        assert len(scripted.failed) == 2


async def test_a_restart_finds_the_sessions_again_in_the_order_of_their_use(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, **STICKY) as agent:
        for session_id in "abc":
            await work(agent, lmcache, session_id)
            await trio.sleep(2)
        await agent.send("session_suspend", "b")
    async with open_agent(tmp_path, lmcache, **STICKY) as agent:
        await trio.sleep(DECIDE_SECONDS)
        standings = agent.service.residency.standings(10)
        assert [(row.session_id, row.chunks) for row in standings] == [("c", 3), ("a", 3)]
        paused = [row.paused_seconds or 0.0 for row in standings]
        assert paused[0] < paused[1]


async def test_a_restart_takes_no_more_sessions_than_the_tier_holds(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, **STICKY) as agent:
        await work(agent, lmcache, *(f"s{number}" for number in range(30)))
    async with open_agent(tmp_path, lmcache, **STICKY) as agent:
        await trio.sleep(DECIDE_SECONDS)
        assert len(agent.service.residency.standings(100)) == 40 // 3


async def test_the_live_rules_keep_some_sessions_where_not_all_fit(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Twenty sessions take turns in a tier for eight: by themselves all would be pushed out."""
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, **STICKY) as agent:
        for _ in range(25):
            for number in range(20):
                session_id = f"s{number}"
                await agent.send("turn_start", session_id)
                chunks = [f"{session_id}-{chunk}" for chunk in range(5)]
                await agent.turn_end(session_id, *chunks, finish_reason="tool_calls")
                await trio.sleep(0.5)
        residency = agent.service.residency
        assert residency.rules is not None
        assert residency.rules.hot_share > 0.15
        assert residency.done[Action.BRING_UP] > 0
        hot = agent.service.hot
        assert hot is not None
        assert 0 < hot.hot < hot.wanted
        assert agent.counts() == {f"s{n}-{c}": 1 for n in range(20) for c in range(5)}


async def off_because(folder: Path, **overrides: Any) -> str:
    lmcache = FakeLMCache()
    async with open_agent(folder, lmcache, **overrides) as agent:
        await work(agent, lmcache, "a", "b")
        await trio.sleep(10 * DECIDE_SECONDS)
        assert lmcache.calls == []
        assert agent.service.residency.rules is None
        assert agent.service.hot is None
        return agent.service.residency.why_off


async def test_it_is_off_by_default(tmp_path: Path, autojump_clock: MockClock) -> None:
    assert "residency.hot_chunks_max is 0" in await off_because(tmp_path)


async def test_it_is_off_where_its_policy_says_so(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    overrides = {**STICKY, "residency__policy": "off"}
    assert await off_because(tmp_path, **overrides) == "residency.policy is off"


async def test_it_stays_off_beside_an_engine_whose_prefetches_leak(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    leaking = {**STICKY, "embedded__behaviour": "lmcache-0.4.4"}
    assert "never frees what a prefetch brought up" in await off_because(tmp_path, **leaking)


async def test_it_stays_off_without_an_lmcache(tmp_path: Path, autojump_clock: MockClock) -> None:
    assert "noop" in await off_because(tmp_path, **{**STICKY, "backend__kind": "noop"})
