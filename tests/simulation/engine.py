"""A simulated LMCache: two ranks behind a scheduler, reached through an httpx transport."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import get_args

import httpx
import msgspec
import trio

from tests.simulation.history import EngineMode
from tests.simulation.points import FaultPoints

SLOW_SECONDS_MAX = 2.0
LATE_SECONDS = 30.0
"""Later than any call times out."""

_MODES: tuple[EngineMode, ...] = get_args(EngineMode)
_ANY = tuple(mode for mode in _MODES if mode != "anything")


class CallBody(msgspec.Struct, frozen=True):
    """What both routes take."""

    chunk_hashes: list[str]
    lookup_id: str = ""
    locations: list[str] = []


@dataclass
class SimulatedLMCache(httpx.AsyncBaseTransport):
    """Carries prefetches and evicts out, or breaks the way its mode says."""

    rng: random.Random
    points: FaultPoints
    nursery: trio.Nursery
    departs: Callable[[str, CallBody], None]
    """Told of each call the moment it leaves the daemon."""
    mode: EngineMode = "well"
    bad: frozenset[str] = frozenset()
    is_cut_off: bool = False
    """The daemon is dead: nothing of it arrives any more."""
    ranks: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))
    slower_tier: set[str] = field(default_factory=set)
    came_late: set[str] = field(default_factory=set)
    """Brought up by a prefetch the daemon had given up: no client can know of these."""
    were_bad: set[str] = field(default_factory=set)
    """Hashes that it refused at some time."""
    calls: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    _under_way: Counter[tuple[str, str]] = field(default_factory=Counter)
    _lookup_ids: set[str] = field(default_factory=set)

    @property
    def hot(self) -> set[str]:
        """Chunks that some rank has in its hot tier."""
        return self.ranks[0] | self.ranks[1]

    def store(self, chunks: set[str]) -> None:
        """Take chunks in, as an engine does with those of a turn that it computed."""
        for rank in self.ranks:
            rank |= chunks
        self.slower_tier |= chunks
        self.came_late -= chunks

    def forget(self) -> None:
        """Be started anew: nothing is found any more."""
        for rank in self.ranks:
            rank.clear()
        self.slower_tier.clear()
        self.came_late.clear()
        self._lookup_ids.clear()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.points.reach("send.before")
        if self.is_cut_off:
            await trio.sleep_forever()
        kind = request.url.path.rpartition("/")[2]
        body = msgspec.json.decode(await request.aread(), type=CallBody)
        self._check_departure(kind, body)
        marks = [(kind, chunk) for chunk in body.chunk_hashes]
        self._under_way.update(marks)
        try:
            response = await self._answer(kind, body)
            self.points.reach("answer.before")
            return response
        finally:
            self._under_way.subtract(marks)

    def _check_departure(self, kind: str, body: CallBody) -> None:
        self.calls[kind] += 1
        self.departs(kind, body)
        other = "evict" if kind == "prefetch" else "prefetch"
        self.violations += [
            f"a {kind} of {chunk} left while its {other} was in flight"
            for chunk in body.chunk_hashes
            if self._under_way[other, chunk]
        ]
        if kind == "prefetch":
            if body.lookup_id in self._lookup_ids:
                self.violations.append(f"lookup_id {body.lookup_id} was used twice")
            self._lookup_ids.add(body.lookup_id)

    async def _answer(self, kind: str, body: CallBody) -> httpx.Response:
        mode = self.rng.choice(_ANY) if self.mode == "anything" else self.mode
        if mode != "well":
            self.faults[f"LMCache {mode}"] += 1
        if mode == "refuses connections":
            raise httpx.ConnectError("connection refused")
        if mode == "hangs":
            await trio.sleep_forever()
        if mode == "slow":
            await trio.sleep(self.rng.uniform(0, SLOW_SECONDS_MAX))
        if mode == "applies late":
            self.nursery.start_soon(self._apply_late, kind, body)
            await trio.sleep_forever()
        if mode == "rejects everything":
            self.were_bad |= set(body.chunk_hashes)
            return _reply(500, {"error": "AssertionError", "message": "not this one"})
        self.were_bad |= self.bad
        if bad := self.bad.intersection(body.chunk_hashes):
            self.faults["bad hash"] += 1
            return _reply(500, {"error": "ValueError", "message": f"{min(bad)} is no hash"})
        return await self._apply(kind, body, mode)

    async def _apply(self, kind: str, body: CallBody, mode: EngineMode) -> httpx.Response:
        failing = self.rng.randrange(2) if mode == "fails on some ranks" else None
        count = self._carry_out(kind, body, failing)
        self.points.reach("send.after")
        if failing is not None:
            self.were_bad |= set(body.chunk_hashes)
            failures = {str(7000 + failing): {"error": "HTTP Error 500: Internal Server Error"}}
            return _reply(500, {"error": "Failed on workers", "failures": failures})
        if mode == "applies, then times out":
            await trio.sleep_forever()
        if mode == "resets mid-body":
            return httpx.Response(200, stream=_Broken())
        if mode == "answers no JSON":
            return httpx.Response(200, content=b"<html>busy</html>")
        if mode == "counts less":
            count //= 2
        return _reply(200, {"status": "success", f"num_{kind}": count}, self.points)

    async def _apply_late(self, kind: str, body: CallBody) -> None:
        await trio.sleep(LATE_SECONDS)
        self._carry_out(kind, body, None)
        if kind == "prefetch":
            self.came_late |= self.hot.intersection(body.chunk_hashes)

    def _carry_out(self, kind: str, body: CallBody, failing_rank: int | None) -> int:
        chunks = set(body.chunk_hashes)
        done = 0
        for number, rank in enumerate(self.ranks):
            if number == failing_rank:
                continue
            if kind == "prefetch":
                rank |= chunks & self.slower_tier
            else:
                rank -= chunks
            done = len(chunks)
        if kind == "evict":
            self.came_late -= chunks
            if "LocalDiskBackend" in body.locations:
                self.slower_tier -= chunks
        return done


class _Broken(httpx.AsyncByteStream):
    """A body whose connection is reset half-way."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b'{"status": "suc'
        raise httpx.ReadError("connection reset by peer")


class _Whole(httpx.AsyncByteStream):
    """A body, and the point at which the daemon has read it."""

    def __init__(self, content: bytes, points: FaultPoints) -> None:
        self._content = content
        self._points = points

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content
        self._points.reach("answer.after")


def _reply(status: int, body: object, points: FaultPoints | None = None) -> httpx.Response:
    content = msgspec.json.encode(body)
    if points is None:
        return httpx.Response(status, content=content)
    return httpx.Response(status, stream=_Whole(content, points))
