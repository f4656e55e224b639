"""What the admin listener shows, from before the actors run until after they have drained."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator

import structlog
import trio

from ramakv.actors.readiness import Check
from ramakv.errors import UnavailableError
from ramakv.problems import Problems
from ramakv.web.admin_views import Views
from ramakv.web.feed import Feed, hello, message
from ramakv.web.operable import Operable
from ramakv.web.overview import Overview
from ramakv.web.snapshot import Snapshot

log = structlog.get_logger("ramakv.admin")

_TICK_SECONDS = 1.0


class Phase(enum.StrEnum):
    """Where the daemon is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"


class Admin:
    """The service, while there is one, and what operators may ask of it."""

    def __init__(self, stop: trio.Event, problems: Problems) -> None:
        """Take the event that is set when the daemon begins to stop."""
        self._stop = stop
        self._problems = problems
        self._service: Operable | None = None
        self._overview: Overview | None = None
        self._views: Views | None = None
        self._feed = Feed()
        self._taking = trio.Lock()

    def attach(self, service: Operable | None) -> None:
        """Show a service that runs now, or, with None, that there is none any more."""
        self._service = service
        self._overview = None if service is None else Overview(service, self._problems)
        self._views = None if service is None else Views(service)

    @property
    def service(self) -> Operable:
        """The service. Raises UnavailableError while none runs."""
        if self._service is None:
            raise self._unavailable()
        return self._service

    @property
    def views(self) -> Views:
        """Single sessions and chunks. Raises UnavailableError while no service runs."""
        if self._views is None:
            raise self._unavailable()
        return self._views

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

    # The live page -----------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take a sample a second, and where somebody looks a snapshot, until cancelled.

        A fault in that is logged, once in a row: the page may not end the daemon.
        """
        task_status.started()
        is_failing = False
        try:
            while True:
                await trio.sleep(_TICK_SECONDS)
                try:
                    await self._tick()
                    is_failing = False
                except Exception as error:
                    if not is_failing:
                        log.exception("the page cannot be brought up to date", exc_info=error)
                    is_failing = True
        finally:
            self._feed.end()

    async def _tick(self) -> None:
        if self._overview is not None:
            self._overview.sampler.sample()
        if self._feed:
            self._feed.show(await self._news())

    async def snapshot(self) -> Snapshot:
        """Take a snapshot now. Raises UnavailableError while no service runs."""
        async with self._taking:
            if self._overview is None:
                raise self._unavailable()
            return await self._overview.take(self.phase)

    def check_room(self) -> None:
        """Raise UnavailableError where too many look already."""
        self._feed.check_room()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Let somebody look: server-sent events, until the daemon has stopped."""
        points = list(self._overview.sampler.points) if self._overview else []
        first = await self._news()
        try:
            viewer = self._feed.join(hello({"points": points}) + first)
        except UnavailableError:
            return  # somebody was quicker
        try:
            async for news in viewer:
                yield news
        finally:
            self._feed.leave(viewer)

    async def _news(self) -> bytes:
        try:
            return message("snapshot", await self.snapshot())
        except UnavailableError:
            return message("phase", {"phase": self.phase})

    def _unavailable(self) -> UnavailableError:
        return UnavailableError(f"the daemon is {self.phase}; try again in a moment")
