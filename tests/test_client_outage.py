"""The client and a daemon that is away for a minute, is killed, comes later, or is the Rust one."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import trio
from trio.testing import MockClock

from ramakv.client import Client, EventSkippedError, SyncClient
from ramakv.web.event_app import create_event_app
from tests.daemons import Daemon, free_port, running_daemon
from tests.event_server import Answer, event_server
from tests.fakes import Agent, make_config, open_agent

Run = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Run:
    return partial(anyio.run, backend=request.param)


# On the mock clock, with the daemon's real actors, web layer and database in the same process


class Road(httpx.AsyncBaseTransport):
    """The way to the daemon, which can be closed."""

    def __init__(self, app: Any) -> None:
        self.is_open = True
        self.tries: list[float] = []
        self._way = httpx.ASGITransport(app=app)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.tries.append(trio.current_time())
        await trio.lowlevel.checkpoint()
        if not self.is_open:
            raise httpx.ConnectError("connection refused")
        return await self._way.handle_async_request(request)


@asynccontextmanager
async def daemon_on_a_road(folder: Path) -> AsyncIterator[tuple[Agent, Road]]:
    async with open_agent(folder) as agent:
        yield agent, Road(create_event_app(agent.service, make_config(folder)))


async def test_a_minute_without_the_daemon_loses_nothing_and_costs_it_little(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with daemon_on_a_road(tmp_path) as (agent, road):
        async with Client("http://daemon", transport=road) as client:
            road.is_open = False
            for second in range(60):
                for name in "abcde":
                    client.session(name).turn_end([f"{name}-{second}"])
                await trio.sleep(1)
            assert client.waiting == 300
            assert 10 < len(road.tries) < 40, "one try at a time, every few seconds"
            road.is_open = True
            reopened_at = trio.current_time()
            while client.waiting:  # noqa: ASYNC110 - it has no event for that
                await trio.sleep(0.1)
            assert trio.current_time() - reopened_at < 6
            counters = client.counters
            assert (counters.delivered, counters.dropped, counters.unanswered) == (300, 0, 0)
        for name in "abcde":
            found = await agent.send("session_map", name)
            assert found["chunk_hashes"] == [f"{name}-59"]


async def test_a_daemon_that_has_no_time_is_asked_less_and_less_and_in_the_end_told(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Also where its 503 says that no wait is needed."""
    tries: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        tries.append(trio.current_time())
        if len(tries) < 15:
            return httpx.Response(503, headers={"retry-after": "0"}, json={"ok": False})
        return httpx.Response(200, json={"ok": True})

    transport = httpx.MockTransport(answer)
    async with Client("http://daemon", transport=transport, answer_seconds=300) as client:
        assert (await client.session("s").suspend()).ok
    gaps = [later - sooner for sooner, later in itertools.pairwise(tries)]
    assert gaps[0] < 0.5
    assert all(5.0 <= gap <= 7.5 for gap in gaps[-5:])


