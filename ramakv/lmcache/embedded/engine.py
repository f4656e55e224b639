"""The embedded engine: store, retrieve, prefetch, evict and query over a hot and a disk tier.

What it answers to is LMCache's API; `app.py` serves it over HTTP. Every change to what the
tiers hold is made in one go, with no await in between; what takes time afterwards (files,
prefetches) belongs to the engine's own tasks, so a caller that is cancelled leaves nothing
half done.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Container, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import islice, takewhile
from pathlib import Path

import trio

from ramakv.config import Embedded
from ramakv.errors import BackendUnavailableError
from ramakv.lmcache.embedded.answers import (
    EngineStatistics,
    Evicted,
    PrefetchStarted,
    PrefetchStatistics,
    Retrieved,
    Stored,
)
from ramakv.lmcache.embedded.disk import DiskTier, RunSync
from ramakv.lmcache.embedded.tiers import DISK_LOCATION, HOT_LOCATION, HotTier, chunk_payload

PREFETCHES_MAX = 64
RETRIEVES_MAX = 64
PREFETCH_CHUNKS_MAX = 65_536
"""How many chunks all prefetches in progress may still want; one alone may want any number."""

_READS_PER_HOP_MAX = 64  # chunks read per hop to the thread, where the disk is not slowed down


class _Wanted:
    """What one prefetch or retrieve in progress may still bring into the hot tier."""

    def __init__(self, chunk_hashes: Iterable[str]) -> None:
        self.hashes = set(chunk_hashes)


class Engine:
    """A cache engine inside this process. Made by `open_engine`.

    Chunk hashes are opaque strings, given in prefix order.
    """

    def __init__(self, config: Embedded, disk: DiskTier, nursery: trio.Nursery) -> None:
        """Start with an empty hot tier. Prefetches run in `nursery`."""
        self._chunk_bytes = config.chunk_bytes
        self._disk_read_seconds = config.disk_read_seconds
        self._reads_per_hop = 1 if config.disk_read_seconds else _READS_PER_HOP_MAX
        self._hot = HotTier(config.hot_chunks_max)
        self._disk = disk
        self._nursery = nursery
        # What each prefetch, and each retrieve, in progress may still bring into the hot tier.
        self._prefetches: set[_Wanted] = set()
        self._retrieves: set[_Wanted] = set()
        self._prefetches_started = 0
        self._prefetches_finished = 0
        self._prefetches_refused = 0
        self._prefetch_chunks_hot = 0
        self._prefetch_chunks_loaded = 0

    async def store(self, chunk_hashes: Sequence[str]) -> Stored:
        """Hold the chunks, as after a turn: in the hot tier at once, on disk when this returns.

        Chunks that a tier has are renewed there. Raises BackendUnavailableError, with nothing
        changed, when too much waits for the disk.
        """
        self._disk.check_room(len(chunk_hashes))
        stored = 0
        for chunk_hash in chunk_hashes:
            if not self._hot.renew(chunk_hash):
                self._hot.put(chunk_hash, chunk_payload(chunk_hash, self._chunk_bytes))
                stored += 1
        written = await self._disk.put(chunk_hashes)
        return Stored(num_chunks=len(chunk_hashes), num_stored=stored, num_written=written)

    async def retrieve(self, chunk_hashes: Sequence[str]) -> Retrieved:
        """Read the chunks from the front, each from the hot tier or else from disk.

        The first chunk that neither tier can give ends the usable prefix. Chunks read from disk
        enter the hot tier, except those that are evicted from it meanwhile. Raises
        BackendUnavailableError when too many retrieves are in progress.
        """
        if len(self._retrieves) >= RETRIEVES_MAX:
            raise BackendUnavailableError("too many retrieves in progress")
        hot = disk = 0
        with _listed(self._retrieves, _Wanted(chunk_hashes)) as wanted:
            while hot + disk < len(chunk_hashes):
                if self._hot.renew(chunk_hashes[hot + disk]):
                    hot += 1
                    continue
                rest = islice(chunk_hashes, hot + disk, hot + disk + self._reads_per_hop)
                run = list(takewhile(self._is_on_disk_only, rest))
                if not run:
                    break
                read, _ = await self._bring_up(run, wanted)
                disk += read
        missing = chunk_hashes[hot + disk :]
        self._hot.count(hits=hot, misses=disk + len(missing))
        self._disk.count(hits=disk, misses=len(missing))
        return Retrieved(
            num_chunks=len(chunk_hashes),
            found={HOT_LOCATION: hot, DISK_LOCATION: disk},
            num_missing=len(missing),
            missing=missing,
        )

    def prefetch(self, chunk_hashes: Sequence[str], lookup_id: str | int) -> PrefetchStarted:
        """Begin to bring chunks up, and return at once.

        Tier by tier: the hot tier's chunks are counted and renewed from the front to its first
        miss; from there on, disk chunks are loaded up to the first that is not on disk. Raises
        BackendUnavailableError, with nothing changed, when too many prefetches are in progress.
        """
        if self._nursery.cancel_scope.cancel_called:
            raise BackendUnavailableError("the embedded engine is stopping")
        hot = sum(1 for _ in takewhile(self._hot.__contains__, chunk_hashes))
        rest = islice(chunk_hashes, hot, None)
        run = tuple(dict.fromkeys(takewhile(self._disk.__contains__, rest)))
        waiting = sum(len(wanted.hashes) for wanted in self._prefetches)
        too_many = len(self._prefetches) >= PREFETCHES_MAX
        if too_many or (waiting and waiting + len(run) > PREFETCH_CHUNKS_MAX):
            self._prefetches_refused += 1
            raise BackendUnavailableError("too many prefetches in progress")
        for chunk_hash in islice(chunk_hashes, hot):
            self._hot.renew(chunk_hash)
        self._prefetches_started += 1
        self._prefetch_chunks_hot += hot
        wanted = _Wanted(run)
        self._prefetches.add(wanted)  # from now on an evict takes chunks out of it
        self._nursery.start_soon(self._run_prefetch, run, wanted)
        return PrefetchStarted(lookup_id=lookup_id, num_chunks=len(chunk_hashes))

    async def evict(
        self, chunk_hashes: Sequence[str], locations: Collection[str] | None = None
    ) -> Evicted:
        """Take the chunks out of the tiers named by `locations`: None is all, empty is none.

        A chunk evicted from the hot tier does not come back through a prefetch or retrieve
        that was asked for before. Returns when the files are gone. Raises
        BackendUnavailableError, with nothing changed, when too much waits for the disk.
        """
        from_disk = locations is None or DISK_LOCATION in locations
        if from_disk:
            self._disk.check_room(len(chunk_hashes))
        evicted = 0
        if locations is None or HOT_LOCATION in locations:
            evicted += len(self._hot.evict(chunk_hashes))
            for wanted in (*self._prefetches, *self._retrieves):
                wanted.hashes.difference_update(chunk_hashes)
        if from_disk:
            evicted += await self._disk.remove(chunk_hashes)
        return Evicted(num_evicted=evicted)

    def query(self, chunk_hashes: Sequence[str]) -> dict[str, list[str]]:
        """Say for each chunk which locations hold it. Renews nothing."""
        tiers: dict[str, Container[str]] = {HOT_LOCATION: self._hot, DISK_LOCATION: self._disk}
        return {
            chunk_hash: [location for location, tier in tiers.items() if chunk_hash in tier]
            for chunk_hash in chunk_hashes
        }

    def statistics(self) -> EngineStatistics:
        """Return the counts of this moment."""
        return EngineStatistics(
            tiers={
                HOT_LOCATION: self._hot.statistics(),
                DISK_LOCATION: self._disk.statistics(),
            },
            prefetches=PrefetchStatistics(
                started=self._prefetches_started,
                finished=self._prefetches_finished,
                refused=self._prefetches_refused,
                chunks_hot=self._prefetch_chunks_hot,
                chunks_loaded=self._prefetch_chunks_loaded,
            ),
        )

    async def _run_prefetch(self, run: Sequence[str], wanted: _Wanted) -> None:
        with _listed(self._prefetches, wanted):
            for start in range(0, len(run), self._reads_per_hop):
                chunk_hashes = run[start : start + self._reads_per_hop]
                if not await self._prefetch_run(chunk_hashes, wanted):
                    break
                wanted.hashes.difference_update(chunk_hashes)
        self._prefetches_finished += 1

    async def _prefetch_run(self, chunk_hashes: Sequence[str], wanted: _Wanted) -> bool:
        """Bring up the next chunks of a prefetch. Return False where its prefix ends."""
        here = list(takewhile(self._is_anywhere, chunk_hashes))
        todo = [chunk_hash for chunk_hash in here if not self._hot.renew(chunk_hash)]
        todo = [chunk_hash for chunk_hash in todo if chunk_hash in wanted.hashes]
        read, loaded = await self._bring_up(todo, wanted)
        self._prefetch_chunks_loaded += loaded
        return read == len(todo) and len(here) == len(chunk_hashes)

    async def _bring_up(self, chunk_hashes: Sequence[str], wanted: _Wanted) -> tuple[int, int]:
        """Read chunks from disk, and put those into the hot tier that are wanted there still.

        Returns how many were read, up to the first that could not be, and how many were put.
        """
        await trio.sleep(self._disk_read_seconds * len(chunk_hashes))
        payloads = await self._disk.read(chunk_hashes)
        loaded = 0
        for chunk_hash, payload in zip(chunk_hashes, payloads, strict=False):
            if chunk_hash in wanted.hashes:
                self._hot.put(chunk_hash, payload)
                loaded += 1
        return len(payloads), loaded

    def _is_on_disk_only(self, chunk_hash: str) -> bool:
        return chunk_hash in self._disk and chunk_hash not in self._hot

    def _is_anywhere(self, chunk_hash: str) -> bool:
        return chunk_hash in self._disk or chunk_hash in self._hot


@asynccontextmanager
async def open_engine(
    config: Embedded, *, disk_dir: Path, run_sync: RunSync = trio.to_thread.run_sync
) -> AsyncIterator[Engine]:
    """Open an engine over the chunk files in `disk_dir`, which is made if it is not there.

    On leaving, prefetches are cancelled and waited for, and what was to be written is written;
    the files stay. When the block raises or is cancelled, the writes are given up as well.
    As with every nursery, an exception of the block comes out in a group. Raises ConfigError
    when the folder cannot be used.
    """
    disk = DiskTier(
        disk_dir,
        chunks_max=config.disk_chunks_max,
        chunk_bytes=config.chunk_bytes,
        run_sync=run_sync,
    )
    await disk.load_index()
    async with trio.open_nursery() as disk_nursery:
        disk_nursery.start_soon(disk.run)
        async with trio.open_nursery() as prefetch_nursery:
            yield Engine(config, disk, prefetch_nursery)
            prefetch_nursery.cancel_scope.cancel()
        disk.close()


@contextmanager
def _listed(in_progress: set[_Wanted], wanted: _Wanted) -> Iterator[_Wanted]:
    in_progress.add(wanted)
    try:
        yield wanted
    finally:
        in_progress.remove(wanted)
