"""The LMCache that the daemon evicts from: it outlives the daemon, and remembers every evict."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import msgspec
import trio

from ramakv.config import Limits
from ramakv.web.server import open_sockets, serve_http
from tests.daemons import free_port
from tests.http_server import read_body, reply

Mood = Literal["well", "slow", "down", "faulty", "embedded", "embedded and faulty"]
"""The last two are the daemon's own engine, and die with it."""
MOODS: tuple[Mood, ...] = get_args(Mood)

SLOW_SECONDS_MAX = 1.0


@dataclass
class LMCache:
    """Answers evicts and prefetches as its mood is."""

    rng: random.Random
    mood: Mood = "well"
    port: int = field(default_factory=free_port)
    evicted_at: dict[str, float] = field(default_factory=dict)
    """When the last evict of a chunk came that was carried out."""
    protected: frozenset[str] = frozenset()
    """Chunks that are referenced all the time: no evict of one may come."""
    violations: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def serving(self, mood: Mood) -> AsyncIterator[None]:
        """Serve during the block, unless the mood is to be down."""
        self.mood, self.protected = mood, frozenset()
        if mood not in ("well", "slow", "faulty"):
            yield
            return
        stop = trio.Event()
        sockets = open_sockets(f"127.0.0.1:{self.port}")
        limits = Limits(drain_timeout_seconds=0.1)
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_http, self, sockets, limits=limits, stop=stop))
            yield
            stop.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, as an ASGI app."""
        if scope["type"] != "http":
            return
        came_at = time.monotonic()
        if scope["path"] not in ("/memory/evict", "/memory/prefetch"):
            await reply(send, b'{"detail": "Not Found"}', 404)
        elif scope["method"] != "POST":
            await reply(send, b'{"detail": "Method Not Allowed"}', 405)
        elif (body := await read_body(receive)) is not None:
            chunks = msgspec.json.decode(body)["chunk_hashes"]
            if scope["path"] == "/memory/evict":
                self.violations += self.protected.intersection(chunks)
            if self.mood == "slow":
                await trio.sleep(self.rng.uniform(0.0, SLOW_SECONDS_MAX))
            status = self._status()
            if status == 200 and scope["path"] == "/memory/evict":
                self.evicted_at.update(dict.fromkeys(chunks, came_at))
            await reply(send, b'{"error": "injected fault"}' if status != 200 else b"{}", status)

    def _status(self) -> int:
        if self.mood != "faulty":
            return 200
        return self.rng.choices((200, 503, 500), weights=(5, 3, 2))[0]
