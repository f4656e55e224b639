"""Whether the daemon can do its work now, found out by asking those who do it."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from ramakv.actors.backend import BackendActor
from ramakv.actors.journal import Journal
from ramakv.actors.refcount import RefcountActor
from ramakv.actors.router import Router
from ramakv.errors import StoreError

_ANSWER_SECONDS_MAX = 2.0
"""An actor that takes longer is as good as none; probes give up after little more."""

_FRESH_SECONDS = 1.0
"""Whoever asks sooner gets what was found: probes must not be a load."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    reason: str = ""
    """What is wrong; empty where nothing is."""
    required: bool = True
    """Whether no work can be done without it. LMCache is not: without it, work is degraded."""


class Readiness:
    """Looks at each actor, not more often than once a second, whoever asks how often."""

    def __init__(
        self, router: Router, refcount: RefcountActor, journal: Journal, backend: BackendActor
    ) -> None:
        self._router = router
        self._refcount = refcount
        self._journal = journal
        self._backend = backend
        self._looking = trio.Lock()
        self._looked_at = -math.inf
        self._found: tuple[Check, ...] = ()

    async def look(self) -> tuple[Check, ...]:
        """Return what is found now, or was found a moment ago."""
        async with self._looking:
            if trio.current_time() - self._looked_at >= _FRESH_SECONDS:
                self._found = (await self._actors(), await self._store(), self._lmcache())
                self._looked_at = trio.current_time()
        return self._found

    async def _actors(self) -> Check:
        if not self._router.is_open:
            return Check("actors", False, "the router takes no events: the daemon is stopping")
        reason = await _in_time(self._refcount.ping, "the refcount actor does not answer")
        return Check("actors", not reason, reason)

    async def _store(self) -> Check:
        try:
            reason = await _in_time(self._journal.probe, "the store does not answer")
        except StoreError as error:
            reason = str(error)
        return Check("store", not reason, reason)

    def _lmcache(self) -> Check:
        trouble = self._backend.trouble
        return Check("lmcache", not trouble, trouble, required=False)


async def _in_time(ask: Callable[[], Awaitable[None]], otherwise: str) -> str:
    """Return why there was no answer, or nothing."""
    with trio.move_on_after(_ANSWER_SECONDS_MAX):
        try:
            await ask()
        except trio.ClosedResourceError:
            return f"{otherwise}: the daemon is stopping"
        return ""
    return f"{otherwise} within {_ANSWER_SECONDS_MAX:g} s"
