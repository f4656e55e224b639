"""The sessions and chunks that stand out, found a little at a time.

Looking at all sessions takes as long as there are many. So it is done in slices, and the next
look waits the longer, the longer the last one took: lists get older, never dearer.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Final

import trio

from ramakv.actors.places import Place
from ramakv.core.chunks import ChunkMap
from ramakv.core.session import Status
from ramakv.web.operable import Operable
from ramakv.web.snapshot import SessionRow, SharedChunks

ROWS_MAX: Final = 12
_NAMED_MAX: Final = 5
_COST_SHARE: Final = 0.01
"""The share of its time that the event loop may spend on each list."""
_SLICE_SECONDS: Final = 0.001
_LOOKUPS_MAX: Final = 400_000
"""Most chunks of awake sessions that are looked at in one go."""
_CANDIDATES_MAX: Final = 400
"""Chunks that are looked at closely; of a longer prefix that many share, only so many are told."""


class _Slices:
    """Lets others run now and then, and says when the next look may begin."""

    def __init__(self) -> None:
        self.due = -math.inf

    async def over(self, items: Iterable[Place]) -> AsyncIterator[Place]:
        """Go through items, a slice of time after the other."""
        spent, began = 0.0, time.perf_counter()
        for item in items:
            yield item
            if (took := time.perf_counter() - began) > _SLICE_SECONDS:
                spent += took
                await trio.lowlevel.checkpoint()
                began = time.perf_counter()
        spent += time.perf_counter() - began
        self.due = trio.current_time() + spent / _COST_SHARE


class TopLists:
    """The largest sessions, and the chunks that most sessions share."""

    def __init__(self, service: Operable) -> None:
        self._service = service
        self._sizing = _Slices()
        self._sharing = _Slices()
        self.references = 0
        self.shared: list[SharedChunks] = []
        self._largest: list[Place] = []

    def recent(self) -> list[SessionRow]:
        """Sessions by their last event, the latest first."""
        awake = self._service.router.awake()
        return [row_of(place) for place in reversed(awake[-ROWS_MAX:])]

    def largest(self) -> list[SessionRow]:
        """Active sessions by the length of their maps."""
        return [row_of(place) for place in self._largest]

    async def refresh(self) -> None:
        """Look again at what is due."""
        now = trio.current_time()
        if now >= self._sizing.due:
            await self._look_at_sizes()
        if now >= self._sharing.due:
            await self._look_at_sharing()

    async def _look_at_sizes(self) -> None:
        heap: list[tuple[int, str, Place]] = []
        references = 0
        async for place in self._sizing.over(self._service.router.places()):
            if place.status is not Status.ACTIVE:
                continue
            references += place.chunks
            if len(heap) < ROWS_MAX:
                heapq.heappush(heap, (place.chunks, place.session_id, place))
            elif place.chunks > heap[0][0]:
                heapq.heapreplace(heap, (place.chunks, place.session_id, place))
        self._largest = [place for _, _, place in sorted(heap, key=lambda item: -item[0])]
        self.references = references

    async def _look_at_sharing(self) -> None:
        """Among awake sessions, find the chunks with most references, then who holds them."""
        awake = self._service.router.awake()[::-1]
        candidates: dict[str, int] = {}
        floor = 1
        async for place in self._sharing.over(_within(awake, _LOOKUPS_MAX)):
            held = _held(place)
            counts = self._service.refcount.counts_of(held)
            candidates |= {chunk: count for chunk, count in counts.items() if count > floor}
            if len(candidates) > 10 * _CANDIDATES_MAX:
                best = heapq.nlargest(_CANDIDATES_MAX, candidates.items(), key=lambda it: it[1])
                candidates, floor = dict(best), best[-1][1] - 1
        due = self._sharing.due
        best = heapq.nlargest(_CANDIDATES_MAX, candidates.items(), key=lambda item: item[1])
        wanted = {chunk for chunk, _ in best}
        holders: dict[str, _Holders] = defaultdict(_Holders)
        async for place in self._sharing.over(_within(awake, _LOOKUPS_MAX) if wanted else ()):
            mark = hash(place.session_id)
            for chunk in wanted.intersection(_held(place)):
                holders[chunk].add(place.session_id, mark)
        self._sharing.due += due - trio.current_time()  # both passes count
        self.shared = _grouped(best, holders)


def _within(places: Sequence[Place], lookups_max: int) -> Iterator[Place]:
    """The first of them, as long as their chunks are not too many."""
    lookups = 0
    for place in places:
        lookups += len(_held(place))
        if lookups > lookups_max:
            return
        yield place


def _held(place: Place) -> ChunkMap:
    return () if place.actor is None else place.actor.references


class _Holders:
    """The first of those who hold a chunk, and a mark of them all: the same for the same ones."""

    __slots__ = ("mark", "named")

    def __init__(self) -> None:
        self.mark = 0
        self.named: list[str] = []

    def add(self, session_id: str, mark: int) -> None:
        self.mark ^= mark
        if len(self.named) < _NAMED_MAX:
            self.named.append(session_id)


def _grouped(best: Sequence[tuple[str, int]], holders: dict[str, _Holders]) -> list[SharedChunks]:
    """Put chunks together that the same sessions hold."""
    groups: dict[tuple[int, int], list[str]] = defaultdict(list)
    for chunk, count in best:
        groups[count, holders[chunk].mark].append(chunk)
    ordered = sorted(groups.items(), key=lambda item: (-item[0][0], -len(item[1])))
    shown = [(count, chunks, holders[chunks[0]].named) for (count, _), chunks in ordered[:ROWS_MAX]]
    return [
        SharedChunks(chunks[0], len(chunks), count, named, more=max(0, count - len(named)))
        for count, chunks, named in shown
    ]


def row_of(place: Place) -> SessionRow:
    """Say what is known of a session without asking it."""
    now = trio.current_time()
    began = place.turn_began
    return SessionRow(
        id=place.session_id,
        state=state_of(place),
        chunks=place.chunks,
        turns=place.turns,
        forks=place.forks,
        idle_seconds=max(0.0, now - place.last_event),
        turn_seconds=None if began is None else now - began,
        waiting=place.actor.unfinished if place.actor else 0,
        awake=place.actor is not None,
    )


def state_of(place: Place) -> str:
    """What a session does."""
    if place.status is Status.UNKNOWN:
        return "closed"
    if place.status is Status.SUSPENDED:
        return "suspended"
    return "paused" if place.turn_began is None else "in_turn"
