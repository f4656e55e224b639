"""Rounds of killing: under load, while it starts, while it migrates, while it stops."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import trio

from tests.crash.agents import Agent
from tests.crash.checks import (
    check_alive,
    check_at_rest,
    check_debts,
    close_everything,
    counts_of,
    probe_counts,
    send,
    traced_counts,
)
from tests.crash.lmcache import MOODS, LMCache, Mood
from tests.crash.old_database import BROKEN, OldDatabase, make_old_database
from tests.crash.stored import Stored
from tests.daemons import Daemon

KINDS = ("load", "start-up", "shutdown", "migration")

AGENTS = 10
RESTING = 2
"""Agents that do nothing in a round: no evict of a chunk of theirs may come."""

LOAD_SECONDS_MAX = 0.6
DRAIN_SECONDS_MAX = 0.4
MIGRATION_KILLS = 3
MIGRATION_SECONDS_MAX = 0.01
GOLDEN = 0.618034
"""Multiples of it, modulo 1, spread evenly however many there are."""

ENVIRONMENT = {
    "RAMAKV_TRACE_EVENTS": "true",
    "RAMAKV_BACKEND__RETRY_BASE_SECONDS": "0.1",
    "RAMAKV_BACKEND__RETRY_MAX_SECONDS": "0.5",
    "RAMAKV_BACKEND__BREAKER_OPEN_SECONDS": "0.3",
    "RAMAKV_EVICTION__BATCH_AGE_SECONDS": "0.05",
    # A close then reaches for tiers that a suspend spares.
    "RAMAKV_EVICTION__CLOSE_LOCATIONS": '["LocalCPUBackend", "LocalDiskBackend"]',
    "RAMAKV_SESSIONS__PASSIVATE_SECONDS": "0.2",
    "RAMAKV_SESSIONS__CLOSED_MEMORY_SECONDS": "86400.0",
}


@dataclass
class Campaign:
    """One daemon's long life, and the databases of others that it takes over."""

    folder: Path
    seed: int
    old_sessions: int = 2000
    old_chunks_per_session: int = 50
    rounds: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        rng = random.Random(f"{self.seed}")
        self.lmcache = LMCache(random.Random(rng.random()))
        fork_ids: set[int] = set()
        self.agents = [Agent(f"s{n}", random.Random(rng.random()), fork_ids) for n in range(AGENTS)]
        self.daemon = Daemon(_folder(self.folder / "life"), **ENVIRONMENT)
        self.start_seconds = 1.0
        self._spread = rng.random()
        self._owed: frozenset[str] = frozenset()
        self._old: OldDatabase | None = None

    @property
    def acknowledged(self) -> int:
        return sum(agent.acknowledged for agent in self.agents)

    async def run(self, rounds: int) -> None:
        """Kill and check `rounds` times, each kind in turn, then end in peace."""
        try:
            for number in range(rounds):
                kind = KINDS[number % len(KINDS)]
                rng = random.Random(f"{self.seed} {number}")
                mood = rng.choice(MOODS)
                async with self.lmcache.serving(mood):
                    _set_mood(self.daemon, mood, self.lmcache.port, seed=number)
                    await getattr(self, f"_round_{kind.replace('-', '_')}")(rng)
                self.rounds[kind] += 1
            async with self.lmcache.serving("well"):
                await self._end_in_peace()
        finally:
            self.daemon.kill()

    # Kinds ---------------------------------------------------------------------------------

    async def _round_load(self, rng: random.Random) -> None:
        """Kill it at work; before that everybody pauses, and all counts are looked at."""
        began = time.monotonic()
        async with self._started(self.daemon) as http:
            await self._check_alive(http, began)
            working = self._choose_workers(rng)
            await self._work(http, working, rng.uniform(0.02, LOAD_SECONDS_MAX))
            await probe_counts(self.daemon, http, self.agents)
            await self._kill_at_work(http, working, rng.uniform(0.02, LOAD_SECONDS_MAX))
        self._check_at_rest()

    async def _round_start_up(self, rng: random.Random) -> None:
        """Kill it before it is ready, up to three times in a row; then let it come up."""
        for _ in range(rng.randint(1, 3)):
            self.daemon.start(wait=False)
            await trio.sleep(self._next_moment() * self.start_seconds)
            self._kill(self.daemon, "starting")
            self._check_at_rest()
        await self._round_load(rng)

    async def _round_shutdown(self, rng: random.Random) -> None:
        """Kill it while it drains, with clients that go on until they are cut off."""
        began = time.monotonic()
        async with self._started(self.daemon) as http:
            await self._check_alive(http, began)
            working = self._choose_workers(rng)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._work, http, working, LOAD_SECONDS_MAX + 30.0)
                await trio.sleep(rng.uniform(0.02, LOAD_SECONDS_MAX))
                assert self.daemon.process is not None
                self.daemon.process.send_signal(signal.SIGTERM)
                await trio.sleep(self._next_moment() * DRAIN_SECONDS_MAX)
                self._kill(self.daemon, "draining")
        self._check_at_rest()

    async def _round_migration(self, rng: random.Random) -> None:
        """Kill it at its first starts on a database of the Rust daemon."""
        old = self._old_database()
        folder = _folder(self.folder / "migration")
        daemon = Daemon(folder, **ENVIRONMENT)
        _set_mood(daemon, "well", self.lmcache.port, seed=0)
        path = folder / "sessions.db"
        try:
            for number in range(MIGRATION_KILLS):
                if number < MIGRATION_KILLS - 1:
                    _remove_database(path)
                    shutil.copy(old.path, path)
                daemon.start(wait=False)
                if number == 0:  # the migration takes moments, so wait until it is about to begin
                    await self._until(daemon, path.with_name("sessions.db.lock").exists)
                    await trio.sleep(rng.uniform(0.0, MIGRATION_SECONDS_MAX))
                else:
                    await trio.sleep(self._next_moment() * self.start_seconds)
                self._kill(daemon, "migrating")
                self.kills["migrated" if old.check(path) else "not migrated yet"] += 1
            async with self._started(daemon) as http:
                await self._check_migrated(daemon, http, old, rng)
                daemon.kill()
            assert old.check(path)
        finally:
            daemon.kill()
            shutil.rmtree(folder)

    async def _check_migrated(
        self, daemon: Daemon, http: httpx.AsyncClient, old: OldDatabase, rng: random.Random
    ) -> None:
        [health] = await send(http, [{"type": "health"}])
        assert health["data"]["sessions_count"] == len(old.sessions)
        names = rng.sample(sorted(old.sessions), min(50, len(old.sessions)))
        maps = await send(http, [{"type": "session_map", "session_id": name} for name in names])
        for name, found in zip(names, maps, strict=True):
            assert tuple(found["data"]["chunk_hashes"]) == old.sessions[name]
        counts = old.counts
        some = rng.sample(sorted(counts), min(1000, len(counts)))
        found = await traced_counts(daemon, http, "probe", some)
        assert found == {chunk: counts[chunk] + 1 for chunk in some}
        [closed] = await send(http, [{"type": "session_close", "session_id": "probe"}])
        assert closed["data"]["evicted_count"] == 0
        said = [json.loads(line) for line in daemon.log.read_text().splitlines()]
        recovered = [line for line in said if line["event"] == "recovered"]
        assert recovered[-1]["set_aside"] == len(BROKEN)

    async def _end_in_peace(self) -> None:
        """Close everything; then nothing is left, in the database or unevicted."""
        _set_mood(self.daemon, "well", self.lmcache.port, seed=0)
        began = time.monotonic()
        async with self._started(self.daemon) as http:
            await self._check_alive(http, began)
            await close_everything(http, self.agents)
        assert await trio.to_thread.run_sync(self.daemon.stop) == 0, self.daemon.log.read_text()
        stored = self._check_at_rest()
        assert not stored.owed

    # Steps ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def _started(self, daemon: Daemon) -> AsyncIterator[httpx.AsyncClient]:
        """Start it and wait until it is ready; the client is not to be used after its death."""
        if daemon.log.exists() and daemon.log.stat().st_size > 10_000_000:
            daemon.log.unlink()
        began = time.monotonic()
        await trio.to_thread.run_sync(daemon.start)
        if daemon is self.daemon:
            self.start_seconds += 0.3 * (time.monotonic() - began - self.start_seconds)
        async with httpx.AsyncClient(
            base_url=daemon.url, trust_env=False, verify=False, timeout=30.0
        ) as http:
            yield http

    async def _check_alive(self, http: httpx.AsyncClient, began: float) -> None:
        await check_debts(self._owed, began, self.agents, self.lmcache)
        await check_alive(self.daemon, http, self.agents)

    def _check_at_rest(self) -> Stored:
        stored = check_at_rest(self.daemon, self.agents, self.lmcache)
        self._owed = stored.owed
        return stored

    def _choose_workers(self, rng: random.Random) -> list[Agent]:
        """All agents but some that rest, whose chunks are protected from now on."""
        resting = rng.sample(self.agents, RESTING)
        self.lmcache.protected = frozenset(counts_of(resting))
        return [agent for agent in self.agents if agent not in resting]

    async def _work(self, http: httpx.AsyncClient, agents: list[Agent], seconds: float) -> None:
        """Let agents work for so long, and end what they began; or until the daemon is gone."""
        pause = trio.Event()
        async with trio.open_nursery() as timer:
            timer.start_soon(_set_after, pause, seconds)
            async with trio.open_nursery() as nursery:
                for agent in agents:
                    nursery.start_soon(agent.work, http, pause)
            timer.cancel_scope.cancel()

    async def _kill_at_work(
        self, http: httpx.AsyncClient, agents: list[Agent], seconds: float
    ) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._work, http, agents, LOAD_SECONDS_MAX + 30.0)
            await trio.sleep(seconds)
            self._kill(self.daemon, "working")

    def _kill(self, daemon: Daemon, doing: str) -> None:
        assert daemon.process is not None
        gone = daemon.process.poll() is not None
        daemon.kill()
        self.kills["ended already" if gone else doing] += 1

    def _next_moment(self) -> float:
        self._spread = (self._spread + GOLDEN) % 1.0
        return self._spread

    async def _until(self, daemon: Daemon, condition: Callable[[], bool]) -> None:
        with trio.fail_after(30):
            while not condition():
                assert daemon.process is not None
                assert daemon.process.poll() is None, daemon.log.read_text()
                await trio.sleep(0.001)

    def _old_database(self) -> OldDatabase:
        """Made once; each round has a copy."""
        if self._old is None:
            self._old = make_old_database(
                self.folder / "old.db",
                random.Random(f"{self.seed} old"),
                sessions=self.old_sessions,
                chunks_per_session=self.old_chunks_per_session,
            )
        return self._old


async def _set_after(event: trio.Event, seconds: float) -> None:
    await trio.sleep(seconds)
    event.set()


def _set_mood(daemon: Daemon, mood: Mood, lmcache_port: int, *, seed: int) -> None:
    """Have the next start use that LMCache."""
    embedded = mood.startswith("embedded")
    port = daemon.engine_port if embedded else lmcache_port
    faulty = mood == "embedded and faulty"
    daemon.environment |= {
        "RAMAKV_BACKEND__KIND": "embedded" if embedded else "lmcache",
        "RAMAKV_LMCACHE_URL": f"http://127.0.0.1:{port}",
        "RAMAKV_EMBEDDED__FAULT_SEED": str(seed),
        "RAMAKV_EMBEDDED__FAULT_ERROR_SHARE": "0.4" if faulty else "0.0",
        "RAMAKV_EMBEDDED__FAULT_LATENCY_SECONDS_MAX": "0.2" if faulty else "0.0",
        "RAMAKV_EMBEDDED__FAULT_HANG_SHARE": "0.05" if faulty else "0.0",
    }


def _remove_database(path: Path) -> None:
    for part in path.parent.glob(path.name + "*"):
        part.unlink()


def _folder(path: Path) -> Path:
    path.mkdir()
    return path
