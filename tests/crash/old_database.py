"""A database as the Rust daemon leaves it, and what must be there after it was migrated."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.crash.model import Chunks
from tests.crash.stored import opened_copy

POOL_PER_SESSION = 10
"""Of so many chunks a session there are in all: most are shared."""

BROKEN = {"broken-1": "not json", "broken-2": "{"}
"""Rows that nobody can read: they must be set aside, and not be lost either."""


@dataclass(frozen=True)
class OldDatabase:
    """What was put into it."""

    path: Path
    sessions: dict[str, Chunks]
    pinned: frozenset[str]

    @property
    def counts(self) -> Counter[str]:
        return Counter(chunk for chunks in self.sessions.values() for chunk in set(chunks))

    def check(self, path: Path) -> bool:
        """Nothing of it is missing in `path`, migrated or not yet; returns whether it is."""
        with opened_copy(path) as database:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            rows = dict(database.execute("SELECT session_id, map_json FROM sessions").fetchall())
            pinned = {key for (key,) in database.execute("SELECT session_id FROM pins")}
            aside: list[tuple[str, str]] = []
            if version:
                aside = database.execute("SELECT key, content FROM set_aside").fetchall()
        assert pinned == self.pinned
        for key, content in aside:
            assert key not in rows, "a row that was set aside is still there"
            rows[key] = content
        assert len(aside) == len(dict(aside)), "a row was set aside twice"
        assert {key: rows.pop(key, None) for key in BROKEN} == BROKEN
        found = {key: tuple(msgspec.json.decode(map_json)) for key, map_json in rows.items()}
        assert found == self.sessions
        return bool(version)


def make_old_database(
    path: Path, rng: random.Random, *, sessions: int, chunks_per_session: int
) -> OldDatabase:
    """Write one: maps as arrays and, as in its first version, as objects of hash to text."""
    pool = [f"-{rng.getrandbits(60):x}" for _ in range(sessions * POOL_PER_SESSION)]
    made = {
        f"old-{number}": tuple(rng.sample(pool, min(chunks_per_session, len(pool))))
        for number in range(sessions)
    }
    pinned = frozenset(name for name in made if rng.random() < 0.1)
    rows = [
        (name, _map_json(chunks, as_object=rng.random() < 0.3)) for name, chunks in made.items()
    ]
    rows += BROKEN.items()
    rng.shuffle(rows)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(
            "CREATE TABLE sessions (session_id TEXT PRIMARY KEY, map_json TEXT NOT NULL);"
            "CREATE TABLE pins (session_id TEXT PRIMARY KEY, pinned_at_ms INTEGER NOT NULL);"
        )
        database.executemany("INSERT INTO sessions VALUES (?, ?)", rows)
        database.executemany("INSERT INTO pins VALUES (?, 1)", [(name,) for name in pinned])
        database.commit()
    return OldDatabase(path, made, pinned)


def _map_json(chunks: Chunks, *, as_object: bool) -> str:
    content: object = dict.fromkeys(chunks, "some text") if as_object else chunks
    return msgspec.json.encode(content).decode()
