"""The backend actor's first lane: prefetches that somebody's turn waits for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import structlog

from ramakv.actors.mailbox import Reply
from ramakv.core.chunks import ChunkHash, ChunkMap
from ramakv.core.tallies import PrefetchTallies
from ramakv.tracing import Trace

log = structlog.get_logger("ramakv.backend")


@dataclass(slots=True, eq=False)
class Prefetch:
    """One prefetch that waits for its turn. The reply: whether LMCache accepted all of it."""

    chunks: ChunkMap
    lookup_id: str
    deadline: float
    accepted: Reply[bool]
    trace: Trace | None = None


class UnderWay:
    """The chunks that calls wait or are under way for: asked for rarely, changed with each call.

    So the calls are kept, and their chunks are looked through when somebody asks.
    """

    __slots__ = ("_all", "_maps")

    def __init__(self) -> None:
        self._maps: dict[int, ChunkMap] = {}
        self._all: set[ChunkHash] | None = set()

    def __len__(self) -> int:
        """Calls whose chunks these are."""
        return len(self._maps)

    def __contains__(self, chunk: object) -> bool:
        """Whether a call about this chunk waits or is under way."""
        if self._all is None:
            self._all = set(chain.from_iterable(self._maps.values()))
        return chunk in self._all

    def hold(self, call: object, chunks: ChunkMap) -> None:
        """Note what a call is about."""
        self._maps[id(call)] = chunks
        self._all = None

    def let_go(self, call: object) -> None:
        """Note that a call has ended."""
        del self._maps[id(call)]
        self._all = None


class PrefetchLane:
    """Prefetches that wait, the first come first, and what all that have not ended are about."""

    def __init__(self) -> None:
        self.tallies = PrefetchTallies()
        self.chunks = UnderWay()
        """Those that a prefetch waits or is under way for: an evict of one of them waits."""
        self._waiting: deque[Prefetch] = deque()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def next_deadline(self) -> float:
        """When the first of those that wait is given up; `inf` where none waits."""
        return self._waiting[0].deadline if self._waiting else math.inf

    def add(self, job: Prefetch) -> None:
        """Let one wait. From here on, an evict that is due must not overtake it."""
        self._waiting.append(job)
        self.chunks.hold(job, job.chunks)

    def take(self, may_go: Callable[[ChunkMap], bool]) -> Prefetch | None:
        """Take the first that may go, for whose chunks."""
        for position, job in enumerate(self._waiting):
            if may_go(job.chunks):
                del self._waiting[position]
                return job
        return None

    def drop_late(self, now: float) -> None:
        """Give up prefetches that waited too long: their turn has begun without them."""
        late = 0
        while self.next_deadline <= now:
            self.end(self._waiting.popleft(), accepted=False)
            late += 1
        self.tallies.late += late
        if late:
            log.debug("prefetches dropped: they waited too long", count=late)

    def end(self, job: Prefetch, *, accepted: bool) -> None:
        """Let go of a prefetch's chunks and answer it, once."""
        if not job.accepted.is_set:
            self.chunks.let_go(job)
            job.accepted.set(accepted)

    def refuse(self) -> None:
        """Answer all that wait: with an open breaker they would wait in vain."""
        self.tallies.skipped += len(self._waiting)
        while self._waiting:
            self.end(self._waiting.popleft(), accepted=False)
