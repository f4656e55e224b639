"""HTTP around the contract's events: batches, tokens, limits, overload and lost clients."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.test_contract_events import Caller, calling, event, eventually, hanging, turn_end

HEAD = b"POST /event HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"


@asynccontextmanager
async def wire(caller: Caller) -> AsyncIterator[trio.SocketStream]:
    """A bare connection to the daemon."""
    url = caller.http.base_url
    async with await trio.open_tcp_stream(url.host, url.port or 0) as stream:
        yield stream


async def read_reply(stream: trio.SocketStream) -> tuple[int, dict[str, str], Any]:
    """Status, headers and decoded body of the one reply on a connection."""
    received = b""
    with trio.fail_after(8):
        while b"\r\n\r\n" not in received:
            received += await read_some(stream)
        head, _, body = received.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        pairs = [line.split(": ", 1) for line in lines]
        headers = {name.lower(): value for name, value in pairs}
        while len(body) < int(headers["content-length"]):
            body += await read_some(stream)
    return int(status.split()[1]), headers, json.loads(body)


async def read_some(stream: trio.SocketStream) -> bytes:
    data = await stream.receive_some()
    assert data, "the connection was closed without a reply"
    return bytes(data)


def check_refusal(status: int, headers: dict[str, str], reply: Any, expected: int) -> None:
    assert status == expected
    assert headers["content-type"] == "application/json"
    assert reply["ok"] is False
    assert reply["error"]
    assert reply.keys() <= {"ok", "type", "error"}


# Batches


async def test_a_batch_is_answered_in_its_order_and_one_bad_event_fails_alone(
    tmp_path: Path,
) -> None:
    events: list[Any] = [
        turn_end("s1", "a", "b"),
        event("session_map", "s1"),
        event("nonsense"),
        7,
        event("session_map", "unknown"),
        event("health"),
        turn_end("s1", ""),
        event("session_map", "s1"),
        event("list_events"),
        {},
        [],
        event("session_close", "s1"),
        turn_end("s1", "late"),
    ]
    async with calling(tmp_path) as caller:
        response = await caller.post(events)
        replies = response.json()
        assert response.status_code == 200
        assert [reply["ok"] for reply in replies] == [
            *(True, True, False, False, False, True, False),
            *(True, True, False, False, True, False),
        ]
        assert [reply.get("type") for reply in replies] == [
            body.get("type") if isinstance(body, dict) else None for body in events
        ]
        assert all(("data" in reply) != ("error" in reply) for reply in replies)
        assert replies[1]["data"] == {"session_id": "s1", "chunk_hashes": ["a", "b"]}
        assert replies[2]["error"] == "unknown event type"
        assert replies[4]["error"] == "session 'unknown' not found"
        assert replies[7]["data"]["chunk_hashes"] == ["a", "b"]
        assert len(replies[8]["data"]["events"]) == 9
        assert replies[9] == {"ok": False, "error": "missing or empty 'type' field"}
        assert replies[11]["data"]["evicted_count"] == 2


async def test_events_of_one_session_in_a_batch_run_in_their_order(tmp_path: Path) -> None:
    names = ["s1", "s2", "s3"]
    async with calling(tmp_path) as caller:
        turns = [turn_end(name, f"{name}-{n}", seq=n) for n in range(20) for name in names]
        response = await caller.post([*turns, *(event("session_map", name) for name in names)])
        replies = response.json()
        assert all(reply["ok"] for reply in replies)
        counts = [reply["data"]["evicted_count"] for reply in replies[:-3]]
        assert counts == [0, 0, 0] + [1] * 57
        maps = [reply["data"]["chunk_hashes"] for reply in replies[-3:]]
        assert maps == [[f"{name}-19"] for name in names]


async def test_sessions_of_a_batch_run_side_by_side(tmp_path: Path) -> None:
    """Eight turns that each wait half a second for a hanging backend take no four seconds."""
    async with hanging(tmp_path, backend__prefetch_ack_seconds=0.5) as caller:
        names = [f"s{n}" for n in range(8)]
        await caller.post([turn_end(name, name) for name in names])
        with trio.fail_after(2.5):
            response = await caller.post([event("turn_start", name) for name in names])
        assert [reply["data"]["prefetch_sent"] for reply in response.json()] == [True] * 8


async def test_an_empty_batch_is_answered_with_an_empty_array(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        response = await caller.post([])
        assert (response.status_code, response.json()) == (200, [])


# Tokens


async def test_a_bearer_token_is_asked_for_where_one_is_configured(tmp_path: Path) -> None:
    async with calling(tmp_path, auth_token="s3cret") as caller:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer s3cret2"},
            {"Authorization": "Bearer"},
            {"Authorization": "s3cret"},
            {"Authorization": "Basic s3cret"},
        ):
            body = turn_end("s", "a")
            response = await caller.http.post("/event", json=body, headers=headers)
            check_refusal(response.status_code, dict(response.headers), response.json(), 401)
        caller.http.headers["Authorization"] = "Bearer s3cret"
        assert await caller.sessions_count() == 0
        await caller.turn_end("s", "a")


# Limits


async def test_lists_and_strings_may_be_as_large_as_their_limits_and_no_larger(
    tmp_path: Path,
) -> None:
    limits: dict[str, Any] = {
        "limits__chunks_per_session_max": 3,
        "limits__hash_chars_max": 4,
        "limits__session_id_chars_max": 5,
    }
    async with calling(tmp_path, **limits) as caller:
        await caller.turn_end("ßßßßß", "漢漢漢漢", "b", "c")
        for body in (
            turn_end("ßßßßß", "1", "2", "3", "4"),
            turn_end("ßßßßß", "12345"),
            turn_end("123456", "a"),
            event("session_map", "123456"),
            event("snapshot_restore", "s", source_session_id="123456"),
            event("session_fork", "ßßßßß", child_session_id="123456"),
        ):
            response = await caller.post(body)
            reply = response.json()
            check_refusal(response.status_code, dict(response.headers), reply, 413)
            assert reply["type"] == body["type"]
        response = await caller.post([turn_end("ßßßßß", "12345"), turn_end("other", "b")])
        assert [reply["ok"] for reply in response.json()] == [False, True]
        assert await caller.map_of("ßßßßß") == ["漢漢漢漢", "b", "c"]


async def test_a_batch_longer_than_its_limit_is_refused(tmp_path: Path) -> None:
    async with calling(tmp_path, limits__batch_events_max=3) as caller:
        assert (await caller.post([event("health")] * 3)).status_code == 200
        batch = [turn_end(f"s{n}", "a") for n in range(4)]
        assert (await caller.post(batch)).status_code == 413
        assert await caller.sessions_count() == 0


async def test_a_body_may_be_as_large_as_its_limit_and_no_larger(tmp_path: Path) -> None:
    def body(size: int) -> bytes:
        return b'{"type":"health","x":"%b"}' % (b"x" * (size - 24))

    async def chunks(size: int) -> AsyncIterator[bytes]:
        for start in range(0, size, 700):
            yield body(size)[start : start + 700]

    async with calling(tmp_path, limits__body_bytes_max=4096) as caller:
        for size, expected in ((4096, 200), (4097, 413), (65_536, 413)):
            for content in (body(size), chunks(size)):
                response = await caller.http.post("/event", content=content)
                assert response.status_code == expected
                assert response.headers["content-type"] == "application/json"
                assert response.json()["ok"] is (expected == 200)
        assert await caller.sessions_count() == 0


async def test_a_body_that_is_declared_too_large_is_refused_before_it_is_sent(
    tmp_path: Path,
) -> None:
    async with calling(tmp_path) as caller, wire(caller) as stream:
        await stream.send_all(HEAD + b"Content-Length: 99999999999\r\n\r\n")
        check_refusal(*await read_reply(stream), expected=413)


async def test_a_body_that_turns_out_too_large_is_refused_before_it_ends(tmp_path: Path) -> None:
    async with calling(tmp_path, limits__body_bytes_max=4096) as caller, wire(caller) as stream:
        await stream.send_all(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        await stream.send_all(b"3E8\r\n%b\r\n" % (b"[" * 1000) * 5)
        check_refusal(*await read_reply(stream), expected=413)


# Overload, and a store that can't commit


async def test_a_turn_that_the_store_cannot_commit_changes_nothing(tmp_path: Path) -> None:
    async with calling(tmp_path, store__busy_timeout_seconds=0.05) as caller:
        await caller.turn_end("s", "a", seq=1)
        with closing(lock(tmp_path)):
            for body in (
                turn_end("s", "b", seq=2),
                turn_end("new", "c"),
                event("session_close", "s"),
                event("session_suspend", "s"),
                event("session_fork", "s", child_session_id="child"),
                event("snapshot_restore", "new", source_session_id="s"),
            ):
                response = await caller.post(body)
                reply = response.json()
                check_refusal(response.status_code, dict(response.headers), reply, 503)
                assert reply["type"] == body["type"]
            assert await caller.map_of("s") == ["a"]
            assert await caller.sessions_count() == 1
        assert await caller.is_unknown("new")
        assert await caller.is_unknown("child")
        assert (await caller.turn_end("s", "b", seq=2))["evicted_count"] == 1


async def test_an_overloaded_session_is_refused_with_a_retry_after(tmp_path: Path) -> None:
    """More turns wait for one session than its mailbox holds, while the store is locked."""
    statuses: list[int] = []
    limits: dict[str, Any] = {"limits__mailbox_events_max": 1, "store__busy_timeout_seconds": 8.0}
    async with calling(tmp_path, **limits) as caller:

        async def send(n: int) -> None:
            response = await caller.post(turn_end("s", f"{n}"))
            statuses.append(response.status_code)
            if response.status_code != 200:
                check_refusal(response.status_code, dict(response.headers), response.json(), 503)
                assert response.json()["type"] == "turn_end"
                assert int(response.headers["retry-after"]) >= 0

        async with trio.open_nursery() as nursery:
            with closing(lock(tmp_path)):
                for n in range(40):
                    nursery.start_soon(send, n)
                await eventually(lambda: len(statuses) > 30)
        assert set(statuses) == {200, 503}
        assert len(await caller.map_of("s")) == 1


async def test_an_event_that_was_answered_503_is_not_applied_later(tmp_path: Path) -> None:
    """The event's time is over while the store is locked; later the store could commit it."""
    statuses: list[int] = []
    limits: dict[str, Any] = {
        "limits__event_timeout_seconds": 0.2,
        "store__busy_timeout_seconds": 8.0,
    }
    async with calling(tmp_path, **limits) as caller:

        async def send() -> None:
            statuses.append((await caller.post(turn_end("s", "b"))).status_code)

        await caller.turn_end("s", "a")
        async with trio.open_nursery() as nursery:
            with closing(lock(tmp_path)), trio.move_on_after(0.6):
                nursery.start_soon(send)
                await eventually(lambda: bool(statuses))
        await caller.turn_end("later", "x")
        assert await caller.map_of("s") == {200: ["b"], 503: ["a"]}[statuses[0]]


