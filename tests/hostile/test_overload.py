"""More than the daemon can bear: who is refused, at what cost, and that the others are served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from ramakv.errors import UnavailableError
from ramakv.service import open_service
from ramakv.web.turnstile import Turnstile
from tests.fakes import Agent, FakeLMCache, make_config
from tests.hostile.house import check_envelopes, event, living_in, turn_end
from tests.hostile.load import Polite, figures, hammering

SESSIONS = 12
TURNS = 8


async def test_refused_clients_come_back_one_a_turn_in_their_order() -> None:
    turnstile = Turnstile()
    entered: list[int] = []

    async def come_back(number: int) -> None:
        while True:
            await turnstile.enter()
            entered.append(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(turnstile.run)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(100):
            nursery.start_soon(come_back, number)
        for _ in range(500):
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert 480 < len(entered) <= 500
    assert entered[100:200] == entered[:100]
    assert sorted(entered[:100]) == list(range(100))


def test_clients_that_ignore_their_503_do_not_stop_a_sessions_work(tmp_path: Path) -> None:
    """Each 503 cost the actors a turn of the loop: 200 of them for one event that was applied."""
    with living_in(tmp_path, limits__mailbox_events_max=4) as house:
        with hammering(house.port, 2.5, "turns", 60, 1) as process:
            house.wait(lambda: house.call(house.service.router.statistics)["known"] > 1)
            polite = Polite(house.port).work(1.0)
            counts = figures(process, 2.5)
        assert polite.statuses.keys() == {200}
        assert counts.keys() == {"200", "503"}
        assert counts["200"] > counts["503"] / 50


def test_a_full_house_refuses_new_sessions_and_serves_those_inside(tmp_path: Path) -> None:
    with living_in(tmp_path, limits__sessions_max=3) as house:
        for name in ("a", "b"):
            assert house.ask(turn_end(name, "x")).status == 200
        for body in (
            turn_end("c", "x"),
            event("session_fork", "a", child_session_id="c"),
            event("snapshot_restore", "c", source_session_id="a"),
        ):
            before = house.state()
            answer = house.ask(body)
            (envelope,) = check_envelopes(answer)
            assert answer.status == 503
            assert "limits.sessions_max" in envelope["error"]
            assert house.state() == before
        assert house.ask(turn_end("a", "y")).status == 200
        assert house.ask(event("session_close", "b")).status == 200
        assert house.ask(turn_end("c", "x")).status == 200


@pytest.mark.parametrize("write_seconds", [0.05, 0.7, 1.9])
async def test_behind_a_slow_store_an_event_is_applied_or_refused_and_never_both(
    tmp_path: Path, autojump_clock: MockClock, write_seconds: float
) -> None:
    async def run_slowly(function: Callable[..., Any], *args: Any, limiter: object = None) -> Any:
        await trio.sleep(write_seconds)
        return function(*args)

    config = make_config(
        tmp_path,
        limits__event_timeout_seconds=3.0,
        limits__mailbox_events_max=6,
        store__group_commits_max=4,
    )
    answers: dict[str, dict[int, str]] = {f"s{number}": {} for number in range(SESSIONS)}
    async with open_service(config, client=FakeLMCache(), run_sync=run_slowly) as service:
        agent = Agent(service)

        async def send(session_id: str, turn: int) -> None:
            try:
                await agent.turn_end(session_id, f"{session_id}-{turn}", seq=turn)
                answers[session_id][turn] = "ok"
            except UnavailableError as error:
                answers[session_id][turn] = str(error)

        async with trio.open_nursery() as nursery:
            for turn in range(TURNS):
                for session_id in answers:
                    nursery.start_soon(send, session_id, turn)
                await trio.testing.wait_all_tasks_blocked()
        kinds = Counter(answer == "ok" for turns in answers.values() for answer in turns.values())
        assert sum(kinds.values()) == SESSIONS * TURNS
        assert kinds[True] >= SESSIONS
        assert kinds[False] > 0  # at the least what the mailboxes do not hold
        await trio.sleep(60)
        assert service.statistics()["store"]["commits"] == kinds[True]
        for session_id, turns in answers.items():
            applied = [turn for turn, answer in turns.items() if answer == "ok"]
            told = await agent.send("session_map", session_id)
            assert told["chunk_hashes"] == [f"{session_id}-{max(applied)}"]
        assert sorted(agent.counts().values()) == [1] * SESSIONS
