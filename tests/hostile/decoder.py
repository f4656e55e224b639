"""What must be true of the decoder whatever bytes it is given; fuzzers and hypothesis feed it."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import msgspec

from ramakv import codec
from ramakv.config import Limits
from ramakv.errors import BadRequestError, TooLargeError

LIMITS = Limits(
    batch_events_max=8, chunks_per_session_max=20, hash_chars_max=12, session_id_chars_max=12
)
SECONDS_MAX = 5.0
"""Far more than the largest body takes on a slow machine; none may take for ever."""


def check(data: bytes) -> int:
    """Decode bytes as `POST /event` does; returns how many events were accepted."""
    began = time.perf_counter()
    accepted = 0
    try:
        found = codec.decode_body(data, LIMITS)
    except codec.Refused as refused:
        _check_refusal(refused)
        found = []
    for raw in found if isinstance(found, list) else [found]:
        try:
            event = codec.decode_event(raw, LIMITS)
        except codec.Refused as refused:
            _check_refusal(refused)
            continue
        accepted += 1
        _check_is_json(bytes(raw))
        _check_again(event)
    assert time.perf_counter() - began < SECONDS_MAX
    return accepted


def _check_refusal(refused: codec.Refused) -> None:
    assert type(refused.error) in (BadRequestError, TooLargeError)
    answer = codec.encode(codec.failure(refused.type, refused.error))
    told = json.loads(answer)
    assert told["ok"] is False
    assert 0 < len(told["error"]) <= codec.ECHO_CHARS_MAX
    assert 0 < len(told.get("type", "?")) <= codec.ECHO_CHARS_MAX


def _check_is_json(raw: bytes) -> None:
    """Another parser must take it as well: whoever reads the same bytes reads the same event."""
    with suppress(RecursionError):
        json.loads(raw, parse_int=str, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def _check_again(event: codec.AnyEvent) -> None:
    """What was accepted can be written, and read as the same."""
    try:
        written = msgspec.json.encode(event)
    except OverflowError:  # a number that is read, and kept, but has no place in 64 bits
        written = json.dumps(msgspec.to_builtins(event)).encode()
    except RecursionError:
        return
    assert codec.decode_event(written, LIMITS) == event
