"""One request in an ASGI app: what the app receives, and how it sends."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
import trio

if TYPE_CHECKING:
    from hypercorn.typing import ASGIReceiveEvent, ASGISendEvent, Scope

    from ramakv.web.connection import Connection

    AppSend = Callable[[ASGISendEvent | None], Awaitable[None]]


class ClientGoneError(OSError):
    """A response goes on, and nobody is there to take it. ASGI has apps told so."""


def json_error(reason: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return headers and body of an error that no app answers."""
    body = msgspec.json.encode({"ok": False, "error": reason})
    length = b"%d" % len(body)
    return [(b"content-type", b"application/json"), (b"content-length", length)], body


class AppCall:
    """One request in the app: what the app receives, and how it sends."""

    def __init__(self, connection: Connection, scope: Scope, send: AppSend) -> None:
        self.scope = scope
        self.waiting: trio.CancelScope | None = None
        self._connection = connection
        self._send = send
        self._messages: deque[Any] = deque()
        self._disconnected = False

    async def put(self, message: ASGIReceiveEvent) -> None:
        """Take a message for the app; HTTPStream calls this."""
        if message["type"] == "http.disconnect":
            self._disconnected = True
            if self.waiting is not None:
                self.waiting.cancel()
        elif self._messages and not message["body"]:  # type: ignore[typeddict-item]
            self._messages[-1]["more_body"] = False  # the end needs no message of its own
        else:
            self._messages.append(message)

    async def receive(self) -> ASGIReceiveEvent:
        """Return the next message; the app calls this."""
        while not self._messages:
            if self._disconnected:
                return {"type": "http.disconnect"}
            await self._connection.read_for(self)
        return self._messages.popleft()  # type: ignore[no-any-return]

    async def send(self, message: ASGISendEvent) -> None:
        """Send a message of the app. The head waits, to leave with the first of the body."""
        await self._send(message)
        if message["type"] == "http.response.start":
            self._connection.was_refused = message["status"] == 503
        elif message["type"] == "http.response.body":
            await self._connection.flush()
            if message.get("more_body"):
                if self._connection.broken:
                    raise ClientGoneError("the client takes no more")
                await trio.lowlevel.checkpoint()  # writes to a fast client never block

    async def finish(self) -> None:
        """Answer for an app that did not, and end the exchange."""
        if not self._disconnected and self._connection.protocol.may_answer:
            headers, body = json_error("internal error")
            head: Any = {"type": "http.response.start", "status": 500, "headers": headers}
            await self.send(head)
            await self.send({"type": "http.response.body", "body": body, "more_body": False})
        await self._send(None)
        await self._connection.flush()
