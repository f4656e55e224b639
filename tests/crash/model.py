"""What a session must look like after each event: the contract, without the daemon's code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

Chunks = tuple[str, ...]

NEW_FORK = -1
"""Stands for the id of a fork that was asked for and not answered yet."""


@dataclass(frozen=True)
class State:
    """One session, with its open forks as (id, chunks)."""

    status: Literal["none", "active", "suspended", "closed"] = "none"
    chunks: Chunks = ()
    turns: int = 0
    seq: int | None = None
    pinned: bool = False
    forks: frozenset[tuple[int, Chunks]] = frozenset()

    @property
    def held(self) -> set[str]:
        """Chunks that the session itself references."""
        return set(self.chunks) if self.status == "active" else set()


World = Mapping[str, State]
"""The sessions that one client uses. An event changes all it changes at once, or nothing."""


def turned(state: State, chunks: Chunks, seq: int) -> State:
    """A turn_end; after a close it begins a new life."""
    return replace(state, status="active", chunks=chunks, turns=state.turns + 1, seq=seq)


def woken(state: State) -> State:
    """A turn_start: a suspended session is back, a closed one may begin a new life."""
    after = {"suspended": "active", "closed": "none"}
    return replace(state, status=after.get(state.status, state.status))  # type: ignore[arg-type]


def suspended(state: State) -> State:
    return replace(state, status="suspended", pinned=True)


def closed(state: State) -> State:
    """Nothing is left of it but its forks, and the memory of the close."""
    return State("closed", forks=state.forks)


def restored(state: State, chunks: Chunks, *, pin: bool) -> State:
    """A snapshot_restore, or the beginning of a fork's child."""
    return replace(state, status="active", chunks=chunks, pinned=state.pinned or pin)


def forked(state: State) -> State:
    fork = (NEW_FORK, tuple(dict.fromkeys(state.chunks)))
    return replace(state, forks=state.forks | {fork})


def fork_ended(state: State, fork_id: int) -> State:
    return replace(state, forks=frozenset(fork for fork in state.forks if fork[0] != fork_id))


def with_fork_id(state: State, fork_id: int) -> State:
    """The same, when the new fork's id is known."""
    named = ((fork_id if known == NEW_FORK else known, chunks) for known, chunks in state.forks)
    return replace(state, forks=frozenset(named))


def counts(worlds: Iterable[World]) -> Counter[str]:
    """How many sessions and forks reference each chunk."""
    found: Counter[str] = Counter()
    for world in worlds:
        for state in world.values():
            found.update(state.held)
            for _, chunks in state.forks:
                found.update(set(chunks))
    return found


def let_go(before: World, after: World) -> set[str]:
    """Chunks that an owner gave up: an evict is owed of each, if it was the last one.

    A suspended session references nothing; its close reaches for the slower tiers.
    """
    gone: set[str] = set()
    for session_id, state in before.items():
        then = after[session_id]
        gone |= state.held - then.held
        for _, chunks in state.forks - then.forks:
            gone |= set(chunks)
        if state.status == "suspended" and then.status == "closed":
            gone |= set(state.chunks)
    return gone


def is_same(stored: State, expected: State, *, reopened: bool) -> bool:
    """Whether this is what is stored; the id of an unanswered fork may be any.

    A turn_start that begins a new life answers before that is written, so a session that was
    `reopened` may be closed still.
    """
    status = expected.status
    if reopened and status == "none" and stored.status == "closed":
        status = "closed"
    plain = replace(stored, forks=frozenset())
    if plain != replace(expected, status=status, forks=frozenset()):
        return False
    unnamed = [chunks for fork_id, chunks in expected.forks if fork_id == NEW_FORK]
    more = stored.forks - expected.forks
    missing = {fork for fork in expected.forks - stored.forks if fork[0] != NEW_FORK}
    return not missing and [chunks for _, chunks in more] == unnamed
