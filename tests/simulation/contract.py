"""What an event may make of one session: the event contract, on one row. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tests.simulation.history import Event

Chunks = tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One session, as the database shows it."""

    status: Literal["none", "active", "suspended"] = "none"
    chunks: Chunks = ()
    turns: int = 0
    seq: int | None = None
    pinned: bool = False
    forks: frozenset[tuple[int, frozenset[str]]] = frozenset()

    @property
    def referenced(self) -> set[str]:
        """Chunks that the session itself references."""
        return set(self.chunks) if self.status == "active" else set()

    def without(self, fork_ids: Collection[int | None]) -> Row:
        """Return the row as it would be if these forks had not been opened."""
        return replace(
            self, forks=frozenset(fork for fork in self.forks if fork[0] not in fork_ids)
        )


NOTHING = Row()


def may_become(
    old: Row, new: Row, event: Event, others_maps: Sequence[Chunks], *, keeps_pinned: bool
) -> bool:
    """Whether the event's own session may go from one row to the other.

    `others_maps` are the maps that the source of a restore had since the event arrived.
    """
    named = tuple(f"c{chunk}" for chunk in event.chunks)
    match event.type:
        case "turn_end":
            if None not in (event.seq, old.seq) and event.seq <= old.seq:  # type: ignore[operator]
                return False
            seq = old.seq if event.seq is None else event.seq
            turned = replace(old, status="active", chunks=named, turns=old.turns + 1, seq=seq)
            return new == turned
        case "turn_start":
            return old.status == "suspended" and new == replace(old, status="active")
        case "session_suspend":
            suspended = replace(old, status="suspended", pinned=True)
            return old.status == "active" and new == suspended
        case "session_close":
            if keeps_pinned and old.pinned and old.status != "none":
                return new == replace(old, status="suspended")
            return new == Row(forks=old.forks)
        case "session_fork":
            return opens_fork(old, new)
        case "session_fork_end":
            return ends_fork(old, new, event.fork)
        case "snapshot_restore":
            maps = [old.chunks] if event.other in (None, event.session) else list(others_maps)
            restored = replace(old, status="active", pinned=True)
            return any(chunks and new == replace(restored, chunks=chunks) for chunks in maps)
    return False


def may_inherit(old: Row, new: Row, held: frozenset[str], parents_maps: Sequence[Chunks]) -> bool:
    """Whether a fork's child may go from one row to the other while the fork holds these chunks."""
    inherited = replace(old, status="active", chunks=new.chunks)
    return new == inherited and new.chunks in parents_maps and held == frozenset(new.chunks)


def may_expire(old: Row, new: Row) -> bool:
    """Whether the daemon itself, without any event, may do this to an idle session."""
    if old.status == "active" and new == replace(old, status="suspended", pinned=True):
        return True
    if old.status == "suspended" and new == Row(forks=old.forks):
        return True
    gone = old.forks - new.forks
    return len(gone) == 1 and new == replace(old, forks=old.forks - gone)


def opens_fork(old: Row, new: Row) -> bool:
    """Whether one more fork is open, with just the session's chunks."""
    added = new.forks - old.forks
    return (
        old.status == "active"
        and new == replace(old, forks=old.forks | added)
        and [held for _, held in added] == [frozenset(old.chunks)]
    )


def ends_fork(old: Row, new: Row, fork_id: int | None) -> bool:
    """Whether this fork, or the latest, is open no more."""
    if not old.forks:
        return False
    wanted = max(known for known, _ in old.forks) if fork_id is None else fork_id
    left = frozenset(fork for fork in old.forks if fork[0] != wanted)
    return left != old.forks and new == replace(old, forks=left)
