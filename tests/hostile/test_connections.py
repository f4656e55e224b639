"""Connections that no client should make, to the whole daemon; a witness beside is always right."""

from __future__ import annotations

import random
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from tests.hostile.house import (
    SEEN,
    STATUSES,
    WITNESS,
    Answer,
    Client,
    House,
    check_envelopes,
    encoded,
    event,
    living_in,
    request,
    turn_end,
    unchanged,
)
from tests.hostile.mutations import BODY_TOKENS, SEEDS, mutated
from tests.http_server import open_fds

BODY_MAX = 20_000
BODY_SECONDS = 0.4
SEND_SECONDS = 0.5
KEPT_SECONDS = 1.0

MAP = encoded(event("session_map", WITNESS))
NEW = encoded(turn_end("new", "a"))
HEAD = b"POST /event HTTP/1.1\r\nhost: x\r\n%b\r\n"
CHUNKED = HEAD % b"transfer-encoding: chunked\r\n"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    limits = {
        "body_bytes_max": BODY_MAX,
        "body_timeout_seconds": BODY_SECONDS,
        "send_timeout_seconds": SEND_SECONDS,
        "keep_alive_seconds": KEPT_SECONDS,
    }
    folder = tmp_path_factory.mktemp("house")
    with living_in(folder, **{f"limits__{name}": value for name, value in limits.items()}) as it:
        yield it


def told(house: House, data: bytes, *, ends: bool = False) -> list[Answer]:
    """Send bytes, and return all responses up to the end of the connection."""
    answers = []
    with house.client() as client:
        with suppress(ConnectionError):
            client.send(data)
            if ends:
                client.socket.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while (answer := client.answer()) is not None:
                answers.append(answer)
    return answers


def body_of_chunks(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)


# Bodies that are not what was announced


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD % b"content-length: %d\r\n" % (BODY_MAX + 1), 413),
        (HEAD % b"content-length: 99999999999999999999\r\n", 413),
        (HEAD % b"content-length: %d\r\n" % (BODY_MAX + 1) + b"x" * BODY_MAX, 413),
        (CHUNKED + body_of_chunks(*[b"x" * 1000] * 21), 413),
        (CHUNKED + b"ffffffff\r\n" + b"x" * 30_000, 413),
        (HEAD % b"content-length: -1\r\n" + NEW, 400),
        (HEAD % b"content-length: 0x10\r\n" + NEW, 400),
        (HEAD % b"content-length: 1e3\r\n" + NEW, 400),
        (HEAD % b"content-length: +5\r\n" + NEW, 400),
        (HEAD % b"content-length: \xd9\xa3\r\n" + NEW, 400),
        (HEAD % b"content-length:\r\n" + NEW, 400),
        (HEAD % b"content-length: %b\r\n" % (b"9" * 30) + NEW, 400),
        (HEAD % b"content-length: %b\r\n" % (b"9" * 5000) + NEW, 400),
        (HEAD % b"content-length: 5\r\ncontent-length: 60\r\n" + NEW, 400),
        (HEAD % b"content-length: 5, 60\r\n" + NEW, 400),
        (HEAD % b"content-length: %d\r\ntransfer-encoding: chunked\r\n" % len(NEW) + NEW, 400),
        (HEAD % b"transfer-encoding: chunked\r\ncontent-length: 3\r\n" + b"0\r\n\r\n", 400),
        (HEAD % b"transfer-encoding: chunked, chunked\r\n" + b"0\r\n\r\n", 501),
        (HEAD % b"transfer-encoding: identity\r\n" + NEW, 501),
        (HEAD % b"transfer-encoding:\r\n" + NEW, 501),
        (CHUNKED + b"-1\r\n" + NEW, 400),
        (CHUNKED + b"%x;%b\r\n" % (len(NEW), b"e" * 90_000) + NEW, 431),
        (CHUNKED + b"%x\r\n%bXX0\r\n\r\n" % (len(NEW), NEW), 400),
        (HEAD % b"content-length: %d\r\n" % (len(NEW) + 1) + NEW, 408),
        (CHUNKED + body_of_chunks(NEW), 408),
        (CHUNKED + body_of_chunks(NEW) + b"0\r\n", 408),
        (CHUNKED, 408),
        (HEAD % b"content-length: 10\r\nexpect: 100-continue\r\n", 100),
    ],
    ids=lambda value: repr(value[30:90]) if isinstance(value, bytes) else "",
)
def test_a_body_that_is_not_what_was_announced_changes_nothing(
    house: House, data: bytes, status: int
) -> None:
    with unchanged(house):
        answers = told(house, data)
        assert answers[0].status == status
        if status == 100:
            answers = answers[1:]
            assert answers[0].status == 408
        if answers[0].status in STATUSES:
            check_envelopes(answers[0])
        assert len(answers) == 1
        assert answers[0].envelope["ok"] is False
        assert answers[0].headers["connection"] == "close"


