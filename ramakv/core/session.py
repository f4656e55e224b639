"""What each event does to one session: pure steps from a state to the next.

A step says which chunks the session (or one of its forks) must acquire before the commit
and release after it. The session actor carries steps out; this module decides them.
"""

from __future__ import annotations

import enum
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ramakv.core.chunks import ChunkMap, diff, distinct
from ramakv.core.evictions import Scope


class Status(enum.IntEnum):
    """Where a session is in its life. ACTIVE and SUSPENDED have a row in the store."""

    UNKNOWN = 0
    ACTIVE = 1
    SUSPENDED = 2


class Fork(Struct, frozen=True):
    """References that a fork holds, whatever becomes of its parent."""

    fork_id: int
    chunks: ChunkMap
    opened_ms: int


class SessionState(Struct, frozen=True):
    """All that a session actor owns. Immutable: a failed commit leaves the old one in place."""

    session_id: str
    status: Status = Status.UNKNOWN
    chunk_map: ChunkMap = ()
    turn_count: int = 0
    seq: int | None = None
    pinned: bool = False
    forks: tuple[Fork, ...] = ()
    closed_ms: int | None = None
    """When it was closed, until something begins a new life."""

    @property
    def references(self) -> ChunkMap:
        """Chunks that the session itself references, each once."""
        return distinct(self.active_map)

    @property
    def active_map(self) -> ChunkMap:
        """The map, if the session references it now."""
        return self.chunk_map if self.status is Status.ACTIVE else ()


class Step(Struct, frozen=True):
    """A state and what leads to it: chunks to acquire before the commit, to release after it."""

    next: SessionState
    acquire: ChunkMap = ()
    release: ChunkMap = ()
    scope: Scope = Scope.RELEASE
    forget: ChunkMap = ()
    """Chunks to evict that the session no longer references: it was suspended."""

    @property
    def outbox(self) -> ChunkMap:
        """Chunks whose evict this step may owe."""
        return self.release + self.forget


def is_stale(state: SessionState, seq: int | None) -> bool:
    """Whether a turn_end with this `seq` is not newer than the last one applied."""
    return seq is not None and state.seq is not None and seq <= state.seq


def was_just_closed(state: SessionState, now_ms: int, memory_seconds: float) -> bool:
    """Whether a turn_end that comes now is a late one of a life that has ended."""
    return state.closed_ms is not None and is_remembered(state.closed_ms, now_ms, memory_seconds)


def is_remembered(closed_ms: int, now_ms: int, memory_seconds: float) -> bool:
    """Whether a close is recent; one in the future is from before the clock was set back."""
    return 0 <= now_ms - closed_ms < memory_seconds * 1000


def turn_end(state: SessionState, hashes: ChunkMap, seq: int | None) -> Step:
    """Replace the map; a suspended or unknown session becomes active."""
    turn_count = state.turn_count + 1
    seq = state.seq if seq is None else seq
    return _replace_map(state, hashes, turn_count=turn_count, seq=seq)


def resume(state: SessionState) -> Step:
    """Reference a suspended session's chunks again."""
    resumed = replace(state, status=Status.ACTIVE, closed_ms=None)
    return Step(resumed, acquire=distinct(state.chunk_map))


def restore(state: SessionState, hashes: ChunkMap, *, pin: bool) -> Step:
    """Take over a map, the session's own or another's."""
    return _replace_map(state, hashes, pinned=state.pinned or pin)


def _replace_map(state: SessionState, hashes: ChunkMap, **changes: Any) -> Step:
    old = state.active_map
    added, removed, alike = diff(old, hashes)
    # Of what is the same, the old texts stay: they have been looked up, and know their hashes.
    changes["chunk_map"] = old[:alike] + hashes[alike:]
    replaced = replace(state, status=Status.ACTIVE, closed_ms=None, **changes)
    return Step(replaced, acquire=added, release=removed)


def suspend(state: SessionState) -> Step:
    """Release the references and keep the map."""
    return Step(
        replace(state, status=Status.SUSPENDED, pinned=True),
        release=state.references,
        scope=Scope.SUSPEND,
    )


def close(
    state: SessionState, closed_ms: int | None, *, keep_row: bool, evict_suspended: bool
) -> Step:
    """End a session; its forks live on. `closed_ms`: when, if that is to be remembered.

    `keep_row`: a pinned session keeps its row, as a suspended one does. `evict_suspended`:
    chunks of a suspended session lie in slower tiers, and close reaches those.
    """
    if keep_row:
        step = suspend(state)
        return replace(step, next=replace(step.next, closed_ms=closed_ms))
    was_suspended = state.status is Status.SUSPENDED
    return Step(
        SessionState(state.session_id, forks=state.forks, closed_ms=closed_ms),
        release=state.references,
        scope=Scope.CLOSE,
        forget=distinct(state.chunk_map) if was_suspended and evict_suspended else (),
    )


def reopen(state: SessionState) -> SessionState:
    """Begin a new life after a close: a turn_start says that the agent is back."""
    return replace(state, closed_ms=None)


def fork(state: SessionState, opened: Fork) -> Step:
    """Take one more reference on each chunk of a fork."""
    return Step(replace(state, forks=(*state.forks, opened)), acquire=opened.chunks)


def find_fork(state: SessionState, fork_id: int | None) -> Fork | None:
    """Find an open fork: the given one, or the latest."""
    if fork_id is None:
        return max(state.forks, key=lambda fork: fork.fork_id, default=None)
    return next((fork for fork in state.forks if fork.fork_id == fork_id), None)


def fork_end(state: SessionState, fork: Fork) -> Step:
    """Release what a fork took."""
    left = tuple(other for other in state.forks if other is not fork)
    return Step(replace(state, forks=left), release=fork.chunks)
