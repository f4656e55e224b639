"""No client takes longer, or more, than it may."""

from __future__ import annotations

import errno
import os
import resource
import socket
from contextlib import suppress
from typing import Any

import pytest
import structlog
import trio
import trio.testing

from ramakv.web import connection as connection_module, server as server_module
from tests.http_server import (
    BIG,
    CHUNKED,
    GET,
    App,
    Wire,
    big,
    cancels_itself,
    echo,
    free_fds,
    hasty_client,
    lines,
    open_fds,
    post,
    quart_app,
    read_body,
    read_to_the_end,
    reply,
    serving,
    until,
)


@pytest.mark.parametrize(
    "app", [echo, cancels_itself, quart_app()], ids=["raw", "cancels itself", "quart"]
)
async def test_an_idle_connection_is_closed_after_keep_alive_seconds(app: App) -> None:
    """Behind Quart-Trio, stock Hypercorn never closed it."""
    async with serving(app, keep_alive_seconds=0.2) as served:
        new, used = await served.connect(), await served.connect()
        await used.ask(GET)
        await used.ask(post(b"abc"))
        started = trio.current_time()
        assert await used.is_closed_within(1)
        assert await new.is_closed_within(1)
        assert trio.current_time() - started > 0.1


@pytest.mark.parametrize("after", [b"", GET], ids=["first", "second"])
async def test_a_head_that_dribbles_in_is_cut(after: bytes) -> None:
    async with serving(keep_alive_seconds=0.3) as served:
        wire = await served.connect()
        if after:
            await wire.ask(after)
        with trio.fail_after(2), suppress(trio.BrokenResourceError):
            await wire.send(b"GET / HTTP/1.1\r\nhost: ")
            while not await wire.is_closed_within(0.05):
                await wire.send(b"x")


async def test_a_request_in_hand_has_no_idle_deadline() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            body = await read_body(receive)
            await trio.sleep(0.3)
            await reply(send, body or b"")

    async with serving(slow, keep_alive_seconds=0.2) as served:
        wire = await served.connect()
        await wire.send(post(b"", length=3))
        for byte in (b"a", b"b", b"c"):
            await trio.sleep(0.15)
            await wire.send(byte)
        assert (await wire.response()).body == b"abc"


async def test_a_client_that_leaves_an_idle_connection_is_forgotten_at_once() -> None:
    """Stock Hypercorn kept its descriptor for keep_alive_timeout."""
    async with serving(keep_alive_seconds=60) as served:
        before = open_fds()
        wires = [await served.connect() for _ in range(20)]
        for wire in wires[10:]:
            await wire.ask(GET)
        for wire in wires[::2]:
            await wire.stream.send_eof()
            assert await wire.is_closed_within(1)
        for wire in wires:
            await wire.stream.aclose()
        await until(lambda: open_fds() == before, 1)


@pytest.mark.parametrize("app", [big, quart_app()], ids=["raw", "quart"])
async def test_a_client_that_never_reads_is_dropped(app: App) -> None:
    async with serving(app, send_timeout_seconds=0.3, keep_alive_seconds=60) as served:
        before = open_fds()
        wire = await served.connect()
        await wire.send(GET.replace(b"/ ", b"/big "))
        await until(lambda: open_fds() == before + 1, 2)  # the client's own is left
        with pytest.raises(trio.BrokenResourceError):  # a reset, not the end of the response
            await read_to_the_end(wire)


@pytest.mark.parametrize(
    "app", [big, cancels_itself, quart_app()], ids=["raw", "cancels itself", "quart"]
)
async def test_a_client_that_reads_slowly_gets_it_all(app: App) -> None:
    async with serving(app, keep_alive_seconds=60) as served:
        wire = await served.connect()
        await wire.send(GET.replace(b"/ ", b"/big "))
        await trio.sleep(0.1)
        assert len((await wire.response()).body) == len(BIG)
        await wire.send(GET)
        assert (await wire.response()).status == 200


async def test_an_endless_response_ends_with_its_client() -> None:
    stopped = trio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
        finally:
            stopped.set()

    with structlog.testing.capture_logs() as logs:
        async with serving(endless) as served:
            wire = await served.connect()
            await wire.send(GET)
            await wire.read()
            await wire.stream.aclose()
            with trio.fail_after(2):
                await stopped.wait()
    assert not lines(logs, "request failed")


