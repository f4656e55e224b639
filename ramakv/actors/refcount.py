"""The refcount actor: who references which chunk, and what must be evicted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import structlog
import trio
from msgspec import Struct

from ramakv.actors.journal import Journal
from ramakv.actors.mailbox import Mailbox, Reply
from ramakv.core.chunks import ChunkHash, ChunkMap
from ramakv.core.evictions import Batch, Owed, Scope
from ramakv.core.refcounts import OutboxRow, RefCounts
from ramakv.core.session import Fork
from ramakv.core.tallies import EvictionTallies
from ramakv.store.store import Bookkeeping

log = structlog.get_logger("ramakv.refcount")


_BURST_MAX = 64
"""Messages handled before others get their turn."""

_SPREAD_SLICE = 50_000
"""Counts looked at between two checkpoints: about a millisecond."""

_SPREAD_SECONDS_PER_CHUNK = 1e-5
"""How old a spread may be: counting it takes a hundredth of that, however often somebody asks."""


class Owner(NamedTuple):
    """Who holds references: a session, or one of its forks.

    The counts do not need it; a ledger that several daemons share will.
    """

    kind: str
    name: str

    @classmethod
    def of(cls, fork: Fork) -> Owner:
        """Who holds a fork's references."""
        return cls("fork", str(fork.fork_id))


@dataclass(frozen=True, slots=True)
class Spread:
    """How many chunks have so many references; when that was."""

    chunks: Counter[int] = field(default_factory=Counter)
    at: float = -math.inf


class Wakeable(Protocol):
    """The backend actor, as far as this one knows it."""

    def wake(self) -> None:
        """Look again: an evict may be due, or may not wait for another any more."""


class Acquire(Struct, frozen=True):
    """Reference chunks, provisionally until `Settle` or `Undo`; others are about to be released."""

    owner: Owner
    chunks: ChunkMap
    leaving: ChunkMap
    reply: Reply[None]


class Settle(Struct, frozen=True):
    """A commit is durable: keep what it acquired, release what it removed.

    The reply is the number of chunks queued for eviction.
    """

    owner: Owner
    acquired: ChunkMap
    released: ChunkMap
    forgotten: ChunkMap
    generation: int
    scope: Scope
    reply: Reply[int]


class Undo(Struct, frozen=True):
    """A commit failed: take back what was acquired for it, and keep what was leaving."""

    owner: Owner
    acquired: ChunkMap
    leaving: ChunkMap
    reply: Reply[None]


@dataclass(frozen=True, slots=True)
class Ping:
    """Show that messages are handled."""

    reply: Reply[None]


@dataclass(frozen=True, slots=True)
class Revive:
    """Queue what were dead letters; the reply says how many are queued now."""

    rows: list[tuple[ChunkHash, Owed]]
    reply: Reply[int]


Message = Acquire | Settle | Undo | Ping | Revive


