"""The database: what it keeps, databases of others, and what goes wrong with files."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from ramakv.core import session as rules
from ramakv.core.evictions import Owed, Scope
from ramakv.core.session import Fork, SessionState, Status, Step
from ramakv.errors import (
    StoreBusyError,
    StoreError,
    StoreFormatError,
    StoreFullError,
    StoreReadOnlyError,
)
from ramakv.store.database import Database
from ramakv.store.store import Bookkeeping, SessionWrite, Store

NOW_MS = 1_700_000_000_000


@contextmanager
def opened(folder: Path, dead_letters_max: int = 10_000) -> Iterator[Store]:
    database = Database.open(folder / "sessions.db", busy_timeout_seconds=0.05)
    store = Store(database, dead_letters_max=dead_letters_max)
    try:
        yield store
    finally:
        store.close()


def write(before: SessionState, step: Step) -> SessionWrite:
    return SessionWrite(before, step.next, step.outbox, step.scope, NOW_MS)


def everything(store: Store) -> dict[str, SessionState]:
    return {
        stored.state.session_id: stored.state
        for found in store.recovery().slices(2)
        for stored in found
    }


def test_what_is_committed_is_there_after_reopening(tmp_path: Path) -> None:
    new = SessionState("s")
    turned = rules.turn_end(new, ("b", "a", "b"), 7)
    forked = rules.fork(turned.next, Fork(1, turned.next.references, NOW_MS))
    suspended = rules.suspend(forked.next)
    with opened(tmp_path) as store:
        store.commit(
            [write(new, turned), write(turned.next, forked), write(forked.next, suspended)]
        )
    with opened(tmp_path) as store:
        assert store.load("s") == suspended.next
        assert everything(store) == {"s": suspended.next}
        assert suspended.next == SessionState(
            "s",
            status=Status.SUSPENDED,
            chunk_map=("b", "a", "b"),
            turn_count=1,
            seq=7,
            pinned=True,
            forks=(Fork(1, ("b", "a"), NOW_MS),),
        )


def test_a_close_leaves_forks_and_a_memory_of_it(tmp_path: Path) -> None:
    new = SessionState("s")
    turned = rules.turn_end(new, ("a",), None)
    forked = rules.fork(turned.next, Fork(1, turned.next.references, NOW_MS))
    closed = rules.close(forked.next, NOW_MS, keep_row=False, evict_suspended=False)
    with opened(tmp_path) as store:
        store.commit([write(new, turned), write(turned.next, forked)])
        store.commit([write(forked.next, closed)])
        assert store.load("s") == closed.next
        assert everything(store) == {"s": closed.next}
        store.commit([Bookkeeping(forget_closed_before_ms=NOW_MS + 1)])
        assert store.load("s").closed_ms is None


def test_fork_ids_are_never_used_again(tmp_path: Path) -> None:
    new = SessionState("s")
    turned = rules.turn_end(new, ("a",), None)
    forked = rules.fork(turned.next, Fork(41, turned.next.references, NOW_MS))
    ended = rules.fork_end(forked.next, forked.next.forks[0])
    with opened(tmp_path) as store:
        assert store.next_fork_id() == 1
        store.commit([write(new, turned), write(turned.next, forked), write(forked.next, ended)])
    with opened(tmp_path) as store:
        assert store.next_fork_id() == 42


def test_a_row_released_anew_outlives_the_end_of_its_older_evict(tmp_path: Path) -> None:
    a = SessionState("s", Status.ACTIVE, ("x", "y"))
    with opened(tmp_path) as store:
        first = store.commit([write(a, rules.turn_end(a, ("y",), None))])
        b = SessionState("t", Status.ACTIVE, ("x",))
        second = store.commit(
            [write(b, rules.close(b, NOW_MS, keep_row=False, evict_suspended=False))]
        )
        store.commit([Bookkeeping(obsolete=[("x", first)])])
        assert store.recovery().outbox() == ([("x", Owed(second, Scope.CLOSE))], [])
        store.commit([Bookkeeping(dead=[("x", second)], dead_reason="refused")])
        assert store.recovery().outbox() == ([], [("x", second)])
    with opened(tmp_path) as store:
        assert store.commit([write(b, rules.suspend(b))]) > second


def bury(store: Store, *chunks: str) -> int:
    """Release chunks and have them refused for good; returns their generation."""
    a = SessionState("s", Status.ACTIVE, chunks)
    generation = store.commit([write(a, rules.turn_end(a, (), None))])
    rows = [(chunk, generation) for chunk in chunks]
    store.commit([Bookkeeping(dead=rows, dead_reason="refused")])
    return generation


def test_of_too_many_dead_letters_the_oldest_go_and_nothing_that_is_owed(tmp_path: Path) -> None:
    with opened(tmp_path, dead_letters_max=20) as store:
        a = SessionState("t", Status.ACTIVE, ("owed",))
        store.commit([write(a, rules.turn_end(a, (), None))])
        for number in range(20):
            bury(store, f"c{number:02}")
        assert store.dead_letters_dropped == 0
        bury(store, "new")
        owed, dead = store.recovery().outbox()
        assert [chunk for chunk, _ in owed] == ["owed"]
        assert sorted(chunk for chunk, _ in dead) == [f"c{n:02}" for n in range(3, 20)] + ["new"]
        assert store.dead_letters_dropped == 3


def test_a_dead_letter_that_is_owed_again_makes_room(tmp_path: Path) -> None:
    with opened(tmp_path, dead_letters_max=2) as store:
        for chunk in "abab":  # released anew each time, and so owed anew
            bury(store, chunk)
        assert store.dead_letters_dropped == 0
        assert len(store.recovery().outbox()[1]) == 2


def test_a_bound_that_was_lowered_holds_from_the_first_commit_on(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number in range(30):
            bury(store, f"c{number}")
    with opened(tmp_path, dead_letters_max=10) as store:
        store.commit([])
        assert len(store.recovery().outbox()[1]) == 9


def test_dead_letters_of_a_commit_that_failed_are_still_counted(tmp_path: Path) -> None:
    with opened(tmp_path, dead_letters_max=10) as store:
        for number in range(10):
            bury(store, f"c{number}")
        generation = bury_unwritten(store, "new")
        assert len(store.recovery().outbox()[1]) == 10
        store.commit([Bookkeeping(dead=[("new", generation)], dead_reason="refused")])
        assert len(store.recovery().outbox()[1]) == 9


def bury_unwritten(store: Store, chunk: str) -> int:
    """The same, but its last commit cannot be made; returns the generation."""
    a = SessionState("s", Status.ACTIVE, (chunk,))
    generation = store.commit([write(a, rules.turn_end(a, (), None))])
    fork = Fork(1, (), NOW_MS)
    forked = write(a, rules.fork(a, fork))
    with pytest.raises(StoreError, match="UNIQUE"):
        store.commit(
            [Bookkeeping(dead=[(chunk, generation)], dead_reason="refused"), forked, forked]
        )
    return generation


@pytest.mark.parametrize(
    ("columns", "with_pins"),
    [("session_id, map_json, turn_count", True), ("session_id, map_json", False)],
    ids=["with turn_count and pins", "its first version"],
)
@pytest.mark.parametrize(
    "map_json",
    ['["h-a","h-b"]', '{"h-a": "some text", "h-b": ""}'],
    ids=["map as array", "map as object"],
)
def test_a_database_of_the_rust_daemon_opens_as_it_is(
    tmp_path: Path, columns: str, with_pins: bool, map_json: str
) -> None:
    with closing(sqlite3.connect(tmp_path / "sessions.db")) as rust:
        more = ", turn_count INTEGER NOT NULL DEFAULT 0" if "turn_count" in columns else ""
        rust.execute(
            f"CREATE TABLE sessions (session_id TEXT PRIMARY KEY, map_json TEXT NOT NULL{more})"
        )
        values = ["s", map_json, 5][: columns.count(",") + 1]
        rust.execute(f"INSERT INTO sessions VALUES ({','.join('?' * len(values))})", values)
        if with_pins:
            rust.execute(
                "CREATE TABLE pins (session_id TEXT PRIMARY KEY, pinned_at_ms INTEGER NOT NULL)"
            )
            rust.execute("INSERT INTO pins VALUES ('s', 1)")
        rust.commit()
    expected = SessionState(
        "s",
        status=Status.ACTIVE,
        chunk_map=("h-a", "h-b"),
        turn_count=5 if "turn_count" in columns else 0,
        pinned=with_pins,
    )
    for _ in range(2):  # migrated by the first start, opened by the second
        with opened(tmp_path) as store:
            assert everything(store) == {"s": expected}
    with closing(sqlite3.connect(tmp_path / "sessions.db")) as rust:  # it still can write to it
        rust.execute("INSERT OR REPLACE INTO sessions (session_id, map_json) VALUES ('s', '[]')")


def test_broken_rows_are_set_aside_and_reported(tmp_path: Path) -> None:
    good = rules.turn_end(SessionState("good"), ("a",), None)
    with opened(tmp_path) as store:
        store.commit([write(SessionState("good"), good)])
        broken = [
            ("text", "not json"),
            ("number", "5"),
            ("bytes", b'["\xff"]'),
            ("nothing", ""),
            (b"\xffid", "[]"),
        ]
        for key, map_json in broken:
            store._db.execute(
                "INSERT INTO sessions (session_id, map_json) VALUES (?, ?)", (key, map_json)
            )
        store._db.execute("INSERT INTO forks VALUES (9, 'good', 'x', 0)")
        store._db.execute("INSERT INTO forks VALUES (10, CAST(x'ff41' AS TEXT), '[]', 0)")
        store._db.execute("INSERT INTO closed VALUES (CAST(x'ff42' AS TEXT), 0)")
        store._db.execute("INSERT INTO outbox VALUES (CAST(x'ff43' AS TEXT), 1, 'close', NULL)")
    with opened(tmp_path) as store:
        recovery = store.recovery()
        found = [stored.state for part in recovery.slices(2) for stored in part]
        assert found == [good.next]
        assert recovery.outbox() == ([], [])
        assert sorted(row.key for row in recovery.set_aside) == [
            "10",
            "9",
            "\\xffB",
            "\\xffC",
            "\\xffid",
            "bytes",
            "nothing",
            "number",
            "text",
        ]
        kept = store._db.execute(
            "SELECT table_name, CAST(content AS BLOB) FROM set_aside"
        ).fetchall()
        assert len(kept) == 9
        assert store.set_aside_count() == 9
        assert ("forks", b"x") in kept
    with opened(tmp_path) as store:
        assert store.recovery().set_aside == []


def test_a_write_that_fails_changes_nothing_and_names_the_full_disk(tmp_path: Path) -> None:
    new = SessionState("s")
    small = rules.turn_end(new, ("a",), None)
    big = rules.turn_end(small.next, tuple(f"{n:0100}" for n in range(5000)), None)
    with opened(tmp_path) as store:
        store.commit([write(new, small)])
        pages = store._db.execute("PRAGMA page_count").fetchone()[0]
        store._db.execute(f"PRAGMA max_page_count = {pages + 2}")
        other = rules.turn_end(SessionState("t"), ("b",), None)
        with pytest.raises(StoreFullError, match="no space left"):
            store.commit([write(SessionState("t"), other), write(small.next, big)])
        assert everything(store) == {"s": small.next}
        store._db.execute("PRAGMA max_page_count = 1000000")
        store.commit([write(small.next, big)])
        assert store.load("s") == big.next


def test_a_second_daemon_is_refused_and_told_who_has_the_file(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(StoreBusyError, match=f"pid {os.getpid()}"):
        Database.open(tmp_path / "sessions.db")
    with opened(tmp_path):
        pass


def test_a_locked_database_is_named_as_such(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        with closing(sqlite3.connect(tmp_path / "sessions.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreBusyError, match="locked by another process"):
                store.commit([])
        store.commit([])


def test_a_file_that_is_no_database_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "sessions.db").write_text("hello " * 100)
    with pytest.raises(StoreFormatError, match="not an SQLite database"):
        Database.open(tmp_path / "sessions.db")


def test_a_damaged_database_is_named_as_such(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number in range(200):
            new = SessionState(f"{number}")
            store.commit([write(new, rules.turn_end(new, ("a" * 200,), None))])
    path = tmp_path / "sessions.db"
    content = bytearray(path.read_bytes())
    content[4096 : len(content)] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(StoreFormatError, match="is damaged"), opened(tmp_path) as store:
        everything(store)


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store._db.execute("PRAGMA user_version = 99")
    before = (tmp_path / "sessions.db").read_bytes()
    with pytest.raises(StoreFormatError, match="newer ramakv"):
        Database.open(tmp_path / "sessions.db")
    assert (tmp_path / "sessions.db").read_bytes() == before


def test_a_read_only_database_is_named_as_such(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store._db.execute("PRAGMA query_only = 1")
        with pytest.raises(StoreReadOnlyError, match="cannot be written"):
            store.commit([Bookkeeping(obsolete=[("a", 1)])])


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreReadOnlyError, match="set session_store_path"):
        Database.open(tmp_path / "file" / "sessions.db")


def test_an_open_that_fails_leaves_no_lock_behind(tmp_path: Path) -> None:
    (tmp_path / "sessions.db").write_text("hello " * 100)
    for _ in range(2):
        with pytest.raises(StoreError, match="not an SQLite"):
            Database.open(tmp_path / "sessions.db")
