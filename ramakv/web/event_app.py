"""`POST /event`: ASGI middleware in front of a Quart app.

It is not a Quart view, because a client that hangs up cancels a view at its next await: an
event whose body was read is applied, whoever still listens. The rest (404, and any error on
another path) is plain Quart.
"""

from __future__ import annotations

from typing import Protocol

import structlog
import trio
from hypercorn.typing import (
    ASGIFramework,
    ASGIReceiveCallable,
    ASGISendCallable,
    ASGISendEvent,
    HTTPScope,
    Scope,
)
from msgspec import Raw

from ramakv import codec, events
from ramakv.config import Config, Limits
from ramakv.core.tallies import EventTallies
from ramakv.errors import (
    BodyTimeoutError,
    EventError,
    InternalError,
    MethodNotAllowedError,
    RamakvError,
    StoreError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
)
from ramakv.web.access import Bearer
from ramakv.web.batches import Placed, stages
from ramakv.web.in_hand import BytesInHand, Share
from ramakv.web.lazy_app import LazyApp

log = structlog.get_logger("ramakv.web")

PATH = "/event"
Headers = list[tuple[bytes, bytes]]

_READING = events.SessionMap | events.Health | events.ListEvents
"""Events that change nothing: whoever cannot be answered may ask again."""


class EventHandler(Protocol):
    """What answers events."""

    async def handle(self, event: events.Event) -> events.Data:
        """Answer one; raises EventError or StoreError, and then has changed nothing."""


def create_event_app(
    handler: EventHandler,
    config: Config,
    bearer: Bearer | None = None,
    tallies: EventTallies | None = None,
) -> EventMiddleware:
    """Build the app of the event listener.

    `bearer` replaces the configuration's token; `tallies` is where events are counted.
    """
    return EventMiddleware(
        LazyApp(_create_rest),
        handler,
        config.limits,
        bearer or Bearer(config.auth_token),
        tallies or EventTallies(codec.TYPES),
    )


def _create_rest() -> ASGIFramework:
    """Build what answers everything that is no event."""
    from quart import Response
    from quart_trio import QuartTrio
    from werkzeug.exceptions import HTTPException

    app = QuartTrio("ramakv", static_folder=None)

    @app.errorhandler(HTTPException)
    async def refuse(error: HTTPException) -> Response:
        message = error.description or error.name
        if error.code == 404:
            message = f"no such path; events go to POST {PATH}"
        return Response(
            codec.encode(codec.failure(None, message)),
            status=error.code,
            content_type="application/json",
        )

    rest: ASGIFramework = app
    return rest


