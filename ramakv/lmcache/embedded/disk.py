"""The disk tier: an LRU index over real files, one file a chunk.

The index changes at once; the files follow in one lane, one job after the other, in the order
asked. So a read meets the file that the index promised when it was asked for, whatever has
been put or removed since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import trio

from ramakv.errors import BackendUnavailableError, ConfigError
from ramakv.lmcache.embedded.files import Changed, ChunkFiles, Read
from ramakv.lmcache.embedded.jobs import STOPPING, Change, Job
from ramakv.lmcache.embedded.tiers import LruTier, TierStatistics, chunk_payload

JOBS_WAITING_MAX = 256
CHUNKS_WAITING_MAX = 65_536
"""How many chunks may wait to be written or unlinked; into an idle lane any one call fits."""
CHUNKS_PER_HOP_MAX = 4096
"""How many chunks one hop to the thread writes: a hop cannot be cancelled, so it must end."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


class RunSync(Protocol):
    """`trio.to_thread.run_sync`, or what runs a blocking function in its place."""

    async def __call__(self, sync_fn: Callable[[], T], /) -> T:
        """Run it and return what it returns."""
        ...


class DiskStatistics(TierStatistics, frozen=True, kw_only=True):
    """A tier's counts, and how its files fare."""

    jobs_waiting: int
    write_failures: int
    """Chunks that could not be written."""
    read_failures: int
    """Chunks whose file was gone, damaged or unreadable."""


@dataclass(eq=False, slots=True)
class _ChunkFile:
    """One file of the index. Compared by identity: a chunk put again is another file."""

    payload_bytes: int


