"""The composition root: opens, wires, starts and drains everything. Nurseries are made here."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

import structlog
import trio

from ramakv import codec, events
from ramakv.actors.backend import BackendActor
from ramakv.actors.caretaker import Care
from ramakv.actors.dead_letters import DeadLetters
from ramakv.actors.debug_files import DebugFiles
from ramakv.actors.journal import Journal, RunSync
from ramakv.actors.readiness import Readiness
from ramakv.actors.refcount import RefcountActor
from ramakv.actors.residency import HotTier, ResidencyActor
from ramakv.actors.router import Router
from ramakv.config import SUSPEND_LOCATIONS, Config, resolve_path
from ramakv.core.evictions import EvictionPolicy, EvictionQueue, Scope
from ramakv.core.refcounts import RefCounts
from ramakv.core.session import Status
from ramakv.core.tallies import EventTallies, HotTallies
from ramakv.lmcache.backend import KVBackend, NoopBackend
from ramakv.store.database import Database
from ramakv.store.rows import StoredSession
from ramakv.store.store import Bookkeeping, Store

log = structlog.get_logger("ramakv.service")

RECOVERY_SLICE_SESSIONS = 100
REFCOUNT_MAILBOX_MAX = 1024


class _Actor(Protocol):
    async def run(self, *, task_status: trio.TaskStatus[None]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Service:
    """The actors, wired. The edge needs `handle`; the rest is for operators and tests."""

    config: Config
    router: Router
    refcount: RefcountActor
    backend: BackendActor
    journal: Journal
    answered: EventTallies
    """What became of events; the edge counts them."""
    readiness: Readiness
    dead_letters: DeadLetters
    residency: ResidencyActor

    @property
    def hot(self) -> HotTallies | None:
        """How often chunks were hot; None while residency is off, and so nobody can tell."""
        return self.residency.hot if self.residency.rules is not None else None

    async def handle(self, event: events.Event) -> events.Data:
        """Answer one event. Raises EventError or StoreError; then nothing was changed."""
        if isinstance(event, events.SessionEvent):
            return await self.router.handle(event)
        assert isinstance(event, events.Health)
        return events.HealthData("running", self.router.active_sessions)

    def statistics(self) -> dict[str, Any]:
        """What each actor says of itself."""
        return {
            "sessions": self.router.statistics(),
            "chunks": self.refcount.statistics(),
            "backend": self.backend.statistics(),
            "store": self.journal.statistics(),
        }


@asynccontextmanager
async def open_service(
    config: Config,
    *,
    client: KVBackend | None = None,
    care: Care | None = None,
    run_sync: RunSync = trio.to_thread.run_sync,
    wall_clock: Callable[[], float] = time.time,
    rng: random.Random | None = None,
) -> AsyncIterator[Service]:
    """Run the actors until the block ends; then drain them from the top down.

    Everything acknowledged is on disk by then. `client` and `care` replace the backend that
    the configuration names, and what looks after it. Raises ConfigError or StoreError where it
    cannot start; a crash of refcount, backend or journal ends the block with it.
    """
    async with AsyncExitStack() as stack:
        if client is None:
            client = await stack.enter_async_context(_open_client(config, run_sync))
        store = await run_sync(_open_store, config)
        try:
            await run_sync(store.begin_ages, int(wall_clock() * 1000))
            counts, sessions, obsolete = await _recover(store, config, run_sync, rng)
            first_fork_id = await run_sync(store.next_fork_id)
        except BaseException:
            store.close()
            raise
        journal = Journal(store, config.store, run_sync)
        refcount = RefcountActor(counts, journal, REFCOUNT_MAILBOX_MAX)
        locations = {
            Scope.SUSPEND: SUSPEND_LOCATIONS,
            Scope.RELEASE: config.eviction.locations,
            Scope.CLOSE: config.eviction.close_locations,
        }
        backend = BackendActor(
            client,
            config.backend,
            locations,
            refcount,
            journal,
            unpaced=config.backend_kind == "noop",
            care=care or _care_for(client, config),
        )
        refcount.connect(backend)
        debug_files = _open_debug_files(config, run_sync)
        residency = ResidencyActor(config.residency, partial(_find_hot_tier, config), backend)
        router = Router(
            config,
            refcount,
            journal,
            backend,
            residency,
            debug_files,
            first_fork_id=first_fork_id,
            clock_offset=wall_clock() - trio.current_time(),
        )
        residency.connect(router)
        while sessions:  # emptied: with many sessions this is much to keep for nothing
            router.admit(sessions.pop())
        # The order of draining, read from below: events stop, sessions finish what they have,
        # their releases are counted, evicts that can leave do, and the journal writes it all.
        dead_letters = DeadLetters(journal, refcount)
        for actor in (journal, backend, refcount, dead_letters, router, residency):
            await stack.enter_async_context(_running(actor))
        if obsolete:
            await journal.tell(Bookkeeping(obsolete=obsolete))
        answered = EventTallies(codec.TYPES)
        readiness = Readiness(router, refcount, journal, backend)
        actors = (router, refcount, backend, journal)
        yield Service(config, *actors, answered, readiness, dead_letters, residency)


@asynccontextmanager
async def _running(actor: _Actor) -> AsyncIterator[None]:
    """Run an actor; at the end close its mailbox and wait until it has drained."""
    async with trio.open_nursery() as nursery:
        await nursery.start(actor.run)
        try:
            yield
        finally:
            actor.close()


def _open_debug_files(config: Config, run_sync: RunSync) -> DebugFiles | None:
    if not config.debug_enabled:
        return None
    return DebugFiles(resolve_path(config.debug_dir), config.limits, run_sync)


def _open_store(config: Config) -> Store:
    return Store(
        Database.open(
            config.store_path,
            synchronous=config.store.synchronous,
            busy_timeout_seconds=config.store.busy_timeout_seconds,
            wal_autocheckpoint_pages=config.store.wal_autocheckpoint_pages,
        ),
        dead_letters_max=config.eviction.dead_letters_max,
    )


async def _recover(
    store: Store, config: Config, run_sync: RunSync, rng: random.Random | None
) -> tuple[RefCounts, list[StoredSession], list[tuple[str, int]]]:
    """Rebuild the counts from active sessions and open forks, and the queue from the outbox."""
    eviction, backend = config.eviction, config.backend
    policy = EvictionPolicy(
        batch_chunks_max=min(eviction.batch_chunks_max, backend.chunks_per_call_max),
        batch_age_seconds=eviction.batch_age_seconds,
        tries_max=backend.evict_tries_max,
        retry_base_seconds=backend.retry_base_seconds,
        retry_max_seconds=backend.retry_max_seconds,
    )
    counts = RefCounts(EvictionQueue(policy, rng or random.Random()))  # noqa: S311 - jitter
    recovery = await run_sync(store.recovery)
    slices = recovery.slices(RECOVERY_SLICE_SESSIONS)
    sessions: list[StoredSession] = []
    while (found := await run_sync(next, slices, None)) is not None:
        for stored in found:
            counts.load(stored.state.active_map)
            for fork in stored.state.forks:
                counts.load(fork.chunks)
            sessions.append(stored.without_maps())
    owed, dead = await run_sync(recovery.outbox)
    for row in recovery.set_aside:
        log.error(
            "a row of the database cannot be read; it was moved to the table set_aside",
            table=row.table,
            key=row.key,
            cause=row.reason,
        )
    obsolete = counts.load_outbox(owed, trio.current_time())
    obsolete += [(chunk, generation) for chunk, generation in dead if counts.count(chunk)]
    log.info(
        "recovered",
        active=sum(stored.state.status is Status.ACTIVE for stored in sessions),
        suspended=sum(stored.state.status is Status.SUSPENDED for stored in sessions),
        forks=sum(len(stored.state.forks) for stored in sessions),
        chunks=len(counts),
        evictions_owed=len(counts.evictions),
        dead_letters=len(dead),
        # Also those of earlier starts, one of which may have ended before it said so.
        set_aside=await run_sync(store.set_aside_count),
    )
    return counts, sessions, obsolete


# What a daemon does not talk to, it does not load: httpx takes a tenth of an import.


def _care_for(client: KVBackend, config: Config) -> Care | None:
    """A real LMCache needs looking after, and so does an engine that behaves like one."""
    well_behaved = config.backend_kind == "embedded" and config.embedded.behaviour == "documented"
    if config.backend_kind == "noop" or well_behaved:
        return None
    from ramakv.lmcache.care import LMCacheCare
    from ramakv.lmcache.client import LMCacheClient

    if not isinstance(client, LMCacheClient):
        return None
    seconds = config.backend.connect_timeout_seconds
    return LMCacheCare(client, config.lmcache_url, timeout_seconds=seconds)


async def _find_hot_tier(config: Config) -> HotTier:
    from ramakv.lmcache.hot_tier import find_hot_tier

    return await find_hot_tier(config)


@asynccontextmanager
async def _open_client(config: Config, run_sync: RunSync) -> AsyncIterator[KVBackend]:
    if config.backend_kind == "noop":
        yield NoopBackend()
        return
    from ramakv.lmcache.client import LMCacheClient

    async with AsyncExitStack() as stack:
        if config.backend_kind == "embedded":
            from ramakv.web.engine_server import serving_engine

            url = urlsplit(config.lmcache_url)
            engine = serving_engine(config, url.hostname or "", url.port or 80, run_sync)
            await stack.enter_async_context(engine)
        yield await stack.enter_async_context(
            LMCacheClient(
                config.lmcache_url,
                connect_timeout_seconds=config.backend.connect_timeout_seconds,
                call_timeout_seconds=config.backend.call_timeout_seconds,
                connections_max=config.backend.calls_in_flight_max,
            )
        )
