"""Who tells the engine what to do beside the requests: nobody, ramakv, or the Rust daemon."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
import trio

from bench.residency.engine import ENGINE_URL, EngineTransport
from bench.residency.meter import Meter
from bench.residency.trace import Turn
from bench.virtual_time import run_inline, wall_clock
from ramakv import codec, events
from ramakv.config import DISK_LOCATION, HOT_LOCATION, Config
from ramakv.errors import BackendError, ConfigError, EventError
from ramakv.lmcache.backend import fresh_lookup_id
from ramakv.lmcache.client import LMCacheClient
from ramakv.service import Service, open_service

FINISH_REASONS = {"tool_use": "tool_calls", "end_turn": "stop"}
CALLS_IN_FLIGHT_MAX = 8


class Coordinator(Protocol):
    """Is told of turns by the agents."""

    async def turn_start(self, turn: Turn) -> None:
        """A turn begins; the request follows when this returns."""
        ...

    async def turn_end(self, turn: Turn) -> None:
        """A turn is over."""
        ...


class Nobody:
    """Leaves the engine to itself."""

    async def turn_start(self, turn: Turn) -> None:
        pass

    async def turn_end(self, turn: Turn) -> None:
        pass


# ramakv ----------------------------------------------------------------------------------


def ramakv_config(
    folder: Path, policy: str, hot_chunks: int, overrides: Mapping[str, Any] = MappingProxyType({})
) -> Config:
    """Return the configuration of a replay's daemon; `overrides` are by dotted key.

    Raises ConfigError.
    """
    table: dict[str, Any] = {
        "lmcache_url": ENGINE_URL,
        "session_store_path": str(folder / "sessions.db"),
        "backend": {"kind": "embedded", "calls_in_flight_max": CALLS_IN_FLIGHT_MAX},
        "store": {"synchronous": "NORMAL"},
        "residency": {"policy": policy, "hot_chunks_max": hot_chunks},
    }
    for key, value in overrides.items():
        section, _, name = key.rpartition(".")
        (table.setdefault(section, {}) if section else table)[name] = value
    try:
        return msgspec.convert(table, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the daemon of policy {policy!r}: {error}") from error


@asynccontextmanager
async def open_ramakv(
    config: Config, transport: EngineTransport, seed: int
) -> AsyncIterator[Ramakv]:
    """Run the whole service, but for its HTTP servers, in front of the engine."""
    backend = config.backend
    async with (
        LMCacheClient(
            config.lmcache_url,
            connect_timeout_seconds=backend.connect_timeout_seconds,
            call_timeout_seconds=backend.call_timeout_seconds,
            connections_max=backend.calls_in_flight_max,
            transport=transport,
        ) as client,
        open_service(
            config,
            client=client,
            run_sync=run_inline,
            wall_clock=wall_clock,
            rng=random.Random(seed),
        ) as service,
    ):
        yield Ramakv(service, transport.meter)


@dataclass
class Ramakv:
    """The service, told of events as its HTTP edge tells it: from bytes, to bytes."""

    service: Service
    meter: Meter
    events_sent: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    _last: dict[str, Sequence[str]] = field(default_factory=dict)
    _forks: dict[str, tuple[str, int]] = field(default_factory=dict)

    async def turn_start(self, turn: Turn) -> None:
        session = turn.request.session
        await self._begin_with_parents_map(turn)
        await self._send({"type": "turn_start", "session_id": session})

    async def turn_end(self, turn: Turn) -> None:
        request = turn.request
        event = {
            "type": "turn_end",
            "session_id": request.session,
            "seq": request.turn,
            "kv_transfer_params": {"chunk_hashes": turn.hashes},
        }
        if request.stop in FINISH_REASONS:
            event["finish_reason"] = FINISH_REASONS[request.stop]
        await self._send(event)
        self._last[request.session] = turn.hashes
        if request.session in self._forks:
            parent, fork_id = self._forks.pop(request.session)
            await self._send({"type": "session_fork_end", "session_id": parent, "fork_id": fork_id})

    async def _begin_with_parents_map(self, turn: Turn) -> None:
        """Fork the parent into a session that starts from its context, and not from nothing."""
        session, parent = turn.request.session, (turn.request.parent or "").rpartition(":")[0]
        theirs = self._last.get(parent)
        if session in self._last or not theirs or not turn.hashes or theirs[0] != turn.hashes[0]:
            return
        event = {"type": "session_fork", "session_id": parent, "child_session_id": session}
        answer = await self._send(event)
        if isinstance(answer, events.SessionForkData):
            self._forks[session] = (parent, answer.fork_id)

    async def _send(self, body: dict[str, Any]) -> events.Data | None:
        content = msgspec.json.encode(body)
        self.events_sent += 1
        with self.meter.counting("daemon"):
            event = codec.decode_event(content, self.service.config.limits)
            assert isinstance(event, events.Event)
            try:
                data = await self.service.handle(event)
            except EventError:
                self.refused[body["type"]] += 1
                return None
            codec.encode(codec.success(body["type"], data))
            return data


# The Rust daemon -------------------------------------------------------------------------


class RustDaemon:
    """The calls that the Rust daemon makes: all of a session up at its turn's start, what its
    turn_end no longer lists out, and a suspended session out; each evict from every tier.

    Its agents suspend a session that has paused for `suspend_after_seconds`.
    """

    def __init__(
        self, client: LMCacheClient, nursery: trio.Nursery, suspend_after_seconds: float
    ) -> None:
        self._client = client
        self._nursery = nursery
        self._suspend_after_seconds = suspend_after_seconds
        self._limiter = trio.CapacityLimiter(CALLS_IN_FLIGHT_MAX)
        self._counts: Counter[str] = Counter()
        self._maps: dict[str, tuple[str, ...]] = {}
        self._suspended: set[str] = set()
        self._events: Counter[str] = Counter()
        """How many events each session had: a pause is over when there is another."""

    async def turn_start(self, turn: Turn) -> None:
        session = turn.request.session
        self._events[session] += 1
        chunks = self._maps.get(session, ())
        if session in self._suspended:
            self._suspended.remove(session)
            self._counts.update(chunks)
        if chunks:
            async with self._limiter:
                with suppress(BackendError):  # the transport has counted it
                    await self._client.prefetch(chunks, fresh_lookup_id())

    async def turn_end(self, turn: Turn) -> None:
        session = turn.request.session
        self._events[session] += 1
        before = () if session in self._suspended else self._maps.get(session, ())
        self._suspended.discard(session)
        self._maps[session] = turn.hashes
        self._counts.update(turn.hashes)
        await self._release(before)
        self._nursery.start_soon(self._suspend_later, session, self._events[session])

    async def _suspend_later(self, session: str, events: int) -> None:
        await trio.sleep(self._suspend_after_seconds)
        if self._events[session] == events:
            self._suspended.add(session)
            await self._release(self._maps[session])

    async def _release(self, chunks: Sequence[str]) -> None:
        self._counts.subtract(chunks)
        free = [chunk for chunk in chunks if not self._counts[chunk]]
        for chunk in free:
            del self._counts[chunk]
        if free:
            async with self._limiter:
                with suppress(BackendError):
                    await self._client.evict(free, (HOT_LOCATION, DISK_LOCATION))


@asynccontextmanager
async def open_rust_daemon(
    transport: EngineTransport, suspend_after_seconds: float
) -> AsyncIterator[RustDaemon]:
    """Make the Rust daemon's calls until the block ends."""
    async with (
        LMCacheClient(
            ENGINE_URL,
            connect_timeout_seconds=2,
            call_timeout_seconds=12,
            connections_max=CALLS_IN_FLIGHT_MAX,
            transport=transport,
        ) as client,
        trio.open_nursery() as nursery,
    ):
        yield RustDaemon(client, nursery, suspend_after_seconds)
        nursery.cancel_scope.cancel()
