"""What operators may change. Sessions' events go to the router, as those of agents do."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import structlog
from quart import Response, request
from quart_trio import QuartTrio

from ramakv import codec, events
from ramakv.errors import BadRequestError
from ramakv.web.admin import Admin
from ramakv.web.admin_page import answer
from ramakv.web.gate import Gate

log = structlog.get_logger("ramakv.admin")

T = TypeVar("T")


class SessionAction(msgspec.Struct):
    """Which session to end, or to let sleep."""

    session_id: str


class PrefetchingAction(msgspec.Struct):
    """Whether prefetches wait until they are let go on."""

    paused: bool


def add_actions(app: QuartTrio, admin: Admin, gate: Gate) -> None:
    """Add the actions. Each is done once, however often it is asked for."""

    @app.post("/api/session/close")
    async def close() -> Response:
        return await end_session("session_close")

    @app.post("/api/session/suspend")
    async def suspend() -> Response:
        return await end_session("session_suspend")

    async def end_session(type_: str) -> Response:
        gate.check_action(request.scope["headers"])
        wanted = await _body(SessionAction)
        service = admin.service
        body = msgspec.json.encode({"type": type_, "session_id": wanted.session_id})
        try:
            event = codec.decode_event(msgspec.Raw(body), service.config.limits)
        except codec.Refused as refused:
            raise refused.error from None
        assert isinstance(event, events.SessionEvent)
        _log(type_, session_id=wanted.session_id)
        return answer(codec.success(type_, await service.handle(event)))

    @app.post("/api/dead-letters/retry")
    async def retry_dead_letters() -> Response:
        gate.check_action(request.scope["headers"])
        _log("retry dead letters")
        return answer({"ok": True, "data": {"queued": await admin.service.dead_letters.retry()}})

    @app.post("/api/prefetching")
    async def prefetching() -> Response:
        gate.check_action(request.scope["headers"])
        wanted = await _body(PrefetchingAction)
        _log("pause prefetching" if wanted.paused else "resume prefetching")
        admin.service.backend.pause(wanted.paused)
        return answer({"ok": True, "data": {"paused": wanted.paused}})


def _log(action: str, **facts: Any) -> None:
    client = request.scope.get("client")
    log.info("an operator acts", action=action, client=client[0] if client else None, **facts)


async def _body(kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.get_data(cache=False), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"the body is not what this action takes: {error}") from error
