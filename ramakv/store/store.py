"""What the journal does to the database: group commits, and reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec import Struct

from ramakv.core.chunks import ChunkHash, ChunkMap
from ramakv.core.evictions import Owed, Scope
from ramakv.core.refcounts import OutboxRow
from ramakv.core.session import Fork, SessionState, Status
from ramakv.errors import StoreError
from ramakv.store.database import Database, mapped_errors
from ramakv.store.rows import Recovery, load_session, read_scope

_encode_map = msgspec.json.Encoder().encode

_UPSERT = """
INSERT INTO sessions (session_id, map_json, turn_count, suspended, seq, updated_ms)
VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (session_id) DO UPDATE SET
    map_json = excluded.map_json, turn_count = excluded.turn_count,
    suspended = excluded.suspended, seq = excluded.seq,
    updated_ms = CASE WHEN excluded.updated_ms THEN excluded.updated_ms ELSE updated_ms END
"""

_OWE = """
INSERT INTO outbox (chunk_hash, generation, scope) VALUES (?, ?, ?)
ON CONFLICT (chunk_hash) DO UPDATE SET
    generation = excluded.generation, scope = excluded.scope, dead_reason = NULL
"""

_DROP_OLDEST_DEAD = """
DELETE FROM outbox WHERE chunk_hash IN (
    SELECT chunk_hash FROM outbox WHERE dead_reason IS NOT NULL
    ORDER BY generation DESC LIMIT -1 OFFSET ?
)
"""

_NOT_FROM_THE_FUTURE = (
    "UPDATE sessions SET updated_ms = :now WHERE updated_ms > :now OR updated_ms = 0",
    "UPDATE forks SET opened_ms = :now WHERE opened_ms > :now",
    "UPDATE closed SET closed_ms = :now WHERE closed_ms > :now",
)

_REVIVE = """
UPDATE outbox SET dead_reason = NULL WHERE dead_reason IS NOT NULL
RETURNING chunk_hash, generation, scope
"""

_COUNT_DEAD = "SELECT count(*) FROM outbox WHERE dead_reason IS NOT NULL"


class SessionWrite(Struct, frozen=True):
    """One step of one session: the state before and after, and what its outbox must remember."""

    before: SessionState
    after: SessionState
    outbox: ChunkMap
    scope: Scope
    now_ms: int
    parents_fork: ParentsFork | None = None
    is_event: bool = True
    """Whether an agent asked for it: what the daemon does by itself makes no session younger."""


@dataclass(frozen=True, slots=True)
class ParentsFork:
    """A fork of another session, stored with the child that begins with its map."""

    session_id: str
    fork: Fork


class Reopened(NamedTuple):
    """A session that began a new life after the close of that time."""

    session_id: str
    closed_ms: int


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """Rows that are no longer needed, or became dead letters. Nobody waits for these."""

    obsolete: Sequence[OutboxRow] = ()
    dead: Sequence[OutboxRow] = ()
    dead_reason: str = ""
    reopened: Reopened | None = None
    forget_closed_before_ms: int | None = None


Write = SessionWrite | Bookkeeping


class _Trimmed(NamedTuple):
    """Dead letters that were dropped, and that are left."""

    dropped: int
    left: int


class Store:
    """The open database. One thread at a time calls it.

    All methods raise StoreError, and then have changed nothing.
    """

    def __init__(self, database: Database, *, dead_letters_max: int = 10_000) -> None:
        self.database = database
        self.path = database.path
        self.dead_letters_dropped = 0
        self._db = database.connection
        self._dead_letters_max = dead_letters_max
        try:
            with mapped_errors(self.path):
                row = self._db.execute("SELECT max(generation) FROM outbox").fetchone()
                dead = self._db.execute(_COUNT_DEAD).fetchone()
        except BaseException:
            database.close()
            raise
        self._generation: int = row[0] or 0
        self.dead_letters: int = dead[0]
        """At least as many as there are: one whose chunk is released anew is owed again."""

    def next_fork_id(self) -> int:
        """The first fork id that was never used."""
        with mapped_errors(self.path):
            found = self._db.execute(
                "SELECT seq FROM sqlite_sequence WHERE name = 'forks'"
            ).fetchone()
        return found[0] + 1 if found else 1

    def begin_ages(self, now_ms: int) -> None:
        """Take what seems to come from the future as of now: the clock was set back meanwhile.

        And so what says nothing of its age, in a database of the Rust daemon.
        """
        with mapped_errors(self.path), self.database.transaction():
            for statement in _NOT_FROM_THE_FUTURE:
                self._db.execute(statement, {"now": now_ms})

    def load(self, session_id: str) -> SessionState:
        """Read one session; an unknown one if there is nothing about it."""
        return load_session(self.database, session_id)

    def load_each(self, session_ids: Sequence[str]) -> list[SessionState | StoreError]:
        """Read sessions; where one cannot be read, its place has the error."""
        found: list[SessionState | StoreError] = []
        for session_id in session_ids:
            try:
                found.append(self.load(session_id))
            except StoreError as error:
                found.append(error)
        return found

    def set_aside_count(self) -> int:
        """Rows that could not be read, by this start or an earlier one."""
        with mapped_errors(self.path):
            count: int = self._db.execute("SELECT count(*) FROM set_aside").fetchone()[0]
        return count

    def recovery(self) -> Recovery:
        """Read everything at start."""
        return Recovery(self.database)

    def commit(self, writes: Sequence[Write]) -> int:
        """Apply writes in one transaction; returns its generation, which grows with each."""
        generation = self._generation + 1
        trimmed: _Trimmed | None = None
        with mapped_errors(self.path), self.database.transaction():
            for write in writes:
                if isinstance(write, SessionWrite):
                    self._write_session(write, generation)
                else:
                    self._keep_books(write)
            if self.dead_letters > self._dead_letters_max:
                trimmed = self._trim_dead_letters()
        self._generation = generation
        if trimmed is not None:
            self.dead_letters = trimmed.left
            self.dead_letters_dropped += trimmed.dropped
        return generation

    def revive(self) -> list[tuple[ChunkHash, Owed]]:
        """Let all dead letters be owed again; returns them."""
        with mapped_errors(self.path), self.database.transaction():
            rows = self._db.execute(_REVIVE).fetchall()
        self.dead_letters = 0
        return [(chunk, Owed(generation, read_scope(scope))) for chunk, generation, scope in rows]

    def touch(self) -> None:
        """Have a page written, as it was, and on disk: to see whether that works."""
        with mapped_errors(self.path), self.database.transaction():
            version: int = self._db.execute("PRAGMA user_version").fetchone()[0]
            self._db.execute(f"PRAGMA user_version = {version}")

    def _trim_dead_letters(self) -> _Trimmed:
        """Of too many keep nine tenths of the bound, so that it is not done for each new one."""
        found: int = self._db.execute(_COUNT_DEAD).fetchone()[0]
        if found <= self._dead_letters_max:
            return _Trimmed(0, found)
        kept = self._dead_letters_max - self._dead_letters_max // 10
        self._db.execute(_DROP_OLDEST_DEAD, (kept,))
        return _Trimmed(found - kept, kept)

    def _write_session(self, write: SessionWrite, generation: int) -> None:
        before, after, now_ms = write.before, write.after, write.now_ms
        key = (after.session_id,)
        if after.status is not Status.UNKNOWN:
            self._db.execute(
                _UPSERT,
                (
                    after.session_id,
                    _encode_map(after.chunk_map).decode(),
                    after.turn_count,
                    after.status is Status.SUSPENDED,
                    after.seq,
                    now_ms if write.is_event else 0,
                ),
            )
        elif before.status is not Status.UNKNOWN:
            self._db.execute("DELETE FROM sessions WHERE session_id = ?", key)
        if after.pinned and not before.pinned:
            self._db.execute("INSERT OR IGNORE INTO pins VALUES (?, ?)", (*key, now_ms))
        elif before.pinned and not after.pinned:
            self._db.execute("DELETE FROM pins WHERE session_id = ?", key)
        if after.closed_ms is not None and after.closed_ms != before.closed_ms:
            self._db.execute(
                "INSERT INTO closed VALUES (?, ?) "
                "ON CONFLICT (session_id) DO UPDATE SET closed_ms = excluded.closed_ms",
                (*key, after.closed_ms),
            )
        elif before.closed_ms is not None and after.closed_ms is None:
            self._db.execute("DELETE FROM closed WHERE session_id = ?", key)
        if after.forks != before.forks:
            self._write_forks(before, after)
        if write.parents_fork is not None:
            self._insert_forks(write.parents_fork.session_id, [write.parents_fork.fork])
        if write.outbox:
            self._db.executemany(
                _OWE, [(chunk, generation, write.scope.value) for chunk in write.outbox]
            )

    def _write_forks(self, before: SessionState, after: SessionState) -> None:
        kept = {fork.fork_id for fork in after.forks}
        known = {fork.fork_id for fork in before.forks}
        self._db.executemany(
            "DELETE FROM forks WHERE fork_id = ?", [(gone,) for gone in known - kept]
        )
        self._insert_forks(
            after.session_id, [fork for fork in after.forks if fork.fork_id not in known]
        )

    def _insert_forks(self, session_id: str, forks: Sequence[Fork]) -> None:
        self._db.executemany(
            "INSERT INTO forks VALUES (?, ?, ?, ?)",
            [
                (fork.fork_id, session_id, _encode_map(fork.chunks).decode(), fork.opened_ms)
                for fork in forks
            ],
        )

    def _keep_books(self, write: Bookkeeping) -> None:
        # A row released anew meanwhile has a higher generation, and stays.
        self._db.executemany(
            "DELETE FROM outbox WHERE chunk_hash = ? AND generation <= ?", write.obsolete
        )
        self._db.executemany(
            "UPDATE outbox SET dead_reason = ? WHERE chunk_hash = ? AND generation <= ?",
            [(write.dead_reason, chunk, generation) for chunk, generation in write.dead],
        )
        self.dead_letters += len(write.dead)
        if write.reopened is not None:
            self._db.execute(
                "DELETE FROM closed WHERE session_id = ? AND closed_ms <= ?", write.reopened
            )
        if write.forget_closed_before_ms is not None:
            self._db.execute(
                "DELETE FROM closed WHERE closed_ms < ?", (write.forget_closed_before_ms,)
            )

    def close(self) -> None:
        """Checkpoint and close."""
        self.database.close()
