"""The embedded engine: store, retrieve, prefetch, evict and query over its tiers.

The hot tier is memory; the disk tier and, where one is configured, the remote tier are folders.
What it answers to is LMCache's API; `app.py` serves it over HTTP. Every change to what the
tiers hold is made in one go, with no await in between; what takes time afterwards (files,
prefetches) belongs to the engine's own tasks, so a caller that is cancelled leaves nothing
half done.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Container, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from ramakv.config import Embedded, resolve_path
from ramakv.errors import BackendUnavailableError
from ramakv.lmcache.embedded.answers import (
    EngineStatistics,
    Evicted,
    PrefetchStarted,
    Retrieved,
    Stored,
)
from ramakv.lmcache.embedded.disk import DiskTier, RunSync
from ramakv.lmcache.embedded.files import ChunkFiles, ChunkFolder
from ramakv.lmcache.embedded.pinning import PinningHotTier, put_while_room
from ramakv.lmcache.embedded.prefetches import Prefetches, Wanted, listed
from ramakv.lmcache.embedded.reading import Reader
from ramakv.lmcache.embedded.switches import Switches
from ramakv.lmcache.embedded.tiers import (
    DISK_LOCATION,
    HOT_LOCATION,
    REMOTE_LOCATION,
    HotTier,
    chunk_payload,
)
from ramakv.lmcache.embedded.wedge import DiskLock

PREFETCHES_MAX = 64
RETRIEVES_MAX = 64
PREFETCH_CHUNKS_MAX = 65_536
"""How many chunks all prefetches in progress may still want; one alone may want any number."""


class Engine:
    """A cache engine inside this process. Made by `open_engine`.

    Chunk hashes are opaque strings, given in prefix order.
    """

    def __init__(
        self,
        config: Embedded,
        files: Mapping[str, DiskTier],
        nursery: trio.Nursery,
        run_sync: RunSync,
    ) -> None:
        """Start with an empty hot tier over these others. Prefetches run in `nursery`."""
        self.config = config
        self.run_sync = run_sync
        self.switches = Switches([HOT_LOCATION, *files])
        self.disk_lock = DiskLock(observed=config.behaviour == "lmcache-0.4.4")
        self.on_chunks: Callable[[Sequence[str]], None] = lambda _: None
        """Told the chunks of every store and lookup."""
        hot_tier = PinningHotTier if self.disk_lock.observed else HotTier
        self._hot = hot_tier(config.hot_chunks_max)
        self._payload_of = partial(chunk_payload, chunk_bytes=config.chunk_bytes)
        self._files = files
        self._nursery = nursery
        self._progress = Prefetches()
        self._reader = Reader(
            self._hot, files, self.switches, self._progress, self.disk_lock, config
        )

    async def store(
        self, chunk_hashes: Sequence[str], payloads: Mapping[str, bytes] | None = None
    ) -> Stored:
        """Hold the chunks, as after a turn: in the hot tier at once, in files when this returns.

        Without `payloads` each has the bytes that stand for it. Chunks that a tier has are
        renewed there; a frozen engine stores nothing. Raises BackendUnavailableError, with
        nothing changed, when too much waits for a disk.
        """
        self.on_chunks(chunk_hashes)
        targets = [
            tier for location, tier in self._files.items() if self.switches.writable(location)
        ]
        if targets:
            await self.disk_lock.pass_through()
        for tier in targets:
            tier.check_room(len(chunk_hashes))
        stored = 0
        taken = chunk_hashes
        if self.switches.writable(HOT_LOCATION):
            payload_of = payloads.__getitem__ if payloads else self._payload_of
            stored, taken = put_while_room(self._hot, chunk_hashes, payload_of)
            self._progress.fulfil(taken)
        changes = [tier.put(taken, payloads) for tier in targets]
        written = sum([await change.wait() for change in changes])
        return Stored(num_chunks=len(chunk_hashes), num_stored=stored, num_written=written)

    async def retrieve(
        self, chunk_hashes: Sequence[str], payloads: list[bytes] | None = None
    ) -> Retrieved:
        """Read the chunks from the front, each from the first tier that has it.

        The first chunk that no tier can give ends the usable prefix. Chunks read from files
        enter the hot tier, except those that are evicted from it meanwhile. The bytes are added
        to `payloads`. Raises BackendUnavailableError when too many retrieves are in progress.
        """
        if len(self._progress.retrieves) >= RETRIEVES_MAX:
            raise BackendUnavailableError("too many retrieves in progress")
        self.on_chunks(chunk_hashes)
        with listed(self._progress.retrieves, Wanted(chunk_hashes)) as wanted:
            found = await self._reader.read_prefix(chunk_hashes, wanted, payloads)
        position = sum(found.values())
        return Retrieved(
            num_chunks=len(chunk_hashes),
            found=found,
            num_missing=len(chunk_hashes) - position,
            missing=chunk_hashes[position:],
        )

    def lookup(self, chunk_hashes: Sequence[str]) -> dict[str, int]:
        """Say how many chunks each tier would give to a prefetch. Renews nothing."""
        hot = self._hot_prefix(chunk_hashes)
        found = dict.fromkeys(self.switches.locations, 0)
        found[HOT_LOCATION] = hot
        for run in self._reader.plan(chunk_hashes, hot):
            found[run.location] = len(run.chunk_hashes)
        return found

    def prefetch(self, chunk_hashes: Sequence[str], lookup_id: str | int) -> PrefetchStarted:
        """Begin to bring chunks up, and return at once.

        Tier by tier: the hot tier's chunks are counted from the front to its first miss, and
        renewed from there back to the front, as LMCache does: a chunk is of no use without
        those before it. From there on, each other tier's chunks are loaded up to the first that
        it has not. Raises BackendUnavailableError, with nothing changed, when too many
        prefetches are in progress.
        """
        if self._nursery.cancel_scope.cancel_called:
            raise BackendUnavailableError("the embedded engine is stopping")
        progress = self._progress
        hot = self._hot_prefix(chunk_hashes)
        runs = self._reader.plan(chunk_hashes, hot)
        loaded = (chunk_hash for run in runs for chunk_hash in run.chunk_hashes)
        wanted = Wanted(loaded, lookup_id)
        waiting = progress.chunks_wanted
        too_many = len(progress.prefetches) >= PREFETCHES_MAX
        if too_many or (waiting and waiting + len(wanted.hashes) > PREFETCH_CHUNKS_MAX):
            progress.refused += 1
            raise BackendUnavailableError("too many prefetches in progress")
        self.on_chunks(chunk_hashes)
        for chunk_hash in reversed(chunk_hashes[:hot]):
            self._hot.renew(chunk_hash)
        self._hot.begin(lookup_id)
        self._hot.hold(lookup_id, chunk_hashes[:hot])
        progress.started += 1
        progress.chunks_hot += hot
        progress.prefetches.add(wanted)  # from now on an evict takes chunks out of it
        self._nursery.start_soon(self._reader.run_prefetch, runs, wanted)
        return PrefetchStarted(lookup_id=lookup_id, num_chunks=len(chunk_hashes))

    async def evict(
        self, chunk_hashes: Sequence[str], locations: Collection[str] | None = None
    ) -> Evicted:
        """Take the chunks out of the tiers named by `locations`: None is all, empty is none.

        A chunk evicted from the hot tier does not come back through a prefetch or retrieve
        that was asked for before. Returns when the files are gone. Raises
        BackendUnavailableError, with nothing changed, when too much waits for a disk.
        """
        tiers = self._named_files(locations)
        for tier in tiers:
            tier.check_room(len(chunk_hashes))
        overlaps = self._progress.touch(chunk_hashes)
        evicted = 0
        if locations is None or HOT_LOCATION in locations:
            evicted += len(self._hot.evict(chunk_hashes))
            if not self.disk_lock.observed:
                self._progress.forget(chunk_hashes)
        if DISK_LOCATION in self._files and self._files[DISK_LOCATION] in tiers:
            await self.disk_lock.pass_through()
            if overlaps:
                self.disk_lock.collide()
        changes = [tier.remove(chunk_hashes) for tier in tiers]
        return Evicted(num_evicted=evicted + sum([await change.wait() for change in changes]))

    async def clear(self, locations: Collection[str] | None = None) -> int:
        """Take everything out of these tiers: None is all. Return how many chunks that were.

        What LMCache 0.4.4 clears is the hot tier alone, and there no held chunk. Raises
        BackendUnavailableError, with nothing changed, when too much waits for a disk.
        """
        tiers = [] if self.disk_lock.observed else self._named_files(locations)
        for tier in tiers:
            tier.check_room(tier.statistics().chunks)
        removed = 0
        if locations is None or HOT_LOCATION in locations:
            removed += self._hot.clear()
            if not self.disk_lock.observed:
                self._progress.forget_all()
        changes = [tier.clear() for tier in tiers]
        return removed + sum([await change.wait() for change in changes])

    def consume(self, lookup_id: str | int) -> None:
        """Let go of what this prefetch holds; only LMCache 0.4.4 holds anything."""
        self._hot.consume(lookup_id)

    def disable_hot_cache(self) -> None:
        """Drop the hot tier's chunks, and let no other enter."""
        self.switches.hot_cache = False
        self._hot.clear()

    def admit(self, chunk_hash: str, payload: bytes) -> bool:
        """Put a chunk that was read elsewhere into the hot tier, if it is open."""
        if not self.switches.writable(HOT_LOCATION):
            return False
        return bool(put_while_room(self._hot, [chunk_hash], lambda _: payload)[1])

    def query(self, chunk_hashes: Sequence[str]) -> dict[str, list[str]]:
        """Say for each chunk which locations hold it, bypassed ones left out. Renews nothing."""
        self.on_chunks(chunk_hashes)
        tiers: dict[str, Container[str]] = {HOT_LOCATION: self._hot, **self._files}
        for location in self.switches.bypassed:
            del tiers[location]
        return {
            chunk_hash: [location for location, tier in tiers.items() if chunk_hash in tier]
            for chunk_hash in chunk_hashes
        }

    def statistics(self) -> EngineStatistics:
        """Return the counts of this moment."""
        files = {location: tier.statistics() for location, tier in self._files.items()}
        return EngineStatistics(
            tiers={HOT_LOCATION: self._hot.statistics(), **files},
            prefetches=self._progress.statistics(),
        )

    @property
    def pinned(self) -> int:
        """How many chunks are held: by prefetches nobody consumed, or in progress."""
        return self._hot.pinned + self._progress.chunks_wanted

    @property
    def prefetches_in_progress(self) -> int:
        """How many prefetches still load."""
        return len(self._progress.prefetches)

    @property
    def prefetches_unconsumed(self) -> int:
        """How many prefetches are done and hold their chunks; only LMCache 0.4.4 holds any."""
        in_progress = {wanted.lookup_id for wanted in self._progress.prefetches}
        return len(self._hot.holders() - in_progress)

    def _hot_prefix(self, chunk_hashes: Sequence[str]) -> int:
        """How many chunks, from the front, may be read from the hot tier."""
        if not self.switches.readable(HOT_LOCATION):
            return 0
        return self._hot.prefix(chunk_hashes)

    def _named_files(self, locations: Collection[str] | None) -> list[DiskTier]:
        return [
            tier
            for location, tier in self._files.items()
            if locations is None or location in locations
        ]


