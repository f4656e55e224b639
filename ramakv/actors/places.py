"""What the router knows of each session."""

from __future__ import annotations

from dataclasses import dataclass

from ramakv.actors.mailbox import Reply
from ramakv.actors.requests import Expire, Outcome
from ramakv.actors.session import SessionActor
from ramakv.config import Sessions
from ramakv.core.session import SessionState, Status


@dataclass(slots=True, eq=False)
class Place:
    """What the router knows of a session, whether it has an actor or not."""

    session_id: str
    status: Status = Status.UNKNOWN
    last_event: float = 0.0
    oldest_fork_ms: int | None = None
    closed_ms: int | None = None
    actor: SessionActor | None = None
    expiry: Reply[Outcome] | None = None
    is_arriving: bool = False
    """Whether it counts as a session already: an event that may create it is on its way."""
    is_unsure: bool = False
    """Whether only the store knows: an actor crashed, maybe after a commit."""
    turn_began: float | None = None
    turns: int = 0
    chunks: int = 0
    forks: int = 0
    """What operators see of a session without asking it, as is the time its turn began."""

    def adopt(self, state: SessionState) -> None:
        """Take in what became of the session."""
        self.status = state.status
        self.oldest_fork_ms = min((fork.opened_ms for fork in state.forks), default=None)
        self.closed_ms = state.closed_ms
        self.is_unsure = False
        self.turns, self.chunks = state.turn_count, len(state.chunk_map)
        self.forks = len(state.forks)

    @property
    def is_empty(self) -> bool:
        """Whether the store has nothing about this session."""
        return not (
            self.is_unsure
            or self.status is not Status.UNKNOWN
            or self.oldest_fork_ms is not None
            or self.closed_ms is not None
        )

    def due(self, sessions: Sessions, idle_seconds: float, now_ms: int) -> Expire | None:
        """What must be ended of a session that had no event for so long."""
        suspend = self.status is Status.ACTIVE and 0 < sessions.idle_suspend_seconds <= idle_seconds
        close = self.status is Status.SUSPENDED and 0 < sessions.idle_close_seconds <= idle_seconds
        forks_before_ms: int | None = None
        if sessions.fork_ttl_seconds and self.oldest_fork_ms is not None:
            before_ms = now_ms - int(sessions.fork_ttl_seconds * 1000)
            forks_before_ms = before_ms if self.oldest_fork_ms < before_ms else None
        if suspend or close or forks_before_ms is not None:
            return Expire(suspend, close, forks_before_ms)
        return None
