"""Sessions come, sleep, expire, crash and come back; none of it costs a reference."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from ramakv.actors.session import SessionActor
from ramakv.actors.steps import Steps
from ramakv.errors import (
    ConflictError,
    InternalError,
    NotFoundError,
    StoreError,
    StoreFullError,
    StoreIOError,
    UnavailableError,
)
from ramakv.service import open_service
from ramakv.store.store import Bookkeeping, Store
from tests.fakes import Agent, FakeLMCache, make_config, open_agent, outage, run_inline


async def test_an_idle_actor_is_passivated_and_comes_back_with_its_next_event(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        await agent.turn_end("s", "a", "b")
        await agent.send("session_fork", "s")
        assert agent.service.router.statistics()["awake"] == 1
        await trio.sleep(100)
        assert agent.service.router.statistics() == {"known": 1, "active": 1, "awake": 0}
        assert agent.counts() == {"a": 2, "b": 2}
        assert (await agent.turn_end("s", "b", "c"))["evicted_count"] == 0
        assert (await agent.send("session_fork_end", "s"))["evicted_count"] == 1
        assert agent.counts() == {"b": 1, "c": 1}


async def test_an_actor_that_went_to_sleep_is_gone_without_the_garbage_collector(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        gc.disable()
        try:
            for _ in range(2):  # a new one, and one that was loaded from the store
                await agent.turn_end("s", "a")
                actor = agent.service.router._places["s"].actor
                assert actor is not None
                left = weakref.ref(actor)
                del actor
                await trio.sleep(100)
                assert left() is None
        finally:
            gc.enable()


async def test_an_unknown_session_leaves_nothing_behind(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        for type_ in ("turn_start", "session_close", "session_suspend", "session_fork_end"):
            await agent.send(type_, "nobody")
        with pytest.raises(NotFoundError, match="session 'nobody' not found"):
            await agent.send("session_map", "nobody")
        assert agent.service.router.statistics() == {"known": 0, "active": 0, "awake": 0}


async def test_a_restart_is_a_no_op(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_agent(tmp_path) as agent:
        await agent.turn_end("a", "1", "2", "1", seq=5)
        await agent.turn_end("b", "2", "3")
        fork_id = (await agent.send("session_fork", "a"))["fork_id"]
        await agent.turn_end("a", "4")
        await agent.send("session_suspend", "b")
        counts = agent.counts()
        assert counts == {"1": 1, "2": 1, "4": 1}
    async with open_agent(tmp_path) as agent:
        assert agent.counts() == counts
        assert (await agent.send("health"))["sessions_count"] == 1
        with pytest.raises(NotFoundError, match="suspended"):
            await agent.send("session_map", "b")
        with pytest.raises(ConflictError, match="seq 5"):
            await agent.turn_end("a", "9", seq=5)
        assert (await agent.send("session_fork", "a"))["fork_id"] > fork_id
        ended = await agent.send("session_fork_end", "a", fork_id=fork_id)
        assert (ended["matched"], ended["evicted_count"]) == (True, 2)
        assert (await agent.send("turn_start", "b"))["restored"]
        assert (await agent.send("session_map", "b"))["chunk_hashes"] == ["2", "3"]


async def test_an_idle_session_is_suspended_then_closed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(
        tmp_path,
        lmcache,
        sessions={"idle_suspend_seconds": 100.0, "idle_close_seconds": 1000.0},
    ) as agent:
        await agent.turn_end("s", "a")
        await trio.sleep(60)
        await agent.send("turn_start", "s")
        await trio.sleep(90)
        assert agent.counts() == {"a": 1}, "a turn_start is an event"
        await trio.sleep(60)
        assert (agent.counts(), lmcache.evicted()) == ({}, ["a"])
        with pytest.raises(NotFoundError, match="suspended"):
            await agent.send("session_map", "s")
        await trio.sleep(1200)
        with pytest.raises(NotFoundError, match="not found"):
            await agent.send("session_map", "s")
        assert agent.service.router.statistics()["known"] == 0


async def test_an_abandoned_fork_is_released(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_agent(tmp_path, sessions__fork_ttl_seconds=500.0) as agent:
        await agent.turn_end("s", "a")
        await agent.send("session_fork", "s")
        await agent.send("session_close", "s")
        assert agent.counts() == {"a": 1}
        await trio.sleep(400)
        assert agent.counts() == {"a": 1}
        await trio.sleep(200)
        assert agent.counts() == {}
        assert not (await agent.send("session_fork_end", "s"))["matched"]


async def test_a_late_turn_end_does_not_bring_a_closed_session_back(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        await agent.turn_end("s", "a")
        await agent.send("session_close", "s")
    async with open_agent(tmp_path) as agent:  # not even after a restart
        with pytest.raises(ConflictError, match="closed"):
            await agent.turn_end("s", "b")
        assert agent.counts() == {}
        await agent.send("turn_start", "s")
        await agent.turn_end("s", "b")
        assert agent.counts() == {"b": 1}
        await agent.send("session_close", "s")
        await trio.sleep(200)
        assert agent.service.router.statistics()["known"] == 0
        await agent.turn_end("s", "c")


async def test_a_crash_of_a_session_actor_is_its_own(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = SessionActor._session_map

    def crash(self: SessionActor) -> Any:
        if self.session_id == "s":
            raise ZeroDivisionError
        return real(self)

    async with open_agent(tmp_path) as agent:
        await agent.turn_end("s", "a")
        await agent.turn_end("t", "a", "b")
        monkeypatch.setattr(SessionActor, "_session_map", crash)
        failed = []

        async def expect_failure(type_: str) -> None:
            with pytest.raises(InternalError):
                await agent.send(type_, "s")
            failed.append(type_)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_failure, "session_map")
            nursery.start_soon(expect_failure, "session_map")
        assert len(failed) == 2
        monkeypatch.undo()
        assert (await agent.send("session_map", "s"))["chunk_hashes"] == ["a"]
        assert (await agent.send("session_map", "t"))["chunk_hashes"] == ["a", "b"]
        assert agent.counts() == {"a": 2, "b": 1}


@pytest.mark.parametrize("known", [True, False], ids=["a known session", "a new session"])
@pytest.mark.parametrize("moment", ["before the commit", "after the commit"])
async def test_a_crash_in_the_middle_of_a_step_leaves_the_counts_right(
    tmp_path: Path,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    known: bool,
) -> None:
    crashes = 1

    async def crash(*_: object) -> None:
        nonlocal crashes
        crashes -= 1
        if crashes >= 0:
            raise ZeroDivisionError

    async with open_agent(tmp_path) as agent:
        if known:
            await agent.turn_end("s", "a", "b")
        if moment == "before the commit":
            monkeypatch.setattr(agent.service.journal, "commit", crash)
        else:
            real = Steps.finish

            async def finish(self: Steps, pending: Any) -> int:
                await crash()
                return await real(self, pending)

            monkeypatch.setattr(Steps, "finish", finish)
        with pytest.raises(InternalError):
            await agent.turn_end("s", "b", "c")
        await wait_all_tasks_blocked()
        monkeypatch.undo()
        before = ["a", "b"] if known else []
        expected = before if moment == "before the commit" else ["b", "c"]
        assert agent.counts() == dict.fromkeys(expected, 1)
        if expected:
            assert (await agent.send("session_map", "s"))["chunk_hashes"] == expected
        assert (await agent.send("health"))["sessions_count"] == bool(expected)


async def test_a_commit_that_fails_changes_nothing(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache) as agent:
        await agent.turn_end("s", "a", "b")
        await agent.turn_end("t", "c")
        await agent.turn_end("t", "d")

        def full(self: Store, writes: object) -> int:
            raise StoreFullError("no space left")

        monkeypatch.setattr(Store, "commit", full)
        for attempt in (
            agent.turn_end("s", "b", "c"),
            agent.turn_end("new", "a"),
            agent.send("session_close", "s"),
            agent.send("session_suspend", "s"),
            agent.send("session_fork", "s"),
            agent.send("session_fork", "s", child_session_id="child"),
            agent.send("snapshot_restore", "new", source_session_id="s"),
        ):
            with pytest.raises(StoreFullError):
                await attempt
        assert agent.counts() == {"a": 1, "b": 1, "d": 1}
        assert (await agent.send("session_map", "s"))["chunk_hashes"] == ["a", "b"]
        assert (await agent.send("health"))["sessions_count"] == 2
        await trio.sleep(60)
        assert set(lmcache.evicted()) == {"c"}, "its withdrawn evict is owed again"
        monkeypatch.undo()
        assert (await agent.turn_end("s", "b"))["evicted_count"] == 1


async def test_a_fork_and_its_child_are_stored_together_or_not_at_all(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[int] = []
    real = Store.commit

    def count(self: Store, writes: Any) -> int:
        commits.append(len(writes))
        return real(self, writes)

    async with open_agent(tmp_path) as agent:
        await agent.turn_end("s", "a", "b")
        await agent.turn_end("child", "z")
        monkeypatch.setattr(Store, "commit", count)
        fork = await agent.send("session_fork", "s", child_session_id="child")
        assert commits[0] == 1
        assert agent.counts() == {"a": 3, "b": 3}
    async with open_agent(tmp_path) as agent:
        assert agent.counts() == {"a": 3, "b": 3}
        await agent.send("session_close", "s")
        ended = await agent.send("session_fork_end", "s", fork_id=fork["fork_id"])
        assert ended["matched"]
        assert (await agent.send("session_close", "child"))["evicted_count"] == 2


async def test_sessions_that_close_together_leave_what_they_owe_for_the_next_start(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path, FakeLMCache(fault=outage)) as agent:
        for session_id in "abcd":
            await agent.turn_end(session_id, "shared")
        async with trio.open_nursery() as nursery:
            for session_id in "abcd":
                nursery.start_soon(agent.send, "session_close", session_id)
        await trio.sleep(5)
    async with open_agent(tmp_path, lmcache := FakeLMCache()):
        await trio.sleep(60)
    assert lmcache.evicted() == ["shared"]


@pytest.mark.parametrize("message", [10**30, 1e308, [[[[]]]], "\u0000"])
async def test_a_debug_file_takes_whatever_json_can_say(
    tmp_path: Path, autojump_clock: MockClock, message: Any
) -> None:
    async with open_agent(tmp_path, debug_enabled=True) as agent:
        answer = await agent.turn_end("s/../s", "a", debug_context={"messages": [message]})
        assert answer["debug_written"]
        (written,) = (tmp_path / "debug").iterdir()
        assert written.name == "kvcache_debug_s____s_1.json"
        assert written.stat().st_mode & 0o777 == 0o600
        assert msgspec.json.decode(written.read_bytes())["messages"] == [message]


async def test_the_debug_files_of_long_ids_are_written_and_kept_apart(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A file name has 255 bytes, and an id may have 256 characters."""
    ids = ["a" * 256, "a" * 255 + "b", "\0" * 256, "é" * 256, "a" * 180]
    async with open_agent(tmp_path, debug_enabled=True) as agent:
        for session_id in ids:
            assert (await agent.turn_end(session_id, "a"))["debug_written"]
        written = sorted((tmp_path / "debug").iterdir())
    assert {msgspec.json.decode(path.read_bytes())["session_id"] for path in written} == {*ids}
    assert (tmp_path / "debug" / f"kvcache_debug_{'a' * 180}_1.json") in written


