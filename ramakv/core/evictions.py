"""Evictions that wait: batched by size and age, withdrawn by a new reference, retried.

A chunk is in one of three places: *fresh* (released, waiting for its batch), in a *retry*
batch (an evict of it failed), or *in flight*. A chunk that was released again while its
evict is in flight is fresh at the same time and is not taken before that evict has ended:
one mutation per chunk at a time.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
import random
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ramakv.core.chunks import ChunkHash
from ramakv.core.pacing import backoff_seconds
from ramakv.core.tallies import EvictionTallies

GENERAL_REFUSAL = 24
"""So many rejected evicts in a row, none carried out between them, are not about bad hashes:
halving 512 chunks around a single bad one takes nine steps, and half of each one succeeds."""


class Scope(enum.StrEnum):
    """Why a chunk was released, which decides from which locations it is evicted."""

    SUSPEND = "suspend"
    RELEASE = "release"
    CLOSE = "close"


class Owed(NamedTuple):
    """An evict that the outbox remembers: the commit that released the chunk, and why."""

    generation: int
    scope: Scope


class _Fresh(NamedTuple):
    generation: int
    since: float


@dataclass(slots=True, eq=False)
class Batch:
    """Chunks that go to LMCache in one call, with the generation of each one's outbox row."""

    scope: Scope
    chunks: dict[ChunkHash, int]
    since: float
    """When the last of these chunks was released."""
    tries: int = 0
    refusals: int = 0
    successes_before: int | None = None
    """What LMCache had done for us when these chunks, in whatever batch, were first rejected."""


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """Sizes and times of batches; seconds and counts."""

    batch_chunks_max: int
    batch_age_seconds: float
    tries_max: int
    retry_base_seconds: float
    retry_max_seconds: float


