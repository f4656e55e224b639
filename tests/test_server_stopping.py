"""How the server stops, and how its app starts and ends."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import structlog
import trio
import trio.testing
from quart_trio import QuartTrio

from ramakv.config import Limits
from ramakv.web.server import open_sockets, serve_http
from tests.http_server import (
    GET,
    App,
    big,
    echo,
    open_fds,
    post,
    quart_app,
    reply,
    serving,
)


async def test_stopping_closes_listener_and_idle_connections_at_once() -> None:
    async with serving(keep_alive_seconds=60, drain_timeout_seconds=60) as served:
        idle, used = await served.connect(), await served.connect()
        await used.ask(GET)
        served.stop.set()
        assert await served.ends_within(1)
        assert await idle.is_closed_within(0.1)
        assert await used.is_closed_within(0.1)
        with pytest.raises(OSError, match="all attempts to connect"):
            await trio.open_tcp_stream("127.0.0.1", served.port)


async def test_a_request_in_hand_is_finished_and_says_close() -> None:
    asked, go = trio.Event(), trio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            asked.set()
            await go.wait()
            await reply(send, b"done")

    async with serving(wait) as served:
        wire = await served.connect()
        await wire.send(GET + GET)
        await asked.wait()
        served.stop.set()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert not served.ended.is_set()
        go.set()
        response = await wire.response()
        assert (response.body, response.headers["connection"]) == (b"done", "close")
        assert await served.ends_within(2)
        assert await wire.is_closed_within(0.1)


async def test_a_response_that_has_begun_is_finished_and_its_connection_closed() -> None:
    begun, go = trio.Event(), trio.Event()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        headers = [(b"content-length", b"6")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"abc", "more_body": True})
        begun.set()
        await go.wait()
        await send({"type": "http.response.body", "body": b"def"})

    async with serving(stream) as served:
        wire = await served.connect()
        await wire.send(GET)
        await begun.wait()
        served.stop.set()
        await trio.testing.wait_all_tasks_blocked(0.05)
        go.set()
        assert (await wire.response()).body == b"abcdef"
        assert await served.ends_within(1)


async def test_half_a_body_is_cut_at_shutdown() -> None:
    async with serving(drain_timeout_seconds=0.3) as served:
        wire = await served.connect()
        await wire.send(post(b"abc", length=10))
        await trio.testing.wait_all_tasks_blocked(0.05)
        served.stop.set()
        assert not await served.ends_within(0.1)
        assert await served.ends_within(1)
        assert await wire.is_closed_within(0.1)


@pytest.mark.parametrize("app", [big, quart_app()], ids=["raw", "quart"])
async def test_a_client_that_never_reads_cannot_hold_shutdown(app: App) -> None:
    """On stock Hypercorn it held it for as long as it liked."""
    async with serving(app, send_timeout_seconds=60, drain_timeout_seconds=0.3) as served:
        wire = await served.connect()
        await wire.send(GET.replace(b"/ ", b"/big "))
        await wire.read()
        served.stop.set()
        assert await served.ends_within(1.5)


async def test_an_app_that_does_not_end_is_cut_at_shutdown() -> None:
    async def sleep(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await trio.sleep_forever()

    async with serving(sleep, drain_timeout_seconds=0.2) as served:
        wire = await served.connect()
        await wire.send(GET)
        await trio.testing.wait_all_tasks_blocked(0.05)
        served.stop.set()
        assert await served.ends_within(1)
        assert await wire.is_closed_within(0.1)


async def test_a_cancelled_server_leaves_nothing_behind() -> None:
    before = open_fds()
    sockets = open_sockets("127.0.0.1:0")
    with trio.fail_after(2):
        async with trio.open_nursery() as nursery:
            limits = Limits(send_timeout_seconds=60)
            await nursery.start(partial(serve_http, big, sockets, limits=limits, stop=trio.Event()))
            stream = await trio.open_tcp_stream("127.0.0.1", sockets[0].getsockname()[1])
            await stream.send_all(GET)
            await stream.receive_some()
            nursery.cancel_scope.cancel()
        await trio.aclose_forcefully(stream)
    assert sockets[0].fileno() == -1
    assert open_fds() == before


async def test_a_stop_before_the_start_ends_it() -> None:
    stop = trio.Event()
    stop.set()
    with trio.fail_after(1):
        sockets = open_sockets("127.0.0.1:0")
        await serve_http(echo, sockets, limits=Limits(), stop=stop)
    assert sockets[0].fileno() == -1


async def test_the_lifespan_of_a_quart_app_is_served() -> None:
    app, seen = QuartTrio("tests"), []

    @app.before_serving
    async def before() -> None:
        seen.append("before")

    @app.after_serving
    async def after() -> None:
        seen.append("after")

    @app.get("/")
    async def index() -> str:
        seen.append("request")
        return ""

    async with serving(app) as served:
        await served.ask(GET)
    assert seen == ["before", "request", "after"]


async def test_an_app_that_cannot_start_is_not_served() -> None:
    app = QuartTrio("tests")

    @app.before_serving
    async def before() -> None:
        raise KeyError("oops")

    with pytest.RaisesGroup(
        pytest.RaisesExc(Exception, match="oops"), flatten_subgroups=True, allow_unwrapped=True
    ):
        sockets = open_sockets("127.0.0.1:0")
        await serve_http(app, sockets, limits=Limits(), stop=trio.Event())
    assert sockets[0].fileno() == -1


@pytest.mark.parametrize("returns", [True, False])
async def test_an_app_needs_no_lifespan(returns: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            if returns:
                return
            raise NotImplementedError
        await reply(send, b"fine")

    with structlog.testing.capture_logs() as logs:
        async with serving(app) as served:
            assert (await served.ask(GET)).body == b"fine"
    assert not [line for line in logs if line["log_level"] != "debug"]


async def test_a_lifespan_that_ends_in_an_error_is_logged() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            raise KeyError("oops")
        await reply(send, b"fine")

    with structlog.testing.capture_logs() as logs:
        async with serving(app) as served:
            assert (await served.ask(GET)).body == b"fine"
    assert [line["log_level"] for line in logs] == ["error"]
