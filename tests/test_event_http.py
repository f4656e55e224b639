"""The event listener over real HTTP: what the contract's own tests do not look at."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest
import trio

from ramakv import codec
from ramakv.config import Limits
from ramakv.service import Service
from ramakv.web.batches import stages
from tests.daemons import serving


def turn_end(session_id: str, *hashes: str) -> dict[str, object]:
    params = {"chunk_hashes": list(hashes)}
    return {"type": "turn_end", "session_id": session_id, "kv_transfer_params": params}


async def test_a_fault_of_ours_is_500_and_an_envelope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError

    async with serving(tmp_path) as (http, _):
        monkeypatch.setattr(Service, "handle", fail)
        reply = await http.post("/event", json={"type": "health"})
        assert reply.status_code == 500
        assert reply.json()["type"] == "health"
        monkeypatch.undo()
        assert (await http.post("/event", json={"type": "health"})).status_code == 200


async def test_a_client_that_hangs_up_does_not_undo_its_event(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, service):
        host, port = http.base_url.host, http.base_url.port
        body = msgspec.json.encode(turn_end("s", "a"))
        for _ in range(30):
            stream = await trio.open_tcp_stream(host, port or 80)
            await stream.send_all(
                b"POST /event HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            await stream.aclose()
        with trio.fail_after(10):
            while service.journal.statistics()["commits"] < 30:
                await http.post("/event", json={"type": "health"})
        reply = await http.post("/event", json={"type": "session_map", "session_id": "s"})
        assert reply.json()["data"]["chunk_hashes"] == ["a"]


async def test_many_connections_share_commits(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, service):

        async def turns(number: int) -> None:
            for turn in range(5):
                reply = await http.post("/event", json=turn_end(f"s{number}", f"c{turn}"))
                assert reply.status_code == 200, reply.text

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(turns, number)
        store = service.journal.statistics()
        assert store["commits"] == 200
        assert store["transactions"] < 150


async def test_a_token_is_asked_for_and_not_told(tmp_path: Path) -> None:
    async with serving(tmp_path, auth_token="sesame") as (http, _):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
            reply = await http.post("/event", json={"type": "health"}, headers=headers)
            assert reply.status_code == 401
            assert "sesame" not in reply.text
        headers = {"Authorization": "Bearer sesame"}
        reply = await http.post("/event", json={"type": "health"}, headers=headers)
        assert reply.status_code == 200


async def test_a_full_store_is_503_and_heals_without_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, service):
        await http.post("/event", json=turn_end("s", "a"))
        database = service.journal._store._db
        pages = database.execute("PRAGMA page_count").fetchone()[0]
        database.execute(f"PRAGMA max_page_count = {pages}")
        big = [f"{number:0200}" for number in range(1000)]
        reply = await http.post("/event", json=turn_end("s", *big))
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "1"
        assert "no space left" in reply.json()["error"]
        assert "nothing was changed" in reply.json()["error"]
        reply = await http.post("/event", json={"type": "session_map", "session_id": "s"})
        assert reply.json()["data"]["chunk_hashes"] == ["a"]
        assert service.refcount.counts() == {"a": 1}
        database.execute("PRAGMA max_page_count = 100000")
        assert (await http.post("/event", json=turn_end("s", *big))).status_code == 200


async def test_a_real_lmcache_that_is_not_there_degrades_and_delays_nothing(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with serving(tmp_path, fake=False, lmcache_url=url) as (http, _):
            await http.post("/event", json=turn_end("s", "a"))
            began = trio.current_time()
            start = {"type": "turn_start", "session_id": "s"}
            reply = await http.post("/event", json=start)
            assert trio.current_time() - began < 2.0  # the bound is 0.1 s; the machine may be busy
            assert reply.json()["data"]["backend_degraded"]


def decode(*bodies: dict[str, object]) -> list[tuple[int, object]]:
    events = [codec.decode_event(msgspec.json.encode(body), Limits()) for body in bodies]
    return list(enumerate(events))


def places(*bodies: dict[str, object]) -> list[list[list[int]]]:
    return [[[place for place, _ in group] for group in stage] for stage in stages(decode(*bodies))]


def test_a_batch_runs_sessions_side_by_side_and_each_in_its_order() -> None:
    assert places(turn_end("a"), turn_end("b"), turn_end("a"), turn_end("c")) == [
        [[0, 2], [1], [3]]
    ]


def test_a_batch_keeps_sessions_together_that_restore_or_fork_from_each_other() -> None:
    restore = {"type": "snapshot_restore", "session_id": "b", "source_session_id": "a"}
    fork = {"type": "session_fork", "session_id": "d", "child_session_id": "b"}
    assert places(turn_end("a"), turn_end("c"), restore, turn_end("d"), fork) == [
        [[0, 2, 3, 4], [1]]
    ]


def test_health_in_a_batch_sees_what_came_before_it() -> None:
    health = {"type": "health"}
    assert places(health, turn_end("a"), turn_end("b"), health, turn_end("c")) == [
        [[0]],
        [[1], [2]],
        [[3]],
        [[4]],
    ]


async def test_events_go_on_while_the_connection_count_is_high(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, _):
        host, port = http.base_url.host, http.base_url.port
        idle = [await trio.open_tcp_stream(host, port or 80) for _ in range(200)]
        assert (await http.post("/event", json={"type": "health"})).status_code == 200
        for stream in idle:
            await stream.aclose()


async def test_the_body_limit_is_the_configured_one(tmp_path: Path) -> None:
    async with serving(tmp_path, limits__body_bytes_max=1000) as (http, _):
        reply = await http.post("/event", content=b"x" * 1001)
        assert reply.status_code == 413
        assert "limits.body_bytes_max (1000)" in reply.json()["error"]