@dataclass(slots=True)
class EvictionQueue:
    """All evictions that are owed and not yet done, except dead letters."""

    policy: EvictionPolicy
    rng: random.Random = field(default_factory=random.Random)
    tallies: EvictionTallies = field(default_factory=EvictionTallies)
    _fresh: dict[Scope, dict[ChunkHash, _Fresh]] = field(
        default_factory=lambda: {scope: {} for scope in Scope}
    )
    _retries: list[tuple[float, int, Batch]] = field(default_factory=list)
    _retry_of: dict[ChunkHash, Batch] = field(default_factory=dict)
    _in_flight: dict[ChunkHash, Batch] = field(default_factory=dict)
    _ticket: itertools.count[int] = field(default_factory=itertools.count)
    _successes: int = 0
    _rejected_in_a_row: int = 0

    def __len__(self) -> int:
        """Chunks that wait, fresh or for a retry."""
        return sum(len(fresh) for fresh in self._fresh.values()) + len(self._retry_of)

    def oldest_since(self) -> float:
        """When the eviction that is owed longest was released; `inf` if none is owed."""
        waiting = (next(iter(fresh.values())).since for fresh in self._fresh.values() if fresh)
        failed = (batch.since for _, _, batch in self._retries if batch.chunks)
        in_flight = (batch.since for batch in self._in_flight.values())
        return min(itertools.chain(waiting, failed, in_flight), default=math.inf)

    def is_in_flight(self, chunks: Iterable[ChunkHash]) -> bool:
        """Whether an evict of one of these has left and not ended."""
        return bool(self._in_flight) and not self._in_flight.keys().isdisjoint(chunks)

    @property
    def in_flight_count(self) -> int:
        """How many chunks are in flight."""
        return len(self._in_flight)

    def add(self, chunk: ChunkHash, owed: Owed, now: float) -> None:
        """Let a chunk wait for its batch; a retry of an older release becomes this one."""
        self.add_all((chunk,), owed, now)

    def add_all(self, chunks: Collection[ChunkHash], owed: Owed, now: float) -> None:
        """Let chunks wait that one commit released."""
        self.tallies.queued += len(chunks)
        self.tallies.superseded += len(self.withdraw_all(chunks))
        self._fresh[owed.scope].update(dict.fromkeys(chunks, _Fresh(owed.generation, now)))

    def withdraw_all(self, chunks: Collection[ChunkHash]) -> dict[ChunkHash, Owed]:
        """Take chunks back, those that wait: mostly none. Returns what each was owed."""
        places: tuple[dict[ChunkHash, Any], ...] = (self._retry_of, *self._fresh.values())
        if all(place.keys().isdisjoint(chunks) for place in places):
            return {}
        return {chunk: owed for chunk in chunks if (owed := self.withdraw(chunk))}

    def withdraw(self, chunk: ChunkHash) -> Owed | None:
        """Take a chunk back, unless its evict is in flight; returns what it was owed."""
        if retry := self._retry_of.pop(chunk, None):
            return Owed(retry.chunks.pop(chunk), retry.scope)
        for scope, fresh in self._fresh.items():
            if entry := fresh.pop(chunk, None):
                return Owed(entry.generation, scope)
        return None

    def take(
        self, now: float, busy: Container[ChunkHash] = (), flush: bool = False
    ) -> Batch | None:
        """Put the next due batch in flight and return it.

        Chunks in `busy` (a prefetch of them is under way) stay. `flush` takes fresh ones
        although they are not due yet; retries keep their time.
        """
        batch = self._take_retry(now, busy) or self._take_fresh(now, busy, flush)
        if batch is not None:
            self._in_flight.update(dict.fromkeys(batch.chunks, batch))
        return batch

    def next_due(self, now: float) -> float:
        """When a batch becomes due: at or before `now` if one is, `inf` if nothing waits."""
        due = math.inf
        for fresh in self._fresh.values():
            if len(fresh) >= self.policy.batch_chunks_max:
                return now
            if fresh:
                since = next(iter(fresh.values())).since
                due = min(due, since + self.policy.batch_age_seconds)
        self._drop_empty_retries()
        return min(due, self._retries[0][0]) if self._retries else due

    def done(self, batch: Batch) -> None:
        """End a batch that LMCache carried out."""
        self._land(batch)
        self.tallies.done += len(batch.chunks)
        self._rejected_in_a_row = 0
        self._successes += 1

    def leave(self, batch: Batch) -> None:
        """End a batch that is not to be sent: LMCache lets go of these chunks by itself."""
        self._land(batch)
        self.tallies.left += len(batch.chunks)

    def succeeded(self) -> None:
        """Note that LMCache did something else we asked for: it works."""
        self._successes += 1

    def retry(self, batch: Batch, now: float) -> None:
        """Let a batch wait that failed as an outage does: all of it again, later and later."""
        self._land(batch)
        batch.tries += 1
        self._push(batch, now + self._backoff(batch.tries))

    def halve(self, batch: Batch, now: float) -> ChunkHash | None:
        """Let a batch wait that was rejected: in halves at once, so that the bad hash stands alone.

        A single chunk is tried again with backoff. When its tries are used up, and LMCache
        did something else meanwhile (so that the hash is bad, not LMCache), it is given up
        and returned: a dead letter. Where LMCache rejects everything, batches stay whole.
        """
        self._rejected_in_a_row += 1
        if batch.successes_before is None:
            batch.successes_before = self._successes
        if self._rejected_in_a_row >= GENERAL_REFUSAL:
            self.retry(batch, now)
            return None
        self._land(batch)
        chunks = list(batch.chunks.items())
        if len(chunks) > 1:
            middle = len(chunks) // 2
            for half in (chunks[:middle], chunks[middle:]):
                part = Batch(batch.scope, dict(half), batch.since)
                part.successes_before = batch.successes_before  # the other half is evidence
                self._push(part, now)
            return None
        if not chunks:
            return None
        batch.refusals += 1
        if batch.refusals >= self.policy.tries_max and self._successes > batch.successes_before:
            self.tallies.dead += 1
            return chunks[0][0]
        self._push(batch, now + self._backoff(batch.refusals))
        return None

    def clear(self, released_before: float) -> dict[ChunkHash, Owed]:
        """Forget what waits since before then, and return it; what is in flight goes on."""
        waiting = [
            chunk
            for fresh in self._fresh.values()
            for chunk, entry in fresh.items()
            if entry.since < released_before
        ]
        waiting += [c for c, batch in self._retry_of.items() if batch.since < released_before]
        forgiven = self.withdraw_all(waiting)
        self.tallies.forgiven += len(forgiven)
        return forgiven

    def drop(self, batch: Batch, chunks: Iterable[ChunkHash]) -> dict[ChunkHash, Owed]:
        """Take chunks out of a batch that came back failed, before it is let wait again."""
        owed = {}
        for chunk in chunks:
            del self._in_flight[chunk]
            owed[chunk] = Owed(batch.chunks.pop(chunk), batch.scope)
        return owed

    def is_waiting(self, chunk: ChunkHash) -> bool:
        """Whether a chunk waits (in flight does not count)."""
        return chunk in self._retry_of or any(chunk in fresh for fresh in self._fresh.values())

    def _take_retry(self, now: float, busy: Container[ChunkHash]) -> Batch | None:
        blocked: list[tuple[float, int, Batch]] = []
        taken: Batch | None = None
        while self._retries and taken is None:
            if self._retries[0][0] > now:
                break
            item = heapq.heappop(self._retries)
            batch = item[2]
            if not batch.chunks:
                continue
            if any(chunk in busy or chunk in self._in_flight for chunk in batch.chunks):
                blocked.append(item)
                continue
            taken = batch
        for item in blocked:
            heapq.heappush(self._retries, item)
        if taken is not None:
            for chunk in taken.chunks:
                del self._retry_of[chunk]
        return taken

    def _take_fresh(self, now: float, busy: Container[ChunkHash], flush: bool) -> Batch | None:
        limit = self.policy.batch_chunks_max
        for scope, fresh in self._fresh.items():
            if not fresh:
                continue
            oldest = next(iter(fresh.values())).since
            due = len(fresh) >= limit or oldest + self.policy.batch_age_seconds <= now
            if not due and not flush:
                continue
            ready = (chunk for chunk in fresh if chunk not in busy and chunk not in self._in_flight)
            taken = {chunk: fresh[chunk] for chunk in itertools.islice(ready, limit)}
            if taken:
                for chunk in taken:
                    del fresh[chunk]
                generations = {chunk: entry.generation for chunk, entry in taken.items()}
                return Batch(scope, generations, max(entry.since for entry in taken.values()))
        return None

    def _land(self, batch: Batch) -> None:
        for chunk in batch.chunks:
            self._in_flight.pop(chunk, None)

    def _push(self, batch: Batch, not_before: float) -> None:
        self.tallies.retried += len(batch.chunks)
        for chunk in batch.chunks:
            self._retry_of[chunk] = batch
        heapq.heappush(self._retries, (not_before, next(self._ticket), batch))

    def _drop_empty_retries(self) -> None:
        while self._retries and not self._retries[0][2].chunks:
            heapq.heappop(self._retries)

    def _backoff(self, tries: int) -> float:
        policy = self.policy
        return backoff_seconds(
            tries, policy.retry_base_seconds, policy.retry_max_seconds, self.rng.random()
        )