def test_half_a_body_and_the_end_of_it_changes_nothing(house: House) -> None:
    with unchanged(house):
        for data in (
            HEAD % b"content-length: %d\r\n" % (len(NEW) + 1) + NEW,
            CHUNKED + body_of_chunks(NEW),
        ):
            (answer,) = told(house, data, ends=True)
            assert answer.status == 400


@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_a_body_that_dribbles_in_is_cut_in_time(house: House, framing: str) -> None:
    head = HEAD % b"content-length: 20000\r\n" if framing == "length" else CHUNKED
    piece = b"x" if framing == "length" else b"1\r\nx\r\n"
    began = time.monotonic()
    with unchanged(house), house.client() as client:
        client.send(head)
        while not select.select([client.socket], [], [], 0.01)[0]:
            assert time.monotonic() < began + 20 * BODY_SECONDS
            client.send(piece)
        answer = client.answer()
        assert answer is not None
        assert answer.status == 408
    assert time.monotonic() > began + BODY_SECONDS


def test_a_dribble_that_is_over_in_time_is_an_event(house: House) -> None:
    with unchanged(house), house.client() as client:
        client.send(CHUNKED)
        client.send(b"".join(body_of_chunks(bytes([byte])) for byte in MAP) + b"0\r\n\r\n")
        answer = client.answer()
        assert answer is not None
        assert answer.envelope["data"]["chunk_hashes"] == SEEN


# Heads


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"a: " + b"b" * 200_000 + b"\r\n", 431),
        (b"b" * 200_000 + b": a\r\n", 431),
        (b"".join(b"a%d: b\r\n" % n for n in range(10_000)), 431),
        (b"a: b\r\n" * 10_000, 431),
        (b"a: b\r\n c: d\r\n" * 5000, 431),
        (b"cookie: " + b"a=b; " * 50_000 + b"\r\n", 431),
        (b"a b: c\r\n", 400),
        (b": c\r\n", 400),
        (b"a\r\n", 400),
        (b"a: \0\r\n", 400),
        (b"a: b\rc\r\n", 400),
        (b"a\0: b\r\n", 400),
        (b"host: y\r\n", 400),
    ],
    ids=lambda value: repr(value[:20]) if isinstance(value, bytes) else "",
)
def test_a_head_that_is_a_bomb_or_broken_is_refused(house: House, head: bytes, status: int) -> None:
    with unchanged(house):
        lines = head + b"content-length: %d\r\n" % len(NEW)
        (answer,) = told(house, HEAD % lines + NEW)
        assert (answer.status, answer.envelope["ok"]) == (status, False)
        (answer,) = told(house, b"GET /" + head * 10 + b" HTTP/1.1\r\nhost: x\r\n\r\n", ends=True)
        assert answer.status in (400, 431)


