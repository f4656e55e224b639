"""The overview: one snapshot of everything, made at most once a second, however many look."""

from __future__ import annotations

import math
import time
from typing import Any

import trio

from ramakv import __version__
from ramakv.problems import Problems
from ramakv.web.operable import Operable
from ramakv.web.sampler import Sampler
from ramakv.web.snapshot import Chunks, Evictions, LMCache, SessionCounts, Snapshot
from ramakv.web.toplists import TopLists

_PROBLEMS_MAX = 20


class Overview:
    """Reads what the actors say of themselves. It asks no session, and waits for nobody."""

    def __init__(self, service: Operable, problems: Problems) -> None:
        self._service = service
        self._problems = problems
        self._began = trio.current_time()
        self.sampler = Sampler(service)
        self._lists = TopLists(service)

    async def take(self, phase: str) -> Snapshot:
        """Make a snapshot."""
        await self._lists.refresh()
        sampler = self.sampler
        return Snapshot(
            at_ms=int(time.time() * 1000),
            version=__version__,
            phase=phase,
            up_seconds=trio.current_time() - self._began,
            sessions=self._sessions(),
            recent=self._lists.recent(),
            largest=self._lists.largest(),
            chunks=self._chunks(),
            shared=self._lists.shared,
            events=sampler.events(),
            by_type=sampler.by_type(),
            evictions=self._evictions(),
            lmcache=self._lmcache(),
            store=sampler.store(),
            problems=list(self._problems.last[:_PROBLEMS_MAX]),
            point=sampler.points[-1],
        )

    def _sessions(self) -> SessionCounts:
        router = self._service.router
        in_turn = router.turns.in_turn
        return SessionCounts(
            in_turn=in_turn,
            paused=router.active_sessions - in_turn,
            suspended=router.suspended_sessions,
            awake=router.statistics()["awake"],
            waiting=router.unfinished,
        )

    def _chunks(self) -> Chunks:
        chunks, hot = self._service.refcount.statistics(), self._service.hot
        return Chunks(
            referenced=chunks["referenced"],
            references=self._lists.references,
            evicting=chunks["evictions_waiting"] + chunks["evictions_in_flight"],
            hot_share=None if hot is None or not hot.wanted else hot.hot / hot.wanted,
        )

    def _evictions(self) -> Evictions:
        refcount = self._service.refcount
        chunks, tallies = refcount.statistics(), refcount.evictions
        return Evictions(
            waiting=chunks["evictions_waiting"],
            in_flight=chunks["evictions_in_flight"],
            oldest_seconds=refcount.oldest_eviction_seconds,
            dead_letters=self._service.journal.statistics()["dead_letters"],
            queued=tallies.queued,
            done=tallies.done,
            withdrawn=tallies.withdrawn,
            retried=tallies.retried,
            forgiven=tallies.forgiven,
            dead=tallies.dead,
        )

    def _lmcache(self) -> LMCache:
        backend, config = self._service.backend, self._service.config
        now: dict[str, Any] = backend.statistics()
        tokens = float(now["tokens"])
        prefetches = backend.prefetches
        return LMCache(
            kind=config.backend_kind,
            url="" if config.backend_kind == "noop" else config.lmcache_url,
            trouble=backend.trouble,
            breaker=str(now["breaker"]),
            paused=backend.is_paused,
            tokens=None if math.isinf(tokens) or math.isnan(tokens) else tokens,
            burst=config.backend.burst_calls_max,
            held=now["held"],
            held_max=config.backend.unconsumed_chunks_max,
            calls=self.sampler.calls(),
            prefetches={
                "accepted": prefetches.accepted,
                "failed": prefetches.failed,
                "late": prefetches.late,
                "skipped": prefetches.skipped,
                "waiting": now["prefetches_waiting"],
            },
        )
