"""The embedded engine over real files: its tiers, prefix rules, races, bounds and restarts."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
from hypothesis import HealthCheck, given, settings, strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from ramakv.config import Embedded
from ramakv.errors import BackendUnavailableError, ConfigError
from ramakv.lmcache.embedded import disk as disk_module, engine as engine_module
from ramakv.lmcache.embedded.disk import DiskStatistics
from ramakv.lmcache.embedded.engine import Engine, open_engine
from ramakv.lmcache.embedded.tiers import DISK_LOCATION, HOT_LOCATION, LruTier, chunk_payload

T = TypeVar("T")

HOT, DISK = HOT_LOCATION, DISK_LOCATION
CHUNK_BYTES = 100


class Gate:
    """Runs blocking functions in place of a thread, one after the other, while it is open."""

    def __init__(self) -> None:
        self.calls = 0
        self._opened = trio.Event()
        self._opened.set()

    async def __call__(self, sync_fn: Callable[[], T], /) -> T:
        self.calls += 1
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope(shield=True):  # a thread cannot be cancelled either
            await self._opened.wait()
        return sync_fn()

    def shut(self) -> None:
        self._opened = trio.Event()

    def open(self) -> None:
        self._opened.set()


@asynccontextmanager
async def open_small(
    folder: Path, *, run_sync: Gate | None = None, **sizes: Any
) -> AsyncIterator[Engine]:
    config = Embedded(
        **{"hot_chunks_max": 8, "disk_chunks_max": 16, "chunk_bytes": CHUNK_BYTES, **sizes}
    )
    async with open_engine(config, disk_dir=folder, run_sync=run_sync or Gate()) as engine:
        yield engine


def names(text: str) -> list[str]:
    """`"a b"` → `["h-a", "h-b"]`: a prefix of chunks."""
    return [f"h-{letter}" for letter in text.split()]


def held(engine: Engine, location: str, text: str = "a b c d e f g h") -> str:
    """Say which of these chunks are in the tier, as in `"a b"`."""
    found = engine.query(names(text))
    return " ".join(name[2:] for name, where in found.items() if location in where)


def file_of(folder: Path, letter: str) -> Path:
    return folder / sha256(f"h-{letter}".encode()).hexdigest()


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def disk_statistics(engine: Engine) -> DiskStatistics:
    statistics = engine.statistics().tiers[DISK]
    assert isinstance(statistics, DiskStatistics)
    return statistics


# The tiers


def test_lru_displaces_what_was_used_longest_ago() -> None:
    """Put and renew make a chunk the last to go; peek and `in` do not."""
    tier = LruTier[bytes](3, size_of=len)
    for name in "abc":
        assert tier.put(name, b"12") is None
    assert tier.renew("a")
    assert tier.peek("b") == b"12"
    assert "b" in tier
    assert tier.put("d", b"1") == "b"
    assert tier.put("c", b"1") is None  # put again: renewed, and smaller now
    assert tier.put("e", b"1") == "a"
    assert not tier.renew("a")
    assert tier.evict(["c", "c", "x"]) == ["c"]
    statistics = tier.statistics()
    assert (statistics.chunks, statistics.payload_bytes) == (2, 2)
    assert (statistics.evictions, statistics.evictions_lru) == (1, 2)


def test_payloads_are_deterministic_and_of_the_size_asked() -> None:
    """The same hash gives the same bytes, another one others."""
    for size in (1, 63, 64, 65, 1000):
        assert len(chunk_payload("h-a", size)) == size
    assert chunk_payload("h-a", 64) == chunk_payload("h-a", 64) != chunk_payload("h-b", 64)


# Store and retrieve


async def test_store_fills_both_tiers(tmp_path: Path) -> None:
    """A stored chunk is hot, and in a file named by the sha256 of its hash; one hop wrote all."""
    gate = Gate()
    async with open_small(tmp_path / "new" / "chunks", run_sync=gate) as engine:
        gate.calls = 0
        stored = await engine.store(["h-a", "-af2f5548dde4cdb", "h-c"])
        assert (stored.num_chunks, stored.num_stored, stored.num_written) == (3, 3, 3)
        assert gate.calls == 1
        assert engine.query(["h-a", "-af2f5548dde4cdb", "h-x"]) == {
            "h-a": [HOT, DISK],
            "-af2f5548dde4cdb": [HOT, DISK],
            "h-x": [],
        }
        again = await engine.store(["h-a", "h-c"])
        assert (again.num_stored, again.num_written, gate.calls) == (0, 0, 1)
    content = file_of(tmp_path / "new" / "chunks", "a").read_bytes()
    assert content.endswith(b"h-a" + chunk_payload("h-a", CHUNK_BYTES))
    assert len(files_in(tmp_path / "new" / "chunks")) == 3


async def test_store_writes_a_hot_chunk_that_the_disk_has_lost(tmp_path: Path) -> None:
    """Each tier takes what it lacks."""
    async with open_small(tmp_path) as engine:
        await engine.store(names("a b"))
        await engine.evict(names("a"), [DISK])
        await engine.evict(names("b"), [HOT])
        stored = await engine.store(names("a b"))
        assert (stored.num_stored, stored.num_written) == (1, 1)
        assert held(engine, HOT) == held(engine, DISK) == "a b"


async def test_hot_tier_is_lru(tmp_path: Path) -> None:
    """A retrieve and a prefetch renew; the chunk used longest ago makes room, and stays on disk."""
    async with open_small(tmp_path, hot_chunks_max=3) as engine:
        await engine.store(names("a b c"))
        await engine.retrieve(names("a"))
        await engine.store(names("d"))
        assert held(engine, HOT) == "a c d"
        engine.prefetch(names("c"), "p")
        await engine.store(names("e f"))
        assert held(engine, HOT) == "c e f"
        assert held(engine, DISK) == "a b c d e f"
        assert engine.statistics().tiers[HOT].evictions_lru == 3


async def test_disk_tier_is_lru_and_its_files_follow(tmp_path: Path) -> None:
    """The oldest files make room; a chunk read or stored again is renewed."""
    async with open_small(tmp_path, hot_chunks_max=1, disk_chunks_max=3) as engine:
        await engine.store(names("a b c"))
        await engine.retrieve(names("a"))  # not hot any more: read from disk
        await engine.store(names("b d"))
        assert held(engine, DISK) == "a b d"
        assert files_in(tmp_path) == {file_of(tmp_path, letter).name for letter in "abd"}
        stored = await engine.store(names("a b c d e"))  # more than the tier can hold
        assert stored.num_written == 3  # d made room for c and was written again
        assert held(engine, DISK) == "c d e"
        assert files_in(tmp_path) == {file_of(tmp_path, letter).name for letter in "cde"}


async def test_retrieve_counts_the_prefix_by_tier(tmp_path: Path) -> None:
    """Hot first, then disk; the first chunk in neither ends it, whatever comes behind."""
    async with open_small(tmp_path) as engine:
        await engine.store(names("a b c d f"))
        await engine.evict(names("b d"), [HOT])
        result = await engine.retrieve(names("a b c d e f"))
        assert result.found == {HOT: 2, DISK: 2}
        assert (result.num_chunks, result.num_missing) == (6, 2)
        assert result.missing == names("e f")
        assert held(engine, HOT) == "a b c d f"
        assert (await engine.retrieve(names("a b c d"))).found == {HOT: 4, DISK: 0}
        nothing = await engine.retrieve(names("x a b"))
        assert (nothing.found, nothing.missing) == ({HOT: 0, DISK: 0}, names("x a b"))
        tiers = engine.statistics().tiers
        assert (tiers[HOT].hits, tiers[HOT].misses) == (6, 7)
        assert (tiers[DISK].hits, tiers[DISK].misses) == (2, 5)


async def test_retrieve_of_more_than_the_hot_tier_holds(tmp_path: Path) -> None:
    """A long prefix passes through a small hot tier."""
    chunks = [f"h-{number}" for number in range(200)]
    async with open_small(tmp_path, hot_chunks_max=10, disk_chunks_max=200) as engine:
        await engine.store(chunks)
        result = await engine.retrieve(chunks)
        assert result.num_missing == 0
        assert sum(result.found.values()) == 200
        assert engine.statistics().tiers[HOT].chunks == 10


@pytest.mark.parametrize("damage", ["flip", "truncate", "swap", "unlink"])
async def test_retrieve_checks_what_it_reads(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged, swapped or vanished file ends the prefix, is reported, and leaves the tier."""
    async with open_small(tmp_path) as engine:
        await engine.store(names("a b c"))
        await engine.evict(names("a b c"), [HOT])
        path = file_of(tmp_path, "b")
        content = path.read_bytes()
        match damage:
            case "flip":
                path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            case "truncate":
                path.write_bytes(content[:-1])
            case "swap":
                shutil.copy(file_of(tmp_path, "c"), path)
            case "unlink":
                path.unlink()
        result = await engine.retrieve(names("a b c"))
        assert (result.found, result.missing) == ({HOT: 0, DISK: 1}, names("b c"))
        assert held(engine, DISK) == "a c"
        assert not path.exists()
        assert len(caplog.records) == disk_statistics(engine).read_failures == 1
        assert (await engine.store(names("b"))).num_written == 1
        await engine.evict(names("b"), [HOT])
        assert (await engine.retrieve(names("a b c"))).num_missing == 0


