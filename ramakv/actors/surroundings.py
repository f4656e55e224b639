"""What every session actor works with, handed to it by the router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import trio

from ramakv.actors.backend import BackendActor
from ramakv.actors.debug_files import DebugFiles
from ramakv.actors.journal import Journal
from ramakv.actors.refcount import RefcountActor
from ramakv.config import Config
from ramakv.core.chunks import ChunkMap
from ramakv.core.orders import Advice
from ramakv.core.session import SessionState

if TYPE_CHECKING:
    from ramakv.actors.session import SessionActor


class Home(Protocol):
    """The router, as far as a session knows it. All of it is synchronous."""

    def new_fork_id(self) -> int:
        """A number that no fork ever had."""

    def state_changed(self, state: SessionState) -> None:
        """Note what became of a session, after it is durable."""

    def retire(self, actor: SessionActor) -> None:
        """End an idle actor: its next event starts another."""


class ResidencyNotes(Protocol):
    """Residency, as far as a session tells it of turns. All of it is synchronous."""

    def turn_started(self, session_id: str) -> Advice:
        """Note that a turn begins, before anything is done for it. Returns what to prefetch."""

    def turn_ended(self, session_id: str, chunks: ChunkMap, finish_reason: str | None) -> None:
        """Note that a turn's end was applied."""

    def inherited(self, session_id: str) -> None:
        """Note that a session begins with another's map."""

    def left(self, session_id: str) -> None:
        """Note that a session is not active any more."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every session actor works with."""

    config: Config
    home: Home
    refcount: RefcountActor
    journal: Journal
    backend: BackendActor
    residency: ResidencyNotes
    debug_files: DebugFiles | None
    clock_offset: float
    """Wall-clock time minus trio's, at start. A wall clock that is set later moves no age."""

    def now_ms(self) -> int:
        """Milliseconds since 1970, for the store."""
        return int((trio.current_time() + self.clock_offset) * 1000)