@asynccontextmanager
async def open_engine(
    config: Embedded,
    *,
    disk_dir: Path,
    run_sync: RunSync = trio.to_thread.run_sync,
    disk_files: ChunkFiles | None = None,
) -> AsyncIterator[Engine]:
    """Open an engine over the chunk files in `disk_dir`, which is made if it is not there.

    `disk_files` keep the disk tier's payloads in place of that folder.

    On leaving, prefetches are cancelled and waited for, and what was to be written is written;
    the files stay. When the block raises or is cancelled, the writes are given up as well.
    As with every nursery, an exception of the block comes out in a group. Raises ConfigError
    when a folder cannot be used.
    """
    files = {
        DISK_LOCATION: DiskTier(
            disk_files or ChunkFolder(disk_dir),
            chunks_max=config.disk_chunks_max,
            chunk_bytes=config.chunk_bytes,
            run_sync=run_sync,
        )
    }
    if config.remote_dir:
        files[REMOTE_LOCATION] = DiskTier(
            ChunkFolder(resolve_path(config.remote_dir)),
            chunks_max=config.remote_chunks_max,
            chunk_bytes=config.chunk_bytes,
            run_sync=run_sync,
            key="embedded.remote_dir",
        )
    for tier in files.values():
        await tier.load_index()
    async with trio.open_nursery() as disk_nursery:
        for tier in files.values():
            disk_nursery.start_soon(tier.run)
        async with trio.open_nursery() as prefetch_nursery:
            yield Engine(config, files, prefetch_nursery, run_sync)
            prefetch_nursery.cancel_scope.cancel()
        for tier in files.values():
            tier.close()
