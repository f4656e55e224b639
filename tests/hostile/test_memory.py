"""What many clients send and do not read, together: bounded, and small events go on."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ramakv.errors import UnavailableError
from ramakv.web.in_hand import FREE_BYTES, BytesInHand
from tests.hostile.house import (
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

MAX = 3_000_000
BODY = 1_000_000
HALF = b"POST /event HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    limits = {"in_hand_bytes_max": MAX, "body_bytes_max": 2 * BODY, "send_timeout_seconds": 20.0}
    with living_in(tmp_path, **{f"limits__{name}": value for name, value in limits.items()}) as it:
        yield it


def visitors(house: House, stack: ExitStack, number: int) -> list[Client]:
    return [stack.enter_context(house.client()) for _ in range(number)]


def test_large_bodies_beyond_what_may_be_in_hand_are_503_and_small_ones_are_not(
    house: House,
) -> None:
    with unchanged(house), ExitStack() as stack:
        clients = visitors(house, stack, 12)
        for client in clients:
            client.send(HALF % (BODY + 1, b" " * BODY))
        refused = [client for client in clients if is_refused(client)]
        assert len(refused) == 12 - MAX // (BODY - FREE_BYTES)
        small = turn_end("small", *(f"{n:08x}" for n in range(1000)))
        assert house.ask(small).status == 200
        for client in clients:
            client.close()
        large = turn_end("small", *(f"{n:0100x}" for n in range(15_000)))
        house.wait(lambda: house.ask(large).status == 200)
        ending = [event("session_close", "small"), event("turn_start", "small")]
        assert house.ask(ending).status == 200


def is_refused(client: Client) -> bool:
    client.socket.settimeout(0.3)
    try:
        answer = client.answer()
    except TimeoutError:
        return False
    assert answer is not None
    (envelope,) = check_envelopes(answer)
    assert answer.status == 503
    assert "limits.in_hand_bytes_max" in envelope["error"]
    assert "nothing was changed" in envelope["error"]
    return True


def test_large_answers_that_nobody_reads_are_bounded_too(house: House) -> None:
    hashes = [f"{n:060x}" for n in range(30_000)]
    with house.client() as client, ExitStack() as stack:
        assert client.ask(turn_end("large", *hashes)).status == 200
        deaf = visitors(house, stack, 40)
        for each in deaf:
            each.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            each.send(request(encoded(event("session_map", "large"))) * 2)
        house.wait(lambda: client.ask(event("session_map", "large")).status == 503)
        assert client.ask(turn_end("small", "a")).status == 200
        for each in deaf:
            each.close()
        house.wait(lambda: client.ask(event("session_map", "large")).status == 200)


def test_one_request_alone_is_never_too_much() -> None:
    in_hand = BytesInHand(10)
    with in_hand.share() as first, in_hand.share() as second:
        for _ in range(5):
            first.grow(FREE_BYTES)
        second.grow(FREE_BYTES)
        with pytest.raises(UnavailableError):
            second.grow(1)
        second.grow(2, may_refuse=False)
        assert in_hand.total == 4 * FREE_BYTES + 2
        with pytest.raises(UnavailableError):  # it is not alone any more
            first.grow(1)
    assert in_hand.total == 0
