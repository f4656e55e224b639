"""Between bytes and events: decoding, checking, the contract's error texts, `list_events`."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import msgspec
from msgspec import UNSET

from ramakv.config import Limits
from ramakv.errors import BadRequestError, EventError, TooLargeError
from ramakv.events import (
    EVENTS,
    AnyEvent,
    Data,
    Event,
    Failure,
    ListEvents,
    SessionEvent,
    SessionFork,
    SnapshotRestore,
    Success,
    TurnEnd,
    TurnStart,
)


class Refused(Exception):  # noqa: N818 - the outcome of decoding, not a fault
    """An event that could not be decoded: its type, if that could be read, and why."""

    def __init__(self, type_: str | None, error: EventError) -> None:
        super().__init__(str(error))
        self.type = type_
        self.error = error


UNKNOWN_TYPE_CHARS_MAX = 64
"""How much of a type that no event has comes back: enough to know it by."""

ECHO_CHARS_MAX = 1000
"""The most that an answer repeats of what a client sent; some send megabytes."""

_TYPES: dict[type[Event], str] = {kind: type_ for type_, kind in EVENTS.items()}
_TYPES[ListEvents] = "list_events"
TYPES = tuple(_TYPES.values())
"""Every type that a request can have."""

encode = msgspec.json.Encoder().encode
_is_batch = re.compile(rb"[ \t\r\n]*\[").match
_decode_event = msgspec.json.Decoder(AnyEvent).decode
_decode_batch = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_loosely = msgspec.json.Decoder().decode


def success(type_: str, data: Data) -> Success[Data]:
    """Wrap what an event is answered with."""
    return Success(True, type_, data)


def failure(type_: str | None, error: EventError | str) -> Failure:
    """Wrap why an event was refused."""
    return Failure(False, UNSET if type_ is None else _shortened(type_), _shortened(str(error)))


def _shortened(text: str) -> str:
    return text if len(text) <= ECHO_CHARS_MAX else f"{text[: ECHO_CHARS_MAX - 1]}…"


def type_of(event: Event) -> str:
    """The `type` that an event has on the wire."""
    return _TYPES[type(event)]


def decode_body(body: bytes, limits: Limits) -> msgspec.Raw | list[msgspec.Raw]:
    """Tell one event from a batch. Raises Refused."""
    if not body.isascii():
        try:
            body.decode()  # fields that no event knows are skipped, and not looked at otherwise
        except UnicodeDecodeError as error:
            raise Refused(None, _not_json(error)) from error
    if not _is_batch(body):
        return msgspec.Raw(body)
    try:
        batch = _decode_batch(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(None, _not_json(error)) from error
    if len(batch) > limits.batch_events_max:
        raise Refused(
            None,
            TooLargeError(
                f"a batch of {len(batch)} events is over limits.batch_events_max "
                f"({limits.batch_events_max})"
            ),
        )
    return batch


def decode_event(raw: msgspec.Raw | bytes, limits: Limits) -> AnyEvent:
    """Decode and check one event. Raises Refused."""
    try:
        event = _decode_event(raw)
    except msgspec.ValidationError as error:
        raise _why_invalid(raw, error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(None, _not_json(error)) from error
    if isinstance(event, SessionEvent):
        try:
            _check(event, limits)
        except EventError as error:
            raise Refused(type_of(event), error) from error
    return event


@functools.cache
def describe_events() -> dict[str, Any]:
    """What `list_events` answers."""
    return {"events": {name: _describe(kind) for name, kind in EVENTS.items()}}


def _describe(kind: type[Event]) -> dict[str, Any]:
    fields = msgspec.structs.fields(kind)
    return {
        "description": inspect.getdoc(kind),
        "required": [field.name for field in fields if field.required],
        "optional": [field.name for field in fields if not field.required],
        "schema": msgspec.json.schema(kind),
    }


def _check(event: SessionEvent, limits: Limits) -> None:
    """Check what types cannot say: limits from the configuration, and texts programs match on."""
    _check_length("session_id", event.session_id, limits)
    match event:
        case TurnEnd():
            hashes = event.kv_transfer_params.chunk_hashes
            if len(hashes) > limits.chunks_per_session_max:
                raise TooLargeError(
                    f"chunk_hashes: {len(hashes)} hashes are over "
                    f"limits.chunks_per_session_max ({limits.chunks_per_session_max})"
                )
            if hashes and (longest := max(map(len, hashes))) > limits.hash_chars_max:
                raise TooLargeError(
                    f"chunk_hashes: a hash of {longest} characters is over "
                    f"limits.hash_chars_max ({limits.hash_chars_max})"
                )
        case SnapshotRestore(source_session_id=str(source)):
            _check_length("source_session_id", source, limits)
        case SessionFork(child_session_id=str(child)):
            _check_length("child_session_id", child, limits)
            if child == event.session_id:
                raise BadRequestError("child_session_id must not be the session itself")
        case TurnStart(lookup_id=str(lookup)):
            _check_length("lookup_id", lookup, limits)


def _check_length(field: str, value: str, limits: Limits) -> None:
    if len(value) > limits.session_id_chars_max:
        raise TooLargeError(
            f"{field}: {len(value)} characters are over limits.session_id_chars_max "
            f"({limits.session_id_chars_max})"
        )


def _not_json(error: Exception) -> BadRequestError:
    if isinstance(error, RecursionError):
        return BadRequestError("the body is nested too deeply")
    return BadRequestError(f"the body is not JSON: {error}")


def _why_invalid(raw: msgspec.Raw | bytes, error: msgspec.ValidationError) -> Refused:
    """Find the contract's words for what msgspec objected to."""
    try:
        found = _decode_loosely(raw)
    except msgspec.ValidationError:
        return Refused(None, BadRequestError("a number is out of the range that can be read"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as worse:
        return Refused(None, _not_json(worse))
    if not isinstance(found, dict):
        return Refused(None, BadRequestError(f"expected a JSON object, got {_json_name(found)}"))
    type_ = found.get("type")
    if not isinstance(type_, str) or not type_:
        return Refused(None, BadRequestError("missing or empty 'type' field"))
    kind = EVENTS.get(type_)
    if kind is None:
        return Refused(type_[:UNKNOWN_TYPE_CHARS_MAX], BadRequestError("unknown event type"))
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in found:
            return Refused(type_, BadRequestError(f"missing required field '{field.name}'"))
    return Refused(type_, BadRequestError(_explain(type_, str(error))))


def _explain(type_: str, text: str) -> str:
    """Turn "Expected `str`, got `int` - at `$.session_id`" into "session_id: expected str, …"."""
    what, _, where = text.partition(" - at `$")
    path = where.strip("`.")
    what = re.sub(r"^([A-Z])", lambda first: first[1].lower(), what).replace("`", "")
    if what == "expected str of length >= 1":
        if path.endswith("session_id"):
            return f"{path} must not be empty"
        what = "expected a non-empty string, got an empty one"
    explained = f"{path}: {what}" if path else what
    if type_ == "turn_end" and not path.startswith("session_id"):
        return f"invalid turn_end payload: {explained}"
    return explained


def _json_name(value: object) -> str:
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
    }
    return names.get(type(value), "null")
