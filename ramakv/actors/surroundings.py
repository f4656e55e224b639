"""What every session actor works with, handed to it by the router."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ramakv.actors.backend import BackendActor
from ramakv.actors.debug_files import DebugFiles
from ramakv.actors.journal import Journal
from ramakv.actors.refcount import RefcountActor
from ramakv.config import Config
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


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every session actor works with."""

    config: Config
    home: Home
    refcount: RefcountActor
    journal: Journal
    backend: BackendActor
    debug_files: DebugFiles | None
    wall_clock: Callable[[], float] = time.time

    def now_ms(self) -> int:
        """Wall-clock time for the store."""
        return int(self.wall_clock() * 1000)
