"""What a session actor is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct, field

from ramakv import events
from ramakv.actors.mailbox import Reply
from ramakv.core.chunks import ChunkMap
from ramakv.core.session import Fork, SessionState
from ramakv.store.store import ParentsFork
from ramakv.tracing import Trace


@dataclass(frozen=True, slots=True)
class Restore:
    """Take the session's own map up again, or, where one is given, another session's."""

    chunk_map: ChunkMap | None


@dataclass(frozen=True, slots=True)
class PrepareFork:
    """Hold the present map's chunks for a fork that the child will store. Answer: `Prepared`."""


@dataclass(frozen=True, slots=True)
class Inherit:
    """Begin with a fork's map, and store that fork of the parent in the same transaction."""

    parents_fork: ParentsFork
    chunk_map: ChunkMap


@dataclass(frozen=True, slots=True)
class EndPrepared:
    """Take up a prepared fork, if the child has stored it, or let go of its chunks."""

    fork: Fork
    stored: bool | None
    """None: the child crashed over it, and only the store knows."""


@dataclass(frozen=True, slots=True)
class ReadSnapshot:
    """Tell the map that the session has or, suspended, had. NotFoundError: there is none."""


@dataclass(frozen=True, slots=True)
class Expire:
    """End what nobody used for long."""

    suspend: bool = False
    close: bool = False
    forks_opened_before_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """Tell the whole state, for operators."""


Request = (
    events.SessionEvent
    | Restore
    | PrepareFork
    | Inherit
    | EndPrepared
    | ReadSnapshot
    | Expire
    | Look
)


class Ask(Struct, eq=False):
    """One request and the slot for its outcome."""

    request: Request
    reply: Reply[Outcome] = field(default_factory=Reply)
    trace: Trace | None = None
    begun: bool = False
    _withdrawn: bool = False

    def begin(self) -> bool:
        """Start on it, unless its caller gave up while it waited."""
        self.begun = not self._withdrawn
        return self.begun

    def withdraw(self) -> bool:
        """Give up, if it has not begun: then it changes nothing."""
        self._withdrawn = not self.begun
        return self._withdrawn


class Prefetching(Struct, frozen=True):
    """An answer that is complete when LMCache has taken the prefetch, or the bound has passed."""

    accepted: Reply[bool] | None
    count: int
    restored: bool = False
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A fork whose chunks are held, and nothing more; the map that it was taken of."""

    fork: Fork
    chunk_map: ChunkMap


Outcome = events.Data | Prefetching | Prepared | SessionState | ChunkMap | None
