"""Requests to an ASGI app without a server in between."""

from __future__ import annotations

from typing import Any


async def post_event(app: Any, body: bytes) -> tuple[int, bytes]:
    """POST a body to `/event`; returns status and body of the answer."""
    status, answer = 0, b""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, answer
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            answer += message["body"]

    scope = {"type": "http", "method": "POST", "path": "/event", "headers": []}
    await app(scope, receive, send)
    return status, answer
