"""The client without async: its own thread, which begins and ends with its `with` block."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ramakv.client import EventDroppedError, EventRefusedError, SyncClient
from tests.event_server import Answer, event_server, ok, refusal


def test_sessions_turns_and_forks_read_like_the_async_ones() -> None:
    with (
        event_server(lambda event: ok(fork_id=1)) as served,
        SyncClient(served.url, close_seconds=30) as client,
        client.session("s", on_exit="suspend") as session,
    ):
        with session.turn() as turn:
            turn.end(["a"])
        with session.fork("child"):
            pass
        assert session.map().wait().ok
        assert client.health().wait().ok
        assert client.list_events().wait().ok
        assert client.send("new_event", session_id="s").wait().ok
        session.close()
    assert served.types() == [
        "turn_start",
        "turn_end",
        "session_fork",
        "session_fork_end",
        "session_map",
        "health",
        "list_events",
        "new_event",
        "session_close",
        "session_suspend",
    ]


def test_no_call_waits_for_a_slow_daemon() -> None:
    with (
        event_server(lambda event: Answer(200, {"ok": True}, seconds=0.3)) as served,
        SyncClient(served.url, close_seconds=30) as client,
    ):
        delivery = client.session("s").turn_end(["a"])
        client.session("s").turn_end(["b"])
        assert delivery.reply is None
        assert delivery.wait().ok
        assert delivery.reply is not None
    assert served.maps() == [["a"], ["b"]]


def test_its_thread_ends_with_its_block() -> None:
    before = set(threading.enumerate())
    with event_server() as served:
        with SyncClient(served.url, close_seconds=30) as client:
            mine = set(threading.enumerate()) - before
            client.session("s").close()
        assert len(mine) >= 1
    assert set(threading.enumerate()) <= before


def test_several_threads_keep_their_order_each() -> None:
    def work(name: str) -> None:
        for number in range(20):
            client.session(name).turn_end([str(number)])

    with (
        event_server() as served,
        SyncClient(served.url, close_seconds=30) as client,
        ThreadPoolExecutor(4) as threads,
    ):
        list(threads.map(work, "abcd"))
    for name in "abcd":
        maps = [event["kv_transfer_params"]["chunk_hashes"] for event in served.of(name)]
        assert maps == [[str(number)] for number in range(20)]


def test_what_is_called_after_its_end_is_dropped_quietly_or_raised_where_asked() -> None:
    with event_server() as served:
        with SyncClient(served.url, close_seconds=30) as client:
            pass
        assert isinstance(client.health().wait().cause, EventDroppedError)
        with SyncClient(served.url, close_seconds=30, raise_errors=True) as strict:
            pass
        with pytest.raises(EventDroppedError, match="closed"):
            strict.health().wait()


def test_it_raises_only_where_asked() -> None:
    with event_server(lambda event: refusal(404, "session 's' not found")) as served:
        with SyncClient(served.url, close_seconds=30) as client:
            assert client.session("s").map().wait().error == "session 's' not found"
        with (
            SyncClient(served.url, close_seconds=30, raise_errors=True) as client,
            pytest.raises(EventRefusedError, match="not found"),
        ):
            client.session("s").map().wait()


def test_the_blocks_own_error_comes_out_as_it_is() -> None:
    def work(client: Any) -> None:
        with client, client.session("s"):
            raise ValueError("mine")

    with event_server() as served, pytest.raises(ValueError, match="mine"):
        work(SyncClient(served.url, close_seconds=30))
    assert served.types() == ["session_close"]
