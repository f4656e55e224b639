"""What the admin listener shows, from before the actors run until after they have drained."""

from __future__ import annotations

import enum
from typing import Protocol

import trio

from ramakv.actors.backend import BackendActor
from ramakv.actors.journal import Journal
from ramakv.actors.readiness import Check, Readiness
from ramakv.actors.refcount import RefcountActor
from ramakv.actors.router import Router
from ramakv.core.tallies import EventTallies, HotTallies
from ramakv.errors import UnavailableError


class Operable(Protocol):
    """The running service, as far as operators see it."""

    @property
    def router(self) -> Router:
        """Counts sessions."""

    @property
    def refcount(self) -> RefcountActor:
        """Counts references and evictions."""

    @property
    def backend(self) -> BackendActor:
        """Counts calls and prefetches."""

    @property
    def journal(self) -> Journal:
        """Counts commits."""

    @property
    def answered(self) -> EventTallies:
        """What became of events."""

    @property
    def hot(self) -> HotTallies | None:
        """How often chunks were hot; None where nobody can tell."""

    @property
    def readiness(self) -> Readiness:
        """Whether it can do its work."""


class Phase(enum.StrEnum):
    """Where the daemon is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"


class Admin:
    """The service, while there is one, and what operators may ask of it."""

    def __init__(self, stop: trio.Event) -> None:
        """Take the event that is set when the daemon begins to stop."""
        self._stop = stop
        self._service: Operable | None = None

    def attach(self, service: Operable | None) -> None:
        """Show a service that runs now, or, with None, that there is none any more."""
        self._service = service

    @property
    def service(self) -> Operable:
        """The service. Raises UnavailableError while none runs."""
        if self._service is None:
            raise UnavailableError(f"the daemon is {self.phase}; try again in a moment")
        return self._service

    @property
    def phase(self) -> Phase:
        """Where the daemon is in its life."""
        if self._stop.is_set():
            return Phase.STOPPING
        return Phase.STARTING if self._service is None else Phase.RUNNING

    async def checks(self) -> tuple[Check, ...]:
        """Look at everything; before the end of the start, and after its stop, at nothing else."""
        if self.phase is Phase.STARTING:
            return (Check("startup", False, "the daemon is starting: it reads its database"),)
        if self.phase is Phase.STOPPING:
            return (Check("startup", False, "the daemon is stopping"),)
        return (Check("startup", True), *(await self.service.readiness.look()))