def lock(folder: Path) -> sqlite3.Connection:
    """A connection that keeps the daemon from writing until it is closed."""
    database = sqlite3.connect(folder / "sessions.db", isolation_level=None)
    database.execute("BEGIN IMMEDIATE")
    return database


# Lost clients


async def test_a_half_sent_body_is_given_up_in_time_and_not_applied(tmp_path: Path) -> None:
    async with calling(tmp_path, limits__body_timeout_seconds=0.2) as caller:
        body = json.dumps(turn_end("s", "a")).encode()
        for framing in (b"Content-Length: %d" % (len(body) + 1), b"Transfer-Encoding: chunked"):
            sent = body if framing.startswith(b"C") else b"%x\r\n%b\r\n" % (len(body), body)
            async with wire(caller) as stream:
                await stream.send_all(HEAD + framing + b"\r\n\r\n" + sent)
                received = b""
                with trio.fail_after(5):
                    while data := await stream.receive_some():
                        received += data
                if received:
                    reply = json.loads(received.partition(b"\r\n\r\n")[2])
                    assert (reply["ok"], set(reply)) == (False, {"ok", "error"})
        assert await caller.is_unknown("s")


@pytest.mark.parametrize("batch", [False, True])
async def test_an_event_is_applied_whose_client_hangs_up_after_its_body(
    tmp_path: Path, batch: bool
) -> None:
    async with calling(tmp_path) as caller:
        for n in range(20):
            bodies = [turn_end(f"s{n}", "a"), turn_end(f"t{n}", "b")]
            body = json.dumps(bodies if batch else bodies[0]).encode()
            async with wire(caller) as stream:
                await stream.send_all(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

        async def applied() -> bool:
            return await caller.sessions_count() == (40 if batch else 20)

        await eventually(applied)
