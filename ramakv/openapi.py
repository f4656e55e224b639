"""The OpenAPI document of both listeners, made of the structs that decode and encode."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from ramakv import __version__, events
from ramakv.config import Config, Limits
from ramakv.errors import (
    BadRequestError,
    BodyTimeoutError,
    ConflictError,
    EventError,
    ForbiddenError,
    TooLargeError,
)
from ramakv.web.admin_actions import PrefetchingAction, SessionAction
from ramakv.web.admin_page import QUERY_CHARS_MAX
from ramakv.web.admin_views import Found, SessionView
from ramakv.web.gate import ACTION_HEADER
from ramakv.web.residency_view import ResidencyView
from ramakv.web.snapshot import Snapshot

Schema = dict[str, Any]

_COMPONENTS = "#/components/schemas/"
_FAILURE: Schema = {"$ref": f"{_COMPONENTS}Failure"}
_ABOUT = (
    "Session-aware coordination of an LLM KV cache. Agents send events to POST /event; operators "
    "look, and act, at the other paths, which another address serves. Lengths are those of the "
    "default configuration."
)
_OF_EVENTS_ALONE = (BodyTimeoutError, ConflictError)
_OF_BODIES_ALONE = (BadRequestError, TooLargeError)
_OF_OPERATORS_ALONE = (ForbiddenError,)


def document() -> Schema:
    """Make the document."""
    config = Config()
    schemas = _schemas(config.limits)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ramakv",
            "version": __version__,
            "summary": "Session-aware coordination of an LLM KV cache",
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": f"http://{config.listen_addr}", "description": "events"}],
        "security": [{}, {"bearer": []}],
        "paths": {
            "/event": {"post": _event_operation()},
            **_admin_paths(f"http://{config.admin.listen_addr}"),
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "auth_token, where one is configured.",
                }
            },
        },
    }


# Schemas -----------------------------------------------------------------------------------


def _data_of(kind: type[events.Event]) -> type[msgspec.Struct]:
    """Find the struct of an event's answer by its name: TurnEnd is answered with TurnEndData."""
    found: type[msgspec.Struct] = getattr(events, f"{kind.__name__}Data")
    return found


def _schemas(limits: Limits) -> Schema:
    kinds: tuple[type[events.Event], ...] = (*events.EVENTS.values(), events.ListEvents)
    structs = (*kinds, *map(_data_of, events.EVENTS.values()), *_admin_structs())
    _, schemas = msgspec.json.schema_components(
        [*structs, events.Failure], ref_template=_COMPONENTS + "{name}"
    )
    for name in (kind.__name__ for kind in kinds):
        _bound(schemas[name], limits)
    for name in ("KVTransferParams", "SessionAction"):
        _bound(schemas[name], limits)
    for schema in schemas.values():
        _tidy(schema)
    failure = schemas["Failure"]
    failure["properties"]["ok"] = {"const": False}
    failure["required"].remove("type")  # it may be unset, which the schema of a type cannot say
    replies = {}
    for type_, kind in events.EVENTS.items():
        data = {"$ref": f"{_COMPONENTS}{_data_of(kind).__name__}"}
        replies[f"{kind.__name__}Reply"] = _reply(type_, data)
    replies["ListEventsReply"] = _reply("list_events", {"type": "object"})
    any_event = {
        "oneOf": [{"$ref": f"{_COMPONENTS}{kind.__name__}"} for kind in kinds],
        "discriminator": {
            "propertyName": "type",
            "mapping": {
                str(kind.__struct_config__.tag): f"{_COMPONENTS}{kind.__name__}" for kind in kinds
            },
        },
    }
    any_reply = {"oneOf": [*({"$ref": _COMPONENTS + name} for name in replies), _FAILURE]}
    return dict(
        sorted({**schemas, **replies, "AnyEvent": any_event, "AnyReply": any_reply}.items())
    )


