"""Replies of the embedded engine: JSON, refusals, and query parameters read as FastAPI does."""

from __future__ import annotations

from typing import Any

import msgspec
from quart import Response, request

_NUMBERS_END = 2**63  # what cannot be sent back is refused

_TRUE = frozenset({"true", "1", "on", "t", "y", "yes"})
_FALSE = frozenset({"false", "0", "off", "f", "n", "no"})


class RefusedError(Exception):
    """The request is answered with this status and body."""

    def __init__(self, status: int, body: object) -> None:
        """A body that is a text stands for `{"error": text}`."""
        self.status = status
        self.body = {"error": body} if isinstance(body, str) else body
        super().__init__(status, self.body)


def refuse(status: int, error: str, message: str) -> RefusedError:
    """Return the refusal that most endpoints use."""
    return RefusedError(status, {"error": error, "message": message})


def reply(answer: object, status: int = 200) -> Response:
    """Return an answer as JSON."""
    return Response(msgspec.json.encode(answer), status, content_type="application/json")


def reply_indented(answer: object, content_type: str) -> Response:
    """Return an answer as JSON for people, under this content type."""
    content = msgspec.json.format(msgspec.json.encode(answer), indent=2)
    return Response(content, content_type=content_type)


def reply_text(text: str) -> Response:
    """Return plain text."""
    return Response(text, content_type="text/plain; charset=utf-8")


def query_int(name: str) -> int | None:
    """Return an integer of the query, None where it is absent. Refuses other values with 422."""
    text = request.args.get(name)
    if text is None:
        return None
    try:
        number = int(text)
        if abs(number) >= _NUMBERS_END:
            raise ValueError
    except ValueError:
        what = "Input should be a valid integer, unable to parse string as an integer"
        raise _unprocessable("int_parsing", ["query", name], what, text) from None
    return number


def query_bool(name: str) -> bool:
    """Return a boolean of the query, False where it is absent. Refuses other values with 422."""
    text = request.args.get(name)
    if text is None:
        return False
    word = text.lower()
    if word not in _TRUE | _FALSE:
        what = "Input should be a valid boolean, unable to interpret input"
        raise _unprocessable("bool_parsing", ["query", name], what, text)
    return word in _TRUE


async def body_bytes() -> bytes:
    """Return the body as it came, whatever its content type."""
    data: bytes = await request.get_data(cache=False, as_text=False, parse_form_data=False)
    return data


def decode_object(data: bytes) -> dict[str, Any]:
    """Return the body as an object. Refuses anything else with 422."""
    if not data:
        raise _unprocessable("missing", ["body"], "Field required", None)
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _unprocessable("json_invalid", ["body", 0], "JSON decode error", {}) from error
    if not isinstance(body, dict):
        what = "Input should be a valid dictionary or object to extract fields from"
        raise _unprocessable("model_attributes_type", ["body"], what, None)
    return body


def body_text(body: dict[str, Any], name: str) -> str:
    """Return a text that the body must have."""
    if name not in body:
        raise _unprocessable("missing", ["body", name], "Field required", {})
    value = body[name]
    if not isinstance(value, str):
        what = "Input should be a valid string"
        raise _unprocessable("string_type", ["body", name], what, value)
    return value


def body_count(body: dict[str, Any], name: str, default: int | None) -> int | None:
    """Return a count that the body may have."""
    value = body.get(name, default)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        what = "Input should be a valid integer"
        raise _unprocessable("int_type", ["body", name], what, value)
    return None if value is None else max(0, value)


def _unprocessable(kind: str, where: list[str | int], what: str, value: Any) -> RefusedError:
    return RefusedError(
        422, {"detail": [{"type": kind, "loc": where, "msg": what, "input": value}]}
    )
