"""A fork into a child touches two sessions; whatever happens to either, counts and rows agree."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from ramakv.actors.steps import Steps
from ramakv.errors import InternalError, StoreIOError, TooLargeError
from ramakv.service import open_service
from tests.fakes import Agent, FakeLMCache, make_config, open_agent


def counts_of_rows(folder: Path) -> dict[str, int]:
    """What the counts must be, recomputed from active sessions and open forks."""
    counts: Counter[str] = Counter()
    with closing(sqlite3.connect(folder / "sessions.db")) as database:
        for table in ("sessions WHERE NOT suspended", "forks"):
            for (text,) in database.execute(f"SELECT map_json FROM {table}").fetchall():
                counts.update(set(msgspec.json.decode(text)))
    return dict(counts)


@asynccontextmanager
async def open_agent_with_slow_commits(
    folder: Path, seconds: Callable[[], float], **overrides: Any
) -> AsyncIterator[Agent]:
    async def run_sync(function: Any, *args: Any, limiter: object = None) -> Any:
        await trio.sleep(seconds() if function.__name__ == "commit" else 0)
        return function(*args)

    async with open_service(
        make_config(folder, **overrides),
        client=FakeLMCache(),
        run_sync=run_sync,
        wall_clock=lambda: 1.7e9 + trio.current_time(),
    ) as service:
        yield Agent(service)


async def test_a_fork_that_ends_before_its_parent_hears_of_it_leaves_no_ghost(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    slow = 0.0
    async with open_agent_with_slow_commits(
        tmp_path, lambda: slow, sessions__passivate_seconds=0.5
    ) as agent:
        await agent.turn_end("parent", "a")
        slow = 2.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                lambda: agent.send("session_fork", "parent", child_session_id="child")
            )
            await trio.sleep(1.5)
            await agent.send("session_fork_end", "parent")
        slow = 0.0
        assert agent.counts() == counts_of_rows(tmp_path) == {"a": 3}
        assert (await agent.send("session_fork_end", "parent"))["matched"]
        assert not (await agent.send("session_fork_end", "parent"))["matched"]
        assert agent.counts() == counts_of_rows(tmp_path) == {"a": 2}


@pytest.mark.parametrize("busy", [False, True], ids=["child at work", "parent at work"])
async def test_a_fork_goes_on_when_whoever_asked_goes_away(
    tmp_path: Path, autojump_clock: MockClock, busy: bool
) -> None:
    slow = 0.0
    async with open_agent_with_slow_commits(tmp_path, lambda: slow) as agent:
        await agent.turn_end("parent", "a")
        slow = 2.0
        async with trio.open_nursery() as nursery:
            if busy:
                nursery.start_soon(agent.turn_end, "parent", "a")
                await wait_all_tasks_blocked()
            with trio.move_on_after(1):
                await agent.send("session_fork", "parent", child_session_id="child")
        slow = 0.0
        await trio.sleep(5)
        assert not agent.service.refcount._counts._provisional
        assert agent.counts() == counts_of_rows(tmp_path) == {"a": 3}
        assert (await agent.send("session_fork_end", "parent"))["matched"]
        assert agent.counts() == counts_of_rows(tmp_path) == {"a": 2}


@pytest.mark.parametrize("moment", ["before the commit", "after the commit"])
async def test_a_child_that_crashes_leaves_counts_and_rows_alike(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    real_finish, real_carry_out = Steps.finish, Steps.carry_out
    crashes = 1

    async def crash_once() -> None:
        nonlocal crashes
        crashes -= 1
        if crashes >= 0:
            raise ZeroDivisionError

    async def finish(self: Steps, pending: Any) -> int:
        await crash_once()
        return await real_finish(self, pending)

    async def carry_out(self: Steps, *args: Any) -> int:
        await crash_once()
        return await real_carry_out(self, *args)

    async with open_agent(tmp_path) as agent:
        await agent.turn_end("parent", "a")
        if moment == "after the commit":
            monkeypatch.setattr(Steps, "finish", finish)
        else:
            monkeypatch.setattr(Steps, "carry_out", carry_out)
        with pytest.raises(InternalError):
            await agent.send("session_fork", "parent", child_session_id="child")
        await wait_all_tasks_blocked()
        monkeypatch.undo()
        expected = {"a": 3} if moment == "after the commit" else {"a": 1}
        assert agent.counts() == counts_of_rows(tmp_path) == expected
        ended = await agent.send("session_fork_end", "parent")
        assert ended["matched"] == (moment == "after the commit")


async def test_two_sessions_may_fork_into_each_other(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path) as agent:
        await agent.turn_end("a", "1")
        await agent.turn_end("b", "2")
        async with trio.open_nursery() as nursery:
            for parent, child in ("ab", "ba"):
                nursery.start_soon(
                    lambda p, c: agent.send("session_fork", p, child_session_id=c), parent, child
                )
        assert agent.counts() == counts_of_rows(tmp_path)
        for session_id in "ab":
            assert (await agent.send("session_fork_end", session_id))["matched"]
            await agent.send("session_close", session_id)
        assert agent.counts() == counts_of_rows(tmp_path) == {}


async def test_open_forks_of_a_session_are_limited(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_agent(tmp_path, limits__forks_per_session_max=2) as agent:
        await agent.turn_end("s", "a")
        for _ in range(2):
            await agent.send("session_fork", "s")
        with pytest.raises(TooLargeError, match="2 open forks"):
            await agent.send("session_fork", "s")
        await agent.send("session_fork_end", "s")
        await agent.send("session_fork", "s", child_session_id="child")


async def test_a_fork_that_became_durable_while_the_daemon_stopped_is_answered_so(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    slow, answers = 0.0, list[Any]()

    async def fork(agent: Agent) -> None:
        answers.append(await agent.send("session_fork", "parent", child_session_id="child"))

    async with (
        trio.open_nursery() as outliving,
        open_agent_with_slow_commits(tmp_path, lambda: slow) as agent,
    ):
        await agent.turn_end("parent", "a")
        slow = 2.0
        outliving.start_soon(fork, agent)
        await wait_all_tasks_blocked()
    assert answers == [{"forked": True, "fork_id": 1}]
    assert counts_of_rows(tmp_path) == {"a": 3}


async def test_a_fork_is_taken_up_without_reading_the_store(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async def run_sync(function: Any, *args: Any, limiter: object = None) -> Any:
        await trio.lowlevel.checkpoint()
        if function.__name__ == "load_each":
            return [StoreIOError("the disk cannot be read")] * len(args[0])
        return function(*args)

    async with open_service(
        make_config(tmp_path), client=FakeLMCache(), run_sync=run_sync
    ) as service:
        agent = Agent(service)
        await agent.turn_end("parent", "a")
        assert (await agent.send("session_fork", "parent", child_session_id="child"))["forked"]
        assert (await agent.send("session_fork_end", "parent"))["matched"]
        assert agent.counts() == counts_of_rows(tmp_path) == {"a": 2}
