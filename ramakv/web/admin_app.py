"""The admin listener's app: plain Quart, its errors mapped here.

A client that hangs up cancels a view at its next await. That harms nothing: views look, and what
they have done is done by the actors. Sends are bounded and shielded by the connection. This module
imports Quart, so it is itself imported when the first request comes.
"""

from __future__ import annotations

from typing import Any

import structlog
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from ramakv import codec
from ramakv.errors import (
    EventError,
    InternalError,
    RamakvError,
    StoreError,
    UnavailableError,
)
from ramakv.web.admin import Admin
from ramakv.web.admin_actions import add_actions
from ramakv.web.admin_page import add_page, answer
from ramakv.web.gate import Gate
from ramakv.web.metrics import render

log = structlog.get_logger("ramakv.admin")

BODY_BYTES_MAX = 64 * 1024

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def create_admin_app(admin: Admin, gate: Gate) -> QuartTrio:
    """Build the app."""
    app = QuartTrio("ramakv", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = BODY_BYTES_MAX
    _map_errors(app)

    @app.before_request
    async def check_host() -> None:
        gate.check_host(request.scope["headers"])

    @app.after_request
    async def protect(response: Response) -> Response:
        response.headers.extend(SECURITY_HEADERS)
        response.headers.setdefault("Cache-Control", "no-store")
        if response.status_code >= 400 and request.method not in ("GET", "HEAD"):
            # The body may not have been read: the connection cannot go on.
            response.headers["Connection"] = "close"
        return response

    @app.get("/livez")
    async def livez() -> Response:
        return answer({"live": True, "phase": admin.phase})

    @app.get("/readyz")
    async def readyz() -> Response:
        """Say why only to those who carry the token; whether, to all: probes carry none."""
        checks = await admin.checks()
        ready = all(check.ok or not check.required for check in checks)
        degraded = [check.reason for check in checks if not check.ok and not check.required]
        found: dict[str, Any] = {"ready": ready, "degraded": bool(degraded), "phase": admin.phase}
        if gate.admits(request.scope["headers"]):
            found["checks"] = {check.name: _told(check.ok, check.reason) for check in checks}
        return answer(found, status=200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        gate.check_reading(request.scope["headers"])
        body, content_type = await render(admin.service, request.headers.get("Accept", ""))
        return Response(body, content_type=content_type)

    add_page(app, admin, gate)
    add_actions(app, admin, gate)
    return app


def _told(ok: bool, reason: str) -> dict[str, Any]:
    return {"ok": ok, "reason": reason} if reason else {"ok": ok}


def _map_errors(app: QuartTrio) -> None:
    """Answer every error with the envelope that events have."""

    @app.errorhandler(RamakvError)
    async def refuse(error: RamakvError) -> Response:
        refusal = _as_refusal(error)
        response = answer(codec.failure(None, refusal), status=refusal.status)
        if refusal.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        if refusal.retry_after_seconds is not None:
            response.headers["Retry-After"] = str(refusal.retry_after_seconds)
        return response

    @app.errorhandler(HTTPException)
    async def refuse_http(error: HTTPException) -> Response:
        message = error.description or error.name
        if error.code == 404:
            message = "no such path; the page is at /"
        response = answer(codec.failure(None, message), status=error.code or 500)
        if (allowed := getattr(error, "valid_methods", None)) is not None:
            response.headers["Allow"] = ", ".join(sorted(allowed))
        return response

    @app.errorhandler(Exception)
    async def fail(error: Exception) -> Response:
        log.exception("an admin request failed", exc_info=error)
        refusal = InternalError("ramakv failed on this request; its log says why")
        return answer(codec.failure(None, refusal), status=500)


def _as_refusal(error: RamakvError) -> EventError:
    if isinstance(error, EventError):
        return error
    if isinstance(error, StoreError):
        return UnavailableError(f"{error}; nothing was changed")
    return InternalError(str(error))
