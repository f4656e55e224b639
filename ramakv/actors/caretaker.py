"""What stands between the backend actor and an LMCache that wants looking after."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog
import trio

from ramakv.core.pacing import PrefetchBudget
from ramakv.core.topology import Condition
from ramakv.errors import BackendError, BackendTimeoutError

log = structlog.get_logger("ramakv.backend")

_CHECK_AGAIN_SECONDS = 30.0
"""How often an LMCache that must not be called is looked at again."""

_LOOK_SECONDS = 5.0
"""How often a running LMCache is looked at."""


class Care(Protocol):
    """What looks after a real LMCache, beside the calls."""

    async def check_first(self) -> bool:
        """Look before the first call; whether it may be called."""

    async def look(self) -> Condition:
        """Look again, now and then."""

    async def find_wedged(self) -> Sequence[str]:
        """After a call that timed out: ports that answer nothing at all."""


class Caretaker:
    """Holds all calls until LMCache was looked at, and prefetches while it holds too many.

    Without `care` there is nothing to look at, and nothing is held.
    """

    def __init__(self, care: Care | None, unconsumed_chunks_max: int) -> None:
        self.is_held = care is not None
        self.is_refused = False
        """Whether LMCache would come to harm if it were called."""
        self._care = care
        self._budget = PrefetchBudget(unconsumed_chunks_max)
        self._is_paused = False
        self._is_diagnosing = False
        self._seen_at = -math.inf
        self._scope = trio.CancelScope()

    @property
    def is_degraded(self) -> bool:
        """Whether no prefetch is to be expected."""
        return self.is_refused or self._budget.is_spent

    @property
    def trouble(self) -> str:
        """Why calls, or prefetches, are held, for people; empty where they are not."""
        if self.is_refused:
            return "LMCache would come to harm if it were called; the log says why"
        if self.is_held:
            return "LMCache was not looked at yet: calls are held until then"
        if self._budget.is_spent:
            return "prefetching pauses: LMCache holds prefetched chunks that nobody consumed"
        return ""

    @property
    def held_chunks(self) -> int | None:
        """Chunks that LMCache says prefetches hold in it; None where it does not say."""
        return self._budget.held

    def allows(self, chunks: int) -> bool:
        """Whether a prefetch of so many chunks may be sent; says so when that changes."""
        fits = self._budget.allows(chunks)
        if fits == self._is_paused:
            self._is_paused = not fits
            if self._is_paused:
                log.warning(
                    "prefetching pauses: LMCache holds prefetched chunks that nobody consumed",
                    held_chunks=self._budget.held,
                    unconsumed_chunks_max=self._budget.chunks_max,
                    advice="it frees them when requests use them, or when it is restarted",
                )
            else:
                log.info("prefetching goes on", held_chunks=self._budget.held)
        return fits and not self.is_refused

    def sent(self, chunks: int) -> None:
        """Count a prefetch."""
        self._budget.spend(chunks)

    async def run(
        self, on_verdict: Callable[[], None], on_restart: Callable[[float], Awaitable[None]]
    ) -> None:
        """Look before the first call, then now and then, until `close`.

        `on_restart` is told when the process that ended was last seen alive.
        """
        if self._care is None:
            return
        with self._scope:
            while not await self._care.check_first():
                self.is_refused = True
                on_verdict()
                await trio.sleep(_CHECK_AGAIN_SECONDS)
            await self._look(on_restart)
            self.is_held = self.is_refused = False
            on_verdict()
            while True:
                await trio.sleep(_LOOK_SECONDS)
                await self._look(on_restart)

    async def _look(self, on_restart: Callable[[float], Awaitable[None]]) -> None:
        assert self._care is not None
        began = trio.current_time()
        condition = await self._care.look()
        if condition.restarted:
            log.warning("LMCache was restarted: what it held is gone")
            await on_restart(self._seen_at)
        if condition.answers:
            self._seen_at = began
        self._budget.look(condition.held_chunks)

    def close(self) -> None:
        """Look no more."""
        self._scope.cancel()

    async def hangs(self, error: BackendError) -> bool:
        """After a call that timed out, see whether LMCache hangs for good; one look at a time."""
        if self._care is None or self._is_diagnosing or not isinstance(error, BackendTimeoutError):
            return False
        self._is_diagnosing = True
        try:
            wedged = await self._care.find_wedged()
        finally:
            self._is_diagnosing = False
        if wedged:
            log.error(
                "LMCache hangs: restart needed",
                ports=list(wedged),
                advice="a disk tier that was evicted under a prefetch never gives its lock back",
            )
        return bool(wedged)
