"""The stream of snapshots that viewers of the page get: one a second, the same for all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import trio

from ramakv import codec
from ramakv.errors import UnavailableError

VIEWERS_MAX: Final = 32
RETRY_MS: Final = 2000


class Viewer:
    """One viewer. One that reads slowly gets the newest snapshot, and not all of them."""

    def __init__(self, hello: bytes) -> None:
        self._hello = hello
        self._unread = b""
        self._news = trio.Event()
        self._news.set()
        self._ended = False

    def show(self, message: bytes) -> None:
        """Have it read this, in place of what it has not read yet."""
        self._unread = message
        self._news.set()

    def end(self) -> None:
        """Have its stream end."""
        self._ended = True
        self._news.set()

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Messages, as server-sent events, until the end."""
        return self

    async def __anext__(self) -> bytes:
        """Wait for the next message."""
        await self._news.wait()
        if self._ended:
            raise StopAsyncIteration
        news, self._hello, self._unread = self._hello + self._unread, b"", b""
        self._news = trio.Event()
        return news


class Feed:
    """Shows snapshots to viewers: never more than a bounded number of them."""

    def __init__(self) -> None:
        self._viewers: set[Viewer] = set()

    def __bool__(self) -> bool:
        """Whether anybody looks."""
        return bool(self._viewers)

    def check_room(self) -> None:
        """Raise UnavailableError where too many look already."""
        if len(self._viewers) >= VIEWERS_MAX:
            raise UnavailableError(f"{VIEWERS_MAX} look already; close a page, or try again")

    def join(self, hello: bytes) -> Viewer:
        """Let one more look, until `leave`. Raises UnavailableError where too many do."""
        self.check_room()
        viewer = Viewer(hello)
        self._viewers.add(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Let one look no more."""
        self._viewers.discard(viewer)

    def show(self, message: bytes) -> None:
        """Show everybody a message."""
        for viewer in self._viewers:
            viewer.show(message)

    def end(self) -> None:
        """End all streams."""
        for viewer in self._viewers:
            viewer.end()


def message(kind: str, data: object) -> bytes:
    """Write a server-sent event. JSON has no line breaks of its own."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), codec.encode(data))


def hello(data: object) -> bytes:
    """Write the first one: also says how soon to come back after the stream broke off."""
    return b"retry: %d\n" % RETRY_MS + message("hello", data)