async def test_a_turn_start_that_missed_its_moment_is_not_sent(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with daemon_on_a_road(tmp_path) as (agent, road):
        async with Client("http://daemon", transport=road) as client:
            session = client.session("s")
            await session.turn().end(["a"])
            road.is_open = False
            turn = session.turn()
            turn.end(["a", "b"])
            await trio.sleep(30)
            road.is_open = True
            reply = await turn.started
            assert isinstance(reply.cause, EventSkippedError)
            assert turn.ended is not None
            assert (await turn.ended).ok
            assert client.counters.skipped == 1
        assert (await agent.send("session_map", "s"))["chunk_hashes"] == ["a", "b"]


async def test_a_turn_start_that_brings_a_closed_session_back_is_never_too_late(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with daemon_on_a_road(tmp_path) as (agent, road):
        async with Client("http://daemon", transport=road) as client:
            session = client.session("s")
            await session.turn().end(["a"])
            await session.close()
            road.is_open = False
            turn = session.turn()
            turn.end(["b"])
            await trio.sleep(30)  # the daemon still knows that the session was closed
            road.is_open = True
            assert (await turn.started).ok
            assert turn.ended is not None
            assert (await turn.ended).ok
        assert (await agent.send("session_map", "s"))["chunk_hashes"] == ["b"]


async def test_a_full_queue_in_an_outage_keeps_the_newest_and_still_tries(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The event that tries is the oldest, so it is the first to be dropped, again and again."""
    async with daemon_on_a_road(tmp_path) as (agent, road):
        async with Client("http://daemon", transport=road, queue_events_max=10) as client:
            road.is_open = False
            for number in range(300):
                client.session("s").turn_end([str(number)])
                await trio.sleep(0.1)
            assert client.waiting == 10
            assert client.counters.dropped == 290
            assert len(road.tries) > 5
            road.is_open = True
        assert (client.counters.delivered, client.counters.dropped) == (10, 290)
        assert (await agent.send("session_map", "s"))["chunk_hashes"] == ["299"]


# Real processes


def test_a_daemon_that_is_killed_and_started_again_gets_every_event_in_order(
    run: Run, tmp_path: Path
) -> None:
    async def main() -> None:
        async with Client(daemon.url, close_seconds=30) as client:
            sessions = [client.session(f"s{n}", on_exit="keep") for n in range(4)]
            for number in range(120):
                for session in sessions:
                    session.turn_end([f"{session.session_id}-{n}" for n in range(number)])
                if number == 40:
                    daemon.kill()
                if number == 80:
                    await anyio.to_thread.run_sync(daemon.start)
                await anyio.sleep(0.005)
        counters = client.counters
        assert (counters.delivered, counters.dropped, counters.unanswered) == (480, 0, 0)
        assert counters.retried > 0

    with running_daemon(tmp_path) as daemon:
        run(main)
        for n in range(4):
            found = daemon.send("session_map", f"s{n}")["data"]["chunk_hashes"]
            assert found == [f"s{n}-{number}" for number in range(119)]


def test_events_before_the_daemons_first_start_wait_for_it(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    try:
        with SyncClient(daemon.url, close_seconds=30) as client:
            client.session("s").turn_end(["a"])
            daemon.start()
        assert client.counters.delivered == 1
        assert daemon.send("session_map", "s")["data"]["chunk_hashes"] == ["a"]
    finally:
        daemon.kill()


def test_a_daemon_with_a_token_on_a_unix_socket(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with Client(f"unix:{path}", token="secret") as client:
            assert (await client.health()).data["status"] == "running"
        async with Client(f"unix:{path}", token="wrong") as client:
            assert "bearer token" in (await client.health()).error

    path = tmp_path / "events.sock"
    daemon = Daemon(tmp_path, RAMAKV_LISTEN_ADDR=f"unix:{path}", RAMAKV_AUTH_TOKEN="secret")
    try:
        daemon.start(wait=False)
        ends = time.monotonic() + 30
        while not path.exists():
            assert time.monotonic() < ends, daemon.log.read_text()
            time.sleep(0.01)
        run(main)
    finally:
        daemon.kill()


# The Rust daemon


def as_rust(event: dict[str, Any]) -> Answer:
    """Answer like the Rust daemon: always 200, the type under another name, fewer fields."""
    sessions = {"known"}
    type_, error, data = event["type"], "", {}
    match type_:
        case "turn_end":
            data = {"evicted_count": 0, "map_updated": True, "debug_written": False}
        case "session_fork":
            data = {"forked": True}
        case "session_map" if event["session_id"] not in sessions:
            error = f"session '{event['session_id']}' not found"
    if error:
        return Answer(200, {"ok": False, "type_": type_, "error": error})
    return Answer(200, {"ok": True, "type_": type_, "data": data})


def test_it_works_with_the_rust_daemon_as_far_as_that_goes(run: Run) -> None:
    async def main() -> None:
        async with Client(served.url, close_seconds=30) as client, client.session("s") as session:
            async with session.turn() as turn:
                assert (await turn.end(["a"])).data["map_updated"] is True
            with session.fork():
                pass
            reply = await session.map()
            assert not reply.ok
            assert reply.error == "session 's' not found"
        assert client.counters.refused == 1

    with event_server(as_rust) as served:
        run(main)
    assert served.types() == [
        "turn_start",
        "turn_end",
        "session_fork",
        "session_fork_end",
        "session_map",
        "session_close",
    ]
    assert all(isinstance(event, dict) for event in served.events), "it knows no arrays"
    assert "fork_id" not in served.events[3], "its forks have no number"


def test_an_unnamed_fork_end_is_not_repeated(run: Run) -> None:
    """On the Rust daemon a second one would end another fork."""

    def answer(event: dict[str, Any]) -> Answer:
        return Answer(status=0) if event["type"] == "session_fork_end" else as_rust(event)

    async def main() -> None:
        async with Client(served.url, close_seconds=30) as client:
            assert not (await client.session("s").fork().end()).ok

    with event_server(answer) as served:
        run(main)
    assert served.types() == ["session_fork", "session_fork_end"]


def test_nobody_listens_at_the_port_of_a_client_that_closes_quickly() -> None:
    began = time.monotonic()
    with SyncClient(f"http://127.0.0.1:{free_port()}", close_seconds=0.3) as client:
        client.session("s").close()
    assert time.monotonic() - began < 10
    assert client.counters.dropped + client.counters.unanswered == 1  # it may be trying just then