class DiskTier:
    """Chunks in files. Owns the index, and the lane through which every file is touched.

    A caller that is cancelled while it waits loses the answer only: what it asked for is done.
    """

    def __init__(
        self,
        files: ChunkFiles,
        *,
        chunks_max: int,
        chunk_bytes: int,
        run_sync: RunSync,
        key: str = "embedded.disk_dir",
    ) -> None:
        """Start with an empty index; `load_index` fills it from what `files` hold."""
        self._files = files
        self._key = key
        self._chunk_bytes = chunk_bytes
        self._run_sync = run_sync
        self._index = LruTier[_ChunkFile](chunks_max, size_of=lambda file: file.payload_bytes)
        self._jobs, self._inbox = trio.open_memory_channel[Job[Any]](JOBS_WAITING_MAX)
        self._open = True
        self._chunks_waiting = 0
        self._write_failures = 0
        self._read_failures = 0
        self._writes_fail = False

    def __contains__(self, chunk_hash: object) -> bool:
        return chunk_hash in self._index

    def prefix(self, chunk_hashes: Iterable[str]) -> int:
        """Return how many of the chunks, from the front to the first miss, are here."""
        return self._index.prefix(chunk_hashes)

    @property
    def chunks_max(self) -> int:
        """How many chunks, and so files, there are at most."""
        return self._index.chunks_max

    async def load_index(self) -> None:
        """Take over the files that are there; of too many, remove the oldest.

        Files that are damaged or not ours stay where they are: one warning counts them.
        Raises ConfigError when the folder cannot be made or read.
        """
        try:
            folder = await self._run_sync(partial(self._files.scan, self.chunks_max))
        except OSError as exc:
            reason = exc.strerror or str(exc)
            raise ConfigError(f"{self._key}: {self._files}: {reason}") from exc
        for file in folder.found:
            self._index.put(file.chunk_hash, _ChunkFile(file.payload_bytes))
        if folder.skipped:
            names = ", ".join(folder.skipped[:3])
            message = "skipped %d files in %s that hold no usable chunk, such as %s"
            _log.warning(message, len(folder.skipped), self._files, names)

    async def run(self) -> None:
        """Do the jobs in the order asked, until `close` and then to the last."""
        with self._inbox:
            try:
                async for job in self._inbox:
                    await self._run_job(job)
            finally:
                self._open = False
                while self._inbox.statistics().current_buffer_used:
                    self._inbox.receive_nowait().done.set()

    def close(self) -> None:
        """Accept no more jobs."""
        self._open = False
        self._jobs.close()

    def check_room(self, chunks: int) -> None:
        """Refuse now what `put` or `remove` of this many chunks would refuse.

        Raises BackendUnavailableError when too much waits for the disk already, and when the
        tier is closed.
        """
        if not self._open:
            raise BackendUnavailableError(STOPPING)
        jobs_full = self._jobs.statistics().current_buffer_used >= JOBS_WAITING_MAX
        chunks_full = self._chunks_waiting and self._chunks_waiting + chunks > CHUNKS_WAITING_MAX
        if jobs_full or chunks_full:
            raise BackendUnavailableError("too much waits for the embedded engine's disk")

    def put(
        self, chunk_hashes: Sequence[str], payloads: Mapping[str, bytes] | None = None
    ) -> Change:
        """Hold the chunks that are not here and renew the others; the files follow.

        Without `payloads`, each chunk has the bytes that stand for it. Counted as changed are
        those written: those that could not be, and those that the later ones of this very call
        displaced, are not among them. Raises what `check_room` raises, before anything is
        changed.
        """
        self.check_room(len(chunk_hashes))
        written: dict[str, _ChunkFile] = {}
        removed: list[str] = []
        for chunk_hash in chunk_hashes:
            if self._index.renew(chunk_hash):
                continue
            size = self._chunk_bytes if payloads is None else len(payloads[chunk_hash])
            written[chunk_hash] = _ChunkFile(size)
            displaced = self._index.put(chunk_hash, written[chunk_hash])
            if displaced is not None and written.pop(displaced, None) is None:
                removed.append(displaced)
        return Change(len(written), self._change(removed, written, payloads))

    def remove(self, chunk_hashes: Sequence[str]) -> Change:
        """Evict the chunks; the unlinking of their files follows. Counted are those here.

        Raises what `check_room` raises, before anything is changed.
        """
        self.check_room(len(chunk_hashes))
        removed = self._index.evict(chunk_hashes)
        return Change(len(removed), self._change(removed, {}, None))

    def clear(self) -> Change:
        """Evict every chunk. Raises what `check_room` raises, before anything is changed."""
        return self.remove(list(self._index))

    async def read(self, chunk_hashes: Sequence[str]) -> list[bytes]:
        """Read chunks, renewing them, up to the first that is not here or cannot be read.

        One that cannot be read leaves the tier. Waits for room in the lane. Raises
        BackendUnavailableError when the tier is closed.
        """
        files: list[_ChunkFile] = []
        for chunk_hash in chunk_hashes:
            file = self._index.peek(chunk_hash)
            if file is None:
                break
            self._index.renew(chunk_hash)
            files.append(file)
        if not files:
            return []
        wanted = tuple(chunk_hashes[: len(files)])
        job = Job[Read](
            hops=(partial(self._files.read, wanted),),
            adopt=lambda outcome: self._drop_unreadable(outcome, wanted, files),
            chunks=0,
        )
        try:
            await self._jobs.send(job)
        except (trio.ClosedResourceError, trio.BrokenResourceError) as exc:
            raise BackendUnavailableError(STOPPING) from exc
        [outcome] = await job.wait()
        return outcome.payloads

    def count(self, *, hits: int = 0, misses: int = 0) -> None:
        """Add to the hits and misses that `statistics` reports."""
        self._index.count(hits=hits, misses=misses)

    def statistics(self) -> DiskStatistics:
        """Return the counts of this moment."""
        tier = self._index.statistics()
        return DiskStatistics(
            **{name: getattr(tier, name) for name in tier.__struct_fields__},
            jobs_waiting=self._jobs.statistics().current_buffer_used,
            write_failures=self._write_failures,
            read_failures=self._read_failures,
        )

    def _change(
        self,
        removed: Sequence[str],
        written: dict[str, _ChunkFile],
        payloads: Mapping[str, bytes] | None,
    ) -> Job[Changed] | None:
        """Let the files follow the index."""
        payload_of = (
            partial(chunk_payload, chunk_bytes=self._chunk_bytes)
            if payloads is None
            else payloads.__getitem__
        )
        changes = [  # removals first, so that there is never a file too many
            *((chunk_hash, False) for chunk_hash in removed),
            *((chunk_hash, True) for chunk_hash in written),
        ]
        hops = [
            partial(self._files.change, changes[i : i + CHUNKS_PER_HOP_MAX], payload_of)
            for i in range(0, len(changes), CHUNKS_PER_HOP_MAX)
        ]
        if not hops:
            return None
        job = Job[Changed](
            hops=hops,
            adopt=lambda outcome: self._drop_unwritten(outcome, written),
            chunks=len(changes),
        )
        self._jobs.send_nowait(job)  # no await since check_room: there is room
        self._chunks_waiting += job.chunks
        return job

    async def _run_job(self, job: Job[T]) -> None:
        try:
            for hop in job.hops:
                outcome = await self._run_sync(hop)
                job.adopt(outcome)
                job.outcomes.append(outcome)
        finally:
            self._chunks_waiting -= job.chunks
            job.done.set()

    def _drop_unwritten(self, outcome: Changed, written: dict[str, _ChunkFile]) -> None:
        for chunk_hash in outcome.failed:
            if self._index.peek(chunk_hash) is written[chunk_hash]:
                self._index.discard(chunk_hash)
        self._write_failures += len(outcome.failed)
        if outcome.failed and not self._writes_fail:  # a full disk would fill the log too
            _log.warning("cannot write chunks to %s: %s", self._files, outcome.reason)
        if written:
            self._writes_fail = bool(outcome.failed)

    def _drop_unreadable(
        self, outcome: Read, chunk_hashes: Sequence[str], files: Sequence[_ChunkFile]
    ) -> None:
        position = len(outcome.payloads)
        if position == len(files):
            return
        chunk_hash = chunk_hashes[position]
        if self._index.peek(chunk_hash) is files[position]:
            self._index.discard(chunk_hash)
            self._read_failures += 1
            _log.warning("dropped chunk %s: %s", chunk_hash, outcome.reason)