def _reply(type_: str, data: Schema) -> Schema:
    return {
        "type": "object",
        "description": f"A {type_} that was done.",
        "properties": {"ok": {"const": True}, "type": {"const": type_}, "data": data},
        "required": ["ok", "type", "data"],
    }


def _bound(schema: Schema, limits: Limits) -> None:
    """Write down the lengths that the configuration allows; types cannot know them."""
    for name, field in schema["properties"].items():
        for part in field.get("anyOf", [field]):
            if name == "chunk_hashes":
                part["maxItems"] = limits.chunks_per_session_max
                part["items"]["maxLength"] = limits.hash_chars_max
            elif name.endswith("_id") and part.get("type") == "string":
                part |= {"minLength": 1, "maxLength": limits.session_id_chars_max}


def _tidy(schema: Schema) -> None:
    """Say once what msgspec says twice: an integer is a number."""
    if not schema.get("required", True):
        del schema["required"]
    for field in schema.get("properties", {}).values():
        parts = field.get("anyOf", ())
        if {"type": "number"} in parts and {"type": "integer"} in parts:
            parts.remove({"type": "integer"})


# POST /event -------------------------------------------------------------------------------


def _event_operation() -> Schema:
    event, reply = ({"$ref": f"{_COMPONENTS}Any{what}"} for what in ("Event", "Reply"))
    batch = {
        "type": "array",
        "items": {"anyOf": [event, {"description": "Anything else fails alone."}]},
        "maxItems": Config().limits.batch_events_max,
    }
    return {
        "operationId": "sendEvent",
        "summary": "Send an event, or an array of them",
        "description": (
            "The events of an array run in their order, those of different sessions side by side. "
            "Fields that an event does not know are ignored."
        ),
        "requestBody": {
            "required": True,
            "content": _json({"anyOf": [event, batch]}),
        },
        "responses": {
            "200": {
                "description": "Done; or the replies to an array, in its order.",
                "content": _json({"anyOf": [reply, {"type": "array", "items": reply}]}),
            },
            **_refusals(but=_OF_OPERATORS_ALONE),
        },
    }


def _refusals(*, but: tuple[type[EventError], ...]) -> Schema:
    """Make the table of errors, without some."""
    kinds = sorted(set(EventError.__subclasses__()) - set(but), key=lambda kind: kind.status)
    return {str(kind.status): _refusal(kind) for kind in kinds}


def _refusal(kind: type[EventError]) -> Schema:
    about = inspect.getdoc(kind) or ""
    response: Schema = {"description": about, "content": _json(_FAILURE)}
    if kind.retry_after_seconds is not None:
        response["headers"] = {
            "Retry-After": {"description": "In seconds.", "schema": {"type": "integer"}}
        }
    return response


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


# Operators ---------------------------------------------------------------------------------


class Live(msgspec.Struct):
    """The process runs and answers."""

    live: bool
    phase: str


class CheckResult(msgspec.Struct):
    """One thing that was looked at."""

    ok: bool
    reason: str | msgspec.UnsetType = msgspec.UNSET


class Ready(msgspec.Struct):
    """Whether events can be taken; `degraded`: they can, and something that helps is missing."""

    ready: bool
    degraded: bool
    phase: str
    checks: dict[str, CheckResult] | msgspec.UnsetType = msgspec.UNSET


class Queued(msgspec.Struct):
    """How many dead letters are evictions again."""

    queued: int


class Paused(msgspec.Struct):
    """Whether prefetches wait now."""

    paused: bool


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that operators may ask for, or do."""

    method: str
    path: str
    summary: str
    answer: type[msgspec.Struct] | str
    """A struct; or the media type of something that is none."""
    asks: str = ""
    """The query's one parameter."""
    body: type[msgspec.Struct] | None = None
    """What an action takes."""
    envelope: str = ""
    """The `type` of an answer in an event's envelope; "-": in one without."""
    also: type[msgspec.Struct] | None = None
    """What 503 answers with, where that is no error."""
    is_open: bool = False
    """Answered without a token, too."""

    @property
    def is_action(self) -> bool:
        """Whether it changes something."""
        return self.method == "post"


