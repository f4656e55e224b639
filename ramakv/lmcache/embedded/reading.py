"""How chunks come up: a retrieve's usable prefix, and the task of a prefetch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import trio

from ramakv.config import Embedded
from ramakv.lmcache.embedded.disk import DiskTier
from ramakv.lmcache.embedded.pinning import PoolExhaustedError
from ramakv.lmcache.embedded.prefetches import Prefetches, Wanted, listed
from ramakv.lmcache.embedded.switches import Switches
from ramakv.lmcache.embedded.tiers import HOT_LOCATION, HotTier
from ramakv.lmcache.embedded.wedge import DiskLock

_READS_PER_HOP_MAX = 64
"""Chunks read per hop to the thread."""

_HOP_SECONDS = 0.1
"""How long a slowed disk reads before what it read is there."""


class Run(NamedTuple):
    """Chunks to read from one location, in prefix order."""

    location: str
    chunk_hashes: Sequence[str]


def _reads_per_hop(read_seconds: float) -> int:
    if read_seconds == 0:
        return _READS_PER_HOP_MAX
    return max(1, min(_READS_PER_HOP_MAX, int(_HOP_SECONDS / read_seconds)))


class Reader:
    """Reads chunks from the tiers of an engine, and brings them into its hot tier."""

    def __init__(
        self,
        hot: HotTier,
        files: Mapping[str, DiskTier],
        switches: Switches,
        progress: Prefetches,
        disk_lock: DiskLock,
        config: Embedded,
    ) -> None:
        """Share these with the engine; nothing here outlives a call but the prefetches' tasks."""
        self._hot = hot
        self._files = files
        self._switches = switches
        self._progress = progress
        self._disk_lock = disk_lock
        self._read_seconds = config.disk_read_seconds
        self._reads_per_hop = _reads_per_hop(config.disk_read_seconds)

    def plan(self, chunk_hashes: Sequence[str], position: int) -> list[Run]:
        """Say what a prefetch loads from `position` on: tier by tier, each to its first miss."""
        runs: list[Run] = []
        for location, tier in self._files.items():
            if not self._switches.readable(location):
                continue
            here = tier.prefix(chunk_hashes[position:])
            if here:
                found = dict.fromkeys(chunk_hashes[position : position + here])
                runs.append(Run(location, tuple(found)))
                position += here
        return runs

    async def read_prefix(
        self, chunk_hashes: Sequence[str], wanted: Wanted, payloads: list[bytes] | None
    ) -> dict[str, int]:
        """Read up to the first chunk that no tier can give. Return how many each tier gave."""
        found = dict.fromkeys(self._switches.locations, 0)
        position = 0
        while position < len(chunk_hashes):
            run = self._next_run(chunk_hashes, position)
            if run is None:
                break
            if run.location == HOT_LOCATION:
                read = [self._use_hot(chunk_hash) for chunk_hash in run.chunk_hashes]
            else:
                await self._disk_lock.pass_through()
                read = await self._read(run)
                with suppress(PoolExhaustedError):  # what has no place there is of use all the same
                    self._put_wanted(run.chunk_hashes, read, wanted)
            found[run.location] += len(read)
            position += len(read)
            if payloads is not None:
                payloads.extend(read)
        self._count(found, len(chunk_hashes))
        return found

    async def run_prefetch(self, runs: Sequence[Run], wanted: Wanted) -> None:
        """Bring up what `plan` said, except what `wanted` has lost by then."""
        with listed(self._progress.prefetches, wanted):
            for part in self._parts(runs, wanted):
                if not await self._prefetch_part(part, wanted):
                    break
                wanted.hashes.difference_update(part.chunk_hashes)
        self._progress.finished += 1

    def _parts(self, runs: Sequence[Run], wanted: Wanted) -> Iterator[Run]:
        """Yield what to bring up next, passing over what is hot at the head of it by then."""
        for location, chunk_hashes in runs:
            start = 0
            while start < len(chunk_hashes):
                hot = self._hot.prefix(islice(chunk_hashes, start, None))
                wanted.hashes.difference_update(chunk_hashes[start : start + hot])
                start += hot
                part = chunk_hashes[start : start + self._reads_per_hop]
                if part:
                    yield Run(location, part)
                start += len(part)

    async def _prefetch_part(self, part: Run, wanted: Wanted) -> bool:
        """Bring up the next chunks of a prefetch. Return False where its prefix ends."""
        here: list[str] = []
        for chunk_hash in part.chunk_hashes:
            if not self._is_anywhere(part.location, chunk_hash):
                break
            here.append(chunk_hash)
        todo = [c for c in here if c not in self._hot and c in wanted.hashes]
        if self._disk_lock.wedged:
            await trio.sleep_forever()
        if not todo:
            return len(here) == len(part.chunk_hashes)
        read = await self._read(Run(part.location, todo))
        try:
            loaded = self._put_wanted(todo, read, wanted)
        except PoolExhaustedError:
            self._disk_lock.wedge()
            await trio.sleep_forever()
        self._progress.chunks_loaded += len(loaded)
        return len(read) == len(todo) and len(here) == len(part.chunk_hashes)

    async def _read(self, run: Run) -> list[bytes]:
        """Read the payloads of a run up to the first that cannot be read."""
        await trio.sleep(self._read_seconds * len(run.chunk_hashes))
        return await self._files[run.location].read(run.chunk_hashes)

    def _put_wanted(
        self, chunk_hashes: Sequence[str], payloads: Sequence[bytes], wanted: Wanted
    ) -> list[str]:
        """Put what was read into the hot tier, where it is wanted there still."""
        if not self._switches.admits(HOT_LOCATION):
            return []
        put: list[str] = []
        for chunk_hash, payload in zip(chunk_hashes, payloads, strict=False):
            if chunk_hash in wanted.hashes:
                self._hot.put(chunk_hash, payload)
                put.append(chunk_hash)
                if wanted.lookup_id is not None:  # at once: the next one must not displace it
                    self._hot.hold(wanted.lookup_id, [chunk_hash])
        return put

    def _next_run(self, chunk_hashes: Sequence[str], position: int) -> Run | None:
        location = self._place(chunk_hashes[position])
        if location is None:
            return None
        run: list[str] = []
        for chunk_hash in islice(chunk_hashes, position, position + self._reads_per_hop):
            if self._place(chunk_hash) != location:
                break
            run.append(chunk_hash)
        return Run(location, run)

    def _place(self, chunk_hash: str) -> str | None:
        """Return the first location that may be read and has the chunk."""
        if chunk_hash in self._hot and self._switches.readable(HOT_LOCATION):
            return HOT_LOCATION
        for location, tier in self._files.items():
            if chunk_hash in tier and self._switches.readable(location):
                return location
        return None

    def _use_hot(self, chunk_hash: str) -> bytes:
        self._hot.renew(chunk_hash)
        payload = self._hot.peek(chunk_hash)
        assert payload is not None
        return payload

    def _is_anywhere(self, location: str, chunk_hash: str) -> bool:
        if chunk_hash in self._hot:
            return True
        return self._switches.readable(location) and chunk_hash in self._files[location]

    def _count(self, found: Mapping[str, int], chunks: int) -> None:
        missing = chunks
        tiers: dict[str, HotTier | DiskTier] = {HOT_LOCATION: self._hot, **self._files}
        for location, tier in tiers.items():
            missing -= found[location]
            tier.count(hits=found[location], misses=missing)