async def test_retrieve_is_as_slow_as_the_disk(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Each chunk from disk costs its read; chunks in the hot tier cost nothing."""
    async with open_small(tmp_path, disk_read_seconds=1.0) as engine:
        await engine.store(names("a b c"))
        await engine.evict(names("b c"), [HOT])
        for seconds in (2.0, 0.0):
            start = trio.current_time()
            await engine.retrieve(names("a b c"))
            assert trio.current_time() - start == seconds


async def test_too_many_retrieves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more retrieve than may be in progress is refused; cancelled ones free their place."""
    monkeypatch.setattr(engine_module, "RETRIEVES_MAX", 2)
    gate = Gate()
    async with open_small(tmp_path, run_sync=gate) as engine, trio.open_nursery() as nursery:
        await engine.store(names("a"))
        await engine.evict(names("a"), [HOT])
        gate.shut()
        nursery.start_soon(engine.retrieve, names("a"))
        nursery.start_soon(engine.retrieve, names("a"))
        await wait_all_tasks_blocked()
        with pytest.raises(BackendUnavailableError):
            await engine.retrieve(names("a"))
        nursery.cancel_scope.cancel()
        gate.open()
        with trio.CancelScope(shield=True):
            await wait_all_tasks_blocked()
            assert (await engine.retrieve(names("a"))).num_missing == 0


# Prefetch


async def test_prefetch_goes_tier_by_tier(tmp_path: Path) -> None:
    """Hot hits from the front to the first miss, then disk hits to the first miss there."""
    async with open_small(tmp_path) as engine:
        await engine.store(names("a b c d e f"))
        await engine.evict(names("b d f"), [HOT])
        await engine.evict(names("e"), [DISK])
        started = engine.prefetch(names("a b c d e f"), "p-1")
        assert (started.status, started.lookup_id) == ("prefetch_started", "p-1")
        assert started.num_chunks == 6
        assert held(engine, HOT) == "a c e"  # nothing yet
        await wait_all_tasks_blocked()
        # e is hot, but not on disk: the disk tier's prefix ended there, before f.
        assert held(engine, HOT) == "a b c d e"
        prefetches = engine.statistics().prefetches
        assert (prefetches.started, prefetches.finished) == (1, 1)
        assert (prefetches.chunks_hot, prefetches.chunks_loaded) == (1, 2)


async def test_prefetch_of_an_unknown_first_chunk_loads_nothing(tmp_path: Path) -> None:
    """It is accepted all the same, as a real one is."""
    async with open_small(tmp_path) as engine:
        await engine.store(names("a"))
        await engine.evict(names("a"), [HOT])
        assert engine.prefetch(names("x a"), 7).num_chunks == 2
        await wait_all_tasks_blocked()
        assert held(engine, HOT) == ""
        assert engine.statistics().prefetches.finished == 1


async def test_prefetch_takes_its_time(tmp_path: Path, mock_clock: MockClock) -> None:
    """Chunk after chunk, each for `disk_read_seconds`; what is hot by then costs nothing."""
    async with open_small(tmp_path, disk_read_seconds=1.0) as engine:
        await engine.store(names("a b c d"))
        await engine.evict(names("a b c d"), [HOT])
        engine.prefetch(names("a b c d a"), "p")
        for expected in ("", "a"):
            await wait_all_tasks_blocked()
            assert held(engine, HOT) == expected
            mock_clock.jump(1.0)
        await wait_all_tasks_blocked()
        await engine.store(names("d"))  # hot again by itself
        await wait_all_tasks_blocked()
        assert held(engine, HOT) == "a b d"
        assert engine.statistics().prefetches.finished == 0
        mock_clock.jump(1.0)
        await wait_all_tasks_blocked()
        assert held(engine, HOT) == "a b c d"
        assert engine.statistics().prefetches.finished == 1
        assert engine.statistics().prefetches.chunks_loaded == 3


async def test_a_prefetch_renews_what_is_hot_from_the_last_chunk_to_the_first(
    tmp_path: Path,
) -> None:
    """A chunk is of no use without those before it: the head of a prefix is the last to go."""
    async with open_small(tmp_path, hot_chunks_max=3) as engine:
        await engine.store(names("a b c"))
        engine.prefetch(names("a b c"), "p")
        await engine.store(names("x"))
        assert held(engine, HOT) == "a b"
        await engine.store(names("y"))
        assert held(engine, HOT) == "a"


async def test_a_prefetch_leaves_alone_what_has_come_up_meanwhile(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    """It is neither read nor renewed, and what it still waits for is no more than the rest."""
    async with open_small(tmp_path, disk_read_seconds=1.0, hot_chunks_max=3) as engine:
        await engine.store(names("a b c"))
        await engine.evict(names("a b c"), [HOT])
        engine.prefetch(names("a b c"), "p")
        await wait_all_tasks_blocked()  # a is being read
        await engine.store(names("c b"))
        mock_clock.jump(1.0)
        await wait_all_tasks_blocked()
        assert held(engine, HOT) == "a b c"
        assert engine.pinned == 0
        assert engine.statistics().prefetches.finished == 1
        assert engine.statistics().prefetches.chunks_loaded == 1
        await engine.store(names("x"))
        assert held(engine, HOT) == "a b"  # c is the oldest still


async def test_a_prefetch_brings_nothing_back_that_came_up_and_was_displaced_meanwhile(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    async with open_small(tmp_path, disk_read_seconds=1.0, hot_chunks_max=2) as engine:
        await engine.store(names("a b"))
        await engine.evict(names("a b"), [HOT])
        engine.prefetch(names("a b"), "p")
        await wait_all_tasks_blocked()  # a is being read
        await engine.store(names("b a"))
        await engine.store(names("c d"))
        mock_clock.jump(1.0)
        await wait_all_tasks_blocked()
        assert held(engine, HOT) == "c d"
        assert engine.statistics().prefetches.chunks_loaded == 0
        assert engine.statistics().prefetches.finished == 1


async def test_a_lookup_counts_as_a_prefetch_does_and_changes_nothing(tmp_path: Path) -> None:
    """Hot from the front to the first miss, from there on what the disk has."""
    async with open_small(tmp_path, hot_chunks_max=6) as engine:
        await engine.store(names("a b c d e f"))
        await engine.evict(names("c e"), [HOT])
        await engine.evict(names("f"), [DISK])
        assert engine.lookup(names("a b c d e f")) == {HOT: 2, DISK: 3}
        assert engine.lookup(names("x a")) == {HOT: 0, DISK: 0}
        await engine.store(names("p q r"))
        assert "a" not in held(engine, HOT)  # it was not renewed
        engine.switches.bypass(HOT)
        assert engine.lookup(names("a b c d e f")) == {HOT: 0, DISK: 5}


async def test_too_many_prefetches(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number and their chunks are bounded; a refused one changes nothing."""
    monkeypatch.setattr(engine_module, "PREFETCHES_MAX", 2)
    monkeypatch.setattr(engine_module, "PREFETCH_CHUNKS_MAX", 4)
    async with open_small(tmp_path, disk_read_seconds=1.0) as engine:
        await engine.store(names("a b c d e f"))
        await engine.evict(names("a b c d e f"), [HOT])
        engine.prefetch(names("a b c d e f"), "alone it may want any number")
        with pytest.raises(BackendUnavailableError):
            engine.prefetch(names("a"), "too many chunks")
        await trio.sleep(3.5)  # three are loaded
        engine.prefetch(names("d"), "fits")
        with pytest.raises(BackendUnavailableError):
            engine.prefetch(names("x"), "too many prefetches")
        await trio.sleep(10)
        prefetches = engine.statistics().prefetches
        assert (prefetches.started, prefetches.finished, prefetches.refused) == (2, 2, 2)
        engine.prefetch(names("a"), "room again")


# Evict


@pytest.mark.parametrize(
    ("locations", "num_evicted", "hot", "disk"),
    [
        (None, 3, "c", "c"),
        ([HOT, DISK], 3, "c", "c"),
        ([HOT], 1, "c", "a b c"),
        ([DISK], 2, "a c", "c"),
        ([], 0, "a c", "a b c"),
        (["RemoteBackend", "localcpubackend"], 0, "a c", "a b c"),
        (["RemoteBackend", HOT], 1, "c", "a b c"),
    ],
)
async def test_evict_by_location(
    tmp_path: Path, locations: list[str] | None, num_evicted: int, hot: str, disk: str
) -> None:
    """The count is summed over tiers; null is all of them, none is none, others are ignored."""
    async with open_small(tmp_path) as engine:
        await engine.store(names("a b c"))
        await engine.evict(names("b"), [HOT])
        result = await engine.evict(names("a b a x"), locations)
        assert result.num_evicted == num_evicted
        assert (held(engine, HOT), held(engine, DISK)) == (hot, disk)
        assert files_in(tmp_path) == {file_of(tmp_path, letter).name for letter in disk.split()}


async def test_evict_takes_chunks_out_of_a_prefetch(tmp_path: Path, mock_clock: MockClock) -> None:
    """A chunk evicted from the hot tier does not come back through a prefetch from before."""
    async with open_small(tmp_path, disk_read_seconds=1.0) as engine:
        await engine.store(names("a b c d"))
        await engine.evict(names("a b c d"), [HOT])
        engine.prefetch(names("a b c d"), "before")
        await wait_all_tasks_blocked()
        mock_clock.jump(1.0)  # a is loaded, b is being read
        await wait_all_tasks_blocked()
        assert (await engine.evict(names("a b c"), [HOT])).num_evicted == 1
        mock_clock.jump(1.0)
        await wait_all_tasks_blocked()
        mock_clock.jump(1.0)
        await wait_all_tasks_blocked()
        assert held(engine, HOT) == "d"
        assert engine.statistics().prefetches.finished == 1
        engine.prefetch(names("a"), "after")
        await wait_all_tasks_blocked()
        mock_clock.jump(1.0)
        await wait_all_tasks_blocked()
        assert held(engine, HOT) == "a d"


async def test_evict_while_the_file_is_being_read(tmp_path: Path) -> None:
    """The bytes that a prefetch or retrieve has in hand do not enter the hot tier."""
    gate = Gate()
    async with open_small(tmp_path, run_sync=gate) as engine, trio.open_nursery() as nursery:
        await engine.store(names("a b"))
        await engine.evict(names("a b"), [HOT])
        gate.shut()
        engine.prefetch(names("a b"), "p")
        nursery.start_soon(engine.retrieve, names("a b"))
        await wait_all_tasks_blocked()
        await engine.evict(names("a"), [HOT])
        gate.open()
        await wait_all_tasks_blocked()
        assert held(engine, HOT) == "b"


async def test_evict_of_everything_under_a_prefetch(
    tmp_path: Path, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The prefetch ends where its prefix does, quietly; evicted chunks stay away."""
    async with open_small(tmp_path, disk_read_seconds=1.0) as engine:
        await engine.store(names("a b c d"))
        await engine.evict(names("a b c d"), [HOT])
        engine.prefetch(names("a b c d"), "p")
        await wait_all_tasks_blocked()
        mock_clock.jump(1.0)
        await wait_all_tasks_blocked()
        await engine.evict(names("a b c"))
        for _ in range(4):
            mock_clock.jump(1.0)
            await wait_all_tasks_blocked()
        assert (held(engine, HOT), held(engine, DISK)) == ("", "d")
        assert files_in(tmp_path) == {file_of(tmp_path, "d").name}
        assert engine.statistics().prefetches.finished == 1
        assert not caplog.records


async def test_evict_from_disk_while_the_file_is_being_read(tmp_path: Path) -> None:
    """A read that was asked for before the evict still gets its bytes."""
    gate = Gate()
    async with open_small(tmp_path, run_sync=gate) as engine, trio.open_nursery() as nursery:
        await engine.store(names("a b"))
        await engine.evict(names("a b"), [HOT])
        gate.shut()
        engine.prefetch(names("a b"), "p")
        await wait_all_tasks_blocked()
        nursery.start_soon(engine.evict, names("a b"), [DISK])
        await wait_all_tasks_blocked()
        assert held(engine, DISK) == ""
        gate.open()
        await wait_all_tasks_blocked()
        assert held(engine, HOT) == "a b"
        assert files_in(tmp_path) == set()


async def test_evict_of_a_chunk_that_is_being_written(tmp_path: Path) -> None:
    """Its file is gone in the end; stored once more, it is there in the end."""
    gate = Gate()
    async with open_small(tmp_path, run_sync=gate) as engine, trio.open_nursery() as nursery:
        gate.shut()
        nursery.start_soon(engine.store, names("a b"))
        await wait_all_tasks_blocked()
        nursery.start_soon(engine.evict, names("a b"))
        await wait_all_tasks_blocked()
        assert engine.query(names("a b")) == {"h-a": [], "h-b": []}
        nursery.start_soon(engine.store, names("b"))
        await wait_all_tasks_blocked()
        gate.open()
        await wait_all_tasks_blocked()
        assert files_in(tmp_path) == {file_of(tmp_path, "b").name}
        await engine.evict(names("b"), [HOT])
        assert (await engine.retrieve(names("b"))).num_missing == 0


# Cancellation, bounds and faults


async def test_what_a_cancelled_store_asked_for_is_done(tmp_path: Path) -> None:
    """The hot tier has it at once, the file follows."""
    gate = Gate()
    async with open_small(tmp_path, run_sync=gate) as engine:
        gate.shut()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.store, names("a"))
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert held(engine, HOT) == "a"
        gate.open()
        await wait_all_tasks_blocked()
        assert files_in(tmp_path) == {file_of(tmp_path, "a").name}


async def test_leaving_cancels_prefetches_and_finishes_writes(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """No prefetch is waited for to its end; a write that was asked for is; the files stay."""
    gate = Gate()
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        async with open_small(tmp_path, run_sync=gate, disk_read_seconds=60.0) as engine:
            await engine.store(names("a b"))
            await engine.evict(names("a b"), [HOT])
            engine.prefetch(names("a b"), "p")
            gate.shut()
            nursery.start_soon(engine.store, names("c"))
            await wait_all_tasks_blocked()
            gate.open()
        assert trio.current_time() == start
        assert held(engine, HOT) == "c"
        assert files_in(tmp_path) == {file_of(tmp_path, letter).name for letter in "abc"}
        with pytest.raises(BackendUnavailableError):
            await engine.store(names("d"))
        with pytest.raises(BackendUnavailableError):
            engine.prefetch(names("a"), "p")


async def test_callers_left_waiting_are_told(tmp_path: Path) -> None:
    """An engine that is cancelled answers those who still wait for its disk."""
    gate = Gate()
    told = 0

    async def expect_refusal(engine: Engine, letter: str) -> None:
        nonlocal told
        with pytest.raises(BackendUnavailableError):
            await engine.store(names(letter))
        told += 1

    async with trio.open_nursery() as callers:
        with trio.CancelScope() as scope:
            async with open_small(tmp_path, run_sync=gate) as engine:
                gate.shut()
                await trio.lowlevel.checkpoint()
                callers.start_soon(expect_first, engine)
                await wait_all_tasks_blocked()
                callers.start_soon(expect_refusal, engine, "b")
                callers.start_soon(expect_refusal, engine, "c")
                await wait_all_tasks_blocked()
                scope.cancel()
                gate.open()
                await trio.sleep_forever()
    assert told == 2
    assert files_in(tmp_path) == {file_of(tmp_path, "a").name}


async def expect_first(engine: Engine) -> None:
    """A write in the thread cannot be stopped: it ends, and is answered."""
    assert (await engine.store(names("a"))).num_written == 1


async def test_what_waits_for_the_disk_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the bound store and evict are refused and change nothing; the hot tier goes on."""
    monkeypatch.setattr(disk_module, "CHUNKS_WAITING_MAX", 4)
    gate = Gate()
    async with open_small(tmp_path, run_sync=gate) as engine, trio.open_nursery() as nursery:
        await engine.store(names("a"))
        gate.shut()
        nursery.start_soon(engine.store, names("b c d e f"))  # any number fits an idle disk
        await wait_all_tasks_blocked()
        with pytest.raises(BackendUnavailableError):
            await engine.store(names("g"))
        with pytest.raises(BackendUnavailableError):
            await engine.evict(names("a"))
        assert engine.query(names("a g")) == {"h-a": [HOT, DISK], "h-g": []}
        assert (await engine.evict(names("a"), [HOT])).num_evicted == 1
        gate.open()
        await wait_all_tasks_blocked()
        assert (await engine.store(names("g"))).num_written == 1


async def test_jobs_that_wait_for_the_disk_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number is bounded too; reads wait for their place."""
    monkeypatch.setattr(disk_module, "JOBS_WAITING_MAX", 2)
    gate = Gate()
    async with open_small(tmp_path, run_sync=gate) as engine, trio.open_nursery() as nursery:
        await engine.store(names("a"))
        await engine.evict(names("a"), [HOT])
        gate.shut()
        for letter in "bcd":  # one at work, two waiting
            nursery.start_soon(engine.store, names(letter))
            await wait_all_tasks_blocked()
        with pytest.raises(BackendUnavailableError):
            await engine.store(names("e"))
        assert disk_statistics(engine).jobs_waiting == 2
        engine.prefetch(names("a"), "p")
        await wait_all_tasks_blocked()
        gate.open()
        await wait_all_tasks_blocked()
        assert held(engine, HOT) == "a b c d"


async def test_a_long_write_is_done_in_several_hops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that cancelling does not have to wait for all of it; the files are the same."""
    monkeypatch.setattr(disk_module, "CHUNKS_PER_HOP_MAX", 2)
    gate = Gate()
    async with open_small(tmp_path, run_sync=gate, disk_chunks_max=5) as engine:
        await engine.store(names("a b c"))
        gate.calls = 0
        # b, c and a are displaced on the way, and b is written again.
        assert (await engine.store(names("a d e f g b"))).num_written == 5
        assert gate.calls == 4  # three to unlink, five to write
        assert held(engine, DISK) == "b d e f g"
        assert files_in(tmp_path) == {file_of(tmp_path, letter).name for letter in "bdefg"}


async def test_a_disk_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The hot tier serves on, the index promises nothing, and the log gets one line for it."""
    folder = tmp_path / "chunks"
    async with open_small(folder) as engine:
        folder.rmdir()
        for letter in "abc":
            stored = await engine.store(names(letter))
            assert (stored.num_stored, stored.num_written) == (1, 0)
        assert (held(engine, HOT), held(engine, DISK)) == ("a b c", "")
        assert disk_statistics(engine).write_failures == 3
        assert len(caplog.records) == 1
        folder.mkdir()
        assert (await engine.store(names("a"))).num_written == 1
        assert held(engine, DISK) == "a"


async def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    """It stops the start with one clear line."""
    path = tmp_path / "file"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"disk_dir.*exists"):
        async with open_small(path):
            raise AssertionError("not reached")


# Restart


async def test_restart_finds_the_files(tmp_path: Path) -> None:
    """The disk tier is back, oldest first to go, and the hot tier is empty."""
    async with open_small(tmp_path) as engine:
        await engine.store(names("a b c"))
    for age, letter in enumerate("bca"):  # b is the oldest
        os.utime(file_of(tmp_path, letter), (1000 + age, 1000 + age))
    async with open_small(tmp_path, disk_chunks_max=3) as engine:
        assert (held(engine, HOT), held(engine, DISK)) == ("", "a b c")
        assert disk_statistics(engine).payload_bytes == 3 * CHUNK_BYTES
        await engine.store(names("d"))
        assert held(engine, DISK) == "a c d"
        assert (await engine.retrieve(names("a c d"))).found == {HOT: 1, DISK: 2}
    async with open_small(tmp_path, disk_chunks_max=1) as engine:
        assert held(engine, DISK) == "d"
        assert files_in(tmp_path) == {file_of(tmp_path, "d").name}


async def test_restart_skips_what_is_no_chunk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Damaged, truncated and foreign files are skipped with one warning, and stay."""
    async with open_small(tmp_path) as engine:
        await engine.store(names("a b c d e f"))
    content = file_of(tmp_path, "b").read_bytes()
    file_of(tmp_path, "b").write_bytes(content[:-1] + b"\0\0")
    file_of(tmp_path, "c").write_bytes(content[:10])
    file_of(tmp_path, "d").write_bytes(b"")
    shutil.copy(file_of(tmp_path, "a"), file_of(tmp_path, "e"))
    damaged = bytearray(file_of(tmp_path, "f").read_bytes())
    damaged[-1] ^= 1
    file_of(tmp_path, "f").write_bytes(damaged)
    (tmp_path / "README").write_text("not ours")
    (tmp_path / ("0" * 64)).mkdir()
    os.mkfifo(tmp_path / ("1" * 64))
    (tmp_path / ("2" * 64)).symlink_to(file_of(tmp_path, "a"))
    leftover = tmp_path / f"{file_of(tmp_path, 'a').name}.tmp"
    leftover.write_bytes(content)
    caplog.clear()
    async with open_small(tmp_path) as engine:
        assert held(engine, DISK) == "a"
        assert not leftover.exists()
        assert len(files_in(tmp_path)) == 10
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert "skipped 9 files" in record.getMessage()
        await engine.store(names("a b c d e f"))
        assert held(engine, DISK) == "a b c d e f"


async def test_restart_checks_large_chunks_when_they_are_read(tmp_path: Path) -> None:
    """At start only the head of a large file is looked at: its damage is found by a read."""
    async with open_small(tmp_path, chunk_bytes=100_000) as engine:
        await engine.store(names("a b c"))
    path = file_of(tmp_path, "a")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    path = file_of(tmp_path, "b")
    path.write_bytes(path.read_bytes()[:-1])
    async with open_small(tmp_path) as engine:  # other chunk_bytes: older files stay good
        assert held(engine, DISK) == "a c"
        assert (await engine.retrieve(names("a"))).num_missing == 1
        assert (await engine.retrieve(names("c"))).found == {HOT: 0, DISK: 1}
        assert engine.statistics().tiers[HOT].payload_bytes == 100_000


# Everything at once

operations = st.tuples(
    st.sampled_from(["store", "retrieve", "prefetch", "evict", "evict_hot", "evict_disk"]),
    st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8).map(" ".join),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batches=st.lists(st.lists(operations, max_size=6), max_size=6))
async def test_any_interleaving_keeps_files_index_and_bounds(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[tuple[str, str]]]
) -> None:
    """After any calls at the same time, the files are those of the index, within the bounds."""
    folder = tmp_path_factory.mktemp("chunks")

    class Watcher(Gate):
        async def __call__(self, sync_fn: Callable[[], T], /) -> T:
            await trio.lowlevel.checkpoint()
            result = sync_fn()
            assert len(files_in(folder)) <= 5
            await trio.lowlevel.checkpoint()
            return result

    async def call(engine: Engine, operation: str, text: str) -> None:
        match operation:
            case "store":
                await engine.store(names(text))
            case "retrieve":
                result = await engine.retrieve(names(text))
                assert sum(result.found.values()) + result.num_missing == result.num_chunks
            case "prefetch":
                engine.prefetch(names(text), "p")
            case "evict":
                await engine.evict(names(text))
            case "evict_hot":
                await engine.evict(names(text), [HOT])
            case "evict_disk":
                await engine.evict(names(text), [DISK])
        assert len(held(engine, HOT).split()) <= 3

    sizes = {"hot_chunks_max": 3, "disk_chunks_max": 5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_module, "CHUNKS_PER_HOP_MAX", 2)
        async with open_small(folder, run_sync=Watcher(), **sizes) as engine:
            for batch in batches:
                async with trio.open_nursery() as nursery:
                    for operation, text in batch:
                        nursery.start_soon(call, engine, operation, text)
            await wait_all_tasks_blocked()
            on_disk = held(engine, DISK)
            assert files_in(folder) == {file_of(folder, letter).name for letter in on_disk.split()}
            assert disk_statistics(engine).read_failures == 0
            prefetches = engine.statistics().prefetches
            assert prefetches.started == prefetches.finished
            for letter in on_disk.split():
                await engine.evict(names(letter), [HOT])
                assert (await engine.retrieve(names(letter))).found == {HOT: 0, DISK: 1}
    async with open_small(folder, disk_chunks_max=5) as engine:
        assert held(engine, DISK) == on_disk


async def test_with_real_threads(tmp_path: Path) -> None:
    """The default runs files in trio's threads."""
    chunks = [f"h-{number}" for number in range(300)]
    config = Embedded(hot_chunks_max=100, disk_chunks_max=300, chunk_bytes=64)
    async with open_engine(config, disk_dir=tmp_path) as engine:
        async with trio.open_nursery() as nursery:
            for start in range(0, 300, 50):
                nursery.start_soon(engine.store, chunks[start : start + 50])
        result = await engine.retrieve(chunks)
        assert result.num_missing == 0
        assert len(files_in(tmp_path)) == 300