class RefcountActor:
    """Counts references and keeps the evictions that wait.

    **Owns** the global counts and the eviction queue. **Receives** acquire, settle, undo.
    **Sends to** the journal (outbox rows that turned out referenced) and wakes the backend,
    which pulls batches. **Stops when** its mailbox is closed and empty.
    """

    def __init__(self, counts: RefCounts, journal: Journal, mailbox_max: int) -> None:
        self._counts = counts
        self._journal = journal
        self._backend: Wakeable | None = None
        self._due = math.inf
        """When the backend will look again by itself."""
        self._mailbox: Mailbox[Message] = Mailbox(mailbox_max, "the refcount actor is behind")
        self._spread = Spread()

    def connect(self, backend: Wakeable) -> None:
        """Say whom to wake; the backend actor is made after this one, which it pulls from."""
        self._backend = backend

    async def acquire(self, owner: Owner, chunks: ChunkMap, leaving: ChunkMap = ()) -> None:
        """Reference chunks before a commit; an evict of one that waits is withdrawn."""
        if chunks or leaving:
            reply: Reply[None] = Reply()
            await self._mailbox.put(Acquire(owner, chunks, leaving, reply))
            await reply.wait()

    async def settle(
        self,
        owner: Owner,
        *,
        acquired: ChunkMap,
        released: ChunkMap,
        forgotten: ChunkMap,
        generation: int,
        scope: Scope,
    ) -> int:
        """Finish after a commit; returns how many chunks were queued for eviction."""
        if not (acquired or released or forgotten):
            return 0
        reply: Reply[int] = Reply()
        await self._mailbox.put(
            Settle(owner, acquired, released, forgotten, generation, scope, reply)
        )
        return await reply.wait()

    async def keep(self, owner: Owner, chunks: ChunkMap) -> None:
        """Finish after a commit that only acquired."""
        await self.settle(
            owner, acquired=chunks, released=(), forgotten=(), generation=0, scope=Scope.RELEASE
        )

    async def undo(self, owner: Owner, acquired: ChunkMap, leaving: ChunkMap = ()) -> None:
        """Finish after a commit that failed."""
        if acquired or leaving:
            reply: Reply[None] = Reply()
            await self._mailbox.put(Undo(owner, acquired, leaving, reply))
            await reply.wait()

    async def revive(self, rows: list[tuple[ChunkHash, Owed]]) -> int:
        """Queue what were dead letters, where they are not needed; returns how many that are."""
        reply: Reply[int] = Reply()
        await self._mailbox.put(Revive(rows, reply))
        return await reply.wait()

    async def ping(self) -> None:
        """Return when everything that waits now has been handled."""
        reply: Reply[None] = Reply()
        await self._mailbox.put(Ping(reply))
        await reply.wait()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the mailbox until it is closed."""
        task_status.started()
        async for first in self._mailbox:
            now = trio.current_time()
            obsolete = self._handle(first, now)
            for _ in range(_BURST_MAX):
                if (message := self._mailbox.get_nowait()) is None:
                    break
                obsolete += self._handle(message, now)
            if self._backend is not None and self._counts.evictions.next_due(now) < self._due:
                self._backend.wake()
            if obsolete:
                await self._journal.tell(Bookkeeping(obsolete=obsolete))

    def close(self) -> None:
        """Accept no more; `run` ends when what waits is handled."""
        self._mailbox.close()

    def _handle(self, message: Message, now: float) -> list[OutboxRow]:
        match message:
            case Acquire():
                self._counts.acquire(message.chunks, message.leaving)
                message.reply.set(None)
                return []
            case Undo():
                obsolete = self._counts.undo(message.acquired, message.leaving, now)
                message.reply.set(None)
                return obsolete
            case Settle():
                settled = self._counts.settle(
                    message.acquired, message.released, message.generation, message.scope, now
                )
                forgotten = self._counts.forget(
                    message.forgotten, message.generation, message.scope, now
                )
                message.reply.set(settled.queued + forgotten.queued)
                return settled.obsolete + forgotten.obsolete
            case Revive():
                revived = self._counts.revive(message.rows, now)
                message.reply.set(revived.queued)
                return revived.obsolete
            case Ping():
                message.reply.set(None)
                return []

    # What the backend actor pulls. Synchronous, so that between "nobody references it" and
    # the call that evicts it nothing else can run.

    def take(self, now: float, busy: Container[ChunkHash], *, flush: bool) -> Batch | None:
        """Put the next due batch of unreferenced chunks in flight."""
        batch = self._counts.evictions.take(now, busy, flush)
        if batch is not None:
            assert not any(self._counts.count(chunk) for chunk in batch.chunks)
        return batch

    def next_due(self, now: float) -> float:
        """When there is something to take; the backend is woken if it becomes earlier."""
        self._due = self._counts.evictions.next_due(now)
        return self._due

    def is_due(self, now: float) -> bool:
        """Whether there is something to take, but for what a prefetch stands in the way of."""
        return self._counts.evictions.next_due(now) <= now

    def is_in_flight(self, chunks: ChunkMap) -> bool:
        """Whether an evict of one of these has left and not ended."""
        return self._counts.evictions.is_in_flight(chunks)

    def references(self, chunk: ChunkHash) -> int:
        """How many references a chunk has now, provisional ones included."""
        return self._counts.count(chunk)

    def evicted(self, batch: Batch) -> Bookkeeping:
        """End a batch that was carried out."""
        return Bookkeeping(obsolete=self._counts.evicted(batch))

    def left(self, batch: Batch) -> Bookkeeping:
        """End a batch that is left to LMCache's LRU."""
        return Bookkeeping(obsolete=self._counts.left(batch))

    def evict_failed(self, batch: Batch, now: float, reason: str, *, rejected: bool) -> Bookkeeping:
        """Let what is left of a failed batch wait again."""
        failed = self._counts.evict_failed(batch, now, rejected=rejected)
        return Bookkeeping(obsolete=failed.obsolete, dead=failed.dead, dead_reason=reason)

    def forgive(self, released_before: float) -> Bookkeeping:
        """Drop the evicts that wait since before then: LMCache lost what they are about."""
        return Bookkeeping(obsolete=self._counts.forgive(released_before))

    def prefetch_succeeded(self) -> None:
        """Note that LMCache works, for the judgement of hashes that it rejects."""
        self._counts.evictions.succeeded()

    async def spread(self) -> Spread:
        """Say how references are spread over chunks. With many chunks it is a few seconds old."""
        now = trio.current_time()
        if now - self._spread.at > len(self._counts) * _SPREAD_SECONDS_PER_CHUNK:
            shared = self._counts.shared()
            chunks = Counter({1: len(self._counts) - len(shared)})
            for start in range(0, len(shared), _SPREAD_SLICE):
                chunks.update(shared[start : start + _SPREAD_SLICE])
                await trio.lowlevel.checkpoint()
            self._spread = Spread(chunks, now)
        return self._spread

    @property
    def evictions(self) -> EvictionTallies:
        """What became of the evictions of chunks."""
        return self._counts.evictions.tallies

    @property
    def oldest_eviction_seconds(self) -> float:
        """How long the eviction that is owed longest has been; 0 where none is owed."""
        return max(0.0, trio.current_time() - self._counts.evictions.oldest_since())

    def statistics(self) -> dict[str, int]:
        """Chunks referenced, waiting for their evict, and in flight; messages that wait."""
        evictions = self._counts.evictions
        return {
            "referenced": len(self._counts),
            "evictions_waiting": len(evictions),
            "evictions_in_flight": evictions.in_flight_count,
            "mailbox": len(self._mailbox),
        }

    def counts_of(self, chunks: ChunkMap) -> dict[ChunkHash, int]:
        """References to each of these, for traces."""
        return {chunk: self._counts.count(chunk) for chunk in chunks}

    def counts(self) -> dict[ChunkHash, int]:
        """A copy of all counts, for tests."""
        return self._counts.as_dict()
