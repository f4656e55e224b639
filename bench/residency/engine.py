"""The engine of a replay: the embedded one with its two tiers, but without bytes and sockets."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import trio

from bench.residency.meter import Meter
from bench.virtual_time import run_inline
from ramakv.config import DISK_LOCATION, HOT_LOCATION, Embedded
from ramakv.errors import BackendUnavailableError
from ramakv.lmcache.embedded.app import create_worker_app
from ramakv.lmcache.embedded.calls import CALLS, chunks_of
from ramakv.lmcache.embedded.engine import Engine, open_engine
from ramakv.lmcache.embedded.files import Changed, Read, Scan
from ramakv.lmcache.embedded.node import Node
from ramakv.lmcache.embedded.replies import RefusedError

ENGINE_URL = "http://engine"


class NoFiles:
    """A disk that keeps no bytes: the tier's index says what would be there."""

    def scan(self, chunks_max: int) -> Scan:
        return Scan([], [])

    def change(
        self, changes: Sequence[tuple[str, bool]], payload_of: Callable[[str], bytes]
    ) -> Changed:
        return Changed([], "")

    def read(self, chunk_hashes: Sequence[str]) -> Read:
        return Read([b"."] * len(chunk_hashes), "")


class NoBytes(Mapping[str, bytes]):
    """A payload for any chunk, of one byte: nobody looks at it."""

    def __getitem__(self, chunk_hash: str) -> bytes:
        return b"."

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        return iter(())


_NO_BYTES = NoBytes()


@dataclass(frozen=True, slots=True)
class Found:
    """Where an arriving request's blocks were: each run ends at the tier's first miss."""

    hot: int
    disk: int
    missing: int


@dataclass
class ReplayEngine:
    """Serves requests, and carries the daemon's calls as an LMCache does."""

    engine: Engine

    async def serve(self, hashes: Sequence[str]) -> Found:
        """Serve a request that arrives now: look, bring up, compute, store.

        All of it in no time: how long it took is the cost model's business, and the next
        request must find what this one left. Blocks are stored from the last to the first, so
        that the head of a prefix, of which most is had, is let go last.
        """
        found = self.engine.lookup(hashes)
        hot, disk = found[HOT_LOCATION], found[DISK_LOCATION]
        if hashes:
            await self.engine.store(hashes[::-1], _NO_BYTES)
        return Found(hot, disk, len(hashes) - hot - disk)


@asynccontextmanager
async def open_replay_engine(
    folder: Path, *, hot_chunks: int, disk_chunks: int, disk_read_seconds: float
) -> AsyncIterator[ReplayEngine]:
    """Open an engine whose prefetches read a chunk from disk in so many seconds."""
    config = Embedded(
        hot_chunks_max=hot_chunks,
        disk_chunks_max=disk_chunks,
        disk_read_seconds=disk_read_seconds,
        chunk_bytes=1,
    )
    async with open_engine(
        config, disk_dir=folder, run_sync=run_inline, disk_files=NoFiles()
    ) as engine:
        yield ReplayEngine(engine)


@dataclass
class EngineTransport(httpx.AsyncBaseTransport):
    """Carries the daemon's calls to the engine, each in so many seconds, and counts them."""

    engine: Engine
    call_seconds: float
    meter: Meter
    calls: Counter[str] = field(default_factory=Counter)
    chunks: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._node = Node(self.engine.config, "scheduler", self.engine, port_start=6999)
        self._other: httpx.ASGITransport | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        kind = path.rpartition("/")[2]
        self.calls[kind] += 1
        with self.meter.counting("replay"):
            await trio.sleep(self.call_seconds)
        with self.meter.counting("engine"):
            if path not in CALLS:
                return await self._ask_app(request)
            body = await request.aread()
            try:
                answer = await CALLS[path][1](self._node, body)
            except RefusedError as error:
                self.failed[kind] += 1
                return httpx.Response(error.status, content=msgspec.json.encode(error.body))
            except BackendUnavailableError as error:
                self.failed[kind] += 1
                return httpx.Response(503, content=msgspec.json.encode({"error": str(error)}))
            self.chunks[kind] += len(chunks_of(body))
            return httpx.Response(200, content=msgspec.json.encode(answer))

    async def _ask_app(self, request: httpx.Request) -> httpx.Response:
        if self._other is None:
            app: Any = create_worker_app(self._node)
            self._other = httpx.ASGITransport(app)
        return await self._other.handle_async_request(request)
