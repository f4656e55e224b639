"""What an event costs behind the edge, counted and not timed: a change that adds to it is seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from ramakv.actors.mailbox import Mailbox
from tests.fakes import Agent, FakeLMCache, open_agent

EVENTS = 64


class _Steps(trio.abc.Instrument):
    """Counts how often any task was given its turn."""

    taken = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.taken += 1


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count turns of tasks, and messages between actors, while the block runs."""
    counted: Counter[str] = Counter()
    real_put, real_put_nowait = Mailbox.put, Mailbox.put_nowait

    async def put(self: Mailbox[Any], message: Any) -> None:
        counted[type(message).__name__] += 1
        await real_put(self, message)

    def put_nowait(self: Mailbox[Any], message: Any) -> None:
        counted[type(message).__name__] += 1
        real_put_nowait(self, message)

    steps = _Steps()
    with monkeypatch.context() as patch:
        patch.setattr(Mailbox, "put", put)
        patch.setattr(Mailbox, "put_nowait", put_nowait)
        trio.lowlevel.add_instrument(steps)
        try:
            yield counted
        finally:
            trio.lowlevel.remove_instrument(steps)
    counted["steps"] = steps.taken


async def _all_at_once(agent: Agent, type_: str, *hashes: str) -> None:
    async with trio.open_nursery() as nursery:
        for number in range(EVENTS):
            session_id = f"s{number}"
            if type_ == "turn_end":
                nursery.start_soon(agent.turn_end, session_id, *hashes, str(number))
            else:
                nursery.start_soon(agent.send, type_, session_id)


async def test_a_turn_end_takes_three_messages_and_shares_its_transaction(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache) as agent:
        await _all_at_once(agent, "turn_end", "shared", "old")
        await wait_all_tasks_blocked()
        before = agent.service.journal.statistics()
        with counting(monkeypatch) as counted:
            await _all_at_once(agent, "turn_end", "shared", "new")
        after = agent.service.journal.statistics()
        each = {name: counted[name] / EVENTS for name in ("Ask", "Acquire", "Commit", "Settle")}
        assert each == {"Ask": 1, "Acquire": 1, "Commit": 1, "Settle": 1}
        assert after["transactions"] - before["transactions"] <= 2
        assert counted["steps"] / EVENTS <= 6.5
        assert lmcache.calls == []


async def test_a_turn_start_asks_its_session_and_makes_one_call(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache, backend__burst_calls_max=EVENTS) as agent:
        await _all_at_once(agent, "turn_end", "shared")
        before = agent.service.journal.statistics()
        with counting(monkeypatch) as counted:
            await _all_at_once(agent, "turn_start")
        assert (counted["Ask"], counted["Commit"], counted["Acquire"]) == (EVENTS, 0, 0)
        assert agent.service.journal.statistics() == before
        assert len(lmcache.calls) == EVENTS
        assert counted["steps"] / EVENTS <= 5.5


async def test_looking_at_a_session_is_one_message(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_agent(tmp_path) as agent:
        await _all_at_once(agent, "turn_end", "shared")
        with counting(monkeypatch) as counted:
            await _all_at_once(agent, "session_map")
        steps = counted.pop("steps")
        assert counted == {"Ask": EVENTS}
        assert steps / EVENTS <= 3.5


async def test_many_releases_go_in_few_calls(tmp_path: Path, autojump_clock: MockClock) -> None:
    lmcache = FakeLMCache()
    async with open_agent(tmp_path, lmcache) as agent:
        await _all_at_once(agent, "turn_end", *(f"c{number}" for number in range(20)))
        await _all_at_once(agent, "session_close")
        await trio.sleep(5)
        assert len(lmcache.evicted()) == EVENTS + 20
        assert len(lmcache.calls) <= 2
