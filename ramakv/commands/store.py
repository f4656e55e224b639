"""`ramakv store`: what is in a database, and whether it is sound."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

from ramakv.errors import StoreError
from ramakv.store.database import SCHEMA_VERSION, connect_for_reading, map_error
from ramakv.store.rows import unreadable_maps

_FINDINGS_MAX = 20


@dataclass(slots=True)
class Findings:
    """What was found: counts of rows, and problems in words."""

    file: str
    schema: int = 0
    sessions_active: int = 0
    sessions_suspended: int = 0
    sessions_pinned: int = 0
    forks: int = 0
    outbox_owed: int = 0
    outbox_dead_letters: int = 0
    set_aside: int = 0
    problems: list[str] = field(default_factory=list)


def check(file: Path, *, as_json: bool) -> int:
    """Print the findings; 0 if the database is sound, 1 if not."""
    try:
        findings = examine(file)
    except StoreError as error:
        click.echo(f"ramakv: {error}", err=True)
        return 1
    if as_json:
        click.echo(json.dumps(asdict(findings), ensure_ascii=False))
    else:
        for name, value in asdict(findings).items():
            if name != "problems":
                click.echo(f"{name.replace('_', ' '):<20} {value}")
        for problem in findings.problems:
            click.echo(f"problem: {problem}")
        click.echo("ok" if not findings.problems else "not ok")
    return 1 if findings.problems else 0


def examine(file: Path) -> Findings:
    """Look at a database without changing it. Raises StoreError."""
    findings = Findings(str(file))
    connection = connect_for_reading(file)
    try:
        _examine(connection, findings)
    except sqlite3.Error as error:
        raise map_error(error, file) from error
    finally:
        connection.close()
    return findings


def _examine(db: sqlite3.Connection, findings: Findings) -> None:
    findings.schema = _one(db, "PRAGMA user_version")
    for (line,) in db.execute(f"PRAGMA integrity_check({_FINDINGS_MAX})").fetchall():
        if line != "ok":
            findings.problems.append(f"integrity: {line}")
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master").fetchall()}
    if "sessions" not in tables:
        findings.problems.append("there is no table sessions: this is not ramakv's database")
        return
    if findings.schema > SCHEMA_VERSION:
        findings.problems.append(
            f"schema {findings.schema} is of a newer ramakv; this one knows {SCHEMA_VERSION}"
        )
    if findings.schema == 0:  # the Rust daemon's: the first start migrates it
        findings.sessions_active = _one(db, "SELECT count(*) FROM sessions")
        _find_unreadable(db, findings, ["sessions"])
        return
    findings.sessions_active = _one(db, "SELECT count(*) FROM sessions WHERE NOT suspended")
    findings.sessions_suspended = _one(db, "SELECT count(*) FROM sessions WHERE suspended")
    findings.sessions_pinned = _one(
        db, "SELECT count(*) FROM pins WHERE session_id IN (SELECT session_id FROM sessions)"
    )
    findings.forks = _one(db, "SELECT count(*) FROM forks")
    findings.outbox_owed = _one(db, "SELECT count(*) FROM outbox WHERE dead_reason IS NULL")
    findings.outbox_dead_letters = _one(
        db, "SELECT count(*) FROM outbox WHERE dead_reason IS NOT NULL"
    )
    findings.set_aside = _one(db, "SELECT count(*) FROM set_aside")
    if findings.set_aside:
        findings.problems.append(
            f"{findings.set_aside} rows could not be read and were set aside (table set_aside)"
        )
    _find_unreadable(db, findings, ["sessions", "forks"])


def _find_unreadable(db: sqlite3.Connection, findings: Findings, tables: Sequence[str]) -> None:
    for table in tables:
        for key, reason in unreadable_maps(db, table):
            if len(findings.problems) < _FINDINGS_MAX:
                findings.problems.append(f"{table} row {key!r}: {reason}")


def _one(db: sqlite3.Connection, query: str) -> int:
    return int(db.execute(query).fetchone()[0])
