"""What prefetches and retrieves in progress may still bring into the hot tier. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from ramakv.lmcache.embedded.answers import PrefetchStatistics


class Wanted:
    """What one prefetch or retrieve in progress still wants. Compared by identity."""

    def __init__(self, chunk_hashes: Iterable[str], lookup_id: str | int | None = None) -> None:
        self.hashes = set(chunk_hashes)
        self.lookup_id = lookup_id


class Prefetches:
    """The prefetches and retrieves in progress, and the counts of the prefetches."""

    def __init__(self) -> None:
        """Start with none."""
        self.prefetches: set[Wanted] = set()
        self.retrieves: set[Wanted] = set()
        self.started = 0
        self.finished = 0
        self.refused = 0
        self.chunks_hot = 0
        self.chunks_loaded = 0

    @property
    def chunks_wanted(self) -> int:
        """How many chunks the prefetches in progress still want."""
        return sum(len(wanted.hashes) for wanted in self.prefetches)

    def forget(self, chunk_hashes: Iterable[str]) -> None:
        """Let nothing that was asked for before bring these chunks up."""
        chunk_hashes = list(chunk_hashes)
        for wanted in (*self.prefetches, *self.retrieves):
            wanted.hashes.difference_update(chunk_hashes)

    def fulfil(self, chunk_hashes: Collection[str]) -> None:
        """Let no prefetch load these chunks again, which have come up without it."""
        for wanted in self.prefetches:
            wanted.hashes.difference_update(chunk_hashes)

    def forget_all(self) -> None:
        """Let nothing that was asked for before bring anything up."""
        for wanted in (*self.prefetches, *self.retrieves):
            wanted.hashes.clear()

    def touch(self, chunk_hashes: Iterable[str]) -> bool:
        """Say whether a prefetch in progress wants one of these chunks."""
        return any(not wanted.hashes.isdisjoint(chunk_hashes) for wanted in self.prefetches)

    def statistics(self) -> PrefetchStatistics:
        """Return the counts of this moment."""
        return PrefetchStatistics(
            started=self.started,
            finished=self.finished,
            refused=self.refused,
            chunks_hot=self.chunks_hot,
            chunks_loaded=self.chunks_loaded,
        )


@contextmanager
def listed(in_progress: set[Wanted], wanted: Wanted) -> Iterator[Wanted]:
    """Keep `wanted` among those in progress during the block."""
    in_progress.add(wanted)
    try:
        yield wanted
    finally:
        in_progress.remove(wanted)
