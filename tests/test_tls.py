"""HTTPS on the event listener: whom it serves, what costs it nothing, and how it ends."""

from __future__ import annotations

import random
import socket
import ssl
import struct
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import trio
import trio.testing

from ramakv.config import Limits
from ramakv.web.server import open_sockets, serve_http
from tests.certificates import Certificates
from tests.http_server import (
    BIG,
    GET,
    App,
    Served,
    Wire,
    answer_early,
    big,
    cancels_itself,
    echo,
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

HELLO_BEGINS = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


async def connect(served: Served, context: ssl.SSLContext, *, compatible: bool = True) -> Wire:
    """Connect; unless `compatible`, a connection that just ends is a broken one."""
    stream = await trio.open_ssl_over_tcp_stream(
        "127.0.0.1", served.port, ssl_context=context, https_compatible=compatible
    )
    wire = Wire(stream)
    served.clients.append(wire)  # closed at the end, also after a failed handshake
    await stream.do_handshake()
    return wire


@asynccontextmanager
async def https(served: Served, context: ssl.SSLContext) -> AsyncIterator[httpx.AsyncClient]:
    url = f"https://127.0.0.1:{served.port}"
    async with httpx.AsyncClient(base_url=url, verify=context, trust_env=False) as client:
        yield client


async def test_a_client_that_trusts_the_ca_is_served(certificates: Certificates) -> None:
    async with (
        serving(quart_app(), tls=certificates.server()) as served,
        https(served, certificates.client()) as client,
    ):
        for body in (b"", b"a", b"b" * 300_000):
            answer = await client.post("/echo", content=body)
            assert (answer.status_code, answer.content) == (200, body)
        assert (await client.get("/big")).content == BIG


async def test_an_app_sees_that_it_is_https(certificates: Certificates) -> None:
    async def tell(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await reply(send, scope["scheme"].encode())

    async with (
        serving(tell, tls=certificates.server()) as served,
        https(served, certificates.client()) as client,
    ):
        assert (await client.get("/")).content == b"https"


async def test_http_1_1_is_what_is_agreed_on(certificates: Certificates) -> None:
    context = certificates.client()
    context.set_alpn_protocols(["h2", "http/1.1"])
    async with serving(tls=certificates.server()) as served:
        wire = await connect(served, context)
        assert isinstance(wire.stream, trio.SSLStream)
        assert wire.stream.selected_alpn_protocol() == "http/1.1"
        assert wire.stream.version() == "TLSv1.3"
        assert (await wire.ask(post(b"x"))).body == b"POST /echo x"


@pytest.mark.parametrize(("version", "served"), [("TLSv1_1", False), ("TLSv1_2", True)])
async def test_tls_1_2_is_the_oldest_that_is_spoken(
    certificates: Certificates, version: str, served: bool
) -> None:
    context = certificates.client()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = ssl.TLSVersion[version]
        context.set_ciphers("ALL:@SECLEVEL=0")
    async with serving(tls=certificates.server()) as server:
        if served:
            assert (await (await connect(server, context)).ask(GET)).status == 200
        else:
            with pytest.raises(trio.BrokenResourceError):
                await connect(server, context)


async def test_a_client_with_another_ca_refuses_and_the_server_goes_on(
    certificates: Certificates, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = Certificates(tmp_path / "other")
    with structlog.testing.capture_logs() as logs:
        async with serving(tls=certificates.server()) as served:
            with pytest.raises(trio.BrokenResourceError) as refused:
                await connect(served, other.client())
            assert isinstance(refused.value.__cause__, ssl.SSLCertVerificationError)
            wire = await connect(served, certificates.client())
            assert (await wire.ask(GET)).status == 200
    assert [line["log_level"] for line in lines(logs, "TLS handshake failed")] == ["debug"]
    assert not [line for line in logs if line["log_level"] != "debug"]


@pytest.mark.parametrize("request_", [GET, post(b"x" * 200_000)], ids=["short", "long"])
async def test_plain_http_is_told_to_use_https(certificates: Certificates, request_: bytes) -> None:
    async with serving(tls=certificates.server()) as served:
        wire = await served.connect()
        with suppress(trio.BrokenResourceError):  # it need not take all of a body
            await wire.send(request_)
        answer = await wire.response()
        assert (answer.status, answer.json()["ok"]) == (400, False)
        assert "https" in answer.json()["error"]
        assert await wire.is_closed_within(2)


async def stall(served: Served) -> list[Wire]:
    """Clients that connect and say nothing, and such that say half of a hello."""
    wires = [await served.connect() for _ in range(40)]
    for wire in wires[20:]:
        await wire.send(HELLO_BEGINS)
    return wires


async def test_handshakes_that_stall_hold_up_nobody(certificates: Certificates) -> None:
    tls = certificates.server(handshake_timeout_seconds=600)
    async with serving(tls=tls) as served:
        await stall(served)
        for _ in range(3):
            wire = await connect(served, certificates.client())
            assert (await wire.ask(GET)).status == 200


async def test_a_handshake_that_stalls_is_cut(certificates: Certificates) -> None:
    fds = open_fds()
    tls = certificates.server(handshake_timeout_seconds=0.3)
    async with serving(tls=tls, keep_alive_seconds=600) as served:
        for wire in await stall(served):
            assert await wire.is_closed_within(10)
    await until(lambda: open_fds() <= fds)


async def test_a_byte_now_and_then_does_not_move_the_deadline(certificates: Certificates) -> None:
    async with serving(tls=certificates.server(handshake_timeout_seconds=0.5)) as served:
        wire = await served.connect()
        with trio.fail_after(10), suppress(trio.BrokenResourceError):
            while True:  # into a socket that is closed, in the end
                await wire.send(b"\x16")
                await trio.sleep(0.05)


async def test_bytes_that_are_no_handshake_end_their_connection_only(
    certificates: Certificates,
) -> None:
    rng, fds = random.Random(7), open_fds()
    with structlog.testing.capture_logs() as logs:
        async with serving(tls=certificates.server()) as served:
            for number in range(150):
                data = rng.randbytes(rng.randrange(1, 400))
                if number % 3:
                    data = HELLO_BEGINS[: rng.randrange(1, 12)] + data
                with socket.create_connection(("127.0.0.1", served.port)) as client:
                    if number % 2:
                        linger = struct.pack("ii", 1, 0)
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    client.sendall(data)
                await trio.lowlevel.checkpoint()
            wire = await connect(served, certificates.client())
            assert (await wire.ask(GET)).status == 200
    await until(lambda: open_fds() <= fds)
    assert not [line for line in logs if line["log_level"] != "debug"]


async def test_garbage_after_the_handshake_ends_its_connection_only(
    certificates: Certificates,
) -> None:
    with structlog.testing.capture_logs() as logs:
        async with serving(tls=certificates.server()) as served:
            wire = await connect(served, certificates.client())
            assert isinstance(wire.stream, trio.SSLStream)
            await wire.ask(GET)
            await wire.stream.transport_stream.send_all(b"\x17\x03\x03\x00\x20" + bytes(32))
            with trio.fail_after(5), suppress(trio.BrokenResourceError):
                assert await wire.stream.transport_stream.receive_some() == b""
            wire = await connect(served, certificates.client())
            assert (await wire.ask(GET)).status == 200
    assert not [line for line in logs if line["log_level"] != "debug"]


async def test_requests_can_follow_each_other_without_waiting(certificates: Certificates) -> None:
    async with serving(tls=certificates.server()) as served:
        wire = await connect(served, certificates.client())
        await wire.send(post(b"1") + post(b"2") + post(b"3"))
        answers = [(await wire.response()).body for _ in range(3)]
        assert answers == [b"POST /echo 1", b"POST /echo 2", b"POST /echo 3"]


async def test_a_request_in_pieces_is_one(certificates: Certificates) -> None:
    async with serving(tls=certificates.server()) as served:
        wire = await connect(served, certificates.client())
        for byte in post(b"piecemeal"):
            await wire.send(bytes([byte]))
        assert (await wire.response()).body == b"POST /echo piecemeal"


@pytest.mark.parametrize("app", [big, cancels_itself, quart_app()], ids=["raw", "self", "quart"])
async def test_a_client_that_never_reads_is_dropped(certificates: Certificates, app: App) -> None:
    async with serving(app, tls=certificates.server(), send_timeout_seconds=0.3) as served:
        before = open_fds()
        wire = await connect(served, certificates.client())
        await wire.send(GET.replace(b"/ ", b"/big "))
        await until(lambda: open_fds() == before + 1)  # the client's own is left
        with pytest.raises(trio.BrokenResourceError):  # a reset, not the end of the response
            await read_to_the_end(wire)


@pytest.mark.parametrize("app", [big, cancels_itself, quart_app()], ids=["raw", "self", "quart"])
async def test_a_client_that_reads_slowly_gets_it_all(certificates: Certificates, app: App) -> None:
    async with serving(app, tls=certificates.server()) as served:
        wire = await connect(served, certificates.client())
        await wire.send(GET.replace(b"/ ", b"/big "))
        await trio.sleep(0.1)
        assert (await wire.response()).body == BIG
        await wire.send(GET)
        assert (await wire.response()).status == 200


async def test_a_client_that_leaves_is_a_disconnect_for_the_app(certificates: Certificates) -> None:
    told = trio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await read_body(receive)
        assert await read_body(receive) is None
        told.set()

    async with serving(wait, tls=certificates.server()) as served:
        wire = await connect(served, certificates.client())
        await wire.send(GET)
        await wire.stream.aclose()
        with trio.fail_after(5):
            await told.wait()


async def test_an_idle_connection_is_closed_after_its_time(certificates: Certificates) -> None:
    async with serving(tls=certificates.server(), keep_alive_seconds=1.0) as served:
        wire = await connect(served, certificates.client())
        assert (await wire.ask(GET)).status == 200
        assert await wire.is_closed_within(5)


async def test_an_answer_that_comes_early_is_read_also_by_who_is_still_sending(
    certificates: Certificates,
) -> None:
    async with serving(answer_early, tls=certificates.server()) as served:
        wire = await connect(served, certificates.client())
        await wire.send(post(b"x" * 200_000, length=10_000_000))
        assert (await wire.response()).body == b"early"


@pytest.mark.parametrize("why", ["idle", "close", "stop", "client"])
async def test_an_end_is_announced(certificates: Certificates, why: str) -> None:
    async with serving(tls=certificates.server(), keep_alive_seconds=1.0) as served:
        wire = await connect(served, certificates.client(), compatible=False)
        stream = wire.stream
        assert isinstance(stream, trio.SSLStream)
        if why == "close":
            await wire.ask(GET.replace(b"host", b"connection: close\r\nhost"))
        else:
            await wire.ask(GET)
        if why == "stop":
            served.stop.set()
        with trio.fail_after(10):
            if why == "client":
                plain, _ = await stream.unwrap()  # its own word, and then the server's
                await plain.aclose()
            else:
                assert await stream.receive_some() == b"", "and not a BrokenResourceError"


async def test_a_client_over_the_limit_is_closed_without_a_handshake(
    certificates: Certificates,
) -> None:
    async with serving(tls=certificates.server(), connections_max=1) as served:
        wire = await connect(served, certificates.client())
        await wire.ask(GET)
        over = await served.connect()
        assert await over.is_closed_within(2)
        assert (await wire.ask(GET)).status == 200


# Stopping


async def test_stopping_closes_idle_connections_and_handshakes_at_once(
    certificates: Certificates,
) -> None:
    tls = certificates.server(handshake_timeout_seconds=60)
    async with serving(tls=tls, keep_alive_seconds=60, drain_timeout_seconds=60) as served:
        silent, halfway = await served.connect(), await served.connect()
        await halfway.send(HELLO_BEGINS)
        idle = await connect(served, certificates.client())
        used = await connect(served, certificates.client())
        await used.ask(GET)
        served.stop.set()
        assert await served.ends_within(5)
        for wire in (silent, halfway, idle, used):
            assert await wire.is_closed_within(1)


async def test_a_request_in_hand_is_finished_and_says_close(certificates: Certificates) -> None:
    asked, go = trio.Event(), trio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            asked.set()
            await go.wait()
            await reply(send, b"done")

    async with serving(wait, tls=certificates.server()) as served:
        wire = await connect(served, certificates.client())
        await wire.send(GET)
        await asked.wait()
        served.stop.set()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert not served.ended.is_set()
        go.set()
        response = await wire.response()
        assert (response.body, response.headers["connection"]) == (b"done", "close")
        assert await served.ends_within(5)


@pytest.mark.parametrize("app", [big, cancels_itself, quart_app()], ids=["raw", "self", "quart"])
async def test_a_client_that_never_reads_cannot_hold_shutdown(
    certificates: Certificates, app: App
) -> None:
    tls = certificates.server()
    async with serving(app, tls=tls, send_timeout_seconds=60, drain_timeout_seconds=0.3) as served:
        wire = await connect(served, certificates.client())
        await wire.send(GET.replace(b"/ ", b"/big "))
        await wire.read()
        served.stop.set()
        assert await served.ends_within(5)


async def test_half_a_body_is_cut_at_shutdown(certificates: Certificates) -> None:
    async with serving(tls=certificates.server(), drain_timeout_seconds=0.3) as served:
        wire = await connect(served, certificates.client())
        await wire.send(post(b"abc", length=10))
        await trio.testing.wait_all_tasks_blocked(0.05)
        served.stop.set()
        assert await served.ends_within(5)


# Another certificate


async def test_a_new_certificate_is_for_new_connections(certificates: Certificates) -> None:
    tls = certificates.server()
    async with serving(tls=tls) as served:
        before = await connect(served, certificates.client())
        await before.ask(GET)
        certificates.issue()
        tls.reload()
        after = await connect(served, certificates.client())
        assert (await before.ask(GET)).status == (await after.ask(GET)).status == 200
        first, second = (
            wire.stream.getpeercert(binary_form=True)  # type: ignore[attr-defined]
            for wire in (before, after)
        )
        assert first != second


async def test_every_address_of_a_name_is_served(certificates: Certificates) -> None:
    sockets, stop = open_sockets("localhost:0"), trio.Event()
    ports = [(sock.family, sock.getsockname()[1]) for sock in sockets]
    async with trio.open_nursery() as nursery:
        serve = partial(
            serve_http, echo, sockets, limits=Limits(), stop=stop, tls=certificates.server()
        )
        await nursery.start(serve)
        for family, port in ports:
            host = "[::1]" if family == socket.AF_INET6 else "127.0.0.1"
            async with httpx.AsyncClient(verify=certificates.client(), trust_env=False) as client:
                assert (await client.get(f"https://{host}:{port}/")).status_code == 200
        stop.set()
