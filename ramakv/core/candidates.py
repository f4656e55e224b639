"""The sessions that residency thinks about: what it knows of each, and how it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from ramakv.core.chunks import ChunkHash, ChunkMap
from ramakv.core.pauses import Pauses, Reason


class Seat(Enum):
    """Where a session stands."""

    RUNNING = "in a turn"
    IN = "in"
    OUT = "out"


@dataclass(slots=True, eq=False)
class Candidate:
    """A session that may stay."""

    session_id: str
    sample: Sequence[ChunkHash] = ()
    members: frozenset[ChunkHash] = frozenset()
    chunk_map: ChunkMap = ()
    reason: Reason = "unknown"
    is_running: bool = False
    last_turn: int = 0
    """Number of its last turn that ended, which no other turn has."""
    since: float = 0.0
    """When its turn began, or ended."""
    step: int = 0
    step_ends: float = 0.0
    is_in: bool = False
    is_fresh: bool = False
    """Whether its turn ended since the last decision."""
    is_demoted: bool = False
    brought_up: float = 0.0
    """When that was begun last in this pause; 0 where it was not."""
    is_prefetched: bool = False
    """Whether LMCache accepted a prefetch of its chunks in this pause."""
    began_anew: bool = False
    """Whether its last turn had no use for most of the map that it began with."""
    is_gone: bool = False
    """Whether it is thought about no more."""
    hot_share: float | None = None
    """Of what its last turn wanted."""


class Standing(NamedTuple):
    """How a session stands, for people."""

    session_id: str
    seat: Seat
    why: str
    chunks: int
    paused_seconds: float | None
    hits_per_second: float
    hot_share: float | None


def standing(session: Candidate, pauses: Pauses, now: float) -> Standing:
    """Say how a session stands, after a turn that stopped for the reason of these pauses."""
    hits_per_second = pauses.to_keep[session.step]
    if session.is_running:
        hits_per_second = pauses.while_running
        seat, why = Seat.RUNNING, "LMCache has just used its chunks; nothing is done with them"
    elif session.is_in:
        seat, why = Seat.IN, "few yield more for the room they take"
    elif session.is_demoted:
        seat, why = Seat.OUT, "demoted: it is not expected back while others are"
    else:
        seat, why = Seat.OUT, "others yield more, or it does not fit beside them"
    return Standing(
        session.session_id,
        seat,
        why,
        len(session.chunk_map),
        None if session.is_running else now - session.since,
        hits_per_second,
        session.hot_share,
    )
