"""turn_end, as the contract has it: the map that it leaves, what it counts, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fakes import FakeLMCache
from tests.test_contract_events import calling, eventually, turn_end


async def test_turn_end_creates_the_session_and_keeps_the_order(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        assert await caller.turn_end("s1", "h-c", "h-a", "h-b") == {
            "evicted_count": 0,
            "map_updated": True,
            "debug_written": False,
            "backend_degraded": False,
            "chunk_count": 3,
        }
        assert await caller.map_of("s1") == ["h-c", "h-a", "h-b"]
        assert await caller.sessions_count() == 1


async def test_hashes_are_opaque_strings(tmp_path: Path) -> None:
    hashes = ["-af2f5548dde4cdb", "h a", "ß漢😀", "\"'\\/", "\0\n", "NULL", "1e5"]
    lmcache = FakeLMCache()
    async with calling(tmp_path, lmcache) as caller:
        await caller.turn_end("s", *hashes)
        await caller.ask("turn_start", "s")
        assert await caller.map_of("s") == hashes
        assert lmcache.prefetched() == [tuple(hashes)]
    async with calling(tmp_path) as caller:
        assert await caller.map_of("s") == hashes


async def test_turn_end_replaces_the_map_and_evicts_what_nobody_references(
    tmp_path: Path,
) -> None:
    lmcache = FakeLMCache()
    async with calling(tmp_path, lmcache) as caller:
        await caller.turn_end("s1", "a", "b", "c")
        await caller.turn_end("s2", "b")
        data = await caller.turn_end("s1", "d", "c")
        assert (data["evicted_count"], data["chunk_count"]) == (1, 2)
        assert await caller.map_of("s1") == ["d", "c"]
        await eventually(lambda: lmcache.evicted() == ["a"])
        assert (await caller.turn_end("s2"))["evicted_count"] == 1
        await eventually(lambda: lmcache.evicted() == ["a", "b"])


async def test_a_hash_counts_once_per_session_however_often_it_is_listed(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        data = await caller.turn_end("s1", "a", "a", "b", "a")
        assert data["chunk_count"] == 4
        await caller.turn_end("s2", "a")
        assert (await caller.turn_end("s1", "b"))["evicted_count"] == 0
        assert (await caller.turn_end("s2", "c", "c"))["evicted_count"] == 1
        assert (await caller.ask("session_close", "s2"))["evicted_count"] == 1


async def test_an_empty_list_clears_the_map(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.turn_end("s", "a", "b", "c")
        data = await caller.turn_end("s")
        assert (data["evicted_count"], data["chunk_count"]) == (3, 0)
        assert await caller.map_of("s") == []


async def test_a_turn_end_at_or_below_the_last_seq_changes_nothing(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        await caller.turn_end("s", "a", seq=3)
        for stale in (3, 2, 0):
            params = {"chunk_hashes": ["x"]}
            status, _ = await caller.refused("turn_end", "s", kv_transfer_params=params, seq=stale)
            assert (status, await caller.map_of("s")) == (409, ["a"])
        assert (await caller.turn_end("s", "b", seq=7))["evicted_count"] == 1
        await caller.turn_end("other", "b", seq=1)
        await caller.turn_end("s", "c")
        assert (await caller.post(turn_end("s", "x", seq=7))).status_code == 409


async def test_turn_end_takes_its_optional_fields(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        timing = {"ttft_ms": 12.5, "total_time_ms": 800, "tpot_ms": 1.25}
        contexts: list[Any] = [{}, {"timing": {}}, {"messages": [], "timing": timing}]
        for context in contexts:
            await caller.turn_end("s", "a", debug_context=context)
        for reason in ("tool_calls", "stop", "length", "content_filter"):
            await caller.turn_end("s", "a", finish_reason=reason)
        assert await caller.map_of("s") == ["a"]


async def test_fields_that_an_event_does_not_know_are_ignored(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        params = {"chunk_hashes": ["a"], "do_remote_decode": False, "remote_block_ids": None}
        await caller.ask("turn_end", "s", kv_transfer_params=params, model="m", tags=[{"x": 1}])
        await caller.ask("turn_start", "s", seq="not of this event", fork_id=[])
        await caller.ask("health", "", extra=None)
        assert await caller.map_of("s") == ["a"]