def test_slow_heads_are_cut_and_hold_up_nobody(house: House) -> None:
    began = time.monotonic()
    with unchanged(house), ExitStack() as stack:
        slow = [stack.enter_context(house.client()) for _ in range(50)]
        for client in slow:
            client.send(b"POST /event HTTP/1.1\r\n")
        while time.monotonic() < began + KEPT_SECONDS / 2:
            for client in slow:
                client.send(b"a: b\r\n")
            assert house.ask(MAP).envelope["data"]["chunk_hashes"] == SEEN
        for client in slow:
            assert client.answer() is None
        assert time.monotonic() - began < 5 * KEPT_SECONDS


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET /event HTTP/1.1", 405),
        (b"HEAd /event HTTP/1.1", 405),
        (b"post /event HTTP/1.1", 405),
        (b"TRACE /event HTTP/1.1", 405),
        (b"CONNECT /event HTTP/1.1", 405),
        (b"%b /event HTTP/1.1" % (b"M" * 5000), 405),
        (b"PO\0ST /event HTTP/1.1", 400),
        (b"PO ST /event HTTP/1.1", 400),
        (b"CONNECT event:443 HTTP/1.1", 400),
        (b"POST event HTTP/1.1", 400),
        (b"POST ?/event HTTP/1.1", 400),
        (b"POST ftp://x/event HTTP/1.1", 400),
        (b"POST \\event HTTP/1.1", 400),
        (b"POST * HTTP/1.1", 404),
        (b"OPTIONS * HTTP/1.1", 404),
        (b"POST http://x HTTP/1.1", 404),
        (b"POST //event HTTP/1.1", 404),
        (b"POST /event/ HTTP/1.1", 404),
        (b"POST /./event HTTP/1.1", 404),
        (b"POST /x/../event HTTP/1.1", 404),
        (b"POST /event%00 HTTP/1.1", 404),
        (b"POST /event%0d%0aa:b HTTP/1.1", 404),
        (b"POST /%2565vent HTTP/1.1", 404),
        (b"POST /%ff%fe HTTP/1.1", 404),
        (b"POST /%zz% HTTP/1.1", 404),
        (b"POST /%3fevent HTTP/1.1", 404),
        (b"POST /event;x HTTP/1.1", 404),
        (b"POST /EVENT HTTP/1.1", 404),
        (b"POST /event\0 HTTP/1.1", 400),
        (b"POST /event\xff HTTP/1.1", 400),
        (b"POST /%b HTTP/1.1" % (b"a" * 10_000), 404),
        (b"POST /%b HTTP/1.1" % (b"../" * 3000), 404),
        (b"POST /event HTTP/1.2", 505),
        (b"POST /event HTTP/2.0", 505),
        (b"POST /event HTTP/0.9", 505),
        (b"POST /event HTTP/11.1", 400),
        (b"POST /event http/1.1", 400),
        (b"POST /event", 400),
        (b"POST  /event  HTTP/1.1", 400),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else "",
)
def test_any_other_request_line_is_refused(house: House, line: bytes, status: int) -> None:
    rest = b"\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(NEW), NEW)
    with unchanged(house):
        answers = told(house, line + rest)
        assert [answer.status for answer in answers] == [status]
        if not line.startswith(b"HEAd"):
            assert answers[0].headers["content-type"] == "application/json"
            assert answers[0].envelope["ok"] is False
            assert len(answers[0].body) < 1100


@pytest.mark.parametrize(
    "line",
    [
        *(b"/event", b"/event?x=%00&/health", b"/event?", b"/%65vent", b"/even%74?%zz"),
        *(b"http://y/event", b"HTTPS://[::1]:9/event"),
    ],
)
def test_other_ways_to_write_the_path_are_the_same_path(house: House, line: bytes) -> None:
    data = b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
    (answer,) = told(house, data % (line, len(MAP), MAP))
    assert answer.envelope["data"]["chunk_hashes"] == SEEN


# Other protocols


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0", 505),
        (b"POST /event\r\n", 400),
        (b"GET /event\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2, 400),
        (b"\x05\x01\x00", 400),
        (b"*1\r\n$4\r\nPING\r\n", 400),
        (b"SSH-2.0-OpenSSH_9.6\r\n", 400),
        (b"\0" * 70_000, 400),
        (b"\r\n" * 5, 400),
        (b"", None),
    ],
    ids=lambda value: repr(value[:30]) if isinstance(value, bytes) else "",
)
def test_another_protocol_is_refused(house: House, data: bytes, status: int | None) -> None:
    with unchanged(house):
        statuses = [answer.status for answer in told(house, data, ends=True)]
        assert statuses == ([] if status is None else [status])


@pytest.mark.parametrize(
    "headers",
    [
        b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n",
        b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
        b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    ],
    ids=["h2c", "websocket"],
)
def test_an_upgrade_is_not_taken_up_and_the_event_is(house: House, headers: bytes) -> None:
    with house.client() as client:
        assert client.ask(MAP, headers).envelope["data"]["chunk_hashes"] == SEEN
        assert client.ask(MAP).envelope["data"]["chunk_hashes"] == SEEN


@pytest.mark.parametrize(
    "head",
    [b"POST /event HTTP/1.0\r\n", b"POST /event HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"],
    ids=["HTTP/1.0", "connection: close"],
)
@pytest.mark.parametrize("after", [b"", b"\0garbage", request(NEW)], ids=["", "garbage", "event"])
def test_what_follows_a_last_request_is_not_looked_at(
    house: House, head: bytes, after: bytes
) -> None:
    """Once that refused the request, whose event was applied all the same."""
    body = encoded(turn_end("last", "a"))
    data = head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    with unchanged(house):
        (answer,) = told(house, data + after)
        assert answer.envelope["data"]["chunk_count"] == 1
        house.ask([event("session_close", "last"), event("turn_start", "last")])


