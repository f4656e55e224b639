"""Rows and what they mean: one session read whole, all of them read at start."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from ramakv.core.chunks import ChunkMap, distinct
from ramakv.core.evictions import Owed, Scope
from ramakv.core.refcounts import OutboxRow
from ramakv.core.session import Fork, SessionState, Status
from ramakv.errors import StoreError, StoreFormatError
from ramakv.store.database import Database, mapped_errors

_decode_map = msgspec.json.Decoder(list[str] | dict[str, str]).decode

# As bytes, so that text which is not UTF-8 is met here and not inside the driver.
_SESSION = """
SELECT sessions.rowid, CAST(sessions.session_id AS BLOB), CAST(map_json AS BLOB), turn_count,
       suspended, seq, updated_ms, pinned_at_ms IS NOT NULL, closed_ms
FROM sessions
LEFT JOIN pins ON pins.session_id = sessions.session_id
LEFT JOIN closed ON closed.session_id = sessions.session_id
"""

_ROWLESS = """
SELECT CAST(ids.session_id AS BLOB), closed_ms
FROM (SELECT session_id FROM forks UNION SELECT session_id FROM closed) AS ids
LEFT JOIN closed ON closed.session_id = ids.session_id
WHERE ids.session_id NOT IN (SELECT session_id FROM sessions WHERE session_id IS NOT NULL)
"""


class StoredSession(NamedTuple):
    """A row of `sessions`, with what other tables say of it."""

    state: SessionState
    updated_ms: int
    chunks: int = 0
    """How long its map is, where it has none here."""

    def without_maps(self) -> StoredSession:
        """The same with empty maps: what the router keeps of sessions that sleep."""
        forks = tuple(replace(fork, chunks=()) for fork in self.state.forks)
        bare = replace(self.state, chunk_map=(), forks=forks)
        return StoredSession(bare, self.updated_ms, len(self.state.chunk_map))


class SetAside(NamedTuple):
    """A row that could not be read: it is kept in a table of its own, out of the way."""

    table: str
    key: str
    reason: str


class Recovery:
    """Reads the whole database at start, slice by slice, and sets aside what is broken.

    A row that cannot be read is never fatal and never dropped: it moves to the table
    `set_aside` and is listed in `set_aside` here.
    """

    def __init__(self, database: Database) -> None:
        self.set_aside: list[SetAside] = []
        self._database = database
        with mapped_errors(database.path):
            self._forks = self._read_forks()

    def slices(self, limit: int) -> Iterator[list[StoredSession]]:
        """All sessions, up to `limit` at a time. Raises StoreError."""
        after = -1
        with mapped_errors(self._database.path):
            while rows := self._database.connection.execute(
                _SESSION + " WHERE sessions.rowid > ? ORDER BY sessions.rowid LIMIT ?",
                (after, limit),
            ).fetchall():
                after = rows[-1][0]
                yield [found for row in rows if (found := self._session(row))]
            yield self._rowless()

    def _session(self, row: Sequence[object]) -> StoredSession | None:
        try:
            return _stored_session(row, self._forks)
        except StoreFormatError as error:
            self._put_aside("sessions", "session_id, map_json", "rowid = ?", row[0], row[1], error)
            return None

    def _rowless(self) -> list[StoredSession]:
        """Sessions without a row that have open forks, or were closed moments ago."""
        sessions = []
        for key, closed_ms in self._database.connection.execute(_ROWLESS).fetchall():
            try:
                session_id = _text(key)
            except StoreFormatError as error:
                where = "CAST(session_id AS BLOB) = ?"
                self._put_aside("closed", "session_id, closed_ms", where, key, key, error)
                continue
            forks = tuple(self._forks.get(session_id, ()))
            state = SessionState(session_id, forks=forks, closed_ms=closed_ms)
            sessions.append(StoredSession(state, 0))
        return sessions

    def _read_forks(self) -> dict[str, list[Fork]]:
        forks: dict[str, list[Fork]] = defaultdict(list)
        rows = self._database.connection.execute(
            "SELECT fork_id, CAST(session_id AS BLOB), CAST(map_json AS BLOB), opened_ms "
            "FROM forks ORDER BY fork_id"
        ).fetchall()
        for fork_id, key, map_json, opened_ms in rows:
            try:
                chunks = distinct(read_map(map_json))
                forks[_text(key)].append(Fork(fork_id, chunks, int(opened_ms)))
            except (StoreFormatError, ValueError) as error:
                self._put_aside("forks", "fork_id, map_json", "rowid = ?", fork_id, fork_id, error)
        return forks

    def outbox(self) -> tuple[list[tuple[str, Owed]], list[OutboxRow]]:
        """Rows of the outbox: those that are owed, and the dead letters. Raises StoreError."""
        owed: list[tuple[str, Owed]] = []
        dead: list[OutboxRow] = []
        with mapped_errors(self._database.path):
            rows = self._database.connection.execute(
                "SELECT CAST(chunk_hash AS BLOB), generation, scope, dead_reason IS NOT NULL "
                "FROM outbox"
            ).fetchall()
        for key, generation, scope, is_dead in rows:
            try:
                chunk = _text(key)
            except StoreFormatError as error:
                where = "CAST(chunk_hash AS BLOB) = ?"
                self._put_aside("outbox", "chunk_hash, scope", where, key, key, error)
                continue
            if is_dead:
                dead.append((chunk, generation))
            else:
                owed.append((chunk, Owed(generation, read_scope(scope))))
        return owed, dead

    def _put_aside(
        self, table: str, columns: str, where: str, which: object, key: object, error: Exception
    ) -> None:
        """Move a row (its key and content) to `set_aside`."""
        self.set_aside.append(SetAside(table, _printable(key), str(error)))
        move = (
            f"INSERT INTO set_aside SELECT '{table}', {columns}, ? "  # noqa: S608
            f"FROM {table} WHERE {where}"
        )
        try:
            with mapped_errors(self._database.path), self._database.transaction():
                self._database.connection.execute(move, (str(error), which))
                self._database.connection.execute(
                    f"DELETE FROM {table} WHERE {where}",  # noqa: S608
                    (which,),
                )
        except StoreError:
            pass  # no space to move it: it stays where it is, and is reported again next time


def load_session(database: Database, session_id: str) -> SessionState:
    """Read one session; an unknown one if there is nothing about it. Raises StoreError."""
    execute = database.connection.execute
    with mapped_errors(database.path):
        row = execute(_SESSION + " WHERE sessions.session_id = ?", (session_id,)).fetchone()
        closed = execute(
            "SELECT closed_ms FROM closed WHERE session_id = ?", (session_id,)
        ).fetchone()
        fork_rows = execute(
            "SELECT fork_id, CAST(map_json AS BLOB), opened_ms FROM forks "
            "WHERE session_id = ? ORDER BY fork_id",
            (session_id,),
        ).fetchall()
    shared: dict[str, str] = {}  # forks of one session name the same chunks again and again
    forks = tuple(
        Fork(fork_id, distinct(shared.setdefault(chunk, chunk) for chunk in read_map(text)), opened)
        for fork_id, text, opened in fork_rows
    )
    if row is None:
        return SessionState(session_id, forks=forks, closed_ms=closed[0] if closed else None)
    return _stored_session(row, {session_id: forks}).state


def unreadable_maps(connection: sqlite3.Connection, table: str) -> Iterator[tuple[str, str]]:
    """Keys of the rows of `sessions` or `forks` whose map cannot be read, and why."""
    key = "session_id" if table == "sessions" else "fork_id"
    cursor = connection.execute(
        f"SELECT CAST({key} AS BLOB), CAST(map_json AS BLOB) FROM {table}"  # noqa: S608
    )
    while rows := cursor.fetchmany(500):
        for row_key, map_json in rows:
            try:
                read_map(map_json)
            except StoreFormatError as error:
                yield _printable(row_key), str(error)


def _stored_session(row: Sequence[object], forks_of: Mapping[str, Sequence[Fork]]) -> StoredSession:
    _, key, map_json, turn_count, suspended, seq, updated_ms, pinned, closed_ms = row
    if not isinstance(turn_count, int) or not isinstance(seq, int | None):
        raise StoreFormatError("turn_count or seq is not an integer")
    session_id = _text(key)
    state = SessionState(
        session_id,
        status=Status.SUSPENDED if suspended else Status.ACTIVE,
        chunk_map=read_map(map_json),
        turn_count=turn_count,
        seq=seq,
        pinned=bool(pinned),
        forks=tuple(forks_of.get(session_id, ())),
        closed_ms=closed_ms if isinstance(closed_ms, int) else None,
    )
    return StoredSession(state, updated_ms if isinstance(updated_ms, int) else 0)


def read_map(map_json: object) -> ChunkMap:
    """Read a map: a JSON array, or the object of the Rust daemon's first version (hash: text)."""
    try:
        found = _decode_map(map_json)  # type: ignore[arg-type]
    except (msgspec.DecodeError, TypeError, UnicodeError, RecursionError) as error:
        raise StoreFormatError(f"map_json cannot be read: {error}") from error
    return tuple(found)


def _text(value: object) -> str:
    if not isinstance(value, bytes) or not value:
        raise StoreFormatError("its key is empty")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise StoreFormatError(f"its key is not UTF-8: {error}") from error


def read_scope(text: str) -> Scope:
    """Return the scope of a row of the outbox."""
    try:
        return Scope(text)
    except ValueError:
        return Scope.SUSPEND  # the narrowest: the hot tier only


def _printable(value: object) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
