"""The model: who owns which chunk, and whether each change that becomes durable may be.

Each commit must be explained by the first event waiting at that session which may have made it;
the ones before it have then been passed, and may not be carried out any more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tests.simulation.contract import NOTHING, Chunks, Row, may_become, may_expire, may_inherit
from tests.simulation.files import looking_at
from tests.simulation.history import Event

_EFFECTS = {
    "turn_end": "map_updated",
    "session_fork": "forked",
    "session_fork_end": "matched",
    "turn_start": "restored",
    "snapshot_restore": "target_session_id",
}
"""Events whose reply says by this field that something was changed, and so was durable."""


@dataclass(frozen=True)
class Change:
    """A write to one session; a fork's child also writes the fork, which is its parent's."""

    session: int
    parent: int | None = None
    fork_id: int | None = None


@dataclass(eq=False)
class Ticket:
    """An event that the daemon was handed."""

    event: Event
    sources_maps_known: int
    applied: tuple[Change, Row, Row] | None = None
    """What it made durable: the write, the row before and after."""
    is_abandoned: bool = False
    """Its agent hung up: whether it was carried out is never said."""
    passed: bool = False
    """A later event of its session was carried out before it."""

    @property
    def session(self) -> int:
        """The session that it writes to: of a fork with a child, that is the child."""
        forks_into = self.event.type == "session_fork" and self.event.other is not None
        return self.event.other if forks_into else self.event.session  # type: ignore[return-value]

    @property
    def floats(self) -> bool:
        """Whether it asks another session first, and so keeps no place in the order."""
        return self.event.other is not None and self.event.type != "turn_end"


def read_rows(path: Path) -> dict[str, Row]:
    """Read what is durable."""
    with looking_at(path) as database:
        sessions = database.execute(
            "SELECT s.session_id, map_json, turn_count, suspended, seq, pinned_at_ms IS NOT NULL "
            "FROM sessions s LEFT JOIN pins ON pins.session_id = s.session_id"
        ).fetchall()
        forks = database.execute("SELECT session_id, fork_id, map_json FROM forks").fetchall()
    held: dict[str, set[tuple[int, frozenset[str]]]] = defaultdict(set)
    for session_id, fork_id, map_json in forks:
        held[session_id].add((fork_id, frozenset(msgspec.json.decode(map_json))))
    rows = {session_id: Row(forks=frozenset(forks)) for session_id, forks in held.items()}
    for session_id, map_json, turns, suspended, seq, pinned in sessions:
        rows[session_id] = Row(
            "suspended" if suspended else "active",
            tuple(msgspec.json.decode(map_json)),
            turns,
            seq,
            bool(pinned),
            frozenset(held[session_id]),
        )
    return rows


@dataclass
class Model:
    """Judges commits and answers as they come."""

    keeps_pinned: bool
    closed_memory_seconds: float
    complain: Callable[[str], None]
    rows: dict[str, Row] = field(default_factory=dict)
    once_owned: set[str] = field(default_factory=set)
    _waiting: dict[int, list[Ticket]] = field(default_factory=lambda: defaultdict(list))
    _maps: dict[int, list[Chunks]] = field(default_factory=lambda: defaultdict(list))
    _fork_ids: set[int | None] = field(default_factory=set)
    _closed_at: dict[int, float] = field(default_factory=dict)

    def owners(self) -> Mapping[str, set[str]]:
        """Who owns each chunk now: sessions and forks, by what is durable."""
        owners: dict[str, set[str]] = defaultdict(set)
        for session_id, row in self.rows.items():
            for chunk in row.referenced:
                owners[chunk].add(session_id)
            for fork_id, chunks in row.forks:
                for chunk in chunks:
                    owners[chunk].add(f"fork {fork_id}")
        return owners

    def arrives(self, event: Event) -> Ticket:
        """Note an event, in the order in which the daemon is handed them."""
        ticket = Ticket(event, len(self._maps[_source(event)]))
        self._waiting[ticket.session].append(ticket)
        return ticket

    def committed(self, changes: Sequence[Change], rows: dict[str, Row], now: float) -> None:
        """Judge what a transaction made durable."""
        before, self.rows = self.rows, rows
        of_children = {change.fork_id for change in changes}
        for change in changes:
            old = before.get(f"s{change.session}", NOTHING)
            new = rows.get(f"s{change.session}", NOTHING)
            self._judge(change, old, new.without(of_children - _ids(old)), now)
        touched = {f"s{change.session}" for change in changes}
        touched |= {f"s{change.parent}" for change in changes}
        for session_id in before.keys() | rows.keys():
            old, new = before.get(session_id, NOTHING), rows.get(session_id, NOTHING)
            if old == new:
                continue
            if session_id not in touched:
                self.complain(f"{session_id} went from {old} to {new} without a write")
            if reused := (_ids(new) - _ids(old)) & self._fork_ids:
                self.complain(f"the fork numbers {reused} were used before")
            self._fork_ids |= _ids(new)
            self._maps[int(session_id[1:])].append(new.chunks)
        self.once_owned.update(self.owners())

    def _judge(self, change: Change, old: Row, new: Row, now: float) -> None:
        """Put a change down to the first event that may have made it."""
        session = change.session
        for ticket in self._waiting[session]:
            if ticket.passed or ticket.applied is not None:
                continue
            if self._explains(ticket, change, old, new):
                ticket.applied = (change, old, new)
                if not ticket.floats:
                    self._pass_those_before(session, ticket)
                    self._check_not_too_late(session, old, ticket.event, now)
                # One whose agent hung up may stand for the daemon's own close of an idle session.
                if ticket.event.type == "session_close" and not ticket.is_abandoned:
                    self._closed_at[session] = now
                break
        else:
            if not may_expire(old, new):
                self.complain(f"no event explains that s{session} went from {old} to {new}")
        if new.status == "active":
            self._closed_at.pop(session, None)

    def _explains(self, ticket: Ticket, change: Change, old: Row, new: Row) -> bool:
        event = ticket.event
        maps = self._maps[_source(event)][max(0, ticket.sources_maps_known - 1) :]
        inherits = event.type == "session_fork" and event.other is not None
        if inherits != (change.fork_id is not None):
            return False
        if not inherits:
            return may_become(old, new, event, maps, keeps_pinned=self.keeps_pinned)
        parents = self.rows.get(f"s{event.session}", NOTHING).forks
        held = next((held for fork_id, held in parents if fork_id == change.fork_id), None)
        at_both = (change.parent, change.session) == (event.session, event.other)
        return at_both and held is not None and may_inherit(old, new, held, maps)

    def _pass_those_before(self, session: int, ticket: Ticket) -> None:
        for other in self._waiting[session]:
            if other is ticket:
                return
            if not other.floats and other.applied is None:
                other.passed = True
                self._note_start(other)

    def _note_start(self, ticket: Ticket) -> None:
        if ticket.event.type == "turn_start":
            self._closed_at.pop(ticket.event.session, None)

    def _check_not_too_late(self, session: int, old: Row, event: Event, now: float) -> None:
        closed_at = self._closed_at.get(session, -math.inf)
        comes_late = now - closed_at < self.closed_memory_seconds - 0.001
        if event.type == "turn_end" and old.status == "none" and comes_late:
            self.complain(f"{event} brought back a session closed moments ago")

    def answered(self, ticket: Ticket, data: dict[str, Any] | None) -> None:
        """Judge an answer; None: the event was refused."""
        self._forget(ticket)
        event = ticket.event
        if data is None:
            if ticket.applied is not None:
                self.complain(f"{event} was refused, and carried out all the same")
            return
        self._note_start(ticket)
        self._take_over(ticket)
        says_done = data.get(_EFFECTS.get(event.type, ""))
        if says_done and ticket.applied is None:
            self.complain(f"{event} was answered with {data} before it was durable")
        if event.type == "turn_end" and data["chunk_count"] != len(event.chunks):
            self.complain(f"{event} was answered with {data}")

    def _take_over(self, ticket: Ticket) -> None:
        """Let an event have done what was put down to one of an agent that hung up."""
        for other in self._waiting[ticket.session]:
            if ticket.applied is not None or other.applied is None or not other.is_abandoned:
                continue
            if self._explains(ticket, *other.applied):
                ticket.applied, other.applied = other.applied, None

    def abandoned(self, ticket: Ticket) -> None:
        """Note that the agent of an event hung up; it may be carried out all the same."""
        ticket.is_abandoned = True
        self._note_start(ticket)

    def abandon_all(self) -> None:
        """Forget what waits: the daemon that had it is gone."""
        self._waiting.clear()

    def _forget(self, ticket: Ticket) -> None:
        if ticket in self._waiting[ticket.session]:
            self._waiting[ticket.session].remove(ticket)


def _ids(row: Row) -> set[int | None]:
    return {fork_id for fork_id, _ in row.forks}


def _source(event: Event) -> int:
    """Whose map an event takes: a fork its own session's, a restore perhaps another's."""
    if event.type == "snapshot_restore" and event.other is not None:
        return event.other
    return event.session