# Pipelines


def test_a_thousand_pipelined_events_are_answered_in_their_order(house: House) -> None:
    with unchanged(house), house.client() as client:
        for number in range(1000):
            changes = number % 10 == 1
            body = turn_end("piped", f"{number}") if changes else event("session_map", "piped")
            client.send(request(encoded(body)))
        for number in range(1000):
            answer = client.answer()
            assert answer is not None
            (envelope,) = check_envelopes(answer)
            if number == 0:
                assert answer.status == 404
            elif number % 10 == 1:
                assert envelope["data"]["chunk_count"] == 1
            else:
                assert envelope["data"]["chunk_hashes"] == [f"{(number - 1) // 10 * 10 + 1}"]
        client.ask(event("session_close", "piped"))
        client.ask(event("turn_start", "piped"))


def test_a_request_smuggled_behind_a_refused_one_is_not_served(house: House) -> None:
    with unchanged(house):
        for refused in (
            HEAD % b"content-length: 4\r\ntransfer-encoding: chunked\r\n",
            HEAD % b"content-length: 1\r\ncontent-length: 2\r\n",
            HEAD % b"content-length: 99999\r\n",
            CHUNKED + b"ZZ\r\n",
            b"POST  /event\r\n",
        ):
            assert len(told(house, refused + request(NEW))) == 1


def test_clients_that_pipeline_and_never_read_are_cut_and_hold_up_nobody(house: House) -> None:
    """Until the windows are full on both sides, where the daemon reads no more."""
    many = request(encoded([event("list_events")] * 20)) * 300
    with unchanged(house), ExitStack() as stack:
        before = open_fds()
        deaf = []
        for _ in range(20):
            client = stack.enter_context(house.client())
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.socket.settimeout(0.02)
            with suppress(TimeoutError):
                client.send(many)
            deaf.append(client)
        slowest = 0.0
        began = time.monotonic()
        while time.monotonic() < began + SEND_SECONDS:
            asked = time.monotonic()
            assert house.ask(MAP).envelope["data"]["chunk_hashes"] == SEEN
            slowest = max(slowest, time.monotonic() - asked)
        assert slowest < 5 * SEND_SECONDS
        house.wait(lambda: open_fds() <= before + len(deaf))  # their own ends are left
        for client in deaf:
            with pytest.raises(ConnectionResetError):
                drain(client)


def drain(client: Client) -> None:
    client.socket.settimeout(10)
    while client.socket.recv(1_000_000):
        pass


# Damage


HTTP_TOKENS = [
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"\xff", b"0", b"\r\n\r\n", b"HTTP/1.1"),
    *(b"content-length: 3\r\n", b"transfer-encoding: chunked\r\n", b"connection: close\r\n"),
    *(b"expect: 100-continue\r\n", b"host: y\r\n", b"upgrade: h2c\r\n", b"POST /event", b"%00"),
    *BODY_TOKENS,
]


def requests_like(chance: random.Random) -> bytes:
    body = chance.choice(SEEDS)
    if chance.random() < 0.3:
        cut = chance.randrange(1, len(body))
        return CHUNKED + body_of_chunks(body[:cut], body[cut:]) + b"0\r\n\r\n"
    return request(body)


@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_requests_never_hurt_the_daemon_or_a_witness(house: House, seed: int) -> None:
    """Each connection sends one to three, damaged, and reads until it is closed or cut off."""
    chance = random.Random(seed)
    before = open_fds()
    answered = 0
    with house.client() as witness:
        for _ in range(250):
            whole = b"".join(requests_like(chance) for _ in range(chance.choice([1, 1, 2, 3])))
            data = mutated(chance, whole, HTTP_TOKENS)
            for answer in told(house, data, ends=True):
                answered += 1
                assert answer.status in STATUSES | {100, 431, 501, 505}, data
                if answer.status not in (100, 200):
                    assert answer.envelope["ok"] is False, data
            if chance.random() < 0.2:
                seen = witness.ask(MAP).envelope["data"]["chunk_hashes"]
                assert seen == SEEN, data
    assert 150 < answered < 750
    house.wait(lambda: open_fds() <= before)
    for session_id in ("s", "t"):
        house.ask([event("session_close", session_id), event("turn_start", session_id)])