OPERATIONS = (
    Operation("get", "/livez", "Does the process run?", Live, is_open=True),
    Operation("get", "/readyz", "Can it take events?", Ready, also=Ready, is_open=True),
    Operation("get", "/metrics", "Figures for Prometheus", "text/plain"),
    Operation("get", "/api/overview", "Everything at a glance", Snapshot),
    Operation("get", "/api/stream", "The same once a second, as it changes", "text/event-stream"),
    Operation("get", "/api/session", "One session's page", SessionView, asks="id"),
    Operation("get", "/api/residency", "Who stays in the hot tier, and why", ResidencyView),
    Operation("get", "/api/search", "Sessions by id, holders by chunk hash", Found, asks="q"),
    Operation(
        *("post", "/api/session/close", "End a session", events.SessionCloseData),
        body=SessionAction,
        envelope="session_close",
    ),
    Operation(
        *("post", "/api/session/suspend", "Let a session sleep", events.SessionSuspendData),
        body=SessionAction,
        envelope="session_suspend",
    ),
    Operation(*("post", "/api/dead-letters/retry", "Try dead letters again", Queued), envelope="-"),
    Operation(
        *("post", "/api/prefetching", "Pause prefetching, or go on", Paused),
        body=PrefetchingAction,
        envelope="-",
    ),
)


def _admin_structs() -> Iterator[type[msgspec.Struct]]:
    for operation in OPERATIONS:
        for kind in (operation.answer, operation.body, operation.also):
            if isinstance(kind, type):
                yield kind


def _admin_paths(server: str) -> Schema:
    paths: Schema = {}
    servers = [{"url": server, "description": "operators (admin.listen_addr)"}]
    for operation in OPERATIONS:
        path = paths.setdefault(operation.path, {"servers": servers})
        path[operation.method] = _admin_operation(operation)
    return paths


def _admin_operation(operation: Operation) -> Schema:
    takes = operation.body or operation.asks
    responses = {
        "200": {"description": "As asked.", "content": _content(operation)},
        **_refusals(but=_OF_EVENTS_ALONE if takes else _OF_EVENTS_ALONE + _OF_BODIES_ALONE),
    }
    if operation.also is not None:
        schema = {"$ref": _COMPONENTS + operation.also.__name__}
        responses["503"] = {"description": "Not now; it says why.", "content": _json(schema)}
    described: Schema = {
        "operationId": operation.method + re.sub(r"\W", "", operation.path.title()),
        "summary": operation.summary,
        "parameters": list(_parameters(operation)),
        "responses": responses,
    }
    if operation.body is not None:
        schema = {"$ref": _COMPONENTS + operation.body.__name__}
        described["requestBody"] = {"required": True, "content": _json(schema)}
    if operation.is_open:
        described["security"] = []
    return described


def _parameters(operation: Operation) -> Iterator[Schema]:
    if operation.asks:
        schema = {"type": "string", "minLength": 1, "maxLength": QUERY_CHARS_MAX}
        yield {"name": operation.asks, "in": "query", "required": True, "schema": schema}
    if operation.is_action:
        about = "Pages of other sites cannot send it; any value will do."
        yield {
            "name": ACTION_HEADER.decode().title(),
            "in": "header",
            "required": True,
            "description": about,
            "schema": {"type": "string"},
            "example": "1",
        }


def _content(operation: Operation) -> Schema:
    answer = operation.answer
    if isinstance(answer, str):
        return {answer: {"schema": {"type": "string"}}}
    data = {"$ref": _COMPONENTS + answer.__name__}
    match operation.envelope:
        case "":
            return _json(data)
        case "-":
            fields = {"ok": {"const": True}, "data": data}
            return _json({"type": "object", "properties": fields, "required": ["ok", "data"]})
        case type_:
            return _json(_reply(type_, data))
