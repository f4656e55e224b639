"""The running service, as far as operators see it."""

from __future__ import annotations

from typing import Protocol

from ramakv import events
from ramakv.actors.backend import BackendActor
from ramakv.actors.dead_letters import DeadLetters
from ramakv.actors.journal import Journal
from ramakv.actors.readiness import Readiness
from ramakv.actors.refcount import RefcountActor
from ramakv.actors.residency import ResidencyActor
from ramakv.actors.router import Router
from ramakv.config import Config
from ramakv.core.tallies import EventTallies, HotTallies


class Operable(Protocol):
    """What the admin side needs of the service. Of actors, it uses what is synchronous or asks."""

    @property
    def config(self) -> Config:
        """Its configuration."""

    @property
    def router(self) -> Router:
        """Sessions."""

    @property
    def refcount(self) -> RefcountActor:
        """Chunks."""

    @property
    def backend(self) -> BackendActor:
        """LMCache."""

    @property
    def journal(self) -> Journal:
        """The store."""

    @property
    def answered(self) -> EventTallies:
        """Events."""

    @property
    def hot(self) -> HotTallies | None:
        """How often chunks were hot; None where nobody can tell."""

    @property
    def residency(self) -> ResidencyActor:
        """Who stays in the hot tier."""

    @property
    def readiness(self) -> Readiness:
        """Whether it can do its work."""

    @property
    def dead_letters(self) -> DeadLetters:
        """Chunks that LMCache refused to evict."""

    async def handle(self, event: events.Event) -> events.Data:
        """Answer one event. Raises EventError or StoreError; then nothing was changed."""