async def test_a_full_mailbox_pushes_back(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_agent(tmp_path, limits__mailbox_events_max=3) as agent:
        answers: list[str] = []

        async def one() -> None:
            try:
                await agent.turn_end("s", "a")
                answers.append("ok")
            except UnavailableError as error:
                answers.append(str(error))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(one)
        assert 3 <= answers.count("ok") <= 4
        assert any("3 events waiting" in answer for answer in answers)


async def test_there_is_a_limit_to_sessions(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_agent(tmp_path, limits__sessions_max=2) as agent:
        await agent.turn_end("a", "1")
        await agent.turn_end("b", "1")
        with pytest.raises(UnavailableError, match="sessions_max"):
            await agent.turn_end("c", "1")
        await agent.turn_end("a", "2")
        await agent.send("session_close", "b")
        await trio.sleep(200)
        await agent.turn_end("c", "1")


async def test_sessions_that_come_all_at_once_keep_to_the_limit(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: Counter[str] = Counter()

    async def arrive(agent: Agent, number: int) -> None:
        try:
            if number % 2:
                await agent.turn_end(f"s{number}", "a")
            else:
                await agent.send("session_fork", "parent", child_session_id=f"s{number}")
            answers["ok"] += 1
        except (StoreError, UnavailableError) as error:
            answers[type(error).__name__] += 1

    async def arrive_together(agent: Agent) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(arrive, agent, number)

    def fail(*_: object) -> None:
        raise StoreError("broken")

    async with open_agent(tmp_path, limits__sessions_max=6) as agent:
        await agent.turn_end("parent", "a")
        with monkeypatch.context() as patch:
            patch.setattr(Store, "commit", fail)
            await arrive_together(agent)
        assert answers.keys() == {"StoreError", "UnavailableError"}  # and nobody keeps a place
        answers.clear()
        await arrive_together(agent)
        assert answers == {"ok": 5, "UnavailableError": 15}
        assert agent.service.router.active_sessions == 6


async def test_an_event_that_waited_too_long_never_happens(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_agent(tmp_path, limits__event_timeout_seconds=2.0) as agent:
        await agent.turn_end("s", "a")
        real = SessionActor._session_map

        async def slow(self: SessionActor) -> Any:
            await trio.sleep(5)
            return real(self)

        async def handle(self: SessionActor, request: Any) -> Any:
            if type(request).__name__ == "SessionMap":
                return await slow(self)
            return await original(self, request)

        original = SessionActor._handle
        monkeypatch.setattr(SessionActor, "_handle", handle)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(agent.send, "session_map", "s")
            await wait_all_tasks_blocked()
            with pytest.raises(UnavailableError, match="nothing was changed"):
                await agent.turn_end("s", "b")
        monkeypatch.undo()
        assert (await agent.send("session_map", "s"))["chunk_hashes"] == ["a"]


@pytest.mark.parametrize("part", ["refcount", "backend", "journal"])
async def test_a_crash_of_a_part_that_all_depend_on_ends_the_service(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def crash(*_: object, **__: object) -> Any:
        raise ZeroDivisionError

    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with open_agent(tmp_path) as agent:
            await agent.turn_end("s", "a")
            target, method = {
                "refcount": (agent.service.refcount, "_handle"),
                "backend": (agent.service.backend, "_may_send"),
                "journal": (agent.service.journal, "_write"),
            }[part]
            monkeypatch.setattr(target, method, crash)
            await agent.turn_end("s", "b")
            await trio.sleep(60)
    monkeypatch.undo()
    async with open_agent(tmp_path) as agent:
        assert agent.counts() in ({"a": 1}, {"b": 1})


async def test_a_clock_that_is_set_moves_no_age(tmp_path: Path, autojump_clock: MockClock) -> None:
    wall = 1.7e9
    async with open_service(
        make_config(tmp_path),
        client=FakeLMCache(),
        run_sync=run_inline,
        wall_clock=lambda: wall + trio.current_time(),
    ) as service:
        agent = Agent(service)
        await agent.turn_end("s", "x")
        await agent.send("session_fork", "s")
        await agent.turn_end("s", "y")
        await agent.turn_end("t", "z")
        await agent.send("session_close", "t")
        wall += 10 * 86_400
        await trio.sleep(61)
        assert agent.counts() == {"x": 1, "y": 1}, "the fork is a minute old"
        wall -= 20 * 86_400
        await agent.turn_end("t", "z")


async def test_an_event_on_its_way_keeps_its_session_awake(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path, sessions__passivate_seconds=1.0) as agent:
        await agent.turn_end("s", "a")
        await trio.sleep(0.95)
        place = agent.service.router._places["s"]
        actor = place.actor
        assert actor is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(agent.turn_end, "s", "b")
            while actor.is_idle:
                await trio.lowlevel.checkpoint()
            place.last_event = -100.0
            await agent.service.router.sweep()
            assert place.actor is actor
        assert agent.counts() == {"b": 1}


async def test_a_full_house_still_answers_what_needs_no_room(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path, limits__sessions_max=1) as agent:
        await agent.turn_end("a", "x")
        assert (await agent.send("turn_start", "unknown"))["prefetch_count"] == 0
        assert (await agent.send("session_close", "unknown"))["closed"]


async def test_closed_sessions_take_no_room(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_agent(tmp_path, limits__sessions_max=2) as agent:
        for number in range(10):
            await agent.turn_end(f"s{number}", "a")
            await agent.send("session_close", f"s{number}")
        assert agent.service.router.statistics()["awake"] == 0


async def test_a_new_life_is_as_durable_as_its_first_turn(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Store.commit

    def refuse_bookkeeping(self: Store, writes: Any) -> int:
        if any(isinstance(write, Bookkeeping) for write in writes):
            raise StoreIOError("disk I/O error")
        return real(self, writes)

    async with open_agent(tmp_path) as agent:
        await agent.turn_end("s", "a")
        await agent.send("session_close", "s")
        await trio.sleep(1)
        monkeypatch.setattr(Store, "commit", refuse_bookkeeping)
        await agent.send("turn_start", "s")
        await agent.turn_end("s", "b")
    monkeypatch.undo()
    async with open_agent(tmp_path) as agent:
        await agent.turn_end("s", "c")
        assert agent.counts() == {"c": 1}
