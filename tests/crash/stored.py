"""Reads what a daemon that is gone has left in its database."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from tests.crash.model import Chunks, State, World


@dataclass(frozen=True)
class Stored:
    """All sessions that the database knows, and its outbox."""

    sessions: World
    owed: frozenset[str]
    dead_letters: frozenset[str]

    def world(self, names: Iterable[str]) -> World:
        return {name: self.sessions.get(name, State()) for name in names}


@contextmanager
def opened_copy(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a copy: to open the file itself would do the next daemon's recovery for it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        for suffix in ("", "-wal"):
            if (part := path.with_name(path.name + suffix)).exists():
                shutil.copy(part, copy.with_name(copy.name + suffix))
        with closing(sqlite3.connect(copy)) as database:
            assert database.execute("PRAGMA quick_check").fetchall() == [("ok",)]
            yield database


def read_stored(path: Path) -> Stored:
    """Read everything that the checks look at."""
    with opened_copy(path) as database:
        if not database.execute("PRAGMA user_version").fetchone()[0]:
            return Stored({}, frozenset(), frozenset())  # killed before it made its tables
        sessions = _sessions(database)
        outbox = database.execute("SELECT chunk_hash, dead_reason FROM outbox").fetchall()
        (set_aside,) = database.execute("SELECT count(*) FROM set_aside").fetchone()
    assert set_aside == 0, "no row that the daemon wrote may be unreadable"
    return Stored(
        sessions,
        owed=frozenset(chunk for chunk, reason in outbox if reason is None),
        dead_letters=frozenset(chunk for chunk, reason in outbox if reason is not None),
    )


def _sessions(database: sqlite3.Connection) -> dict[str, State]:
    found: dict[str, State] = {}
    for (session_id,) in database.execute("SELECT session_id FROM closed"):
        found[session_id] = State("closed")
    pinned = {session_id for (session_id,) in database.execute("SELECT session_id FROM pins")}
    rows = database.execute("SELECT session_id, map_json, suspended, turn_count, seq FROM sessions")
    for session_id, map_json, suspended, turns, seq in rows:
        status = "suspended" if suspended else "active"
        is_pinned = session_id in pinned
        found[session_id] = State(status, _chunks(map_json), turns, seq, is_pinned)  # type: ignore[arg-type]
    assert pinned <= found.keys(), "a pin outlived its session"
    for fork_id, session_id, map_json in database.execute(
        "SELECT fork_id, session_id, map_json FROM forks"
    ):
        state = found.get(session_id, State())
        found[session_id] = replace(state, forks=state.forks | {(fork_id, _chunks(map_json))})
    return found


def _chunks(map_json: str) -> Chunks:
    return tuple(msgspec.json.decode(map_json, type=list[str]))