class EventMiddleware:
    """Reads a body, decodes it, asks, answers. State lives behind `handler`, none here."""

    def __init__(
        self,
        rest: ASGIFramework,
        handler: EventHandler,
        limits: Limits,
        bearer: Bearer,
        tallies: EventTallies,
    ) -> None:
        self._rest = rest
        self._handler = handler
        self._limits = limits
        self._bearer = bearer
        self._tallies = tallies
        self._in_hand = BytesInHand(limits.in_hand_bytes_max)
        self._list_events = codec.describe_events()

    async def __call__(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._rest(scope, receive, send)
            return
        with self._in_hand.share() as share:
            try:
                body = await self._read_request(scope, receive, share)
                if body is None:
                    return  # hung up half-way: nothing was asked
                status, headers, answer = await self._answer(body, share)
            except EventError as error:
                self._tallies.refused(None, error.status)
                # The body may not have been read: the connection cannot go on.
                status, headers = error.status, [(b"connection", b"close"), *_headers_of(error)]
                answer = codec.encode(codec.failure(None, error))
            await _reply(send, status, headers, answer)

    async def _read_request(
        self, scope: HTTPScope, receive: ASGIReceiveCallable, share: Share
    ) -> bytes | None:
        """Check what the head says and read the body; None if the client went away."""
        if scope["method"] != "POST":
            raise MethodNotAllowedError(f"{PATH} takes POST, not {scope['method']}")
        if not self._bearer.admits(scope["headers"]):
            raise UnauthorizedError("invalid or missing bearer token")
        declared = next(
            (value for name, value in scope["headers"] if name == b"content-length"), b"0"
        )
        if int(declared) > self._limits.body_bytes_max:
            raise self._too_large()
        with trio.move_on_after(self._limits.body_timeout_seconds):
            return await self._read_body(receive, share)
        raise BodyTimeoutError(
            f"the body did not arrive within {self._limits.body_timeout_seconds:g} s"
        )

    async def _read_body(self, receive: ASGIReceiveCallable, share: Share) -> bytes | None:
        body = bytearray()  # not a list: a part may be one byte
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            part = message["body"]
            if len(body) + len(part) > self._limits.body_bytes_max:
                raise self._too_large()
            share.grow(len(part))
            if not message["more_body"]:
                return bytes(body + part) if body else part
            body += part

    def _too_large(self) -> TooLargeError:
        return TooLargeError(
            f"the body is over limits.body_bytes_max ({self._limits.body_bytes_max})"
        )

    async def _answer(self, body: bytes, share: Share) -> tuple[int, Headers, bytes]:
        try:
            found = codec.decode_body(body, self._limits)
        except codec.Refused as refused:
            self._tallies.refused(refused.type, refused.error.status)
            envelope = codec.failure(refused.type, refused.error)
            return refused.error.status, [], codec.encode(envelope)
        if isinstance(found, list):
            return 200, [], await self._answer_batch(found, share)
        return await self._answer_one(found, share)

    async def _answer_batch(self, batch: list[Raw], share: Share) -> bytes:
        """Answer many: those of one session in their order, different sessions side by side."""
        answers = [b""] * len(batch)
        decoded: list[Placed] = []
        room = _Room(self._limits.body_bytes_max, share)
        for place, raw in enumerate(batch):
            try:
                decoded.append((place, codec.decode_event(raw, self._limits)))
            except codec.Refused as refused:
                self._tallies.refused(refused.type, refused.error.status)
                answers[place] = codec.encode(codec.failure(refused.type, refused.error))

        async def answer(group: list[Placed]) -> None:
            for place, event in group:
                answers[place] = (await self._respond(event, room))[2]

        for stage in stages(decoded):
            async with trio.open_nursery() as nursery:
                for group in stage:
                    nursery.start_soon(answer, group)
        return b"[" + b",".join(answers) + b"]"

    async def _answer_one(self, raw: Raw, share: Share) -> tuple[int, Headers, bytes]:
        try:
            event = codec.decode_event(raw, self._limits)
        except codec.Refused as refused:
            error = refused.error
            self._tallies.refused(refused.type, error.status)
            answer = codec.encode(codec.failure(refused.type, error))
            return error.status, _headers_of(error), answer
        return await self._respond(event, _Room(None, share))

    async def _respond(self, event: events.AnyEvent, room: _Room) -> tuple[int, Headers, bytes]:
        """Have one event answered, and map whatever went wrong: here, and nowhere else."""
        type_, began = codec.type_of(event), trio.current_time()
        try:
            data: events.Data
            if isinstance(event, _READING):
                room.check()
            if isinstance(event, events.ListEvents):
                data = self._list_events
            else:
                data = await self._handler.handle(event)
            answer = codec.encode(codec.success(type_, data))
            room.take(len(answer), has_changed=not isinstance(event, _READING))
        except (EventError, StoreError) as error:
            refusal = _as_event_error(error)
        except Exception as error:
            log.exception("an event failed inside ramakv", type=type_, exc_info=error)
            refusal = InternalError("ramakv failed on this event; its log says why")
        else:
            self._tallies.answered(type_, 200, trio.current_time() - began)
            log.debug(
                "event", type=type_, session_id=getattr(event, "session_id", None), status=200
            )
            return 200, [], answer
        self._tallies.answered(type_, refusal.status, trio.current_time() - began)
        log.debug(
            "event",
            type=type_,
            session_id=getattr(event, "session_id", None),
            status=refusal.status,
            error=str(refusal),
        )
        answer = codec.encode(codec.failure(type_, refusal))
        return refusal.status, _headers_of(refusal), answer


class _Room:
    """What the answers to one request may take: a batch can ask for a map a thousand times."""

    def __init__(self, most: int | None, share: Share) -> None:
        self._most = most
        self._share = share
        self._size = 0
        self._is_full = False

    def check(self) -> None:
        """Raise TooLargeError where an answer did not fit already: no more need be made."""
        if self._is_full:
            raise TooLargeError(
                f"the answers to this batch are over limits.body_bytes_max ({self._most}); "
                "ask for the rest in another"
            )

    def take(self, size: int, *, has_changed: bool) -> None:
        """Count an answer. One that says what was done is given in any case, and is short."""
        if not has_changed and self._most is not None and self._size + size > self._most:
            self._is_full = True
            self.check()
        self._share.grow(size, may_refuse=not has_changed)
        self._size += size


def _as_event_error(error: RamakvError) -> EventError:
    """What the store cannot do, the daemon cannot: try later."""
    if isinstance(error, EventError):
        return error
    return UnavailableError(f"{error}; nothing was changed")


def _headers_of(error: EventError) -> Headers:
    if error.retry_after_seconds is not None:
        return [(b"retry-after", b"%d" % error.retry_after_seconds)]
    if isinstance(error, MethodNotAllowedError):
        return [(b"allow", b"POST")]
    if isinstance(error, UnauthorizedError):
        return [(b"www-authenticate", b"Bearer")]
    return []


async def _reply(send: ASGISendCallable, status: int, headers: Headers, body: bytes) -> None:
    start: ASGISendEvent = {
        "type": "http.response.start",
        "status": status,
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *headers,
        ],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": False})