async def test_a_response_to_a_client_that_reads_as_fast_starves_nobody() -> None:
    sent = 0

    async def long(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        assert scope["type"] == "http"
        if scope["path"] == "/echo":
            await reply(send, b"%d" % sent)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while sent < 5000:
            sent += 1
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with serving(long) as served, trio.open_nursery() as nursery:
        other = await served.connect()

        def read_all() -> None:  # not in this thread: there it would read in turns
            with socket.create_connection(("127.0.0.1", served.port)) as client:
                client.sendall(GET)
                while not client.recv(100_000).endswith(b"0\r\n\r\n"):
                    pass

        nursery.start_soon(trio.to_thread.run_sync, read_all)
        await until(lambda: sent > 0)
        assert int((await other.ask(post(b""))).body) < 4000


async def test_a_client_that_is_given_up_is_a_disconnect_for_the_app() -> None:
    told = trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await read_body(receive)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with pytest.raises(OSError, match="takes no more"):
            await send({"type": "http.response.body", "body": BIG, "more_body": True})
        assert await read_body(receive) is None
        told.set()

    async with serving(app, send_timeout_seconds=0.2) as served:
        wire = await served.connect()
        await wire.send(GET)
        with trio.fail_after(2):
            await told.wait()


async def test_what_a_client_pipelines_is_not_hoarded() -> None:
    async def wait(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await read_body(receive)
        await receive()

    async with serving(wait, drain_timeout_seconds=0.1) as served:
        wire = await served.connect()
        with trio.move_on_after(0.5) as sending:
            await wire.send(post(b"abc") + BIG)
        assert sending.cancelled_caught


async def test_a_body_of_many_pieces_starves_nobody() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await trio.lowlevel.checkpoint()
            ticks += 1

    async with serving() as served, trio.open_nursery() as nursery:
        wire = await served.connect()
        await wire.ask(GET)
        nursery.start_soon(tick)
        await wire.ask(CHUNKED + b"1\r\nx\r\n" * 5000 + b"0\r\n\r\n")
        nursery.cancel_scope.cancel()
    assert ticks > 5000 / connection_module.EVENTS_PER_TURN / 2


async def test_a_disconnect_reaches_a_handler_that_waits_for_one() -> None:
    left = trio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            assert await read_body(receive) == b"abc"
            assert (await receive())["type"] == "http.disconnect"
            assert (await receive())["type"] == "http.disconnect"
            left.set()

    with structlog.testing.capture_logs() as logs:
        async with serving(wait) as served:
            wire = await served.connect()
            await wire.send(post(b"abc"))
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not left.is_set()
            await wire.stream.aclose()
            with trio.fail_after(1):
                await left.wait()
    assert not lines(logs, "request failed")


async def test_a_client_too_many_gets_503_and_the_next_a_free_place() -> None:
    async with serving(connections_max=2) as served:
        first, second = await served.connect(), await served.connect()
        assert (await first.ask(GET)).status == (await second.ask(GET)).status == 200
        third = hasty_client(served.port, GET)
        response = await third.response()
        assert response.status == 503
        assert response.json() == {"ok": False, "error": "too many connections"}
        with trio.fail_after(2):
            assert await third.stream.receive_some() == b""  # and no reset
        await third.stream.aclose()
        await first.stream.aclose()
        assert await second.is_closed_within(0.05) is False
        assert (await served.ask(GET)).status == 200


async def test_without_file_descriptors_the_server_waits_quietly() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with structlog.testing.capture_logs() as logs:
        async with serving() as served:
            clients = [trio.socket.socket() for _ in range(6)]
            free = free_fds()
            try:
                # Two more, then none; the clients have theirs already.
                resource.setrlimit(resource.RLIMIT_NOFILE, (free[2], hard))
                for client in clients:
                    await client.connect(("127.0.0.1", served.port))
                await until(lambda: bool(lines(logs, "cannot accept connections")))
                for _ in range(4):
                    await trio.sleep(server_module.ACCEPT_PAUSE_SECONDS)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for client in clients:
                async with trio.SocketStream(client) as stream:
                    assert (await Wire(stream).ask(GET)).status == 200
    said = lines(logs, "cannot accept connections")
    assert 1 <= len(said) <= 8
    assert said[0]["error"] == os.strerror(errno.EMFILE)


async def test_a_burst_of_clients_is_let_in_at_once() -> None:
    async with serving() as served:
        wires = [await served.connect() for _ in range(100)]
        for wire in wires:
            await wire.send(GET)
        for wire in wires:
            assert (await wire.response()).status == 200
