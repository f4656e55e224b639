"""A fake daemon and engine on real loopback HTTP, for the tests of `ramakv replay`."""

from __future__ import annotations

import json
import re
import threading
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

Reply = tuple[int, Any]


class FakeServer:
    """A daemon and an engine in one: notes what came, in order, and fails on demand.

    `answer` may return a status and a body for a request, None for the usual reply, or status
    0 to hang up without any.
    """

    def __init__(self) -> None:
        self.url = ""
        self.events: list[tuple[str, str]] = []
        self.headers: list[bytes] = []
        self.answer: Callable[[str, dict[str, Any]], Awaitable[Reply | None]] | None = None
        self.stored: set[str] = set()
        self.connections = 0

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(
                partial(trio.serve_tcp, self._connection, 0, host="127.0.0.1")
            )
            self.url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
            task_status.started()

    async def _connection(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        received = b""
        while True:
            while not (end := _end_of_request(received)):
                try:
                    part = await stream.receive_some()
                except trio.BrokenResourceError:
                    return
                if not part:
                    return
                received += part
            head, body = received[:end].split(b"\r\n\r\n", 1)
            received = received[end:]
            self.headers.append(head)
            path = head.split()[1].decode()
            status, reply = await self._reply(path, json.loads(body or b"{}"))
            if not status:
                return
            text = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            length = f"Content-Length: {len(text)}\r\n\r\n"
            await stream.send_all(f"HTTP/1.1 {status} X\r\n{length}".encode() + text)

    async def _reply(self, path: str, message: dict[str, Any]) -> Reply:
        kind = message.get("type", path)
        if kind not in {"health", "/"}:
            self.events.append((kind, message.get("session_id", "")))
        if self.answer is not None:
            reply = await self.answer(kind, message)
            if reply is not None:
                return reply
        if path == "/event":
            return 200, {"ok": True, "type": kind, "data": {}}
        hashes = message.get("chunk_hashes", [])
        if path == "/engine/store":
            self.stored.update(hashes)
        missing = [h for h in hashes if h not in self.stored]
        on_disk = sum(h not in missing and h.endswith("0") for h in hashes)
        found = {
            "LocalCPUBackend": len(hashes) - len(missing) - on_disk,
            "LocalDiskBackend": on_disk,
        }
        return (200 if path != "/" and hashes else 400), {
            "status": "success",
            "num_chunks": len(hashes),
            "found": found,
            "num_missing": len(missing),
            "missing": missing,
        }


@asynccontextmanager
async def serving() -> AsyncIterator[FakeServer]:
    server = FakeServer()
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve)
        yield server
        nursery.cancel_scope.cancel()


@contextmanager
def serving_in_thread() -> Iterator[FakeServer]:
    """Serve from another thread, for the command that runs trio itself."""
    server = FakeServer()
    started = threading.Event()
    stop: list[Callable[[], object]] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve)
            token = trio.lowlevel.current_trio_token()
            stop.append(partial(token.run_sync_soon, nursery.cancel_scope.cancel))
            started.set()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    assert started.wait(30)
    try:
        yield server
    finally:
        stop[0]()
        thread.join(30)


def _end_of_request(received: bytes) -> int:
    """Where the first request ends; 0 as long as it is not all there."""
    head_end = received.find(b"\r\n\r\n")
    if head_end < 0:
        return 0
    length = re.search(rb"content-length: (\d+)", received[:head_end], re.IGNORECASE)
    end = head_end + 4 + (int(length[1]) if length else 0)
    return end if len(received) >= end else 0
