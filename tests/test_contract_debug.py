"""The debug file that each turn_end writes, as the contract has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.test_contract_events import calling, turn_end

TIMING = {"ttft_ms": 12.5, "total_time_ms": 800, "tpot_ms": 1.25}


def written(folder: Path) -> list[dict[str, Any]]:
    """Contents of the debug files, oldest turn first, each found under the name it must have."""
    files = [json.loads(path.read_bytes()) for path in (folder / "debug").iterdir()]
    assert all(
        set(file) == {"session_id", "turn_count", "chunk_hashes", "messages", "timing"}
        for file in files
    )
    assert all(set(file["timing"]) == set(TIMING) for file in files)
    return sorted(files, key=lambda file: file["turn_count"])


def named(folder: Path, name: str, files: list[dict[str, Any]]) -> bool:
    names = {f"kvcache_debug_{name}_{file['turn_count']}.json" for file in files}
    return names == {path.name for path in (folder / "debug").iterdir()}


async def test_each_turn_end_writes_a_debug_file_where_that_is_switched_on(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "漢"}]
    async with calling(tmp_path, debug_enabled=True) as caller:
        context = {"messages": messages, "timing": TIMING}
        data = await caller.turn_end("s-1", "b", "a", debug_context=context)
        assert data["debug_written"] is True
        data = await caller.turn_end("s-1", debug_context={"timing": {"tpot_ms": 2}})
        assert data["debug_written"] is True
        assert (await caller.turn_end("s-1", "c"))["debug_written"] is True
        full, partial, bare = files = written(tmp_path)
        assert named(tmp_path, "s-1", files)
        assert full["session_id"] == "s-1"
        assert (full["chunk_hashes"], full["messages"]) == (["b", "a"], messages)
        assert full["timing"] == TIMING
        assert partial["chunk_hashes"] == []
        assert partial["timing"] == {"ttft_ms": None, "total_time_ms": None, "tpot_ms": 2}
        assert bare["timing"] == dict.fromkeys(TIMING)


async def test_turn_count_grows_by_one_through_suspension_restore_and_restart(
    tmp_path: Path,
) -> None:
    async with calling(tmp_path, debug_enabled=True) as caller:
        await caller.turn_end("s", "a")
        await caller.ask("session_suspend", "s")
        await caller.ask("snapshot_restore", "s")
        await caller.turn_end("s", "a", "b")
    async with calling(tmp_path, debug_enabled=True) as caller:
        await caller.ask("snapshot_restore", "s")
        await caller.turn_end("s", "c")
        counts = [file["turn_count"] for file in written(tmp_path)]
        assert counts == [counts[0], counts[0] + 1, counts[0] + 2]


async def test_odd_characters_of_the_session_id_become_underscores_in_the_name(
    tmp_path: Path,
) -> None:
    async with calling(tmp_path, debug_enabled=True) as caller:
        await caller.turn_end("../é b_C-9\0", "a")
        files = written(tmp_path)
        assert files[0]["session_id"] == "../é b_C-9\0"
        assert named(tmp_path, "_____b_C-9_", files)


async def test_a_debug_file_that_cannot_be_written_fails_no_turn(tmp_path: Path) -> None:
    (tmp_path / "debug").write_text("a file where the folder should be")
    async with calling(tmp_path, debug_enabled=True) as caller:
        data = await caller.turn_end("s", "a")
        assert (data["debug_written"], data["map_updated"]) == (False, True)
        assert await caller.map_of("s") == ["a"]


async def test_a_refused_turn_end_writes_nothing(tmp_path: Path) -> None:
    async with calling(tmp_path, debug_enabled=True) as caller:
        await caller.turn_end("s", "a", seq=2)
        assert (await caller.post(turn_end("s", "b", seq=2))).status_code == 409
        assert (await caller.post(turn_end("s", ""))).status_code == 400
        assert len(written(tmp_path)) == 1


async def test_no_file_is_written_by_default(tmp_path: Path) -> None:
    async with calling(tmp_path) as caller:
        data = await caller.turn_end("s", "a", debug_context={"timing": TIMING})
        assert data["debug_written"] is False
    assert not (tmp_path / "debug").exists()
