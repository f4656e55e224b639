"""Residency in the daemon: real actors and a real database on the mock clock, a fake LMCache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio
from trio.testing import MockClock

from ramakv.actors.residency import QUIET_SECONDS
from ramakv.config import DISK_LOCATION, HOT_LOCATION
from ramakv.core.orders import Action, Order
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
        await trio.sleep(QUIET_SECONDS * 1.01 + 0.2)


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
        assert lmcache.prefetched() == [("b0", "b1", "b2", "c0", "c1", "c2", "a0", "a1", "a2")]
        done = agent.service.residency.done
        assert (done[Action.BRING_UP], done[Action.RENEW]) == (1, 2)
        assert scripted.failed == []


async def test_a_second_session_is_brought_up_by_a_call_of_its_own_after_the_first(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache(seconds_per_call=0.05)
    async with open_agent(tmp_path, lmcache, **STICKY) as agent:
        await work(agent, lmcache, "a", "b", "c")
        await Scripted(agent).order(
            (Action.BRING_UP, "a"), (Action.BRING_UP, "b"), (Action.RENEW, "c")
        )
        assert sorted(lmcache.prefetched()) == [
            ("b0", "b1", "b2"),
            ("c0", "c1", "c2", "a0", "a1", "a2"),
        ]
        first, second = (call.at for call in lmcache.calls)
        assert second >= first + 0.05


async def test_a_turn_start_sends_no_prefetch_that_its_pause_had_already(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, **STICKY) as agent:
        await work(agent, lmcache, "a", "b")
        await Scripted(agent).order((Action.RENEW, "a"))
        lmcache.calls.clear()
        for session_id in "a", "b":
            started = await agent.send("turn_start", session_id)
            assert started == {
                "prefetch_sent": True,
                "prefetch_count": 3,
                "backend_degraded": False,
                "restored": False,
            }
        assert lmcache.prefetched() == [("b0", "b1", "b2")]


async def test_a_turn_start_with_an_id_of_its_own_is_always_sent(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, **STICKY) as agent:
        await work(agent, lmcache, "a")
        await Scripted(agent).order((Action.RENEW, "a"))
        lmcache.calls.clear()
        await agent.send("turn_start", "a", lookup_id="mine")
        assert [call.detail for call in lmcache.calls] == ["mine"]


async def test_a_turn_start_after_a_refused_errand_sends_its_prefetch(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, **STICKY) as agent:
        await work(agent, lmcache, "a")
        lmcache.fault = outage
        await Scripted(agent).order((Action.BRING_UP, "a"))
        lmcache.fault = None
        lmcache.calls.clear()
        await agent.send("turn_start", "a")
        assert lmcache.prefetched() == [("a0", "a1", "a2")]


async def alternate(agent: Agent, turns: int) -> None:
    """A session has turns in two contexts in turn, in a tier where both have room."""
    for number in range(turns):
        await agent.turn_end("a", *(f"{number % 2}-{chunk}" for chunk in range(4)))
        await trio.sleep(QUIET_SECONDS * 1.01)


async def test_auto_leaves_to_lru_what_turns_release_and_want_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, **STICKY | {"residency__policy": "auto"}) as agent:
        await agent.turn_end("a", "first")
        await trio.sleep(QUIET_SECONDS * 1.01)
        await alternate(agent, turns=20)
        await trio.sleep(5)
        assert lmcache.calls == []
        tallies = agent.service.refcount.evictions
        assert tallies.left == 1 + 19 * 4
        assert tallies.queued == tallies.left
        assert agent.service.refcount.statistics()["evictions_waiting"] == 0


async def test_what_turns_release_is_evicted_where_another_tier_is_to_be_told(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    both = {"residency__policy": "auto", "eviction__locations": (HOT_LOCATION, DISK_LOCATION)}
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, **STICKY | both) as agent:
        await alternate(agent, turns=5)
        await trio.sleep(5)
        assert agent.service.refcount.evictions.left == 0
        assert {call.kind for call in lmcache.calls} == {"evict"}


async def test_sticky_evicts_what_turns_release(tmp_path: Path, autojump_clock: MockClock) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, **STICKY) as agent:
        await alternate(agent, turns=5)
        await trio.sleep(5)
        assert agent.service.refcount.evictions.left == 0
        assert "evict" in {call.kind for call in lmcache.calls}


async def test_the_outbox_forgets_what_was_left_to_lru(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    auto = STICKY | {"residency__policy": "auto"}
    async with open_agent(tmp_path, lmcache, **auto) as agent:
        await alternate(agent, turns=3)
        await trio.sleep(5)
        assert agent.service.refcount.evictions.left == 8
    async with open_agent(tmp_path, lmcache, **auto) as agent:
        assert agent.service.refcount.statistics()["evictions_waiting"] == 0
        assert lmcache.calls == []


async def test_what_a_close_releases_is_evicted_under_every_policy(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, **STICKY | {"residency__policy": "auto"}) as agent:
        await agent.turn_end("a", "a0", "a1")
        await agent.send("session_close", "a")
        await trio.sleep(5)
        assert [call.chunks for call in lmcache.calls] == [("a0", "a1")]


async def test_a_child_that_begins_with_its_parents_map_prefetches_none_of_it_under_auto(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    for policy, sent in ("auto", 0), ("sticky", 3):
        lmcache = FakeLMCache()
        wanted = STICKY | {"residency__policy": policy}
        async with open_agent(tmp_path / policy, lmcache, **wanted) as agent:
            await work(agent, lmcache, "a")
            await agent.send("session_fork", "a", child_session_id="b")
            started = await agent.send("turn_start", "b")
            assert isinstance(started, dict)
            assert started["prefetch_count"] == sent


async def test_after_a_restore_only_the_new_map_is_acted_on(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, **STICKY) as agent:
        await work(agent, lmcache, "a", "b")
        await agent.send("snapshot_restore", "b", source_session_id="a")
        await trio.sleep(5)  # what b had is evicted
        lmcache.calls.clear()
        await Scripted(agent).order((Action.DEMOTE, "b"), (Action.RENEW, "b"))
        assert lmcache.calls == []


async def test_auto_prefetches_no_end_of_a_map_that_turns_have_no_use_for(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, **STICKY | {"residency__policy": "auto"}) as agent:
        for number in range(40):
            await agent.send("turn_start", "a")
            await agent.turn_end("a", *(f"c{chunk}" for chunk in range(number)), f"part{number}")
        lmcache.calls.clear()
        started = await agent.send("turn_start", "a")
        assert lmcache.prefetched() == [tuple(f"c{chunk}" for chunk in range(39))]
        assert isinstance(started, dict)
        assert started["prefetch_count"] == 39


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
        scripted.orders = [Order(Action.DEMOTE, "b"), Order(Action.DEMOTE, "a")]
        await trio.sleep(QUIET_SECONDS * 1.01)
        await agent.send("turn_start", "a")
        await trio.sleep(10)
        evicted = [call.chunks for call in lmcache.calls if call.kind == "evict"]
        assert evicted == [("b0", "b1", "b2")]
        assert scripted.failed == [Order(Action.DEMOTE, "a")]


async def test_a_prefetch_waits_for_a_demotion_of_its_chunks_that_is_under_way(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache(seconds_per_call=1.0)
    async with open_agent(tmp_path, lmcache, **STICKY) as agent:
        await work(agent, lmcache, "a")
        scripted = Scripted(agent)
        scripted.orders = [Order(Action.DEMOTE, "a")]
        await trio.sleep(QUIET_SECONDS * 1.01 + 0.3)
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
        await trio.sleep(QUIET_SECONDS * 1.01 + 0.3)
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
        await trio.sleep(QUIET_SECONDS)
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
        await trio.sleep(QUIET_SECONDS)
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
        await trio.sleep(10 * QUIET_SECONDS)
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
