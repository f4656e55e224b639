"""Global reference counts, and which released chunks must be evicted.

Counts are moved in two steps around a commit. *Acquire* comes before it and is provisional;
*settle* after it makes the acquired references durable and releases the removed ones;
*undo* takes it all back when the commit failed. In between, everything errs on the side of
keeping.

Each released chunk has a row in the outbox, written by the commit that released it. A row
may be deleted only when the evict is done or when a *durable* reference exists. A
provisional one can still be undone, and one that is *leaving* may be gone from the disk
already; then the evict is owed again. Rows that wait for that decision are in `_owed`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ramakv.core.chunks import ChunkHash
from ramakv.core.counting import Holds
from ramakv.core.evictions import Batch, EvictionQueue, Owed, Scope

OutboxRow = tuple[ChunkHash, int]
"""A chunk, and the generation of its outbox row: only rows up to it are meant."""


class Settled(NamedTuple):
    """What a settle did: chunks queued for eviction, and outbox rows no longer needed."""

    queued: int
    obsolete: list[OutboxRow]


class FailedBatch(NamedTuple):
    """What is left of a failed batch: rows no longer needed, and rows that became dead letters."""

    obsolete: list[OutboxRow]
    dead: list[OutboxRow]


@dataclass(slots=True)
class RefCounts:
    """Counts by chunk: sessions and forks that reference it, each once."""

    evictions: EvictionQueue
    _counts: Holds[ChunkHash] = field(default_factory=Holds)
    _provisional: Holds[ChunkHash] = field(default_factory=Holds)
    _leaving: Holds[ChunkHash] = field(default_factory=Holds)
    _owed: dict[ChunkHash, Owed] = field(default_factory=dict)

    def __len__(self) -> int:
        """Chunks that are referenced."""
        return len(self._counts)

    def count(self, chunk: ChunkHash) -> int:
        """References to a chunk, provisional ones included."""
        return self._counts.count(chunk)

    def shared(self) -> list[int]:
        """A copy of the counts of chunks with more than one reference."""
        return self._counts.shared()

    def as_dict(self) -> dict[ChunkHash, int]:
        """A copy of all counts."""
        return self._counts.as_dict()

    def load(self, chunks: Collection[ChunkHash]) -> None:
        """Count the durable references of one owner at start, each chunk once."""
        self._counts.hold(chunks)

    def load_outbox(self, rows: Iterable[tuple[ChunkHash, Owed]], now: float) -> list[OutboxRow]:
        """Queue what is owed and unreferenced at start; return the rows that are not."""
        obsolete = []
        for chunk, owed in rows:
            if chunk in self._counts:
                obsolete.append((chunk, owed.generation))
            else:
                self.evictions.add(chunk, owed, now)
        return obsolete

    def acquire(self, chunks: Collection[ChunkHash], leaving: Collection[ChunkHash] = ()) -> None:
        """Reference distinct chunks provisionally; an evict that waits is withdrawn.

        `leaving` are chunks that the same commit will release.
        """
        self._counts.hold(chunks)
        self._provisional.hold(chunks)
        withdrawn = self.evictions.withdraw_all(chunks)
        self.evictions.tallies.withdrawn += len(withdrawn)
        self._owed.update(withdrawn)
        self._leaving.hold(leaving)

    def settle(
        self,
        acquired: Collection[ChunkHash],
        released: Collection[ChunkHash],
        generation: int,
        scope: Scope,
        now: float,
    ) -> Settled:
        """Make acquired references durable and release others, after their commit.

        `generation` is that commit's, and so of the outbox rows of the released chunks.
        """
        obsolete: list[OutboxRow] = []
        self._provisional.let_go_all(acquired)
        self._leaving.let_go_all(released)
        for chunk in acquired if self._owed else ():
            self._drop_if_durable(chunk, obsolete)
        owed, free = Owed(generation, scope), []
        for chunk in released:
            if self._counts.let_go(chunk):
                self._owe(chunk, owed)
                self._drop_if_durable(chunk, obsolete)
                continue
            free.append(chunk)
        self.evictions.add_all(free, owed, now)
        for chunk in free if self._owed else ():
            # A later commit may have been settled first: then the row is that one's.
            known = self._owed.pop(chunk, owed)
            if known.generation > generation:
                self.evictions.add(chunk, known, now)
        return Settled(len(free), obsolete)

    def undo(
        self, acquired: Iterable[ChunkHash], leaving: Iterable[ChunkHash], now: float
    ) -> list[OutboxRow]:
        """Take an acquire back; what is owed and unreferenced again, waits again.

        Returns the outbox rows that are not needed after all.
        """
        obsolete: list[OutboxRow] = []
        for chunk in acquired:
            self._provisional.let_go(chunk)
            if self._counts.let_go(chunk) == 0 and (owed := self._owed.pop(chunk, None)):
                self.evictions.add(chunk, owed, now)
        for chunk in leaving:
            self._leaving.let_go(chunk)
            self._drop_if_durable(chunk, obsolete)
        return obsolete

    def forget(
        self, chunks: Iterable[ChunkHash], generation: int, scope: Scope, now: float
    ) -> Settled:
        """Queue what nobody references of a suspended session's chunks; it held no reference."""
        obsolete: list[OutboxRow] = []
        queued = 0
        for chunk in chunks:
            if chunk not in self._counts:
                self.evictions.add(chunk, Owed(generation, scope), now)
                queued += 1
            else:
                self._owe(chunk, Owed(generation, scope))
                self._drop_if_durable(chunk, obsolete)
        return Settled(queued, obsolete)

    def revive(self, rows: Iterable[tuple[ChunkHash, Owed]], now: float) -> Settled:
        """Owe dead letters again, but for those that were referenced, or released anew, since."""
        obsolete: list[OutboxRow] = []
        queued = 0
        for chunk, owed in rows:
            if chunk in self._counts:
                self._owe(chunk, owed)
                self._drop_if_durable(chunk, obsolete)
            elif not self.evictions.is_waiting(chunk):  # else under a newer row
                self.evictions.add(chunk, owed, now)
                queued += 1
        return Settled(queued, obsolete)

    def evicted(self, batch: Batch) -> list[OutboxRow]:
        """End a batch that was carried out; returns the outbox rows it settles."""
        self.evictions.done(batch)
        return list(batch.chunks.items())

    def left(self, batch: Batch) -> list[OutboxRow]:
        """End a batch that is not sent; returns the outbox rows it settles."""
        self.evictions.leave(batch)
        return list(batch.chunks.items())

    def evict_failed(self, batch: Batch, now: float, *, rejected: bool) -> FailedBatch:
        """Let a failed batch wait again, without the chunks that are referenced by now."""
        obsolete = self._drop_referenced(batch)
        dead: ChunkHash | None = None
        if rejected:
            dead = self.evictions.halve(batch, now)
        else:
            self.evictions.retry(batch, now)
        return FailedBatch(obsolete, [(dead, batch.chunks[dead])] if dead is not None else [])

    def forgive(self, released_before: float) -> list[OutboxRow]:
        """Drop evicts that wait since before then: the chunks are gone. Returns the rows to delete.

        Rows that wait for a commit to be decided stay: they are dropped, or owed, after it.
        """
        owed = self.evictions.clear(released_before)
        return [(chunk, row.generation) for chunk, row in owed.items()]

    def _drop_referenced(self, batch: Batch) -> list[OutboxRow]:
        """Take out of a failed batch what is referenced again, or was released anew."""
        obsolete: list[OutboxRow] = []
        stale = [
            chunk
            for chunk in batch.chunks
            if chunk in self._counts or self.evictions.is_waiting(chunk)
        ]
        tallies = self.evictions.tallies
        for chunk, owed in self.evictions.drop(batch, stale).items():
            if chunk not in self._counts:
                tallies.superseded += 1  # it waits under a newer row of its own
            else:
                tallies.withdrawn += 1
                self._owe(chunk, owed)
                self._drop_if_durable(chunk, obsolete)
        return obsolete

    def _owe(self, chunk: ChunkHash, owed: Owed) -> None:
        """Remember a row; a chunk has one, and the latest commit that wrote it counts."""
        known = self._owed.get(chunk)
        if known is None or known.generation <= owed.generation:
            self._owed[chunk] = owed

    def _drop_if_durable(self, chunk: ChunkHash, obsolete: list[OutboxRow]) -> None:
        """Let a row go if somebody holds the chunk, on disk, and is not about to let go."""
        if chunk not in self._owed:
            return
        unsure = self._provisional.count(chunk) + self._leaving.count(chunk)
        if self._counts.count(chunk) > unsure:
            obsolete.append((chunk, self._owed.pop(chunk).generation))
