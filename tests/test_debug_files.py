"""Debug files: who can read them, that they stay in their folder, and how many there are."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from ramakv.actors import debug_files
from ramakv.actors.debug_files import DebugFiles, file_name
from ramakv.config import Limits
from ramakv.events import DebugContext, KVTransferParams, TurnEnd
from tests.fakes import run_inline


@pytest.fixture(params=[0o022, 0o000, 0o077], ids="umask {0:03o}".format)
def _umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def opened(folder: Path, **limits: int) -> DebugFiles:
    return DebugFiles(folder, Limits(**limits), run_inline)


def turn(session_id: str = "s", messages: list[Any] | None = None) -> TurnEnd:
    return TurnEnd(
        session_id=session_id,
        kv_transfer_params=KVTransferParams(chunk_hashes=["h-a"]),
        debug_context=DebugContext(messages=messages or []),
    )


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def contents(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def turns_in(folder: Path) -> list[int]:
    return sorted(json.loads(path.read_text())["turn_count"] for path in folder.glob("*.json"))


@pytest.mark.usefixtures("_umask")
async def test_files_and_folder_are_their_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "debug"
    files = opened(folder)
    assert await files.write(turn(), 1)
    assert await files.write(turn(), 1), "written again"
    (written,) = contents(folder)
    assert mode_of(written) == 0o600
    assert mode_of(folder) & 0o077 == 0


async def test_a_folder_that_others_can_read_is_pointed_out_once(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    files = opened(tmp_path)
    with structlog.testing.capture_logs() as logs:
        for number in range(3):
            assert await files.write(turn(), number)
    (line,) = logs
    assert (line["mode"], line["advice"]) == ("0755", f"chmod 700 {tmp_path}")
    assert mode_of(tmp_path) == 0o755, "it is not ours to change"


@pytest.mark.parametrize(
    "session_id",
    ["..", "../../x", "/etc/passwd", "a/../../b", "\0", ".", "~", "a\nb", "％2e％2e", "x" * 5000],
)
async def test_no_session_id_leads_out_of_the_folder(tmp_path: Path, session_id: str) -> None:
    folder = tmp_path / "debug"
    assert await opened(folder).write(turn(session_id), 1)
    assert [path.name for path in contents(tmp_path)] == ["debug"]
    (written,) = contents(folder)
    assert json.loads(written.read_text())["session_id"] == session_id


async def test_a_planted_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "debug"
    victim.write_text("precious")
    folder.mkdir(0o700)
    (folder / file_name("s", 1)).symlink_to(victim)
    (folder / file_name("s", 2)).symlink_to(tmp_path / "not there")
    os.link(victim, folder / file_name("s", 3))
    files = opened(folder)
    for number in (1, 2, 3):
        assert await files.write(turn(), number)
    assert victim.read_text() == "precious"
    assert not (tmp_path / "not there").exists()
    assert turns_in(folder) == [1, 2, 3]
    assert not any(path.is_symlink() for path in contents(folder))


async def test_links_and_other_files_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    folder = tmp_path / "debug"
    folder.mkdir(0o700)
    (folder / "notes.json").write_text("mine")
    (folder / f"{debug_files.PREFIX}x_1.json").symlink_to(tmp_path / "x")
    (folder / f"{debug_files.PREFIX}folder_1.json").mkdir()
    files = opened(folder, debug_files_max=1)
    for number in range(5):
        assert await files.write(turn(), number)
    assert len(contents(folder)) == 4
    assert (folder / "notes.json").read_text() == "mine"


async def test_a_name_that_is_taken_by_a_folder_is_a_failure_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / file_name("s", 1)).mkdir()
    with structlog.testing.capture_logs() as logs:
        assert not await opened(tmp_path).write(turn(), 1)
    assert logs[-1]["event"] == "debug file not written"
    assert [path.name for path in contents(tmp_path)] == [file_name("s", 1)]


# Names that are too long


async def test_a_long_session_id_is_written_under_a_shorter_name(tmp_path: Path) -> None:
    one, other = "漢" * 300 + "1", "漢" * 300 + "2"
    files = opened(tmp_path)
    assert await files.write(turn(one), 1)
    assert await files.write(turn(other), 1)
    assert await files.write(turn(other), 10**18)
    names = [path.name for path in contents(tmp_path)]
    assert len(set(names)) == 3
    assert all(len(name.encode()) <= 255 for name in names)
    assert {json.loads(p.read_text())["session_id"] for p in contents(tmp_path)} == {one, other}


@pytest.mark.parametrize("chars", [100, 143, 255])
def test_a_name_is_cut_only_where_it_must_be(chars: int) -> None:
    room = chars - len(file_name("", 7))
    assert file_name("x" * room, 7, chars) == f"kvcache_debug_{'x' * room}_7.json"
    cut = file_name("x" * (room + 1), 7, chars)
    assert len(cut) == chars
    assert cut.endswith("_7.json")
    assert cut != file_name("x" * (room + 2), 7, chars)
    assert cut == file_name("x" * (room + 1), 7, chars)


# How many there are


async def test_the_oldest_go_where_there_are_too_many(tmp_path: Path) -> None:
    files = opened(tmp_path, debug_files_max=5)
    for number in range(12):
        assert await files.write(turn(), number)
        assert turns_in(tmp_path) == list(range(max(0, number - 4), number + 1))


async def test_the_oldest_go_where_they_are_too_large(tmp_path: Path) -> None:
    files = opened(tmp_path, debug_bytes_max=10_000)
    for number in range(10):
        assert await files.write(turn(messages=["x" * 3000]), number)
    assert turns_in(tmp_path) == [7, 8, 9]
    assert await files.write(turn(messages=["x" * 9000]), 10)
    assert turns_in(tmp_path) == [10]
    for number in range(11, 16):
        assert await files.write(turn(), number)
    assert turns_in(tmp_path) == [10, 11, 12, 13, 14, 15]
    assert sum(path.stat().st_size for path in contents(tmp_path)) <= 10_000


async def test_a_file_over_the_limit_is_not_written_and_removes_nothing(tmp_path: Path) -> None:
    files = opened(tmp_path, debug_bytes_max=1000)
    assert await files.write(turn(), 1)
    with structlog.testing.capture_logs() as logs:
        assert not await files.write(turn(messages=["secret" * 1000]), 2)
    assert "limits.debug_bytes_max (1000)" in logs[0]["cause"]
    assert "secret" not in str(logs)
    assert turns_in(tmp_path) == [1]


async def test_a_file_that_is_written_again_counts_once_and_is_the_newest(tmp_path: Path) -> None:
    size = 4 * (200 + 1000)
    files = opened(tmp_path, debug_files_max=3, debug_bytes_max=size)
    for number in (1, 2, 3, 1, 1, 1):
        assert await files.write(turn(messages=["x" * 1000]), number)
    assert turns_in(tmp_path) == [1, 2, 3]
    assert await files.write(turn(), 4)
    assert turns_in(tmp_path) == [1, 3, 4]


async def test_files_of_an_earlier_run_are_counted_and_go_first(tmp_path: Path) -> None:
    for number in (3, 1, 2):
        assert await opened(tmp_path).write(turn(), number)
        os.utime(tmp_path / file_name("s", number), (number, number))
    leftover = tmp_path / f"{debug_files.PREFIX}0123.partial"
    leftover.write_text("{")
    os.utime(leftover, (0, 0))
    files = opened(tmp_path, debug_files_max=3)
    assert await files.write(turn(), 9)
    assert not leftover.exists()
    assert turns_in(tmp_path) == [2, 3, 9]


async def test_a_folder_that_is_far_too_full_is_emptied_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debug_files, "REMOVALS_MAX", 4)
    for number in range(20):
        assert await opened(tmp_path).write(turn("old"), number)
    files = opened(tmp_path, debug_files_max=5)
    counts = []
    for number in range(8):
        assert await files.write(turn(), number)
        counts.append(len(contents(tmp_path)))
    assert counts == [17, 14, 11, 8, 5, 5, 5, 5]


async def test_the_folder_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = 0
    scandir = os.scandir

    def count(*arguments: Any) -> Any:
        nonlocal listed
        listed += 1
        return scandir(*arguments)

    monkeypatch.setattr(os, "scandir", count)
    files = opened(tmp_path / "debug", debug_files_max=10)
    for number in range(50):
        assert await files.write(turn(), number)
    assert listed == 1


async def test_what_others_remove_does_not_matter(tmp_path: Path) -> None:
    folder = tmp_path / "debug"
    files = opened(folder, debug_files_max=3)
    for number in range(3):
        assert await files.write(turn(), number)
    (folder / file_name("s", 0)).unlink()
    assert await files.write(turn(), 3)
    assert turns_in(folder) == [1, 2, 3]
    folder.rename(tmp_path / "moved")
    for number in range(4, 8):
        assert await files.write(turn(), number)
    assert turns_in(folder) == [5, 6, 7]
    assert turns_in(tmp_path / "moved") == [1, 2, 3]


async def test_a_full_folder_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", fail)
    with structlog.testing.capture_logs() as logs:
        assert not await opened(tmp_path / "debug").write(turn(), 1)
    assert "No space left" in logs[0]["cause"]
    assert contents(tmp_path / "debug") == []
