"""The database file: opening it alone, its schema and migrations, and what its errors mean."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ramakv.errors import (
    StoreBusyError,
    StoreError,
    StoreFormatError,
    StoreFullError,
    StoreIOError,
    StoreReadOnlyError,
)

SCHEMA_VERSION = 1

# Columns that the Rust daemon's `sessions` lacks; it keeps working on a migrated database.
_ADDED_COLUMNS = {
    "turn_count": "INTEGER NOT NULL DEFAULT 0",  # absent in its earliest databases
    "suspended": "INTEGER NOT NULL DEFAULT 0",
    "seq": "INTEGER",
    "updated_ms": "INTEGER NOT NULL DEFAULT 0",
}

_TABLES = """
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY,
    map_json TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS pins (
    session_id TEXT PRIMARY KEY,
    pinned_at_ms INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS forks (
    fork_id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used again, also across restarts
    session_id TEXT NOT NULL,
    map_json TEXT NOT NULL,
    opened_ms INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS forks_by_session ON forks (session_id);
CREATE TABLE IF NOT EXISTS closed (
    session_id TEXT PRIMARY KEY,
    closed_ms INTEGER NOT NULL
);
CREATE TRIGGER IF NOT EXISTS new_life AFTER INSERT ON sessions
    BEGIN DELETE FROM closed WHERE session_id = NEW.session_id; END;
CREATE TABLE IF NOT EXISTS outbox (
    chunk_hash TEXT PRIMARY KEY,
    generation INTEGER NOT NULL,
    scope TEXT NOT NULL,
    dead_reason TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS set_aside (  -- grows by rows that others damaged, and not in service
    table_name TEXT NOT NULL,
    key TEXT,
    content TEXT,
    reason TEXT NOT NULL
);
"""


class Database:
    """One connection to one file, and the lock that keeps other daemons away from it."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: IO[str]) -> None:
        self.path = path
        self.connection = connection
        self._lock = lock

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        synchronous: str = "FULL",
        busy_timeout_seconds: float = 1.0,
        wal_autocheckpoint_pages: int = 4000,
    ) -> Database:
        """Open or create the database, alone: a second daemon on the same file is refused.

        Raises StoreError.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = _take_lock(path)
            path.touch(mode=0o600)
        except OSError as error:
            raise StoreReadOnlyError(
                f"cannot create {path} or its folder: {error.strerror}; "
                "set session_store_path to a place that can be written"
            ) from error
        try:
            with mapped_errors(path):
                connection = sqlite3.connect(
                    path,
                    isolation_level=None,
                    check_same_thread=False,  # the journal's calls come from one thread at a time
                    timeout=busy_timeout_seconds,
                )
                database = cls(path, connection, lock)
                try:
                    database._prepare(synchronous, wal_autocheckpoint_pages)
                except BaseException:
                    connection.close()
                    raise
            return database
        except BaseException:
            lock.close()
            raise

    def _prepare(self, synchronous: str, wal_autocheckpoint_pages: int) -> None:
        version = self.connection.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise StoreFormatError(
                f"the database {self.path} was written by a newer ramakv (schema {version}, "
                f"this one knows {SCHEMA_VERSION}); start that version, or name another file"
            )
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute(f"PRAGMA synchronous = {synchronous}")
        self.connection.execute(f"PRAGMA wal_autocheckpoint = {wal_autocheckpoint_pages}")
        self.connection.execute("PRAGMA journal_size_limit = 67108864")
        # Also without anything to migrate: a file that cannot be written is found now,
        # not by the first event.
        with self.transaction():
            if version < SCHEMA_VERSION:
                self._migrate()

    def _migrate(self) -> None:
        for statement in _TABLES.split(";\n"):
            if statement.strip():
                self.connection.execute(statement)
        rows = self.connection.execute("PRAGMA table_info(sessions)").fetchall()
        present = {row[1] for row in rows}
        for column, definition in _ADDED_COLUMNS.items():
            if column not in present:
                self.connection.execute(f"ALTER TABLE sessions ADD COLUMN {column} {definition}")
        self.connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing. IMMEDIATE: a lock that cannot be had is met here, with its timeout."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._roll_back()
            raise
        try:
            self.connection.execute("COMMIT")
        except BaseException:
            self._roll_back()
            self._bury()
            raise

    def _roll_back(self) -> None:
        if self.connection.in_transaction:  # SQLITE_FULL has rolled back by itself
            self.connection.execute("ROLLBACK")

    def _bury(self) -> None:
        """Write over what a failed commit left in the WAL.

        Where only its sync failed it is there whole, and a crash would bring back what was
        refused. Not synced: it must reach no further than what it covers. Where this fails, too,
        the next commit does it.
        """
        execute = self.connection.execute
        with suppress(sqlite3.Error):
            version = execute("PRAGMA user_version").fetchone()[0]
            synchronous = execute("PRAGMA synchronous").fetchone()[0]
            execute("PRAGMA synchronous = NORMAL")
            try:
                execute(f"PRAGMA user_version = {version}")  # a write that changes nothing
            finally:
                execute(f"PRAGMA synchronous = {synchronous}")

    def close(self) -> None:
        """Move the WAL into the database, close it, and let another daemon have it.

        Where the WAL cannot be moved (a full disk, say), it stays, and the next start has it.
        """
        try:
            with suppress(sqlite3.Error):
                self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            self.connection.close()
            self._lock.close()


def connect_for_reading(path: Path) -> sqlite3.Connection:
    """Open a database to look at it only. Raises StoreError."""
    if not path.is_file():
        raise StoreReadOnlyError(f"there is no file {path}")
    with mapped_errors(path):
        return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)


def _take_lock(path: Path) -> IO[str]:
    """Hold `<database>.lock`: SQLite's own locks would let two daemons share the file."""
    lock_path = path.with_name(path.name + ".lock")
    lock = os.fdopen(os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise StoreBusyError(
            f"the database {path} is in use by another ramakv (pid {owner}); "
            "stop it, or set session_store_path to another file"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


@contextmanager
def mapped_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into ours, once."""
    try:
        yield
    except sqlite3.Error as error:
        raise map_error(error, path) from error


def map_error(error: sqlite3.Error, path: Path) -> StoreError:
    """Say what an SQLite error means here and what to do about it."""
    code = getattr(error, "sqlite_errorcode", None)
    primary = code & 0xFF if isinstance(code, int) else None
    if primary == sqlite3.SQLITE_FULL:
        return StoreFullError(f"no space left for the database {path}; free some")
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreBusyError(f"the database {path} is locked by another process; end it")
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return StoreReadOnlyError(
            f"the database {path} cannot be written; check owner and mode of it and its folder"
        )
    if primary == sqlite3.SQLITE_CANTOPEN:
        return StoreReadOnlyError(
            f"the database {path} cannot be opened; check its folder's owner, mode and space"
        )
    if primary == sqlite3.SQLITE_NOTADB:
        return StoreFormatError(
            f"{path} is not an SQLite database; name another file as session_store_path"
        )
    if primary == sqlite3.SQLITE_CORRUPT:
        return StoreFormatError(
            f"the database {path} is damaged ({error}); run `ramakv store check {path}` "
            "and restore it from a backup, or move it away to start empty"
        )
    if primary == sqlite3.SQLITE_IOERR:
        return StoreIOError(f"reading or writing the database {path} failed: {error}")
    return StoreError(f"the database {path} failed: {error}")
