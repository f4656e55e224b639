"""Plays a history to the whole service in virtual time, through every life of the daemon."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import httpx
import msgspec
import trio

from bench import virtual_time
from ramakv.errors import StoreError
from ramakv.lmcache.client import LMCacheClient
from ramakv.service import Service, open_service
from ramakv.web.event_app import EventMiddleware, create_event_app
from tests.asgi import post_event
from tests.fakes import FakeCare, make_config
from tests.simulation import history as steps
from tests.simulation.disk import Disk, store_error
from tests.simulation.engine import SimulatedLMCache
from tests.simulation.files import FileFault, Files
from tests.simulation.history import History, Step
from tests.simulation.judge import Judge, ObservedService
from tests.simulation.points import FaultPoints

HEALED_SECONDS = 120.0
"""Longer than any retry, breaker or late answer takes to come to its end."""
DEADLOCK_SECONDS = 1e6
ANSWER_SECONDS_MAX = 60.0
"""Longer than any event may wait for its answer, whatever is broken."""


_IO_ERRORS = {
    "file.open": sqlite3.SQLITE_CANTOPEN,
    "file.read": sqlite3.SQLITE_IOERR_READ,
    "file.write": sqlite3.SQLITE_IOERR_WRITE,
    "file.sync": sqlite3.SQLITE_IOERR_FSYNC,
    "file.truncate": sqlite3.SQLITE_IOERR_TRUNCATE,
}
_SHORT_BYTES = 1000
"""How much of a write comes to the disk where it stops short; a page has 4096."""


@dataclass
class Report:
    """What a history came to: what must not have been, counts, and all that was, in order."""

    violations: list[str]
    counted: Counter[str]
    story: list[str]


def play(history: History, folder: Path) -> Report:
    """Play a history from beginning to end, in an empty folder."""
    simulation = Simulation(history, folder)
    with simulation.files.installed() if history.touches_files else nullcontext():
        virtual_time.run(simulation.run, seed=history.seed)
    return simulation.report()


@dataclass
class Simulation:
    """One history, its daemon (one life after the other), and everything around it."""

    history: History
    folder: Path
    points: FaultPoints = field(default_factory=FaultPoints)
    counted: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.history.seed)
        self._config = make_config(self.folder, **self.history.settings)
        self._disk = Disk(self._rng, self.points, lambda writes: self._judge.committed(writes))
        self._judge = Judge(self._config, self._disk, self.points)
        self._care = FakeCare()
        self.files = Files(self._reach_file)
        self._is_up = self._is_healed = False
        self._left: list[Step] = list(self.history.steps)

    def report(self) -> Report:
        """Sum up."""
        counted = self.counted + self._engine.faults + self._disk.faults
        counted.update({f"calls of {kind}": n for kind, n in self._engine.calls.items()})
        counted.update({f"fault at {point}": n for point, n in self.points.fired.items()})
        counted["commits"] = self._disk.commits
        counted["demotions"] = self._judge.demotions
        violations = [*self._judge.violations, *self._engine.violations]
        return Report(violations, counted, self._judge.story)

    async def run(self) -> None:
        """Play all steps, through as many lives as that takes; then start once more, in peace."""
        async with trio.open_nursery() as outside:
            engine = SimulatedLMCache(self._rng, self.points, outside, self._judge.departs)
            self._engine = self._judge.engine = engine
            outside.start_soon(self._end_deadlock)
            while not self._is_healed:
                await self._live()
            calls = engine.calls.copy()
            async with self._serving() as service:
                self._judge.started(service)
            self._judge.expect(engine.calls == calls, "a restart in peace called LMCache")
            outside.cancel_scope.cancel()

    async def _end_deadlock(self) -> None:
        """Virtual time gets this far only when everything waits for something else."""
        await trio.sleep(DEADLOCK_SECONDS)
        raise AssertionError("\n".join(["deadlock", *self._judge.story[-20:]]))

    # Lives of the daemon -----------------------------------------------------------------

    async def _live(self) -> None:
        """One life, from a start to a drain or a death."""
        self._engine.is_cut_off = self._disk.is_dead = self._is_up = False
        try:
            with trio.CancelScope() as self._life:
                # Agents outlive the daemon: some events meet one that drains, or is gone.
                async with trio.open_nursery() as agents, self._serving() as service:
                    self._is_up = True
                    self._judge.started(service)
                    await self._play_steps(service, agents)
        except* StoreError:
            self._judge.expect(not self._is_up, "the daemon went down with its disk")
            self.counted["starts that failed with the disk"] += 1
        if self._disk.is_dead:
            self.points.disarm()

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[Service]:
        backend = self._config.backend
        async with (
            LMCacheClient(
                self._config.lmcache_url,
                connect_timeout_seconds=backend.connect_timeout_seconds,
                call_timeout_seconds=backend.call_timeout_seconds,
                connections_max=backend.calls_in_flight_max,
                transport=self._engine,
            ) as client,
            open_service(
                self._config,
                client=client,
                care=self._care,
                run_sync=self._disk.run_sync,
                wall_clock=virtual_time.wall_clock,
                rng=self._rng,
            ) as service,
        ):
            self._app = create_event_app(ObservedService(service, self._judge), self._config)
            yield service

    def _reach_file(self, point: str) -> None:
        self.points.reach(point)
        if self._disk.is_dead:
            raise FileFault(sqlite3.SQLITE_IOERR)

    def _die(self, *, power_fails: bool = False) -> None:
        """Kill the daemon: the files stay as they are at this moment, or as they were synced."""
        if self._disk.is_dead:
            return
        self._disk.is_dead = self._engine.is_cut_off = True
        self.counted["kills"] += 1
        old = self._config.store_path
        new = self.folder / f"sessions-{self.counted['kills']}.db"
        for suffix in ("", "-wal", "-journal"):
            source, target = Path(f"{old}{suffix}"), Path(f"{new}{suffix}")
            if not power_fails:
                shutil.copy(source, target) if source.exists() else None
            elif (left := self.files.after_power_failure(source)) is not None:
                target.write_bytes(left)
        self._config = msgspec.structs.replace(self._config, session_store_path=str(new))
        self._judge.path = new
        self._life.cancel()

    # Steps -------------------------------------------------------------------------------

    async def _play_steps(self, service: Service, agents: trio.Nursery) -> None:
        while self._left:
            step = self._left.pop(0)
            if isinstance(step, steps.Restart):
                self.counted["restarts"] += 1
                return
            self._judge.tell(f"step: {step}")
            await self._play_step(step, service, agents)
            await trio.lowlevel.checkpoint()
        await self._heal(service)

    async def _heal(self, service: Service) -> None:
        """Let nothing be broken any more, and everything settle; then look at what is left."""
        self.points.disarm()
        self._disk.mode, self._engine.mode, self._engine.bad = "well", "well", frozenset()
        await trio.sleep(HEALED_SECONDS)
        await self._judge.settled(service)
        self._judge.nothing_leaked()
        self._is_healed = True

    async def _play_step(self, step: Step, service: Service, agents: trio.Nursery) -> None:
        match step:
            case steps.Send(waits=True):
                await self._send(self._app, step)
            case steps.Send():
                agents.start_soon(self._send, self._app, step)
            case steps.Pause():
                await trio.sleep(step.seconds)
            case steps.Engine():
                self._engine.mode = step.mode
                self._engine.bad = frozenset(f"c{chunk}" for chunk in step.bad)
            case steps.EngineRestart():
                self.counted["restarts of LMCache"] += 1
                self._engine.forget()
                self._care.condition = replace(self._care.condition, restarted=True)
            case steps.Disk():
                self._disk.mode = step.mode
            case steps.Kill(at=None):
                self._die(power_fails=step.power_fails)
            case steps.Kill():
                die = partial(self._die, power_fails=step.power_fails)
                self.points.arm(str(step.at), step.nth, die)
            case steps.Fail():
                self.points.arm(step.at, step.nth, partial(_fail, step))
            case steps.FailFile():
                for time in range(step.times):
                    self.points.arm(step.at, step.nth + time, partial(_fail_file, step))
            case steps.Settle():
                with trio.move_on_after(ANSWER_SECONDS_MAX) as patience:
                    while agents.child_tasks:  # noqa: ASYNC110 - a nursery tells nobody
                        await trio.sleep(0.01)
                if not patience.cancelled_caught:
                    await self._judge.settled(service)

    async def _send(self, app: EventMiddleware, step: steps.Send) -> None:
        bodies = [event.body() for event in step.events]
        body = msgspec.json.encode(bodies if len(bodies) > 1 else bodies[0])
        self.counted["events"] += len(step.events)
        patience_seconds = step.patience_seconds
        seconds = ANSWER_SECONDS_MAX if patience_seconds is None else patience_seconds
        with trio.move_on_after(seconds) as patience:
            status, _ = await post_event(app, body)
            self.counted[f"replies {status}"] += 1
        if patience.cancelled_caught:
            self.counted["agents that hung up"] += 1
            hung_up = step.patience_seconds is not None
            self._judge.expect(hung_up, f"{step} was not answered in {seconds:g} s")


def _fail(step: steps.Fail) -> None:
    if step.at == "send.before":
        raise httpx.ConnectError("made up: connection refused")
    if step.at == "answer.before":
        raise httpx.ReadError("made up: connection reset")
    raise store_error(step.disk)


def _fail_file(step: steps.FailFile) -> None:
    code = sqlite3.SQLITE_FULL if step.how == "full" else _IO_ERRORS[step.at]
    raise FileFault(code, bytes_written=_SHORT_BYTES if step.how == "short" else 0)
