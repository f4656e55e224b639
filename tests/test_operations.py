"""What operators may do: look without a trace, try dead letters again, pause prefetching."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from ramakv.actors.requests import Look
from ramakv.core.session import SessionState, Status
from ramakv.errors import (
    BackendRejectedError,
    BackendUnavailableError,
    NotFoundError,
    UnavailableError,
)
from tests.fakes import Agent, Call, FakeCare, FakeLMCache, open_agent, outage


def refuse_bad(call: Call) -> BaseException | None:
    bad = call.kind == "evict" and any(chunk.startswith("bad") for chunk in call.chunks)
    return BackendRejectedError("invalid literal") if bad else None


async def bury(agent: Agent, *chunks: str) -> None:
    """Release chunks that LMCache refuses to evict, until they are dead letters."""
    await agent.turn_end("s", *chunks)
    await agent.turn_end("s")
    for number in range(40):  # that LMCache does other things shows that it is the hash
        await agent.turn_end("t", f"good{number}")
        await trio.sleep(10)
    assert agent.service.refcount.statistics()["evictions_waiting"] == 0


async def look(agent: Agent, session_id: str) -> SessionState:
    router = agent.service.router
    state = await router.ask_quietly(router.place(session_id), Look()).wait()
    assert isinstance(state, SessionState)
    return state


# Dead letters


async def test_dead_letters_are_evicted_once_lmcache_takes_them(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache(fault=refuse_bad)
    async with open_agent(tmp_path, lmcache) as agent:
        await bury(agent, "bad-1", "bad-2")
        assert agent.service.journal.statistics()["dead_letters"] == 2
        lmcache.fault = None
        assert await agent.service.dead_letters.retry() == 2
        await trio.sleep(10)
        assert sorted(lmcache.evicted()[-2:]) == ["bad-1", "bad-2"]
        assert await agent.service.dead_letters.retry() == 0  # asking twice does no harm
    async with open_agent(tmp_path) as agent:  # and nothing is owed after a restart
        assert agent.service.refcount.statistics()["evictions_waiting"] == 0


async def test_a_dead_letter_that_is_referenced_again_is_not_evicted(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache(fault=refuse_bad)
    async with open_agent(tmp_path, lmcache) as agent:
        await bury(agent, "bad-1")
        await agent.turn_end("u", "bad-1")
        lmcache.calls.clear()
        lmcache.fault = None
        assert await agent.service.dead_letters.retry() == 0
        await trio.sleep(10)
        assert "bad-1" not in lmcache.evicted()
        await agent.turn_end("u")
        await trio.sleep(10)
        assert "bad-1" in lmcache.evicted()


async def test_a_retry_goes_on_when_whoever_asked_goes_away(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache(fault=refuse_bad)
    async with open_agent(tmp_path, lmcache) as agent:
        await bury(agent, "bad-1")
        lmcache.fault = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(agent.service.dead_letters.retry)
            await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        await trio.sleep(10)
        assert "bad-1" in lmcache.evicted()


async def test_a_crash_between_the_two_steps_of_a_retry_loses_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache(fault=refuse_bad)
    async with open_agent(tmp_path, lmcache) as agent:
        await bury(agent, "bad-1")
        assert [chunk for chunk, _ in await agent.service.journal.revive()] == ["bad-1"]
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache) as agent:
        await trio.sleep(10)
        assert lmcache.evicted() == ["bad-1"]


# Looking


async def test_a_look_makes_no_session_younger(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_agent(tmp_path, sessions__idle_suspend_seconds=100.0) as agent:
        await agent.turn_end("s", "a", "b")
        for _ in range(11):
            assert (await look(agent, "s")).chunk_map in (("a", "b"), ())
            await trio.sleep(10.5)
        state = await look(agent, "s")
        assert (state.status, state.chunk_map) == (Status.SUSPENDED, ("a", "b"))


async def test_who_is_unknown_cannot_be_looked_at_and_does_not_come_to_be(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        with pytest.raises(NotFoundError, match="'nobody' not found"):
            agent.service.router.place("nobody")
        assert agent.service.router.statistics()["known"] == 0


async def test_after_a_restart_sessions_are_known_by_what_they_were(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        await agent.turn_end("s", "a", "b", "c")
        await agent.turn_end("s", "a", "b")
        await agent.send("session_fork", "s")
    async with open_agent(tmp_path) as agent:
        place = agent.service.router.place("s")
        assert (place.chunks, place.turns, place.forks) == (2, 2, 1)
        assert place.actor is None


async def test_turns_are_noted_from_their_start_to_their_end(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        turns = agent.service.router.turns
        await agent.send("turn_start", "s")  # nobody knows it yet
        assert turns.in_turn == 0
        await agent.turn_end("s", "a")
        await agent.send("turn_start", "s")
        await agent.send("turn_start", "s")
        assert turns.in_turn == 1
        await trio.sleep(3)
        await agent.turn_end("s", "b", "c")
        assert turns.in_turn == 0
        first, second = turns.of("s")
        assert (first.seconds, first.chunks, first.evicted) == (None, 1, 0)
        assert (second.seconds, second.chunks, second.evicted) == (pytest.approx(3.0), 2, 1)
        for ending in ("session_suspend", "session_close"):
            await agent.send("turn_start", "s")
            assert turns.in_turn == 1
            await agent.send(ending, "s")
            assert turns.in_turn == 0, ending


async def test_the_turns_of_a_session_that_is_over_are_forgotten(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        turns = agent.service.router.turns
        await agent.turn_end("s", "a")
        await agent.send("session_suspend", "s")
        assert len(turns.of("s")) == 1
        await agent.send("session_close", "s")
        assert len(turns.of("s")) == 0


# Prefetching, paused


async def test_paused_prefetching_sends_none_and_holds_no_turn(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache) as agent:
        backend = agent.service.backend
        await agent.turn_end("s", "a")
        backend.pause(True)
        backend.pause(True)
        began = trio.current_time()
        assert not (await agent.send("turn_start", "s"))["prefetch_sent"]
        assert trio.current_time() == began
        await agent.send("session_close", "s")
        await trio.sleep(5)
        assert lmcache.evicted() == ["a"]  # evictions go on
        backend.pause(False)
        await agent.turn_end("t", "b")
        assert (await agent.send("turn_start", "t"))["prefetch_sent"]


# Where chunks lie


class Located(FakeLMCache):
    """Says that everything is hot."""

    async def query(self, chunk_hashes: Sequence[str]) -> dict[str, list[str]] | None:
        await self._call(Call("query", tuple(chunk_hashes), None, trio.current_time()))
        return {chunk: ["LocalCPUBackend"] for chunk in chunk_hashes}


async def test_a_question_is_answered_when_a_worker_is_free(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path, Located()) as agent:
        answer = await agent.service.backend.locate(("a", "b")).wait()
        assert answer == {"a": ["LocalCPUBackend"], "b": ["LocalCPUBackend"]}


async def test_a_question_takes_a_token_and_waits_behind_prefetches(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = Located(seconds_per_call=0.1)
    options = {"backend__calls_in_flight_max": 1, "backend__burst_calls_max": 2}
    async with open_agent(tmp_path, lmcache, backend__calls_per_second=1.0, **options) as agent:
        await agent.turn_end("s", "a")
        before = agent.service.backend.calls
        question = agent.service.backend.locate(("a",))
        started = agent.service.backend.prefetch(("a",), None)
        assert await started.wait()
        assert await question.wait()
        assert [call.kind for call in lmcache.calls] == ["prefetch", "query"]
        assert agent.service.backend.calls == before + 2


async def test_a_question_that_waits_too_long_is_given_up(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = Located(seconds_per_call=8.0)
    async with open_agent(tmp_path, lmcache, backend__calls_in_flight_max=1) as agent:
        agent.service.backend.prefetch(("a",), None)
        await trio.sleep(0.1)
        question = agent.service.backend.locate(("a",))
        with trio.fail_after(9.0), pytest.raises(BackendUnavailableError, match="more important"):
            await question.wait()


async def test_an_lmcache_that_is_down_or_not_looked_at_is_not_asked(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = Located(fault=outage)
    async with open_agent(tmp_path, lmcache, backend__breaker_failures_max=1) as agent:
        await agent.turn_end("s", "a")
        await agent.send("turn_start", "s")
        await trio.sleep(0.5)
        with pytest.raises(BackendUnavailableError, match="does not answer"):
            await agent.service.backend.locate(("a",)).wait()
        assert "query" not in {call.kind for call in lmcache.calls}
    async with open_agent(tmp_path, Located(), FakeCare(may_be_called=False)) as agent:
        with pytest.raises(BackendUnavailableError, match="come to harm"):
            await agent.service.backend.locate(("a",)).wait()


async def test_a_question_that_fails_says_nothing_of_lmcache(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = Located(fault=outage)
    async with open_agent(tmp_path, lmcache, backend__breaker_failures_max=1) as agent:
        with pytest.raises(BackendUnavailableError, match="connection refused"):
            await agent.service.backend.locate(("a",)).wait()
        assert not agent.service.backend.is_degraded


async def test_questions_are_few(tmp_path: Path, autojump_clock: MockClock) -> None:
    lmcache = Located(seconds_per_call=1.0)
    async with open_agent(tmp_path, lmcache, backend__calls_in_flight_max=1) as agent:
        questions = [agent.service.backend.locate((f"c{number}",)) for number in range(20)]
        with pytest.raises(BackendUnavailableError, match="too many"):
            await questions[-1].wait()
        assert await questions[0].wait()


async def test_a_daemon_that_stops_takes_no_requests_of_operators(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        await agent.turn_end("s", "a")
        place = agent.service.router.place("s")
    with pytest.raises(UnavailableError):
        agent.service.router.ask_quietly(place, Look())
    with pytest.raises((UnavailableError, trio.ClosedResourceError)):
        await agent.service.dead_letters.retry()
